//! Archives with the longest packed pieces that their formats allow, in the least memory.
//!
//! No thread may wait for bytes that only another waiting thread could return.

use std::fs;
use std::io::{Cursor, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tarfs::Stats;
use tarfs::archive::scan::{self, PayloadEnd, ScanError, Sink};
use tarfs::archive::{Archive, DiskCacheMode, OpenError, OpenOptions, ReadError, Volume};
use tarfs::fetch;
use tarfs::index::Ino;
use tarfs::internal::thread::Thread;
use tarfs::source::{MemorySource, Pipe, RetryForever, Source, Validator};
use tarfs::tar::{self, Member};
use tokio::runtime::{Builder, Runtime};
use xxhash_rust::xxh32::xxh32;

use crate::support::cli::{Outcome, Place};
use crate::support::raw;
use crate::support::rng::Rng;

const MIB: usize = 1 << 20;
/// Work that takes longer hangs.
const WORK_TIMEOUT: Duration = Duration::from_mins(1);

/// Bytes that no format compresses (xorshift).
fn random_bytes(len: usize) -> Vec<u8> {
    Rng::new(1).bytes(len)
}

/// An archive of one file.
fn archive(name: &str, payload: &[u8]) -> Vec<u8> {
    raw::Archive::new().file(name, payload).end()
}

/// `bytes` in one zstd frame without a content size, as for a pipe.
fn zstd_of_a_pipe(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("an encoder");
    encoder.write_all(bytes).expect("room");
    encoder.finish().expect("room")
}

/// `bytes` in the longest blocks of the legacy format.
fn lz4_legacy(bytes: &[u8]) -> Vec<u8> {
    let mut packed = 0x184c_2102_u32.to_le_bytes().to_vec();
    for block in bytes.chunks(8 * MIB) {
        let block = lz4_flex::block::compress(block);
        packed.extend(u32::try_from(block.len()).expect("short").to_le_bytes());
        packed.extend(block);
    }
    packed
}

/// `bytes` in stored blocks of 4 MiB, the longest that may refer to earlier ones.
fn lz4_linked(bytes: &[u8]) -> Vec<u8> {
    let descriptor = [0x40, 0x70];
    let mut packed = 0x184d_2204_u32.to_le_bytes().to_vec();
    packed.extend(descriptor);
    packed.push(xxh32(&descriptor, 0).to_le_bytes()[1]);
    for block in bytes.chunks(4 * MIB) {
        let len = u32::try_from(block.len()).expect("short");
        packed.extend((len | 1 << 31).to_le_bytes());
        packed.extend(block);
    }
    packed.extend([0; 4]);
    packed
}

/// `bytes` in blocks of 24 MiB with sizes in their headers.
fn xz_of_threads(bytes: &[u8]) -> Vec<u8> {
    xz(&["-0", "-T2", "--block-size=24MiB"], bytes)
}

/// `bytes` in blocks of 4 MiB, each with a dictionary of 64 MiB.
fn xz_of_large_dictionaries(bytes: &[u8]) -> Vec<u8> {
    xz(&["--lzma2=preset=0,dict=64MiB", "--block-size=4MiB"], bytes)
}

fn xz(arguments: &[&str], bytes: &[u8]) -> Vec<u8> {
    let mut xz = Command::new("xz")
        .arg("-c")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("xz is installed");
    let mut stdin = xz.stdin.take().expect("piped");
    let bytes = bytes.to_vec();
    let writer = Thread::spawn("xz", move || stdin.write_all(&bytes)).expect("a thread");
    let output = xz.wait_with_output().expect("it runs");
    writer.join().expect("it reads");
    output.stdout
}

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime")
}

fn minimum_options() -> scan::Options {
    scan::Options {
        compression: None,
        tar: tar::Options::default(),
        allow_truncated: false,
        spans: true,
        connections: 8,
        chunk_len: 8 << 20,
        min_speed: fetch::MinSpeed::default(),
        retry_forever: RetryForever::default(),
        cancel_token: fetch::CancelToken::default(),
        memory: 0,
        memory_share: scan::MemoryShare::Whole,
        readers: None,
        reclaimers: Vec::new(),
        workers: 2,
        allow_skipping: false,
        sha256: scan::Digest::Ignore,
        plain_sha256: scan::Digest::Ignore,
        resume_points: false,
        resume: None,
        saved_index: None,
    }
}

/// Runs `work` and returns its result.
///
/// # Panics
///
/// If it does not end in time. Its thread then continues.
fn run_with_timeout<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, made) = mpsc::channel();
    let thread = Thread::spawn("work", move || drop(sender.send(work()))).expect("a thread");
    match made.recv_timeout(WORK_TIMEOUT) {
        Ok(made) => made,
        Err(error) => {
            std::mem::forget(thread);
            panic!("{what}: {error}");
        }
    }
}

/// Counts payloads.
#[derive(Default)]
struct Counter(usize);

impl Sink for Counter {
    type Error = ();
    fn member(&mut self, _member: Member) -> Result<(), ()> {
        Ok(())
    }
    fn payload(&mut self, bytes: bytes::Bytes) -> Result<(), ()> {
        self.0 += bytes.len();
        Ok(())
    }
    fn member_end(&mut self, _end: PayloadEnd) -> Result<(), ()> {
        Ok(())
    }
    fn warning(&mut self, _text: &str) {}
    fn damage(&mut self, _offset: tarfs::Plain, _text: &str) {}
}

fn scan_payload_bytes(packed: Vec<u8>, options: &scan::Options, stats: &Arc<Stats>) -> usize {
    let runtime = runtime();
    let source: Arc<dyn Source> = Arc::new(MemorySource::new("test", packed));
    let mut counter = Counter::default();
    scan::scan(&source, options, runtime.handle(), stats, &mut counter).expect("scanned");
    counter.0
}

// Promises: memory-bound
#[test]
fn decoders_finish_with_minimum_memory() {
    let plain = archive("a", &random_bytes(20 * MIB));
    let formats = [
        ("zstd of a pipe", zstd_of_a_pipe(&plain)),
        ("legacy lz4", lz4_legacy(&plain)),
        ("linked lz4", lz4_linked(&plain)),
        ("xz of threads", xz_of_threads(&plain)),
    ];
    for (name, packed) in formats {
        let len = run_with_timeout(name, move || {
            scan_payload_bytes(packed, &minimum_options(), &Arc::default())
        });
        assert_eq!(len, 20 * MIB, "{name}");
    }
}

#[test]
fn speculative_decoding_never_blocks_earlier_data() {
    // Incompressible bytes give the longest shares. Bytes packed a thousand times give the longest
    // decoded shares.
    let mut payload = random_bytes(20 * MIB);
    payload.extend(vec![0; 150 * MIB]);
    payload.extend(random_bytes(20 * MIB));
    let len = payload.len();
    let level = flate2::Compression::new(3);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
    encoder.write_all(&archive("a", &payload)).expect("room");
    let packed = encoder.finish().expect("room");
    for memory in [0, 48 << 20, 64 << 20, 128 << 20] {
        let options = scan::Options {
            memory,
            workers: 6,
            ..minimum_options()
        };
        let (packed, stats) = (packed.clone(), Arc::<Stats>::default());
        let counted = Arc::clone(&stats);
        let got = run_with_timeout("a scan", move || {
            scan_payload_bytes(packed, &options, &counted)
        });
        assert_eq!(got, len);
        assert_eq!(stats.speculative_decodes.get() > 0, memory > 32 << 20);
    }
}

// Promises: decode-memory
#[test]
fn speculative_gzip_leaves_buffers_to_the_front() {
    // Every byte refers to the previous window, so speculative decoding keeps everything twice. Shares
    // decode to more than their buffers, but blocks do not.
    let payload = random_bytes(16 << 10).repeat(16_384);
    let len = payload.len();
    let level = flate2::Compression::new(6);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
    for block in archive("a", &payload).chunks(256 << 10) {
        encoder.write_all(block).expect("room");
        encoder.flush().expect("room");
    }
    let packed = encoder.finish().expect("room");
    for workers in [4, 6] {
        let options = scan::Options {
            memory: 1 << 30,
            workers,
            ..minimum_options()
        };
        let (packed, stats) = (packed.clone(), Arc::<Stats>::default());
        let counted = Arc::clone(&stats);
        let got = run_with_timeout("a scan", move || {
            scan_payload_bytes(packed, &options, &counted)
        });
        assert_eq!(got, len);
        assert!(stats.speculative_decodes.get() > 0);
    }
}

/// `bytes` in blocks of 900,000 bytes after run-length encoding.
fn bzip2(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ::bzip2::write::BzEncoder::new(Vec::new(), ::bzip2::Compression::best());
    encoder.write_all(bytes).expect("room");
    encoder.finish().expect("room")
}

// Promises: decode-memory
#[test]
fn bzip2_blocks_larger_than_memory_are_scanned_and_read() {
    // Ten blocks of 45.9 MB, each packed to 180 KB.
    let values = random_bytes(1_800_000).into_iter();
    let payload: Arc<[u8]> = values.flat_map(|value| [value; 255]).collect();
    let packed = bzip2(&archive("a", &payload));
    let (len, for_reads) = (payload.len(), packed.clone());
    let got = run_with_timeout("a scan", move || {
        scan_payload_bytes(packed, &minimum_options(), &Arc::default())
    });
    assert_eq!(got, len);
    let got = run_with_timeout("reads", move || {
        let cache = tempfile::tempdir().expect("a directory");
        let network = runtime();
        let options = OpenOptions {
            disk_cache: DiskCacheMode::Disabled,
            ..options(cache.path())
        };
        let source = Arc::new(MemorySource::new("test", for_reads));
        let archive = Archive::open(source, &options, network.handle(), &Arc::default());
        let archive = archive.expect("opened");
        std::thread::scope(|scope| {
            let readers = [0, 40, 100, 400].map(|at| {
                let archive = &archive;
                scope.spawn(move || read(archive, b"a", at * MIB as u64))
            });
            readers.map(|reader| reader.join().expect("no panic"))
        })
    });
    for (at, got) in [0, 40, 100, 400].into_iter().zip(got) {
        assert!(got == payload[at * MIB..at * MIB + 100], "at {at} MiB");
    }
}

// Promises: unmount-quick
#[test]
fn closing_archive_ends_reads_waiting_for_memory() {
    let packed = zstd_of_a_pipe(&archive("a", &random_bytes(20 * MIB)));
    let ended = run_with_timeout("reads", move || {
        let cache = tempfile::tempdir().expect("a directory");
        let network = runtime();
        let options = OpenOptions {
            disk_cache: DiskCacheMode::Disabled,
            ..options(cache.path())
        };
        let source = Arc::new(MemorySource::new("test", packed));
        let archive = Archive::open(source, &options, network.handle(), &Arc::default());
        let archive = archive.expect("opened");
        let found = archive
            .index()
            .tree()
            .expect("rows")
            .lookup(Ino::ROOT, b"a")
            .map(|entry| entry.ino());
        archive.close();
        archive.read_blocking(found.expect("it is there"), 19 * MIB as u64, 100)
    });
    assert!(matches!(ended, Err(ReadError::Unreachable(_))), "{ended:?}");
}

/// `bytes` as one zstd frame with a window of 64 MiB.
fn zstd_of_a_large_window(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("an encoder");
    let window = zstd::zstd_safe::CParameter::WindowLog(26);
    encoder.set_parameter(window).expect("a known parameter");
    encoder.write_all(bytes).expect("room");
    encoder.finish().expect("room")
}

// Promises: memory-decoder, memory-needed, memory-saved-index
#[test]
fn decoder_needing_more_than_memory_reports_how_much() {
    let plain = archive("a", &random_bytes(70 * MIB));
    let formats = [
        ("xz", xz_of_large_dictionaries(&plain)),
        ("zstd", zstd_of_a_large_window(&plain)),
    ];
    for (name, packed) in formats {
        for memory in [85 << 20, 86 << 20] {
            let packed = packed.clone();
            let scanned = run_with_timeout(name, move || {
                let runtime = runtime();
                let source: Arc<dyn Source> = Arc::new(MemorySource::new("test", packed));
                let options = scan::Options {
                    memory,
                    ..minimum_options()
                };
                let (mut counter, stats) = (Counter::default(), Arc::default());
                let scanned = scan::scan(&source, &options, runtime.handle(), &stats, &mut counter);
                scanned.map(|_| counter.0)
            });
            match scanned {
                Ok(len) => assert_eq!((len, memory), (70 * MIB, 86 << 20), "{name}"),
                Err(ScanError::Archive { error, .. }) => {
                    assert_eq!(memory, 85 << 20, "{name}: {error}");
                    let hint = error.hint().expect("a hint");
                    assert_eq!(hint, "allow it with --memory 86MiB", "{name}");
                }
                Err(ScanError::Sink(())) => panic!("{name}: the sink has no limit"),
            }
        }
    }
}

// Promises: memory-saved-index
#[test]
fn saved_index_of_a_stream_that_needs_more_than_memory_is_refused() {
    let payload = random_bytes(12 * MIB);
    let plain = archive("a", &payload);
    let formats = [
        ("xz", xz_of_large_dictionaries(&plain)),
        ("zstd", zstd_of_a_large_window(&plain)),
    ];
    for (name, packed) in formats {
        let payload = payload.clone();
        run_with_timeout(name, move || {
            let (cache, network) = (tempfile::tempdir().expect("a directory"), runtime());
            let open = |memory: u64, disk_cache| {
                let mut options = options(cache.path());
                options.scan.memory = memory << 20;
                options.disk_cache = disk_cache;
                let version = Validator::StrongEtag("\"1\"".to_owned());
                let source = MemorySource::new("test", packed.clone()).with_validator(version);
                Archive::open(
                    Arc::new(source),
                    &options,
                    network.handle(),
                    &Arc::default(),
                )
            };
            let enabled = DiskCacheMode::Enabled { limit_bytes: None };
            // The pools of the first scan are so large that the window of zstd fits them.
            drop(open(2048, enabled).expect("opened"));
            for mode in [enabled, DiskCacheMode::Disabled] {
                let Err(OpenError::Archive { error, .. }) = open(85, mode) else {
                    panic!("{name}: too little memory");
                };
                let hint = error.hint().expect("a hint");
                assert_eq!(hint, "allow it with --memory 86MiB", "{name}");
                let archive = open(86, mode).expect("the value that the hint names");
                assert!(read(&archive, b"a", 500) == payload[500..600], "{name}");
            }
            let listed = open(85, DiskCacheMode::IndexOnly).expect("only the tree");
            assert_eq!(listed.index().entry_count(), 2);
        });
    }
}

/// Otherwise the entries would be written with other bytes, and called damaged.
// Promises: memory-saved-index
#[test]
fn verbs_that_read_by_a_saved_index_name_the_memory_that_they_need() {
    let place = Place::new();
    let packed = xz_of_large_dictionaries(&archive("a", &random_bytes(MIB)));
    place.put("a.tar.xz", packed);
    place.succeeds(&["index", "-q", "a.tar.xz"]);
    place.succeeds(&["ls", "--memory=32MiB", "a.tar.xz"]);
    fs::write(place.path("out/a"), vec![0; MIB]).expect("written");
    for verb in [
        &["diff", "--checksum", "a.tar.xz", "out"][..],
        &["shard", "tar", "a.tar.xz", "1/1"],
        &["shard", "write", "a.tar.xz", "1/1", "-C", "out"],
        &["sync", "a.tar.xz", "out"],
    ] {
        let words = [verb, &["--memory=32MiB"]].concat();
        let outcome = place.run(&words);
        assert_eq!(outcome.code, 2, "{verb:?}");
        let reason = "decoding needs 67108864 bytes of memory, 25165824 are allowed";
        assert!(
            outcome.complaints.contains(reason),
            "{}",
            outcome.complaints
        );
    }
}

/// Runs `words` with this many MiB of memory.
fn run_with_memory(place: &Place, words: &[&str], mebibytes: u64) -> Outcome {
    let memory = format!("--memory={mebibytes}MiB");
    place.run(&[words, &[&*memory]].concat())
}

/// The MiB that the error of `outcome` names; `None` for a success.
#[track_caller]
fn named_memory(outcome: &Outcome) -> Option<u64> {
    if outcome.code == 0 {
        return None;
    }
    let text = &outcome.complaints;
    let (_, rest) = text.split_once("(allow it with --memory ").expect(text);
    let (mebibytes, _) = rest.split_once("MiB)").expect(text);
    Some(mebibytes.parse().expect(text))
}

// Promises: memory-needed
#[test]
fn named_memory_suffices_and_is_the_least_for_every_way_of_reading() {
    let mut refused = 0;
    for mebibytes in [24, 32, 48, 64, 96] {
        let place = Place::new();
        let dictionary = format!("--lzma2=preset=0,dict={mebibytes}MiB");
        let pack = |bytes: &[u8]| xz(&[&dictionary], bytes);
        let plain = archive("f", b"content");
        let packed = pack(&plain);
        place.put("outer.tar", archive("a.tar.xz", &packed));
        place.put("outer.tar.xz", pack(&archive("a.tar", &plain)));
        let middle = archive("outer.tar.xz", &pack(&archive("a.tar", &plain)));
        place.put("outermost.tar.xz", pack(&middle));
        place.put("a.tar.xz", &packed);
        for (words, is_indexed) in [
            (&["ls", "a.tar.xz"][..], false),
            (&["index", "-q", "a.tar.xz"], false),
            (&["verify", "a.tar.xz"], false),
            (&["materialize", "-q", "a.tar.xz", "-C", "out"], false),
            (&["shard", "tar", "a.tar.xz", "1/1"], true),
            (&["ls", "tar:outer.tar!/a.tar.xz"], false),
            (&["ls", "tar:outer.tar.xz!/a.tar"], false),
            (
                &["ls", "tar:tar:outermost.tar.xz!/outer.tar.xz!/a.tar"],
                false,
            ),
        ] {
            let run = |mebibytes| {
                fs::remove_dir_all(place.path("cache")).ok();
                if is_indexed {
                    place.succeeds(&["index", "-q", "--memory=1GiB", "a.tar.xz"]);
                }
                run_with_memory(&place, words, mebibytes)
            };
            let Some(named) = named_memory(&run(32)) else {
                continue;
            };
            refused += 1;
            let context = format!("{words:?}: {named} for {mebibytes}");
            let enough = run(named);
            assert_eq!(enough.code, 0, "{context}: {}", enough.complaints);
            assert_eq!(named_memory(&run(named - 1)), Some(named), "{context}");
        }
    }
    assert!(refused > 20, "{refused}");
}

/// An error about one file has the advice, too.
// Promises: memory-needed
#[test]
fn file_that_needs_more_memory_is_reported_with_the_hint() {
    let place = Place::new();
    let packed = xz_of_large_dictionaries(&archive("a", &random_bytes(MIB)));
    place.put("a.tar.xz", packed);
    place.succeeds(&["index", "-q", "a.tar.xz"]);
    fs::write(place.path("out/a"), vec![0; MIB]).expect("written");
    let words = ["diff", "--checksum", "a.tar.xz", "out"];
    let outcome = run_with_memory(&place, &words, 32);
    let named = named_memory(&outcome).expect("too little");
    assert_eq!(run_with_memory(&place, &words, named).code, 1);
}

// Promises: memory-needed
#[test]
fn scan_for_a_mount_lends_decoders_what_the_hint_counts() {
    let packed = xz_of_large_dictionaries(&archive("a", &random_bytes(MIB)));
    run_with_timeout("xz", move || {
        for (memory, fits) in [(85, false), (86, true)] {
            let (cache, network) = (tempfile::tempdir().expect("a directory"), runtime());
            let mut options = options(cache.path());
            options.scan.memory = memory << 20;
            let source = Arc::new(MemorySource::new("test", packed.clone()));
            let opened = Archive::open(source, &options, network.handle(), &Arc::default());
            assert_eq!(opened.is_ok(), fits, "{memory} MiB");
        }
    });
}

// Promises: memory-decoder
#[test]
fn readers_take_turns_if_memory_fits_one_decoder() {
    let payload = random_bytes(20 * MIB);
    let packed = xz_of_large_dictionaries(&archive("a", &payload));
    let got = run_with_timeout("reads", move || {
        let cache = tempfile::tempdir().expect("a directory");
        let network = runtime();
        let mut options = options(cache.path());
        options.scan.memory = 90 << 20;
        options.disk_cache = DiskCacheMode::Disabled;
        let source = Arc::new(MemorySource::new("test", packed));
        let archive = Archive::open(source, &options, network.handle(), &Arc::default());
        let archive = archive.expect("opened");
        std::thread::scope(|scope| {
            let readers = [0, 5, 10, 15].map(|at| {
                let archive = &archive;
                scope.spawn(move || read(archive, b"a", at * MIB as u64))
            });
            readers.map(|reader| reader.join().expect("no panic"))
        })
    });
    for (at, got) in [0, 5, 10, 15].into_iter().zip(got) {
        assert!(got == payload[at * MIB..at * MIB + 100], "at {at} MiB");
    }
}

fn options(cache_dir: &Path) -> OpenOptions {
    OpenOptions {
        scan: minimum_options(),
        cache_dir: Some(cache_dir.to_owned()),
        index_file: None,
        published_index: None,
        index_memory: tarfs::index::MemoryLimit::default(),
        index_rows: tarfs::index::store::RowsToLoad::All,
        should_rescan_unproven: false,
        should_log_problems: false,
        layer: None,
        resources: None,
        peers: None,
        disk_cache: DiskCacheMode::Enabled {
            limit_bytes: Some(1 << 30),
        },
    }
}

fn opened(source: impl Source + 'static, cache_dir: &Path, network: &Runtime) -> Archive {
    let options = options(cache_dir);
    let stats = Arc::new(Stats::default());
    Archive::open(Arc::new(source), &options, network.handle(), &stats).expect("opened")
}

fn read(archive: &Archive, name: &[u8], offset: u64) -> Vec<u8> {
    let found = archive
        .index()
        .tree()
        .expect("rows")
        .lookup(Ino::ROOT, name)
        .map(|entry| entry.ino());
    archive
        .read_blocking(found.expect("it is there"), offset, 100)
        .expect("readable")
        .to_vec()
}

#[test]
fn blocks_larger_than_memory_are_read_from_their_start() {
    let payload = random_bytes(20 * MIB);
    let packed = xz_of_threads(&archive("a", &payload));
    let got = run_with_timeout("a read", move || {
        let cache = tempfile::tempdir().expect("a directory");
        let network = runtime();
        let options = OpenOptions {
            disk_cache: DiskCacheMode::Disabled,
            ..options(cache.path())
        };
        let source = Arc::new(MemorySource::new("test", packed));
        let archive = Archive::open(source, &options, network.handle(), &Arc::default());
        read(&archive.expect("opened"), b"a", 1000)
    });
    assert_eq!(got, payload[1000..1100]);
}

#[test]
fn piped_input_is_never_served_from_earlier_cache() {
    let cache = tempfile::tempdir().expect("a directory");
    let network = runtime();
    for text in ["first", "other"] {
        let pipe = Pipe::new(
            "-",
            Cursor::new(archive("a", text.as_bytes())),
            Arc::default(),
        );
        let archive = opened(pipe, cache.path(), &network);
        assert_eq!(read(&archive, b"a", 0), text.as_bytes());
    }
}
