//! Who wants bytes with a certain digest gets these, or none.

use tarfs::archive::{Error, OpenError, OpenOptions, scan::Digest};
use tarfs::base::sha256::Sha256;

use super::{Lab, PATH, assert_files, for_each_packing, packed};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::sums::sha256;
use crate::support::tree::Tree;

const OTHER: Sha256 = Sha256([0x5a; 32]);

fn digest(bytes: &[u8]) -> Sha256 {
    sha256(bytes).parse().expect("a digest")
}

impl Lab {
    fn expecting(&self, digest: Sha256) -> OpenOptions {
        let mut options = self.options();
        options.scan.sha256 = Digest::Expect(digest);
        // Large members would be passed over.
        options.scan.allow_skipping = true;
        options
    }

    #[track_caller]
    fn refuses(&self, digest: Sha256) -> Sha256 {
        match self.try_open(&self.expecting(digest)) {
            Err(OpenError::Archive { error, .. }) => match *error {
                Error::DigestMismatch { expected, found } => {
                    assert_eq!(expected, digest);
                    found
                }
                error => panic!("{error:?}"),
            },
            result => panic!("opened: {}", result.is_ok()),
        }
    }
}

fn all_packed_bytes_make_the_digest(packing: Packing) {
    let packed = packed(packing);
    let right = digest(&packed);
    let lab = Lab::serving(packed);
    assert_eq!(lab.refuses(OTHER), right);
    assert!(lab.cached("index").is_empty() && lab.cached("disk-cache").is_empty());
    let archive = lab.open_with(&lab.expecting(right));
    assert_eq!(archive.stats().scans.get(), 1);
    assert_eq!(archive.index().origin().sha256, Some(right));
    assert_files(&archive, &Tree::mixed());
}
for_each_packing!(all_packed_bytes_make_the_digest);

#[test]
fn what_follows_an_archives_end_counts_too() {
    let packed = [&packed(Packing::Plain)[..], &vec![0; 3 << 20]].concat();
    let lab = Lab::serving(packed.clone().into());
    assert_eq!(lab.refuses(OTHER), digest(&packed));
}

#[test]
fn a_saved_index_counts_if_its_digest_was_taken_and_its_version_is_strong() {
    let packed = packed(Packing::Lz4);
    let right = digest(&packed);
    let lab = Lab::serving(packed.clone());
    // Nobody had asked for a digest when it was saved.
    drop(lab.open());
    let archive = lab.open_with(&lab.expecting(right));
    assert_eq!(archive.stats().scans.get(), 1);
    drop(archive);
    let archive = lab.open_with(&lab.expecting(right));
    assert_eq!(archive.stats().scans.get(), 0);
    drop(archive);
    // Who does not ask may use it as well.
    assert_eq!(lab.open().stats().scans.get(), 0);
    // It is known already that it is another one.
    let sent = lab.server.sent_bytes(PATH);
    assert_eq!(lab.refuses(OTHER), right);
    assert!(lab.server.sent_bytes(PATH) - sent < 1 << 20);
}

#[test]
fn no_saved_index_vouches_for_a_version_that_is_only_weak() {
    let packed = packed(Packing::Lz4);
    let right = digest(&packed);
    let lab = Lab::new();
    lab.serve(Resource::new(packed.clone()).etag("W/\"1\""));
    for _ in 0..2 {
        let archive = lab.open_with(&lab.expecting(right));
        assert_eq!(archive.stats().scans.get(), 1);
    }
    assert_eq!(lab.open().stats().scans.get(), 0);
}

#[test]
fn an_index_file_from_elsewhere_vouches_for_nothing() {
    let packed = packed(Packing::Lz4);
    let right = digest(&packed);
    let elsewhere = Lab::serving(packed.clone());
    drop(elsewhere.open_with(&elsewhere.expecting(right)));
    let lab = Lab::serving(packed.clone());
    let options = OpenOptions {
        index_file: Some(elsewhere.the_cached("index")),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..lab.expecting(right)
    };
    assert_eq!(lab.open_with(&options).stats().scans.get(), 1);
    // Nor does one that claims to be of this place: anyone can write that.
    let options = OpenOptions {
        index_file: Some(lab.the_cached("index")),
        index_memory: tarfs::index::MemoryLimit::default(),
        ..lab.expecting(right)
    };
    assert_eq!(lab.open_with(&options).stats().scans.get(), 1);
}

#[test]
fn nothing_is_left_of_an_archive_that_turns_out_to_be_another_one() {
    let lab = Lab::serving(packed(Packing::Lz4));
    let (source, stats) = lab.source();
    let options = lab.expecting(OTHER);
    let network = lab.network.handle();
    let opened = tarfs::archive::Archive::open_early(source, &options, network, &stats);
    let Err(OpenError::Archive { error, .. }) = opened else {
        panic!("opened: {}", opened.is_ok());
    };
    assert!(matches!(*error, Error::DigestMismatch { .. }), "{error:?}");
    assert!(lab.cached("index").is_empty() && lab.cached("disk-cache").is_empty());
}
