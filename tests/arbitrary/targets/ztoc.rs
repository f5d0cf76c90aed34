//! SOCI ztocs of arbitrary bytes: each is an index or an error, and takes memory for its own length only.

use tarfs::index::import::{Importer, import_ztoc};
use tarfs::index::{Builder, Options, Origin};
use tarfs::tar::Limits;
use tarfs::{Extent, Packed};

use super::index::description;

/// Length of the layer of the seed.
const LAYER_BYTES: u64 = 11_599;

pub(super) fn run(bytes: &[u8]) {
    // A cut ztoc may be one of a layer of any length.
    let lens = [LAYER_BYTES, 0, u64::MAX >> 1];
    for packed_bytes in lens {
        let origin = Origin {
            packed_bytes,
            ..Origin::default()
        };
        let importer = Importer::new(Builder::new(Options::default()), &Limits::default());
        let Ok((index, digests)) = import_ztoc(bytes, importer, origin) else {
            continue;
        };
        assert!(index.memory_bytes() <= bytes.len() * 16 + 4096);
        description(&index);
        for range in [0..packed_bytes, 100..200] {
            let range = Extent::new(Packed(range.start), Packed(range.end)).expect("in order");
            let inside = digests.inside(range);
            inside.for_each(|(digested, _)| assert!(digested.end() <= range.end()));
        }
    }
}
