//! The targets of `tests/arbitrary` for libFuzzer.

#![allow(dead_code, reason = "tests need more of what is here")]

#[path = "../../support/rng.rs"]
mod rng;
#[path = "../../support/packing.rs"]
mod packing;
#[path = "../../support/raw.rs"]
mod raw;
#[path = "../../support/soci.rs"]
mod soci;
#[path = "../../arbitrary/seeds.rs"]
mod seeds;
#[path = "../../arbitrary/targets/mod.rs"]
mod targets;

use std::fs;
use std::io;
use std::path::Path;

// The files of private modules name them so (`targets/private.rs`).
use tarfs::internal as base;
use tarfs::source;

use targets::Target;

/// Runs the target called `name` over `bytes`.
///
/// # Panics
/// When a promise is not kept.
pub fn run(name: &str, bytes: &[u8]) {
    let target = Target::ALL.iter().find(|target| target.name == name);
    (target.expect("a target").run)(bytes);
}

/// Writes the seeds of all targets, each in a directory of its own below `directory`.
///
/// # Errors
/// When they cannot be written.
pub fn write_seeds(directory: &Path) -> io::Result<()> {
    for target in Target::ALL {
        let directory = directory.join(target.name);
        fs::create_dir_all(&directory)?;
        for (number, seed) in (target.seeds)().iter().enumerate() {
            fs::write(directory.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
