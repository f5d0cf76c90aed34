//! Calls of liblzma.

use liblzma::stream::{Action, Error as LzmaError, Status, Stream};

use super::header::{Block, Check, put_integer};
use crate::codec::Cause;

pub(super) fn decoder() -> Result<Stream, Cause> {
    // The limit was held against the dictionary's length, which is what takes the memory.
    Stream::new_stream_decoder(u64::MAX, 0).map_err(cause)
}

pub(super) fn cause(error: LzmaError) -> Cause {
    match error {
        LzmaError::Options | LzmaError::UnsupportedCheck | LzmaError::NoCheck => {
            Cause::unsupported("a filter or an option of a block")
        }
        LzmaError::Mem | LzmaError::MemLimit => {
            Cause::unsupported("liblzma could not allocate a decoder")
        }
        LzmaError::Data | LzmaError::Format | LzmaError::Program => {
            Cause::malformed("a block does not decode, or not to what its check says")
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    pub(super) consumed: usize,
    pub(super) produced: usize,
    pub(super) is_ended: bool,
}

pub(super) fn run(
    decoder: &mut Stream,
    source: &[u8],
    target: &mut [u8],
) -> Result<Progress, Cause> {
    let (read, made) = (decoder.total_in(), decoder.total_out());
    let status = decoder
        .process(source, target, Action::Run)
        .map_err(cause)?;
    let since = |now: u64, before: u64| usize::try_from(now - before).unwrap_or_default();
    Ok(Progress {
        consumed: since(decoder.total_in(), read),
        produced: since(decoder.total_out(), made),
        is_ended: status == Status::StreamEnd,
    })
}

/// The index's length of `block`, from the block's own header.
pub(super) fn unpadded_len(block: &Block, check: Check) -> u64 {
    let packed_len = block.packed_len.unwrap_or_default();
    packed_len.saturating_add((block.header_len + check.len()) as u64)
}

pub(super) fn index_and_footer(check: Check, unpadded_len: u64, plain_len: u64) -> Vec<u8> {
    let mut index = vec![0, 1];
    put_integer(&mut index, unpadded_len);
    put_integer(&mut index, plain_len);
    index.resize(index.len().next_multiple_of(4), 0);
    index.extend(super::header::crc32(&index).to_le_bytes());
    index.extend(check.stream_footer(index.len() as u64));
    index
}
