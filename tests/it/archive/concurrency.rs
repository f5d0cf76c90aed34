//! Many readers at once: nothing is made twice, and nobody waits for ever.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use tarfs::base::thread::Thread;

use super::{Lab, assert_file, assert_random_reads, ino, large_lz4, packed};
use crate::support::packing::Packing;
use crate::support::tree::Tree;

/// Ends the process when it is not dropped in time: threads that wait for each other cannot be
/// ended otherwise.
struct Watchdog {
    // Before the thread: it ends when no one sends.
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

#[test]
fn a_span_that_many_ask_for_is_decoded_once() {
    let _watchdog = Watchdog::start("one span");
    let tree = Tree::large();
    let lab = Lab::serving(large_lz4());
    drop(lab.open());
    let archive = lab.open_with(&lab.without_spool());
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
fn many_readers_in_little_memory_get_along() {
    let _watchdog = Watchdog::start("little memory");
    let tree = Tree::mixed();
    for packing in [
        Packing::Plain,
        Packing::Gzip,
        Packing::Lz4,
        Packing::Zstd,
        Packing::Bzip2,
    ] {
        let lab = Lab::serving(packed(packing));
        let mut options = lab.without_spool();
        options.scan.memory = 1 << 20;
        drop(lab.open_with(&options));
        let archive = lab.open_with(&options);
        std::thread::scope(|scope| {
            for seed in 0..12 {
                let (archive, tree) = (&archive, &tree);
                scope.spawn(move || assert_random_reads(archive, tree, 10, seed));
            }
        });
    }
}

#[test]
fn streams_of_one_piece_are_decoded_by_many_at_once() {
    let _watchdog = Watchdog::start("one piece");
    let tree = Tree::mixed();
    let lab = Lab::serving(packed(Packing::Zstd));
    let mut options = lab.without_spool();
    options.scan.memory = 1 << 20;
    let archive = lab.open_with(&options);
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let (archive, tree) = (&archive, &tree);
            scope.spawn(move || assert_random_reads(archive, tree, 5, seed));
        }
    });
}

#[test]
fn queued_reads_are_all_answered() {
    let _watchdog = Watchdog::start("queued reads");
    let tree = Tree::large();
    let lab = Lab::serving(large_lz4());
    let mut options = lab.without_spool();
    options.scan.memory = 16 << 20;
    drop(lab.open_with(&options));
    let archive = lab.open_with(&options);
    let (sender, answers) = channel();
    for (number, (name, _)) in tree.files.iter().enumerate() {
        let sender = sender.clone();
        archive.read(
            ino(&archive, name),
            0,
            4096,
            Arc::new(|| true),
            move |read| {
                drop(sender.send((number, read)));
            },
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
