//! Parser, decoders and writer alone, from memory: medians of a few runs, as a table.
//!
//! ```text
//! cargo bench --bench micro
//! ```

#![expect(clippy::print_stdout, reason = "the results")]
#![expect(
    clippy::cast_precision_loss,
    reason = "results are shown with few digits"
)]

#[path = "../support/raw.rs"]
#[expect(dead_code, reason = "tests need more of it")]
mod raw;
#[path = "../support/rng.rs"]
mod rng;

use std::hint::black_box;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use rustix::time::{ClockId, clock_gettime};
use tarfs::Stats;
use tarfs::archive::scan::{PayloadEnd, Sink};
use tarfs::codec::{self, Compression, Pull};
use tarfs::internal::buffer_pool::BufferPool;
use tarfs::internal::memory_reclaim::MemoryBroker;
use tarfs::materialize::{Materializer, Options};
use tarfs::tar::{self, Event, Member, Parser};
use xxhash_rust::xxh32::xxh32;

use rng::Rng;

const ROUNDS: usize = 5;
/// Length of the pieces of a stream, as chunks and decoded blocks have it.
const PIECE_LEN: usize = 4 << 20;
const MEMBERS: usize = 40_000;
const FILES: usize = 10_000;
const FILE_LEN: usize = 4096;
const FILES_A_DIRECTORY: usize = 100;

fn main() -> anyhow::Result<()> {
    println!("| what | median of {ROUNDS} |");
    println!("|---|--:|");
    parser()?;
    decoders()?;
    writer()
}

fn row(what: &str, value: f64, unit: &str) {
    println!("| {what} | {value:.*} {unit} |", usize::from(value < 100.0));
}

/// The median of the results of `run`.
fn median(run: impl FnMut() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
    let mut values: Vec<f64> = std::iter::repeat_with(run)
        .take(ROUNDS)
        .collect::<anyhow::Result<_>>()?;
    values.sort_by(f64::total_cmp);
    values.get(ROUNDS / 2).copied().context("no rounds")
}

/// Processor time of `clock` in seconds.
fn processor_seconds(clock: ClockId) -> f64 {
    let time = Duration::try_from(clock_gettime(clock));
    time.unwrap_or_default().as_secs_f64()
}

/// Pieces of `bytes`, without a copy.
fn pieces(bytes: &Bytes) -> impl Iterator<Item = Bytes> {
    (0..bytes.len())
        .step_by(PIECE_LEN)
        .map(|start| bytes.slice(start..bytes.len().min(start + PIECE_LEN)))
}

fn parser() -> anyhow::Result<()> {
    let bare = archive(MEMBERS, 600, false);
    let amended = archive(MEMBERS, 600, true);
    for (what, archive) in [("ustar", bare), ("pax", amended)] {
        let rate = median(|| {
            let before = processor_seconds(ClockId::ThreadCPUTime);
            let members = parse(&archive, |_| {})?;
            anyhow::ensure!(members == MEMBERS, "{members} members");
            let spent = processor_seconds(ClockId::ThreadCPUTime) - before;
            Ok(members as f64 / spent / 1e6)
        })?;
        let what = format!("parser, {what}");
        row(&what, rate, "million members a CPU second");
    }
    Ok(())
}

/// An archive of files of `len` bytes and their directories. With `pax`, headers hold a time and a
/// long name.
fn archive(files: usize, len: usize, pax: bool) -> Bytes {
    let content = Rng::new(1).text(len);
    let mut archive = raw::Archive::new();
    for number in 0..files {
        let folder = number / FILES_A_DIRECTORY;
        if pax {
            let name = format!("{}/{folder:04}/file-{number:06}", "a-long-name/".repeat(10));
            let time = format!("1700000000.{number:09}");
            archive = archive.pax(&[("path", &name), ("mtime", &time)]);
        }
        archive = archive.file(&format!("tree/{folder:04}/file-{number:06}"), &content);
    }
    archive.end().into()
}

/// Parses an archive. Returns the number of members, and passes all events to `take`.
fn parse(archive: &Bytes, mut take: impl FnMut(Event)) -> anyhow::Result<usize> {
    let mut parser = Parser::new(tar::Options::default());
    let mut pieces = pieces(archive);
    let mut members = 0;
    loop {
        match parser.pull()? {
            Event::NeedInput => match pieces.next() {
                Some(piece) => parser.push(piece),
                None => parser.finish(),
            },
            Event::End => return Ok(members),
            event => {
                members += usize::from(matches!(event, Event::Member(_)));
                take(black_box(event));
            }
        }
    }
}

fn decoders() -> anyhow::Result<()> {
    let large = sources(32 << 20);
    // The slowest formats get fewer bytes.
    let small = sources(8 << 20);
    let packings = [
        (Compression::Lz4, lz4(&large)?),
        (Compression::Zstd, zstd::bulk::compress(&large, 3)?.into()),
        (Compression::Gzip, gzip(&large)?),
        (Compression::Xz, xz(&small)?),
        (Compression::Bzip2, bzip2(&small)?),
    ];
    for (compression, packed) in packings {
        let packed: Bytes = packed;
        let rate = median(|| {
            let before = processor_seconds(ClockId::ThreadCPUTime);
            let plain_len = decode(compression, &packed)?;
            let spent = processor_seconds(ClockId::ThreadCPUTime) - before;
            Ok(plain_len as f64 / spent / 1e6)
        })?;
        let what = format!("decoder, {compression}");
        row(&what, rate, "MB of plain bytes a CPU second");
    }
    Ok(())
}

/// Data like a source tree with pictures: lines of words, of which some are far more frequent than
/// others, and noise.
fn sources(len: usize) -> Vec<u8> {
    const WORDS: u64 = 5000;
    let mut noise = Rng::new(2);
    let vocabulary: Vec<Vec<u8>> = (0..WORDS)
        .map(|_| {
            let len = 3 + noise.below(9);
            noise.text(usize::try_from(len).unwrap_or_default())
        })
        .collect();
    let mut sources = Vec::with_capacity(len + (64 << 10));
    while sources.len() < len {
        if noise.below(4) == 0 {
            sources.extend(noise.bytes(32 << 10));
        }
        let end = sources.len() + (64 << 10);
        while sources.len() < end {
            let rank = noise.below(WORDS) * noise.below(WORDS) / WORDS;
            let word = vocabulary
                .iter()
                .cycle()
                .nth(usize::try_from(rank).unwrap_or_default());
            sources.extend_from_slice(word.map(Vec::as_slice).unwrap_or_default());
            sources.push(if noise.below(8) == 0 { b'\n' } else { b' ' });
        }
    }
    sources.truncate(len);
    sources
}

/// A frame of independent blocks of 4 MiB, as lz4(1) makes it, but without the checksum.
fn lz4(plain: &[u8]) -> anyhow::Result<Bytes> {
    let descriptor = [0x60, 0x70];
    let [_, checksum, ..] = xxh32(&descriptor, 0).to_le_bytes();
    let mut frame = [&[0x04, 0x22, 0x4d, 0x18], &descriptor[..], &[checksum]].concat();
    for block in plain.chunks(4 << 20) {
        let packed = lz4_flex::block::compress(block);
        anyhow::ensure!(packed.len() < block.len(), "such a block is stored");
        frame.extend(u32::try_from(packed.len())?.to_le_bytes());
        frame.extend(packed);
    }
    frame.extend([0; 4]);
    Ok(frame.into())
}

fn gzip(plain: &[u8]) -> anyhow::Result<Bytes> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(6));
    encoder.write_all(plain)?;
    Ok(encoder.finish()?.into())
}

fn xz(plain: &[u8]) -> anyhow::Result<Bytes> {
    let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
    encoder.write_all(plain)?;
    Ok(encoder.finish()?.into())
}

fn bzip2(plain: &[u8]) -> anyhow::Result<Bytes> {
    let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::best());
    encoder.write_all(plain)?;
    Ok(encoder.finish()?.into())
}

/// Decodes a stream. Returns the number of plain bytes. Jobs run at once on this thread.
fn decode(compression: Compression, packed: &Bytes) -> anyhow::Result<usize> {
    let context = codec::Context {
        pool: BufferPool::new(64 << 20),
        wants_seek_points: false,
        broker: MemoryBroker::with_limit(64 << 20),
        workers: 0,
    };
    let mut decoder = codec::start(compression, context);
    let mut pieces = pieces(packed);
    let mut plain_len = 0;
    loop {
        plain_len += match decoder.pull()? {
            Pull::NeedInput => {
                match pieces.next() {
                    Some(piece) => decoder.push(piece),
                    None => decoder.finish(),
                }
                0
            }
            Pull::Plain(bytes) => black_box(bytes).len(),
            Pull::Job(job) => {
                let (mut output, mut len) = (job.run()?, 0);
                while let Some(piece) = output.next_piece()? {
                    len += black_box(piece).len();
                }
                len
            }
            Pull::End => return Ok(plain_len),
            _ => 0,
        };
    }
}

fn writer() -> anyhow::Result<()> {
    let archive = archive(FILES, FILE_LEN, false);
    let mut files: Vec<(Member, Bytes)> = Vec::new();
    parse(&archive, |event| match event {
        Event::Member(member) => files.push((*member, Bytes::new())),
        Event::Payload(bytes) => {
            if let Some((_, payload)) = files.last_mut() {
                *payload = bytes;
            }
        }
        _ => {}
    })?;
    // A payload that crosses a piece boundary arrives in two parts, and is skipped.
    files.retain(|(member, bytes)| member.size == bytes.len() as u64);
    let files = files;
    let mut waits = Vec::new();
    let spent = median(|| {
        let directory = tempfile::tempdir_in("/dev/shm").context("a tmpfs at /dev/shm")?;
        let members = files.clone();
        let stats = Arc::new(Stats::default());
        let start = Instant::now();
        let before = processor_seconds(ClockId::ProcessCPUTime);
        let mut writer = Materializer::new(directory.path(), Options::for_this_user(), stats)?;
        for (member, bytes) in members {
            writer.member(member)?;
            writer.payload(bytes)?;
            writer.member_end(PayloadEnd::Complete)?;
        }
        let summary = writer.finish()?;
        let spent = processor_seconds(ClockId::ProcessCPUTime) - before;
        waits.push(start.elapsed().as_secs_f64() * 1e6 / files.len() as f64);
        anyhow::ensure!(summary.errors == 0, "{:?}", summary.problems);
        Ok(spent * 1e6 / files.len() as f64)
    })?;
    waits.sort_by(f64::total_cmp);
    row("writer, 4 KiB to tmpfs", spent, "µs of CPU a file");
    let waited = waits.get(ROUNDS / 2).copied().unwrap_or_default();
    row("writer, 4 KiB to tmpfs", waited, "µs a file");
    Ok(())
}
