//! What costs more to make again than to read back is kept on disk, and nothing depends on it.

use std::fs;
use std::sync::Arc;

use tarfs::archive::{Archive, OpenError, DiskCacheMode};
use tarfs::base::stats::Stats;
use tarfs::source;

use super::{
    Lab, PATH, assert_file, assert_files, assert_files_backwards, assert_random_reads,
    for_each_packing, index, packed,
};
use crate::support::http::Resource;
use crate::support::noise::Noise;
use crate::support::packing::Packing;
use crate::support::tree::Tree;
use crate::support::wait;

const ONE_PIECE: [Packing; 2] = [Packing::Zstd, Packing::Xz];

/// Reads everything, and is told how many bytes were fetched for it.
fn fetched_by_reading(archive: &Archive) -> u64 {
    let before = archive.stats().source_read_bytes.get();
    assert_files_backwards(archive, &Tree::mixed());
    archive.stats().source_read_bytes.get() - before
}

#[test]
fn stream_of_one_piece_is_cached_on_disk_and_fetched_once() {
    for packing in ONE_PIECE {
        let lab = Lab::serving(packed(packing));
        let mut options = lab.options();
        // Far less than the archive.
        options.scan.memory = 8 << 20;
        let archive = lab.open_with(&options);
        assert!(archive.index().span_count() > 1);
        assert_eq!(fetched_by_reading(&archive), 0, "{packing:?}");
        assert_random_reads(&archive, &Tree::mixed(), 100, 1);
        assert!(archive.stats().disk_cache_read_bytes.get() > 0);
        drop(archive);

        let archive = lab.open_with(&options);
        assert_eq!(fetched_by_reading(&archive), 0, "{packing:?}");
        assert_random_reads(&archive, &Tree::mixed(), 100, 1);
        assert_eq!(archive.stats().decoded_spans.get(), 0);
        assert_eq!(archive.stats().scans.get(), 0);
    }
}

/// Reads all files of the mixed tree, each whole, in an order without reason.
fn assert_files_at_random(archive: &Archive, seed: u64) {
    let tree = Tree::mixed();
    let mut left: Vec<_> = tree.files.iter().collect();
    let mut noise = Noise::new(seed);
    while !left.is_empty() {
        let number = index(noise.below(left.len() as u64));
        let (name, content) = left.swap_remove(number);
        assert_file(archive, name, content);
    }
}

fn an_archive_is_fetched_once_in_whatever_order_it_is_read(packing: Packing) {
    let packed = packed(packing);
    let lab = Lab::serving(packed.clone());
    let mut options = lab.options();
    // Far less than the archive.
    options.scan.memory = 8 << 20;
    let archive = lab.open_with(&options);
    assert_files_at_random(&archive, 1);
    let once = packed.len() as u64 * 102 / 100;
    let sent = lab.server.sent_bytes(PATH);
    assert!(sent <= once, "{sent} of {once}");
    assert_eq!(archive.stats().decoded_spans.get(), 0);
    assert_eq!(archive.disk_cache_problem(), None);
    drop(archive);

    let requests = lab.server.seen(PATH).len();
    let archive = lab.open_with(&options);
    let opening = (lab.server.seen(PATH).len(), lab.server.sent_bytes(PATH));
    let (asked, got) = (opening.0 - requests, opening.1 - sent);
    assert!(
        asked == 1 && got <= 64 << 10,
        "{asked} requests, {got} bytes"
    );
    assert_files_at_random(&archive, 2);
    let read = (lab.server.seen(PATH).len(), lab.server.sent_bytes(PATH));
    assert_eq!(read, opening, "nothing is fetched for reads");
}
for_each_packing!(an_archive_is_fetched_once_in_whatever_order_it_is_read);

#[test]
fn reads_fill_the_disk_cache_with_a_foreign_index() {
    let packed = packed(Packing::Lz4);
    let lab = Lab::serving(packed.clone());
    let mut options = lab.options();
    options.disk_cache = DiskCacheMode::IndexOnly;
    drop(lab.open_with(&options));
    assert!(lab.cached("disk-cache").is_empty());

    options = lab.options();
    options.scan.memory = 8 << 20;
    let archive = lab.open_with(&options);
    assert_files(&archive, &Tree::mixed());
    let stats = Arc::clone(archive.stats());
    assert_eq!(stats.scans.get(), 0);
    assert!(stats.decoded_spans.get() > 0);
    drop(archive);
    assert!(stats.disk_cache_written_bytes.get() > 0);
    assert!(stats.disk_cache_written_bytes.get() <= stats.decoded_bytes.get());

    let archive = lab.open_with(&options);
    assert_files_at_random(&archive, 3);
    let missing = stats.decoded_bytes.get() - stats.disk_cache_written_bytes.get();
    let stats = archive.stats();
    assert!(stats.disk_cache_hit_spans.get() > 0);
    // Each once, and again what memory has let go meanwhile.
    assert!(missing > 0 || stats.decoded_bytes.get() == 0);
}

#[test]
fn a_local_archive_is_kept_on_disk_if_it_is_packed() {
    for packing in Packing::ALL {
        let lab = Lab::new();
        let path = lab.cache.path().join("archive");
        fs::write(&path, packed(packing)).expect("written");
        let stats = Arc::<Stats>::default();
        let open = || {
            let spec = path.to_str().expect("UTF-8");
            let source = source::open(spec, source::Options::default());
            let source = lab.network.block_on(source).expect("a source");
            let network = lab.network.handle();
            Archive::open(source, &lab.options(), network, &stats).expect("an archive")
        };
        for scans in [1, 1] {
            let archive = open();
            assert_eq!(stats.scans.get(), scans);
            assert_files(&archive, &Tree::mixed());
        }
        let is_packed = packing != Packing::Plain;
        assert_eq!(
            stats.disk_cache_written_bytes.get() > 0,
            is_packed,
            "{packing:?}"
        );
        assert_eq!(lab.cached("disk-cache").len(), usize::from(is_packed));
    }
}

#[test]
fn reads_are_right_whatever_happens_to_the_disk_cache() {
    for packing in ONE_PIECE {
        let harms: [fn(&Lab); 4] = [
            |lab| fs::remove_file(lab.the_cached("disk-cache")).expect("removed"),
            |lab| truncate(lab, 9_000_000),
            |lab| truncate(lab, 0),
            |lab| {
                let garbage = Noise::new(9).bytes(Tree::mixed().tar.len());
                fs::write(lab.the_cached("disk-cache"), garbage).expect("written");
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
        .open(lab.the_cached("disk-cache"));
    file.expect("a spool").set_len(len).expect("shorter");
}

#[test]
fn bytes_are_decoded_again_without_a_disk_cache() {
    for packing in ONE_PIECE {
        let lab = Lab::serving(packed(packing));
        let options = lab.without_spool();
        for _ in 0..2 {
            let archive = lab.open_with(&options);
            assert_files(&archive, &Tree::mixed());
            assert_random_reads(&archive, &Tree::mixed(), 20, 1);
        }
        assert!(lab.cached("disk-cache").is_empty());
    }
}

#[test]
fn disk_cache_that_cannot_grow_is_noted_in_status() {
    for limit in [0, 9 << 20] {
        let lab = Lab::serving(packed(Packing::Zstd));
        let mut options = lab.options();
        options.scan.memory = 8 << 20;
        options.disk_cache = DiskCacheMode::Enabled {
            limit_bytes: Some(limit),
        };
        let archive = lab.open_with(&options);
        wait::until("it is noted", || archive.disk_cache_problem().is_some());
        let trouble = archive.disk_cache_problem().expect("just seen");
        assert!(
            trouble.contains("the disk cache is incomplete"),
            "{trouble}"
        );
        assert!(archive.stats().disk_cache_written_bytes.get() <= limit);
        assert_files(&archive, &Tree::mixed());
        drop(archive);
        let archive = lab.open_with(&options);
        for (name, content) in Tree::mixed().files.iter().rev() {
            assert_file(&archive, name, content);
            let used = archive.disk_cache_use().expect("a spool");
            assert!(used.all_bytes <= limit, "{used:?}");
            assert_eq!(used.limit_bytes, limit);
        }
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
fn server_without_ranges_is_cached_on_disk_whole() {
    let tree = Tree::mixed();
    for packing in [Packing::Plain, Packing::Gzip, Packing::Lz4, Packing::Zstd] {
        let lab = without_ranges(packing);
        let mut options = lab.options();
        options.scan.memory = 8 << 20;
        let archive = lab.open_with(&options);
        assert_eq!(
            archive.stats().disk_cache_written_bytes.get(),
            tree.tar.len() as u64
        );
        assert_files(&archive, &tree);
        drop(archive);

        let archive = lab.open_with(&options);
        assert_eq!(archive.stats().scans.get(), 0, "index and spool are enough");
        assert_files(&archive, &tree);
        drop(archive);

        fs::remove_file(lab.the_cached("disk-cache")).expect("removed");
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
fn server_without_ranges_needs_a_disk_cache() {
    let lab = without_ranges(Packing::Gzip);
    let refused = lab.options();
    let nowhere = lab.options();
    let too_small = lab.options();
    let cases = [
        tarfs::archive::OpenOptions {
            disk_cache: DiskCacheMode::Disabled,
            ..refused
        },
        tarfs::archive::OpenOptions {
            cache_dir: None,
            ..nowhere
        },
        tarfs::archive::OpenOptions {
            disk_cache: DiskCacheMode::Enabled {
                limit_bytes: Some(1 << 20),
            },
            ..too_small
        },
    ];
    for options in cases {
        let error = lab.try_open(&options).err();
        assert!(
            matches!(error, Some(OpenError::NoDiskCache { .. })),
            "{error:?}"
        );
    }
    assert!(lab.cached("disk-cache").is_empty());
}

#[test]
fn tree_needs_no_disk_cache() {
    let lab = without_ranges(Packing::Gzip);
    let mut options = lab.options();
    options.disk_cache = DiskCacheMode::IndexOnly;
    let archive = lab.open_with(&options);
    assert!(archive.index().entry_count() > Tree::mixed().files.len() as u64);
    assert!(lab.cached("disk-cache").is_empty());
}
