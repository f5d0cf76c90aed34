//! A lower bound for `.gz`: inflates a file on one core with the library that tarfs uses, verifies the
//! checksum and drops the bytes.
//!
//! ```text
//! inflate FILE.gz
//! ```

#![expect(clippy::print_stdout, reason = "the result")]

use std::fs::File;
use std::io::{BufReader, Read};
use std::time::Instant;
use std::{env, io};

use flate2::bufread::MultiGzDecoder;

const PIECE_LEN: usize = 1 << 20;

fn main() -> io::Result<()> {
    // Cargo adds a word of its own.
    let Some(path) = env::args_os().skip(1).find(|word| word != "--bench") else {
        return Err(io::Error::other("usage: inflate FILE.gz"));
    };
    let start = Instant::now();
    let packed = BufReader::with_capacity(PIECE_LEN, File::open(path)?);
    let mut plain = MultiGzDecoder::new(packed);
    let mut buffer = vec![0; PIECE_LEN];
    let mut plain_len = 0;
    loop {
        match plain.read(&mut buffer)? {
            0 => break,
            len => plain_len += len,
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "shown with few digits")]
    let rate = plain_len as f64 / 1e6 / seconds;
    println!("{seconds:.2} s, {rate:.0} MB/s of plain bytes");
    Ok(())
}
