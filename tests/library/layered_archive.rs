//! Layers opened by the library: when they answer, and what they record and replay.

use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FlockOperation, flock};
use tarfs::archive::scan::Digest;
use tarfs::archive::{AccessedRange, OpenOptions, PrefetchMode, PrefetchOptions, Volume};
use tarfs::index::Ino;
use tarfs::layers::{Layer, LayeredArchive, WhiteoutFormat};
use tarfs::source;
use tarfs::{ArchivePath, Stats};

use crate::support::archive_env::TestEnv;
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::raw::{Archive, random_bytes};
use crate::support::rng::Rng;
use crate::support::wait;

/// Length of the kernel's requests.
const KERNEL_REQUEST_LEN: u32 = 128 << 10;

const FILES: u64 = 12;

/// Files of 1 MiB of noise in each layer.
fn name(layer: u64, number: u64) -> String {
    format!("{layer}/{number}")
}

fn content(layer: u64, number: u64) -> Vec<u8> {
    Rng::new(layer * FILES + number).bytes(1 << 20)
}

/// A server with two layers of noise, and an empty one above them.
fn noise_env() -> TestEnv {
    let env = TestEnv::new();
    for layer in 0..2 {
        let archive = (0..FILES).fold(Archive::new(), |archive, number| {
            archive.file(&name(layer, number), content(layer, number))
        });
        serve(&env, layer, Packing::Lz4.pack(&archive.end().into()));
    }
    serve(&env, 2, Packing::Lz4.pack(&Archive::new().end().into()));
    env
}

fn path(layer: u64) -> String {
    format!("/{layer}")
}

fn serve(env: &TestEnv, layer: u64, packed: impl Into<bytes::Bytes>) {
    let resource = Resource::new(packed.into()).etag(&format!("\"{layer}\""));
    env.server.serve(&path(layer), resource);
}

fn open(env: &TestEnv, layers: u64, options: &OpenOptions) -> (LayeredArchive, Arc<Stats>) {
    let stats = Arc::<Stats>::default();
    let open_layer = |layer| {
        let options = source::Options {
            stats: Arc::clone(&stats),
            ..source::Options::default()
        };
        let url = env.server.url(&path(layer));
        let source = env.network.block_on(source::open(&url, options));
        Layer {
            source: source.expect("a source"),
            digest: Digest::Ignore,
            published_index: None,
        }
    };
    let layers: Vec<_> = (0..layers).map(open_layer).collect();
    let network = env.network.handle();
    let opened = LayeredArchive::open(&layers, options, WhiteoutFormat::Oci, network, &stats);
    (opened.expect("layers"), stats)
}

fn sent_bytes(env: &TestEnv) -> u64 {
    (0..3)
        .map(|layer| env.server.sent_bytes(&path(layer)))
        .sum()
}

fn ino(volume: &LayeredArchive, name: &str) -> Ino {
    let path = ArchivePath::sanitize(name.as_bytes()).path;
    volume
        .index()
        .tree()
        .expect("rows")
        .find(&path)
        .expect("there")
        .ino()
}

/// Reads a file as a mount does.
fn read(volume: &LayeredArchive, layer: u64, number: u64) {
    let ino = ino(volume, &name(layer, number));
    for (piece, expected) in (0..).zip(content(layer, number).chunks(KERNEL_REQUEST_LEN as usize)) {
        let offset = piece * u64::from(KERNEL_REQUEST_LEN);
        volume.report_read(ino, offset, KERNEL_REQUEST_LEN);
        let read = volume.read_blocking(ino, offset, KERNEL_REQUEST_LEN);
        assert!(read.expect("readable") == expected, "{layer}/{number}");
    }
}

fn wait_until_idle(volume: &LayeredArchive) {
    wait::wait_until("prefetch settles", || {
        let mut layers = volume.archives().into_iter();
        layers.all(tarfs::archive::Archive::is_prefetch_idle)
    });
}

/// Spans of the replays of all layers that are filled, and all of them.
fn replayed(volume: &LayeredArchive) -> Vec<(u64, u64)> {
    let progress = volume.archives().into_iter().map(|layer| {
        let progress = layer.prefetch_progress().expect("started");
        (progress.replayed_spans, progress.replay_spans)
    });
    progress.collect()
}

fn replay(accesses: Vec<AccessedRange>) -> PrefetchOptions {
    PrefetchOptions {
        mode: PrefetchMode::Off,
        replay: Some(Box::new(move |_| accesses)),
        ..PrefetchOptions::default()
    }
}

// Promises: layer-scan
#[test]
fn layers_answer_before_their_indexes_are_saved() {
    let saved = |directory: &Path| {
        let names = fs::read_dir(directory).expect("listed");
        let names = names.map(|entry| entry.expect("listed").file_name());
        names
            .filter(|name| name.to_string_lossy().ends_with(".idx"))
            .count()
    };
    let env = TestEnv::new();
    serve(&env, 0, Archive::new().file("f", random_bytes(9_000)).end());
    let answered_before_saving = |_| {
        let cache = tempfile::tempdir().expect("a directory");
        let directory = cache.path().join("index");
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700).create(&directory).expect("made");
        // Saving waits for this lock, for at most a second.
        let lock = File::open(&directory).expect("opened");
        flock(&lock, FlockOperation::LockExclusive).expect("locked");
        let options = OpenOptions {
            cache_dir: Some(cache.path().to_owned()),
            ..env.options()
        };
        let (volume, _) = open(&env, 1, &options);
        let saved_early = saved(&directory);
        assert!(
            volume
                .index()
                .tree()
                .expect("rows")
                .find(&ArchivePath::sanitize(b"f").path)
                .is_some()
        );
        drop(lock);
        drop(volume);
        assert_eq!(saved(&directory), 1, "saved by then");
        saved_early == 0
    };
    // A busy machine may take the second.
    assert!((0..20).any(answered_before_saving));
}

// Promises: layer-scan
#[test]
fn layers_with_saved_indexes_are_opened_without_their_bytes() {
    let env = noise_env();
    let options = env.options_without_disk_cache();
    drop(open(&env, 3, &options));
    let before = sent_bytes(&env);
    let (volume, stats) = open(&env, 3, &options);
    assert_eq!(volume.index().entry_count(), 2 * (FILES + 1) + 1);
    assert_eq!((stats.scans.get(), stats.decoded_bytes.get()), (0, 0));
    // The first request of each layer asks for its front.
    let opened = sent_bytes(&env) - before;
    assert!(
        opened <= stats.source_requests.get() * (64 << 10),
        "{opened}"
    );
    assert_eq!(stats.source_requests.get(), 3);
}

// Promises: profile-mismatch
#[test]
fn reads_of_all_layers_are_recorded_in_one_order() {
    let env = noise_env();
    let (volume, _) = open(&env, 3, &env.options());
    let record = PrefetchOptions {
        mode: PrefetchMode::Off,
        record: true,
        ..PrefetchOptions::default()
    };
    volume.start_prefetch(record).expect("threads");
    assert_eq!(volume.accesses_since(0), None);
    let files = [(1, 3), (0, 7), (1, 0), (0, 1)];
    for (layer, number) in files {
        read(&volume, layer, number);
    }
    let (recorded, reads) = volume.accesses_since(0).expect("something was read");
    let expected = files.map(|(layer, number)| AccessedRange {
        ino: ino(&volume, &name(layer, number)),
        offset: 0,
        len: 1 << 20,
    });
    assert_eq!(recorded, expected);
    assert_eq!(volume.accesses_since(reads), None, "nothing since");
    assert!(
        volume
            .archives()
            .iter()
            .all(|layer| layer.accesses_since(0).is_none())
    );
}

// Promises: profile-replay
#[test]
fn replay_of_layers_leaves_no_fetch_to_reads() {
    let env = noise_env();
    let mut options = env.options_without_disk_cache();
    options.scan.memory = 256 << 20;
    drop(open(&env, 3, &options));
    let (volume, stats) = open(&env, 3, &options);
    let files = [(1, 3), (0, 7), (1, 0), (0, 1)];
    let accesses = files.map(|(layer, number)| AccessedRange {
        ino: ino(&volume, &name(layer, number)),
        offset: 0,
        len: 1 << 20,
    });
    volume
        .start_prefetch(replay(accesses.to_vec()))
        .expect("threads");
    wait_until_idle(&volume);
    let replayed = replayed(&volume);
    assert!(
        replayed.iter().all(|(done, all)| done == all),
        "{replayed:?}"
    );
    assert!(replayed[0].1 > 0 && replayed[1].1 > 0, "{replayed:?}");
    assert_eq!(replayed[2], (0, 0));
    let before = sent_bytes(&env);
    for (layer, number) in files {
        read(&volume, layer, number);
    }
    assert_eq!(sent_bytes(&env), before);
    assert_eq!(stats.memory_miss_spans.get(), 0);
}

// Promises: profile-replay
#[test]
fn replays_of_layers_share_the_memory_of_one() {
    let env = noise_env();
    let mut options = env.options_without_disk_cache();
    options.scan.memory = 64 << 20;
    drop(open(&env, 3, &options));
    let (volume, stats) = open(&env, 3, &options);
    let all = (0..2).flat_map(|layer| (0..FILES).map(move |number| (layer, number)));
    let accesses = all.clone().map(|(layer, number)| AccessedRange {
        ino: ino(&volume, &name(layer, number)),
        offset: 0,
        len: 1 << 20,
    });
    volume
        .start_prefetch(replay(accesses.collect()))
        .expect("threads");
    wait_until_idle(&volume);
    let started = replayed(&volume);
    assert!(started[0].0 > 0 && started[1].0 > 0, "{started:?}");
    // Three eighths of the memory are for spans, and three eighths of these may be ahead of reads.
    assert!(stats.decoded_bytes.get() <= 9 << 20, "{started:?}");
    for (layer, number) in all {
        wait_until_idle(&volume);
        read(&volume, layer, number);
    }
    wait_until_idle(&volume);
    let ended = replayed(&volume);
    assert!(ended.iter().all(|(done, all)| done == all), "{ended:?}");
}
