//! Packings of archives, made by the usual tools.

use std::io::{Seek, SeekFrom, Write};
use std::process::{Command, Stdio};

use bytes::Bytes;
use flate2::Crc;
use flate2::write::DeflateEncoder;

/// A way to pack bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Packing {
    Plain,
    Gzip,
    GzipMembers,
    Bgzf,
    Lz4,
    Lz4Linked,
    Lz4Frames,
    Lz4Legacy,
    Zstd,
    ZstdFrames,
    Xz,
    XzBlocks,
    XzStreams,
    Bzip2,
    Bzip2Streams,
}

impl Packing {
    pub(crate) const ALL: [Self; 15] = [
        Self::Plain,
        Self::Gzip,
        Self::GzipMembers,
        Self::Bgzf,
        Self::Lz4,
        Self::Lz4Linked,
        Self::Lz4Frames,
        Self::Lz4Legacy,
        Self::Zstd,
        Self::ZstdFrames,
        Self::Xz,
        Self::XzBlocks,
        Self::XzStreams,
        Self::Bzip2,
        Self::Bzip2Streams,
    ];

    /// Whether decoding can start only at the beginning.
    pub(crate) fn is_unseekable(self) -> bool {
        matches!(self, Self::Zstd | Self::Xz)
    }

    /// Whether every span can be decoded on its own.
    pub(crate) fn is_all_seekable(self) -> bool {
        !self.is_unseekable() && self != Self::XzStreams
    }

    pub(crate) fn pack(self, plain: &Bytes) -> Bytes {
        let whole = |tool: &[&str]| run(tool, plain);
        // An odd length, so that pieces end in the middle of members and records.
        let pieces = |len: usize, tool: &[&str]| pieces(len, tool, plain);
        let packed = match self {
            Self::Plain => return plain.clone(),
            Self::Gzip => whole(&["gzip", "-1", "-n"]),
            Self::GzipMembers => pieces(1_234_567, &["gzip", "-1", "-n"]),
            Self::Bgzf => bgzf(plain),
            Self::Lz4 => whole(&["lz4", "-1"]),
            Self::Lz4Linked => whole(&["lz4", "-1", "-BD", "-B5"]),
            Self::Lz4Frames => pieces(2_345_678, &["lz4", "-1", "-B4"]),
            Self::Lz4Legacy => whole(&["lz4", "-l"]),
            Self::Zstd => whole(&["zstd", "-1"]),
            Self::ZstdFrames => pieces(1_345_679, &["zstd", "-1"]),
            Self::Xz => whole(&["xz", "-0", "-T1"]),
            Self::XzBlocks => whole(&["xz", "-0", "-T2", "--block-size=1500000"]),
            Self::XzStreams => pieces(7_654_321, &["xz", "-0", "-T1"]),
            Self::Bzip2 => whole(&["bzip2", "-9"]),
            Self::Bzip2Streams => pieces(3_456_789, &["bzip2", "-5"]),
        };
        packed.into()
    }
}

/// Output of `tool` for `plain`.
fn run(tool: &[&str], plain: &[u8]) -> Vec<u8> {
    let (program, arguments) = tool.split_first().expect("a tool");
    let mut input = tempfile::tempfile().expect("a file");
    input.write_all(plain).expect("written");
    input.seek(SeekFrom::Start(0)).expect("a file");
    let output = Command::new(program)
        .args(arguments)
        .arg("-c")
        .stdin(Stdio::from(input))
        .output()
        .unwrap_or_else(|error| panic!("{program} is needed: {error}"));
    assert!(output.status.success(), "{tool:?}: {output:?}");
    output.stdout
}

/// Concatenated outputs of `tool` for every `len` bytes of `plain`.
fn pieces(len: usize, tool: &[&str], plain: &[u8]) -> Vec<u8> {
    plain
        .chunks(len)
        .flat_map(|piece| run(tool, piece))
        .collect()
}

/// Members of 57,000 bytes with their length in the header, and the empty one at the end.
fn bgzf(plain: &[u8]) -> Vec<u8> {
    let pieces = plain.chunks(57_000).chain([&[][..]]);
    pieces.flat_map(bgzf_member).collect()
}

fn bgzf_member(plain: &[u8]) -> Vec<u8> {
    let mut deflate = DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
    deflate.write_all(plain).expect("memory");
    let deflated = deflate.finish().expect("memory");
    let mut crc = Crc::new();
    crc.update(plain);
    let last_byte = u16::try_from(18 + deflated.len() + 8 - 1).expect("a short member");
    let mut member = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0".to_vec();
    member.extend_from_slice(&last_byte.to_le_bytes());
    member.extend_from_slice(&deflated);
    member.extend_from_slice(&crc.sum().to_le_bytes());
    member.extend_from_slice(&crc.amount().to_le_bytes());
    member
}
