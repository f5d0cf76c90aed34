//! What cannot be decoded from the middle is kept on disk, and nothing depends on it.

use std::fs;

use tarfs::archive::{Archive, OpenError, Spooling};

use super::{Lab, assert_files, assert_files_backwards, assert_random_reads, packed};
use crate::support::http::Resource;
use crate::support::noise::Noise;
use crate::support::packing::Packing;
use crate::support::tree::Tree;

const ONE_PIECE: [Packing; 2] = [Packing::Zstd, Packing::Xz];

/// Reads everything, and is told how many bytes were fetched for it.
fn fetched_by_reading(archive: &Archive) -> u64 {
    let before = archive.stats().source_read_bytes.get();
    assert_files_backwards(archive, &Tree::mixed());
    archive.stats().source_read_bytes.get() - before
}

#[test]
fn a_stream_of_one_piece_is_spooled_and_never_fetched_again() {
    for packing in ONE_PIECE {
        let lab = Lab::serving(packed(packing));
        let mut options = lab.options();
        // Far less than the archive.
        options.scan.memory = 8 << 20;
        let archive = lab.open_with(&options);
        assert!(archive.index().span_count() > 1);
        assert_eq!(fetched_by_reading(&archive), 0, "{packing:?}");
        assert_random_reads(&archive, &Tree::mixed(), 100, 1);
        assert!(archive.stats().unspooled_bytes.get() > 0);
        drop(archive);

        let archive = lab.open_with(&options);
        assert_eq!(fetched_by_reading(&archive), 0, "{packing:?}");
        assert_random_reads(&archive, &Tree::mixed(), 100, 1);
        assert_eq!(archive.stats().decoded_spans.get(), 0);
        assert_eq!(archive.stats().scans.get(), 0);
    }
}

#[test]
fn a_stream_that_is_seekable_is_not_spooled() {
    for packing in Packing::ALL
        .into_iter()
        .filter(|packing| packing.is_all_seekable())
    {
        let lab = Lab::serving(packed(packing));
        let archive = lab.open();
        assert_eq!(archive.stats().spooled_bytes.get(), 0, "{packing:?}");
        assert!(lab.cached("spool").is_empty());
    }
}

#[test]
fn whatever_happens_to_a_spool_reads_are_right() {
    for packing in ONE_PIECE {
        let harms: [fn(&Lab); 4] = [
            |lab| fs::remove_file(lab.the_cached("spool")).expect("removed"),
            |lab| truncate(lab, 9_000_000),
            |lab| truncate(lab, 0),
            |lab| {
                let garbage = Noise::new(9).bytes(Tree::mixed().tar.len());
                fs::write(lab.the_cached("spool"), garbage).expect("written");
            },
        ];
        for harm in harms {
            let lab = Lab::serving(packed(packing));
            drop(lab.open());
            harm(&lab);
            let archive = lab.open();
            assert_files(&archive, &Tree::mixed());
            assert_random_reads(&archive, &Tree::mixed(), 20, 1);
            assert!(archive.stats().decoded_spans.get() > 0);
        }
    }
}

fn truncate(lab: &Lab, len: u64) {
    let file = fs::OpenOptions::new()
        .write(true)
        .open(lab.the_cached("spool"));
    file.expect("a spool").set_len(len).expect("shorter");
}

#[test]
fn without_a_spool_bytes_are_decoded_again() {
    for packing in ONE_PIECE {
        let lab = Lab::serving(packed(packing));
        let mut options = lab.options();
        options.spooling = Spooling::Refused;
        for _ in 0..2 {
            let archive = lab.open_with(&options);
            assert_files(&archive, &Tree::mixed());
            assert_random_reads(&archive, &Tree::mixed(), 20, 1);
        }
        assert!(lab.cached("spool").is_empty());
    }
}

#[test]
fn a_spool_that_may_not_grow_is_noted_and_reads_are_right() {
    for limit in [0, 9 << 20] {
        let lab = Lab::serving(packed(Packing::Zstd));
        let mut options = lab.options();
        options.spooling = Spooling::ToDisk {
            limit_bytes: Some(limit),
        };
        let archive = lab.open_with(&options);
        let notes = archive.notes();
        assert!(
            notes
                .iter()
                .any(|note| note.contains("the spool is incomplete"))
        );
        assert!(archive.stats().spooled_bytes.get() <= limit);
        assert_files(&archive, &Tree::mixed());
        let archive = lab.open_with(&options);
        assert_files_backwards(&archive, &Tree::mixed());
    }
}

/// A lab whose server sends everything or nothing.
fn without_ranges(packing: Packing) -> Lab {
    let lab = Lab::new();
    lab.serve(
        Resource::new(packed(packing))
            .etag("\"1\"")
            .without_ranges(),
    );
    lab
}

#[test]
fn everything_from_a_server_without_ranges_is_spooled() {
    let tree = Tree::mixed();
    for packing in [Packing::Plain, Packing::Gzip, Packing::Lz4, Packing::Zstd] {
        let lab = without_ranges(packing);
        let mut options = lab.options();
        options.scan.memory = 8 << 20;
        let archive = lab.open_with(&options);
        assert_eq!(archive.stats().spooled_bytes.get(), tree.tar.len() as u64);
        assert_files(&archive, &tree);
        drop(archive);

        let archive = lab.open_with(&options);
        assert_eq!(archive.stats().scans.get(), 0, "index and spool are enough");
        assert_files(&archive, &tree);
        drop(archive);

        fs::remove_file(lab.the_cached("spool")).expect("removed");
        let archive = lab.open_with(&options);
        assert_eq!(archive.stats().scans.get(), 1, "the spool is lost");
        assert_files(&archive, &tree);
        assert_random_reads(&archive, &tree, 50, 1);
    }
}

#[test]
fn a_damaged_spool_of_a_server_without_ranges_is_made_anew() {
    let tree = Tree::mixed();
    for len in [0, 1_000_000, 12_000_000, 14_000_000] {
        let lab = without_ranges(Packing::Gzip);
        drop(lab.open());
        truncate(&lab, len);
        let archive = lab.open();
        assert_files(&archive, &tree);
    }
}

#[test]
fn a_server_without_ranges_needs_a_spool() {
    let lab = without_ranges(Packing::Gzip);
    let refused = lab.options();
    let nowhere = lab.options();
    let too_small = lab.options();
    let cases = [
        tarfs::archive::OpenOptions {
            spooling: Spooling::Refused,
            ..refused
        },
        tarfs::archive::OpenOptions {
            cache_dir: None,
            ..nowhere
        },
        tarfs::archive::OpenOptions {
            spooling: Spooling::ToDisk {
                limit_bytes: Some(1 << 20),
            },
            ..too_small
        },
    ];
    for options in cases {
        let error = lab.try_open(&options).err();
        assert!(
            matches!(error, Some(OpenError::NoSpool { .. })),
            "{error:?}"
        );
    }
    assert!(lab.cached("spool").is_empty());
}

#[test]
fn a_tree_needs_no_spool() {
    let lab = without_ranges(Packing::Gzip);
    let mut options = lab.options();
    options.spooling = Spooling::TreeOnly;
    let archive = lab.open_with(&options);
    assert!(archive.index().entry_count() > Tree::mixed().files.len() as u64);
    assert!(lab.cached("spool").is_empty());
}
