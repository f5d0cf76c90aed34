//! Magic bytes → codec.

use std::fmt;

/// A packed format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compression {
    /// None: packed bytes are plain bytes.
    None,
    /// gzip (RFC 1952), any number of members.
    Gzip,
    /// lz4 frames, modern and legacy.
    Lz4,
    /// Zstandard (RFC 8878).
    Zstd,
    /// xz.
    Xz,
    /// bzip2.
    Bzip2,
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "plain",
            Self::Gzip => "gzip",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Bzip2 => "bzip2",
        })
    }
}

/// What the first bytes of a source say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Detected {
    /// A format that can be decoded.
    Supported(Compression),
    /// A format that is recognised and not supported, by name.
    Unsupported(&'static str),
}

/// Recognises a format by the first bytes, [`DETECT_LEN`] of them or all there are.
pub fn detect(first: &[u8]) -> Detected {
    todo!("{first:?}")
}

/// How many bytes [`detect`] wants to see.
pub const DETECT_LEN: usize = 512;
