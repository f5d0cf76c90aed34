//! Archives that unpack to a thousand times their size. `scripts/soak bombs` uses ten gigabytes.

use std::fs;
use std::io::Write as _;

use flate2::Crc;
use flate2::write::DeflateEncoder;
use serde_json::Value;

use super::codecs::pack;
use super::{MEMORY, MOST_BYTES, PROGRAM, Place, tree};
use crate::support::http::{Response, Server};
use crate::support::measured_runner::{MeasuredRunner, Run};
use crate::support::program::peak_mib;
use crate::support::raw::{Archive, Header, random_bytes};

/// Number of zero bytes in each bomb.
const LEN: u64 = 512 << 20;

/// Number of zero bytes that are packed once and repeated.
const CHUNK: usize = 16 << 20;

/// An archive and then a stream of zeros, as one gzip member.
fn gzip(start: &[u8], zeros: u64) -> Vec<u8> {
    let chunk = vec![0; CHUNK];
    let mut packed = b"\x1f\x8b\x08\0\0\0\0\0\0\x03".to_vec();
    let mut crc = Crc::new();
    let block = |bytes: &[u8]| {
        let mut deflate = DeflateEncoder::new(Vec::new(), flate2::Compression::best());
        deflate.write_all(bytes).expect("memory");
        // Flush to a byte boundary, so that another chunk can follow.
        deflate.flush().expect("memory");
        deflate.get_ref().clone()
    };
    let (head, repeated) = (block(start), block(&chunk));
    packed.extend(head);
    crc.update(start);
    for _ in 0..zeros / CHUNK as u64 {
        packed.extend_from_slice(&repeated);
        crc.update(&chunk);
    }
    packed.extend([3, 0]);
    packed.extend(crc.sum().to_le_bytes());
    packed.extend(crc.amount().to_le_bytes());
    packed
}

/// The same as one zstd frame, of blocks that repeat a byte.
fn zstd(start: &[u8], zeros: u64) -> Vec<u8> {
    const BLOCK: u64 = 128 << 10;
    let header = |kind: u64, len: u64, last: u64| {
        let word = (len << 3 | kind << 1 | last).to_le_bytes();
        [word[0], word[1], word[2]]
    };
    let mut packed = b"\x28\xb5\x2f\xfd\0\x50".to_vec();
    packed.extend(header(0, start.len() as u64, 0));
    packed.extend_from_slice(start);
    for number in 1..=zeros / BLOCK {
        packed.extend(header(1, BLOCK, u64::from(number == zeros / BLOCK)));
        packed.push(0);
    }
    packed
}

/// An archive of one file of zeros, without its end.
fn file() -> Vec<u8> {
    Archive::new()
        .file("before", "1")
        .add(Header::new("zeros", b'0').size(LEN), "")
        .unfinished()
}

/// A complete archive.
fn ended_archive() -> Vec<u8> {
    Archive::new().file("a", "1").end()
}

struct Bomb {
    place: Place,
    runner: MeasuredRunner,
}

impl Bomb {
    fn new(packed: &[u8]) -> Self {
        assert!(packed.len() < 4 << 20, "no bomb: {} bytes", packed.len());
        Self::of(packed)
    }

    /// A bomb of any length.
    fn of(packed: &[u8]) -> Self {
        let place = Place::create();
        fs::write(place.path("a"), packed).expect("space");
        let runner = MeasuredRunner::start(place.root());
        Self { place, runner }
    }

    /// Runs `tarfs` in the destination.
    fn run(&mut self, words: &[&str]) -> Run {
        let root = self.place.root_of("own");
        let run = self.runner.run(&root, &[&[PROGRAM], words].concat());
        assert!(run.peak_bytes < MOST_BYTES, "{words:?}: {run:?}");
        run
    }
}

/// A counter of `--stats`.
fn counter(run: &Run, name: &str) -> u64 {
    let mark = format!("{name}: ");
    let found = run
        .said
        .split(&mark)
        .nth(1)
        .and_then(|rest| rest.lines().next());
    found
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("{name}: {run:?}"))
}

#[test]
fn bomb_is_listed_and_mounted_in_bounded_memory() {
    for packed in [
        gzip(&file(), LEN + CHUNK as u64),
        zstd(&file(), LEN + CHUNK as u64),
    ] {
        let mut bomb = Bomb::new(&packed);
        let listed = bomb.run(&["ls", "-ln", MEMORY, "../../a"]);
        assert!(
            listed.code == 0 && listed.said.contains(&LEN.to_string()),
            "{listed:?}"
        );
        fs::create_dir(bomb.place.path("mnt")).expect("fresh");
        let mnt = bomb.place.path("mnt");
        let mnt = mnt.to_str().expect("UTF-8");
        let mounted = bomb.run(&[
            "mount",
            "--no-disk-cache",
            "--wait-index",
            MEMORY,
            "../../a",
            mnt,
        ]);
        assert_eq!(mounted.code, 0, "{mounted:?}");
        let zeros = fs::metadata(bomb.place.path("mnt/zeros")).expect("listed");
        let status = bomb.run(&["status", "--json", mnt]);
        let status: Value = serde_json::from_str(&status.said).expect("JSON");
        let process = format!("/proc/{}/status", status.get("pid").expect("a number"));
        let process = fs::read_to_string(process).expect("it runs");
        let unmounted = bomb.run(&["umount", mnt]);
        assert_eq!((zeros.len(), unmounted.code), (LEN, 0));
        let peak = process.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|text| text.trim().strip_suffix(" kB"));
        let peak: u64 = peak
            .and_then(|text| text.trim().parse().ok())
            .expect("a number");
        assert!(peak << 10 < MOST_BYTES, "{peak} KiB");
    }
}

#[test]
fn bomb_is_rejected_before_it_is_unpacked() {
    for packed in [
        gzip(&file(), LEN + CHUNK as u64),
        zstd(&file(), LEN + CHUNK as u64),
    ] {
        let mut bomb = Bomb::new(&packed);
        let words = [
            "materialize",
            "--stats",
            MEMORY,
            "--max-unpacked-size=100M",
            "../../a",
        ];
        let run = bomb.run(&words);
        assert_eq!(run.code, 2, "{run:?}");
        assert!(
            run.said.contains(&format!("'zeros' of {LEN} bytes")),
            "{run:?}"
        );
        assert_eq!(tree(&bomb.place.root_of("own")).len(), 1);
        assert_eq!(counter(&run, "written_bytes"), 1);
    }
}

#[test]
fn bomb_after_the_end_or_excluded_is_stopped_at_the_limit() {
    let left_out = ["--max-unpacked-size=600M", "--exclude=zeros"];
    for (start, flags) in [
        (ended_archive(), &["--max-unpacked-size=16M"][..]),
        (file(), &left_out),
    ] {
        for packed in [gzip(&start, LEN * 2), zstd(&start, LEN * 2)] {
            let mut bomb = Bomb::new(&packed);
            let words = [&["materialize", "--stats", MEMORY, "../../a"], flags].concat();
            let run = bomb.run(&words);
            assert_eq!(run.code, 2, "{run:?}");
            assert!(run.said.contains("unpacked to more than"), "{run:?}");
            assert!(run.said.contains("--max-unpacked-size"), "{run:?}");
            // The run decodes at most the allowed bytes, plus those in flight.
            let allowed = if start == ended_archive() {
                16 << 20
            } else {
                600 << 20
            };
            let decoded = counter(&run, "decoded_bytes");
            assert!(decoded < allowed + (40 << 20), "{decoded}: {run:?}");
        }
    }
}

/// Peak memory of the process that serves the mount at `mnt`.
fn peak_of_mount(bomb: &mut Bomb, mnt: &str) -> u64 {
    let status = bomb.run(&["status", "--json", mnt]);
    let status: Value = serde_json::from_str(&status.said).expect("JSON");
    let pid = status.get("pid").and_then(Value::as_u64).expect("a number");
    peak_mib(u32::try_from(pid).expect("a number")).expect("it runs") << 20
}

#[test]
fn bzip2_blocks_of_long_runs_are_read_within_memory_limit() {
    // Packed to more than an eighth of a block's work memory, and 51 times as long unpacked.
    let runs: Vec<u8> = random_bytes(600_000)
        .into_iter()
        .flat_map(|byte| [byte; 255])
        .collect();
    let archive = Archive::new().file("runs", &runs).end();
    let mut bomb = Bomb::new(&pack(&["bzip2", "-9"], &archive));
    let verified = bomb.run(&["verify", MEMORY, "../../a"]);
    assert_eq!(verified.code, 0, "{verified:?}");
    let written = bomb.run(&["materialize", MEMORY, "../../a"]);
    assert_eq!(written.code, 0, "{written:?}");
    fs::create_dir(bomb.place.path("mnt")).expect("fresh");
    let mnt = bomb.place.path("mnt");
    let mnt = mnt.to_str().expect("UTF-8");
    let mounted = bomb.run(&["mount", "--no-disk-cache", MEMORY, "../../a", mnt]);
    assert_eq!(mounted.code, 0, "{mounted:?}");
    let root = bomb.place.root_of("own");
    let compared = ["cmp", &format!("{mnt}/runs"), "runs"];
    let compared = bomb.runner.run(&root, &compared);
    let peak_bytes = peak_of_mount(&mut bomb, mnt);
    let unmounted = bomb.run(&["umount", mnt]);
    assert_eq!((compared.code, unmounted.code), (0, 0), "{compared:?}");
    assert!(peak_bytes < MOST_BYTES, "{} MiB", peak_bytes >> 20);
    assert!(fs::read(root.join("runs")).expect("written") == runs);
}

#[test]
fn umount_ends_process_whose_threads_are_busy() {
    // Half a terabyte of zeros in few chunks after the end: a scan decodes them for minutes.
    let mut bomb = Bomb::of(&zstd(&ended_archive(), 512 << 30));
    fs::create_dir(bomb.place.path("mnt")).expect("fresh");
    let mnt = bomb.place.path("mnt");
    let mnt = mnt.to_str().expect("UTF-8");
    let mounted = bomb.run(&["mount", "../../a", mnt]);
    assert_eq!(mounted.code, 0, "{mounted:?}");
    // This fails if the process runs for another half minute.
    let unmounted = bomb.run(&["umount", mnt]);
    assert_eq!(unmounted.code, 0, "{unmounted:?}");
}

/// Error of each verb with an index at its memory limit.
const INDEX_MEMORY_ERROR: &str = "the index needs more than the 16777216 bytes of memory that --index-memory \
                             allows (if that is to be expected, allow it with a larger --index-memory)";

#[test]
fn index_of_long_links_fails_at_its_memory_limit() {
    let target = "x".repeat(3900);
    let archive = (0..12_000).fold(Archive::new(), |archive, number| {
        let link = Header::new(format!("link{number}"), b'2').link("x");
        archive.long(b'K', &target).add(link, "")
    });
    let mut bomb = Bomb::new(&gzip(&archive.end(), 0));
    fs::create_dir(bomb.place.path("mnt")).expect("fresh");
    let mnt = bomb.place.path("mnt");
    let mnt = mnt.to_str().expect("UTF-8");
    let limit = "--index-memory=16MiB";
    for words in [
        &["ls", MEMORY, limit, "../../a"][..],
        &["index", MEMORY, limit, "../../a"],
        &["mount", "--wait-index", MEMORY, limit, "../../a", mnt],
    ] {
        let run = bomb.run(words);
        assert_eq!(run.code, 2, "{words:?}: {run:?}");
        assert!(run.said.contains(INDEX_MEMORY_ERROR), "{words:?}: {run:?}");
    }
    let root = bomb.place.root_of("own");
    let made = bomb.runner.run(&root, &[PROGRAM, "index", "../../a"]);
    assert_eq!(made.code, 0, "{made:?}");
    // The saved index is as large, and is not loaded either.
    let run = bomb.run(&["ls", MEMORY, limit, "../../a"]);
    assert!(
        run.code == 2 && run.said.contains(INDEX_MEMORY_ERROR),
        "{run:?}"
    );
}

#[test]
fn layer_merge_fails_at_memory_limit_of_the_index() {
    let archive = (0..100_000).fold(Archive::new(), |archive, number| {
        archive.symlink(&number.to_string(), "x")
    });
    let mut bomb = Bomb::new(&pack(&["gzip", "-1"], &archive.end()));
    let limit = "--index-memory=16MiB";
    let alone = bomb.run(&["ls", MEMORY, limit, "../../a"]);
    assert_eq!(alone.code, 0, "{alone:?}");
    fs::create_dir(bomb.place.path("mnt")).expect("fresh");
    let mnt = bomb.place.path("mnt");
    let mnt = mnt.to_str().expect("UTF-8");
    let layer = [MEMORY, limit, "--whiteouts=oci", "../../a"];
    for words in [&["ls"][..], &["materialize"], &["mount"]] {
        let place = [mnt];
        let place = if words == ["mount"] { &place[..] } else { &[] };
        let run = bomb.run(&[words, &layer, place].concat());
        assert_eq!(run.code, 2, "{words:?}: {run:?}");
        assert!(run.said.contains(INDEX_MEMORY_ERROR), "{words:?}: {run:?}");
    }
    let left = fs::read_dir(bomb.place.root_of("own")).expect("there");
    assert_eq!(left.count(), 0);
}

#[test]
fn whiteouts_of_a_layer_count_as_index_memory() {
    let whiteouts = (0..200_000).fold(Archive::new(), |archive, number| {
        archive.file(&format!("{number}/.wh.x"), "")
    });
    let mut bomb = Bomb::new(&pack(&["gzip", "-1"], &whiteouts.end()));
    fs::write(bomb.place.path("low"), Archive::new().file("x", "1").end()).expect("space");
    let layers = [
        MEMORY,
        "--index-memory=32MiB",
        "../../low",
        "--layer=../../a",
    ];
    for verb in ["ls", "materialize"] {
        let run = bomb.run(&[&[verb], &layers[..]].concat());
        assert_eq!(run.code, 0, "{verb}: {run:?}");
        // Both limits, and the program.
        assert!(run.peak_bytes < (32 + 32 + 16) << 20, "{verb}: {run:?}");
    }
}

#[test]
fn claimed_length_does_not_make_index_unbounded() {
    const TOTAL: u64 = 1 << 60;
    let header = Header::new("huge", b'0').binary(124, 12, 1 << 59);
    let start = Archive::new().file("a", "1").add(header, "").unfinished();
    let server = Server::start();
    server.route("/a.tar", move |request| {
        let (from, to) = request.range().unwrap_or((0, TOTAL));
        let to = to.min(TOTAL).min(from + (8 << 20));
        let mut body = vec![0; usize::try_from(to - from).expect("a few MiB")];
        if from == 0 {
            let len = body.len().min(start.len());
            body[..len].copy_from_slice(&start[..len]);
        }
        Response::new(206)
            .with("Content-Range", format!("bytes {from}-{}/{TOTAL}", to - 1))
            .with("ETag", "\"1\"")
            .with_body(body)
    });
    let mut bomb = Bomb::of(b"");
    let run = bomb.run(&["ls", MEMORY, "--index-memory=16MiB", &server.url("/a.tar")]);
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.said.contains(INDEX_MEMORY_ERROR), "{run:?}");
}
