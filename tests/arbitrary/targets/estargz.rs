//! TOCs of eStargz layers of arbitrary bytes: each is an index or an error, and takes memory for its own length only.

use tarfs::index::import::{Importer, import_estargz};
use tarfs::index::{Builder, Options, Origin};
use tarfs::tar::Limits;

use super::index::description;

pub(super) const SEED: &[u8] = br#"{"version":1,"entries":[{"name":"d/","type":"dir","mode":493},
{"name":"d/f","type":"reg","size":9,"offset":80,"chunkSize":5,"uid":1,"userName":"u","xattrs":{"user.a":"dmFsdWU="},
"chunkDigest":"sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"},
{"name":"d/f","type":"chunk","offset":120,"chunkOffset":5,
"chunkDigest":"sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"},
{"name":"l","type":"symlink","linkName":"d/f","modtime":"2001-09-09T01:46:40Z"},
{"name":"c","type":"char","devMajor":5,"devMinor":6}]}"#;

pub(super) fn run(bytes: &[u8]) {
    for packed_bytes in [200, 0, u64::MAX >> 1] {
        let origin = Origin {
            packed_bytes,
            ..Origin::default()
        };
        let importer = Importer::new(Builder::new(Options::default()), &Limits::default());
        let Ok((index, digests)) = import_estargz(bytes, importer, origin) else {
            continue;
        };
        // A name of two bytes for each directory.
        assert!(index.memory_bytes() <= bytes.len() * 64 + 4096);
        description(&index);
        assert!((0..index.span_count()).all(|span| digests.plain(span).is_some()));
    }
}
