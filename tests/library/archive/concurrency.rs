//! Many concurrent readers: no span is decoded twice, and no reader waits for ever.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use tarfs::archive::Volume;
use tarfs::internal::thread::Thread;

use super::{TestEnv, assert_file, assert_random_reads, ino, large_lz4, packed};
use crate::support::packing::Packing;
use crate::support::tree::Tree;

/// Ends the process unless it is dropped in time. Deadlocked threads cannot be ended otherwise.
struct Watchdog {
    // Dropped before the thread is joined, because the thread ends when the sender is gone.
    _alive: Sender<()>,
    _thread: Thread<()>,
}

impl Watchdog {
    fn start(what: &'static str) -> Self {
        let (alive, silence) = channel::<()>();
        let thread = Thread::spawn("watchdog", move || {
            let limit = Duration::from_mins(1);
            if silence.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                #[expect(clippy::print_stderr, reason = "the last words of the process")]
                {
                    eprintln!("{what}: nothing for {limit:?}");
                }
                std::process::abort();
            }
        });
        Self {
            _alive: alive,
            _thread: thread.expect("a thread"),
        }
    }
}

// Promises: status-counters
#[test]
fn span_read_by_many_readers_is_decoded_once() {
    let _watchdog = Watchdog::start("one span");
    let tree = Tree::large();
    let env = TestEnv::with_archive(large_lz4());
    drop(env.open());
    let archive = env.open_with(&env.options_without_disk_cache());
    let (name, content) = &tree.files[100];
    let barrier = Barrier::new(16);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                barrier.wait();
                assert_file(&archive, name, content);
            });
        }
    });
    let stats = archive.stats();
    assert_eq!(stats.decoded_spans.get(), 1);
    assert_eq!(stats.source_requests.get(), 2);
    assert_eq!(stats.memory_miss_spans.get(), 1);
    let (hits, shared) = (
        stats.memory_hit_spans.get(),
        stats.memory_shared_spans.get(),
    );
    assert_eq!(hits + shared, 15);
}

#[test]
fn many_readers_finish_in_little_memory() {
    let _watchdog = Watchdog::start("little memory");
    let tree = Tree::mixed();
    for packing in [
        Packing::Plain,
        Packing::Gzip,
        Packing::Lz4,
        Packing::Zstd,
        Packing::Bzip2,
    ] {
        let env = TestEnv::with_archive(packed(packing));
        let mut options = env.options_without_disk_cache();
        options.scan.memory = 1 << 20;
        drop(env.open_with(&options));
        let archive = env.open_with(&options);
        std::thread::scope(|scope| {
            for seed in 0..12 {
                let (archive, tree) = (&archive, &tree);
                scope.spawn(move || assert_random_reads(archive, tree, 10, seed));
            }
        });
    }
}

#[test]
fn unseekable_streams_are_decoded_by_many_readers_at_once() {
    let _watchdog = Watchdog::start("one piece");
    let tree = Tree::mixed();
    let env = TestEnv::with_archive(packed(Packing::Zstd));
    let mut options = env.options_without_disk_cache();
    options.scan.memory = 1 << 20;
    let archive = env.open_with(&options);
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let (archive, tree) = (&archive, &tree);
            scope.spawn(move || assert_random_reads(archive, tree, 5, seed));
        }
    });
}

#[test]
fn all_queued_reads_are_answered() {
    let _watchdog = Watchdog::start("queued reads");
    let tree = Tree::large();
    let env = TestEnv::with_archive(large_lz4());
    let mut options = env.options_without_disk_cache();
    options.scan.memory = 16 << 20;
    drop(env.open_with(&options));
    let archive = env.open_with(&options);
    let (sender, answers) = channel();
    for (number, (name, _)) in tree.files.iter().enumerate() {
        let sender = sender.clone();
        archive.read(
            ino(&archive, name),
            0,
            4096,
            Arc::new(|| true),
            Box::new(move |read| drop(sender.send((number, read)))),
        );
    }
    drop(sender);
    let mut answered = 0;
    for (number, read) in answers {
        assert!(tree.files[number].1.starts_with(&read.expect("bytes")));
        answered += 1;
    }
    assert_eq!(answered, tree.files.len());
}
