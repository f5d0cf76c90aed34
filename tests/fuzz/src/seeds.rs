//! Writes the seeds of all targets below a directory: `seeds DIR`.

use std::io;
use std::path::Path;

fn main() -> io::Result<()> {
    let directory = std::env::args_os().nth(1);
    let directory = directory.ok_or_else(|| io::Error::other("usage: seeds DIR"))?;
    tarfs_fuzz::write_seeds(Path::new(&directory))
}
