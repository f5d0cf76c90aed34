//! Decoders: packed bytes in, plain bytes out; pure: no files, no clocks, no runtime.
//!
//! The caller pushes packed bytes into a [`Decoder`] in order, and pulls plain bytes, jobs (any thread may
//! run them) and seek points. [`resume`] makes the same decoder in the middle, at a seek point.

pub(crate) mod detect;

mod around_decoded;
mod bzip2;
mod content_checksum;
mod decoder;
mod error;
mod gzip;
mod indexed;
mod job;
mod lz4;
mod plain;
pub(crate) mod seek_point;
#[cfg(test)]
mod test_support;
mod walker;
mod xz;
mod zstd;

use self::seek_point::STATE_BETWEEN_FRAMES;
use crate::base::extent::{Packed, Plain};

pub(crate) use around_decoded::start_around;
pub(crate) use decoder::LOOKAHEAD_LEN;
pub use detect::{Compression, Encryption, UnknownCompression};
pub use error::{Cause, Error};
pub(crate) use gzip::{block_seek_point, member_seek_point};

// For the tests.
#[doc(hidden)]
pub use {
    content_checksum::ContentChecksum,
    decoder::{Context, Decoder, Pull, UNKNOWN_PLAIN},
    detect::{Detected, detect},
    indexed::{DecodedSpans, ExpectedSpan, SeekRange, start_indexed},
    job::{Job, Output, SpeculativeJob},
    seek_point::SeekPoint,
};

/// Maximum bytes that a decoder takes from its pool, if the caller drops each piece before the next pull.
#[doc(hidden)]
pub fn read_pool_bytes(compression: Compression) -> u64 {
    match compression {
        Compression::None => 0,
        // A piece; or members of BGZF until they make as much, of which the last has 64 KiB.
        Compression::Gzip => (1 << 20) + (64 << 10),
        // A block of the legacy format, behind smaller ones that make almost a piece.
        Compression::Lz4 => (8 << 20) + (1 << 20),
        // A block, a stream made of it, libbz2's state, and pieces of a block that is long.
        Compression::Bzip2 => bzip2::READ_POOL_BYTES,
        Compression::Xz => READ_POOL_BYTES / 4,
        Compression::Zstd => READ_POOL_BYTES,
    }
}

/// A pool large enough to read spans with, in bytes.
#[doc(hidden)]
pub const READ_POOL_BYTES: u64 = 16 << 20;

/// A decoder for a stream of `compression` that starts at packed and plain offset 0.
#[doc(hidden)]
pub fn start(compression: Compression, context: Context) -> Box<dyn Decoder> {
    match compression {
        Compression::None => Box::new(plain::Decoder::start(&context)),
        Compression::Gzip => Box::new(gzip::Decoder::start(context)),
        Compression::Lz4 => Box::new(lz4::Decoder::start(context)),
        Compression::Zstd => Box::new(zstd::Decoder::start(context)),
        Compression::Xz => Box::new(xz::Decoder::start(context)),
        Compression::Bzip2 => Box::new(bzip2::Decoder::start(context)),
    }
}

/// A decoder for a stream of lz4 or zstd whose first bytes, up to `packed`, are skippable frames, and the first
/// seek point, which it does not repeat.
///
/// # Errors
/// [`Cause::Malformed`] for another format.
#[doc(hidden)]
pub fn start_after_skippable(
    compression: Compression,
    context: Context,
    packed: Packed,
) -> Result<(Box<dyn Decoder>, SeekPoint), Error> {
    let seek_point = SeekPoint::without_window(packed, Plain(0), STATE_BETWEEN_FRAMES);
    Ok((resume(compression, context, &seek_point)?, seek_point))
}

/// A decoder at `seek_point`: first pushed byte [`SeekPoint::packed`], first plain byte [`SeekPoint::plain`].
/// It does not verify checksums over bytes before.
///
/// # Errors
/// [`Cause::Malformed`] when another codec made the seek point, which comes from an untrusted file.
#[doc(hidden)]
pub fn resume(
    compression: Compression,
    context: Context,
    seek_point: &SeekPoint,
) -> Result<Box<dyn Decoder>, Error> {
    Ok(match compression {
        Compression::None => Box::new(plain::Decoder::resume(&context, seek_point)?),
        Compression::Gzip => Box::new(gzip::Decoder::resume(context, seek_point)?),
        Compression::Lz4 => Box::new(lz4::Decoder::resume(context, seek_point)?),
        Compression::Zstd => Box::new(zstd::Decoder::resume(context, seek_point)?),
        Compression::Xz => Box::new(xz::Decoder::resume(context, seek_point)?),
        Compression::Bzip2 => Box::new(bzip2::Decoder::resume(context, seek_point)?),
    })
}
