//! A web server of a generated archive: a tar of equal members, whose bytes are computed on request.
//!
//! ```text
//! generated MEMBERS BYTES
//! ```
//!
//! Members are named `vast/0000000` and so on. The server prints its port when it accepts connections,
//! and runs until it is killed.

#![expect(clippy::print_stdout, reason = "the port")]

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

/// Bytes of a tar record.
const RECORD: u64 = 512;
/// Bytes computed at once.
const PIECE: u64 = 1 << 18;

fn main() -> anyhow::Result<()> {
    // Cargo adds a word of its own, which is not a number.
    let numbers: Vec<u64> = env::args()
        .skip(1)
        .filter_map(|word| word.parse().ok())
        .collect();
    let &[members, bytes] = &numbers[..] else {
        anyhow::bail!("usage: generated MEMBERS BYTES");
    };
    let archive = Archive { members, bytes };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    println!("{}", listener.local_addr()?.port());
    for connection in listener.incoming() {
        let connection = connection?;
        #[expect(
            clippy::disallowed_methods,
            reason = "a thread for each connection, all of which end with the process"
        )]
        std::thread::spawn(move || {
            // Clients may close the connection at any time.
            archive.serve(connection).ok();
        });
    }
    Ok(())
}

/// Number of members, and bytes of each.
#[derive(Clone, Copy)]
struct Archive {
    members: u64,
    bytes: u64,
}

impl Archive {
    /// Distance between two headers.
    fn stride(self) -> u64 {
        RECORD + self.bytes.next_multiple_of(RECORD)
    }

    fn len(self) -> u64 {
        self.members * self.stride() + 2 * RECORD
    }

    fn serve(self, connection: TcpStream) -> io::Result<()> {
        connection.set_nodelay(true)?;
        let mut lines = BufReader::new(connection.try_clone()?).lines();
        let mut output = connection;
        loop {
            let mut range = None;
            loop {
                let Some(line) = lines.next().transpose()? else {
                    return Ok(());
                };
                if line.is_empty() {
                    break;
                }
                let line = line.to_ascii_lowercase();
                if let Some(bounds) = line.strip_prefix("range: bytes=") {
                    range = bounds.split_once('-').map(|(first, last)| {
                        let last = last.parse().unwrap_or(u64::MAX).min(self.len() - 1);
                        (first.parse().unwrap_or(0), last)
                    });
                }
            }
            self.answer(&mut output, range)?;
        }
    }

    fn answer(self, output: &mut TcpStream, range: Option<(u64, u64)>) -> io::Result<()> {
        let (first, last) = range.unwrap_or((0, self.len() - 1));
        let status = match range {
            Some(_) => "206 Partial Content",
            None => "200 OK",
        };
        let (len, total) = (last + 1 - first, self.len());
        write!(
            output,
            "HTTP/1.1 {status}\r\nContent-Length: {len}\r\nAccept-Ranges: bytes\r\n\
             ETag: \"{total}\"\r\nContent-Range: bytes {first}-{last}/{total}\r\n\r\n"
        )?;
        let mut at = first;
        let mut piece = Vec::new();
        while at <= last {
            piece.clear();
            self.fill(&mut piece, at, (last + 1 - at).min(PIECE));
            output.write_all(&piece)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Appends the `len` bytes at `at`, or fewer up to the next record boundary.
    fn fill(self, piece: &mut Vec<u8>, at: u64, len: u64) {
        let end = at + len;
        let mut record = at / RECORD * RECORD;
        let mut bytes = [0; 512];
        while record < end {
            self.record(record, &mut bytes);
            let from = usize::try_from(at.saturating_sub(record)).unwrap_or(512);
            let until = usize::try_from((end - record).min(RECORD)).unwrap_or(512);
            piece.extend_from_slice(bytes.get(from..until).unwrap_or_default());
            record += RECORD;
        }
    }

    fn record(self, at: u64, bytes: &mut [u8; 512]) {
        let (member, within) = (at / self.stride(), at % self.stride());
        if member >= self.members {
            bytes.fill(0);
        } else if within == 0 {
            header(member, self.bytes, bytes);
        } else {
            for (word, place) in bytes.chunks_exact_mut(8).zip(at / 8..) {
                let mixed = (place ^ place >> 7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                word.copy_from_slice(&mixed.to_le_bytes());
            }
        }
    }
}

/// The header of member number `member`, in the ustar format.
fn header(member: u64, bytes: u64, record: &mut [u8; 512]) {
    record.fill(0);
    let mut put = |at: usize, text: &str| {
        if let Some(field) = record.get_mut(at..at + text.len()) {
            field.copy_from_slice(text.as_bytes());
        }
    };
    put(0, &format!("vast/{member:07}"));
    put(100, "0000644");
    put(108, "0000000");
    put(116, "0000000");
    put(124, &format!("{bytes:011o}"));
    put(136, "14500000000");
    put(148, "        ");
    put(156, "0");
    put(257, "ustar");
    put(263, "00");
    let sum: u32 = record.iter().map(|&byte| u32::from(byte)).sum();
    let text = format!("{sum:06o}\0 ");
    if let Some(field) = record.get_mut(148..156) {
        field.copy_from_slice(text.as_bytes());
    }
}
