//! The cost of parsing an archive, beyond reading its bytes.
//!
//! Hashes the payload of every member (xxh3-64), or the whole file with `--plain`. Writes no file.
//!
//! ```text
//! hash FILE.tar [--plain]
//! ```

#![expect(clippy::print_stdout, reason = "the result")]

use std::convert::Infallible;
use std::env;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use bytes::Bytes;
use tarfs::Stats;
use tarfs::archive::scan::{self, PayloadEnd, Sink};
use tarfs::source;
use tarfs::tar::Member;
use xxhash_rust::xxh3::Xxh3;

/// Length of a read with `--plain`.
const PIECE_LEN: usize = 2 << 20;
/// Memory budget of the scan.
const MEMORY: u64 = 128 << 20;

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let path = words.iter().find(|word| !word.starts_with("--"));
    let path = path.context("usage: hash FILE.tar [--plain]")?;
    let start = Instant::now();
    let (what, digest) = if words.iter().any(|word| word == "--plain") {
        ("1 file".to_owned(), whole(path)?)
    } else {
        let hashes = members(path)?;
        (format!("{} members", hashes.members), hashes.sum)
    };
    let seconds = start.elapsed().as_secs_f64();
    println!("{seconds:.3} s, {what}, {digest:016x}");
    Ok(())
}

fn whole(path: &str) -> anyhow::Result<u64> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; PIECE_LEN];
    let mut hash = Xxh3::new();
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.digest()),
            len => hash.update(buffer.get(..len).unwrap_or_default()),
        }
    }
}

fn members(path: &str) -> anyhow::Result<Hashes> {
    let network = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let stats = Arc::new(Stats::default());
    let opened = source::open(path, source::Options::default());
    let source = network.block_on(opened)?;
    let options = scan::Options {
        memory: MEMORY,
        workers: tarfs::internal::thread::processors(),
        ..scan::Options::default()
    };
    let mut hashes = Hashes::default();
    match scan::scan(&source, &options, network.handle(), &stats, &mut hashes) {
        Ok(_) => Ok(hashes),
        Err(scan::ScanError::Archive { error, .. }) => Err(error.into()),
    }
}

/// The hashes of all members, added up.
#[derive(Default)]
struct Hashes {
    members: u64,
    sum: u64,
    hash: Xxh3,
}

impl Sink for Hashes {
    type Error = Infallible;

    fn member(&mut self, _: Member) -> Result<(), Infallible> {
        self.members += 1;
        self.hash.reset();
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Infallible> {
        self.hash.update(&bytes);
        Ok(())
    }

    fn member_end(&mut self, _: PayloadEnd) -> Result<(), Infallible> {
        self.sum = self.sum.wrapping_add(self.hash.digest());
        Ok(())
    }

    fn warning(&mut self, _: &str) {}

    fn damage(&mut self, _: tarfs::Plain, _: &str) {}
}
