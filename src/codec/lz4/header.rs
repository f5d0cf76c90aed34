//! Frame headers, and what a seek point inside a frame must keep of them.

use xxhash_rust::xxh32::xxh32;

use crate::codec::Cause;

pub(super) const MAGIC: u32 = 0x184d_2204;
pub(super) const LEGACY_MAGIC: u32 = 0x184c_2102;
pub(super) const MAGIC_LEN: usize = 4;
/// Flags, block size, content size, dictionary id, checksum.
const MAX_DESCRIPTOR_LEN: usize = 2 + 8 + 4 + 1;

/// Plain bytes in every legacy block but the last.
const LEGACY_BLOCK_LEN: usize = 8 << 20;
/// No block of [`LEGACY_BLOCK_LEN`] grows longer when packed.
const LEGACY_PACKED_LEN: usize = LEGACY_BLOCK_LEN + LEGACY_BLOCK_LEN / 255 + 16;

const VERSION_MASK: u8 = 0xc0;
const VERSION: u8 = 0x40;
const INDEPENDENT: u8 = 1 << 5;
const BLOCK_CHECKSUMS: u8 = 1 << 4;
const CONTENT_LEN: u8 = 1 << 3;
const CONTENT_CHECKSUM: u8 = 1 << 2;
const FLAGS_RESERVED: u8 = 1 << 1;
const DICTIONARY: u8 = 1;
const BLOCK_LEN_RESERVED: u8 = 0x8f;

/// Flag of [`SeekPoint::state`](crate::codec::SeekPoint::state) within a frame of the legacy format.
const STATE_LEGACY: u32 = 1 << 8;

#[expect(
    clippy::struct_excessive_bools,
    reason = "they are the flags of the format"
)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    /// Blocks refer to plain bytes of earlier ones.
    pub(super) is_linked: bool,
    pub(super) has_block_checksums: bool,
    /// The end mark is followed by the checksum of all plain bytes.
    pub(super) has_content_checksum: bool,
    pub(super) content_len: Option<u64>,
    pub(super) max_block_len: usize,
    /// There are no end mark and no stored blocks.
    pub(super) is_legacy: bool,
}

impl Header {
    pub(super) const LEGACY: Self = Self {
        is_linked: false,
        has_block_checksums: false,
        has_content_checksum: false,
        content_len: None,
        max_block_len: LEGACY_BLOCK_LEN,
        is_legacy: true,
    };

    /// Reads the descriptor, and its length, with `peek`, which copies bytes after the magic; `None` if cut.
    pub(super) fn read(peek: impl Fn(&mut [u8]) -> bool) -> Option<Result<(Self, usize), Cause>> {
        let mut bytes = [0; MAX_DESCRIPTOR_LEN];
        let mut flags = [0];
        if !peek(&mut flags) {
            return None;
        }
        let [flags] = flags;
        let content_len_len = if flags & CONTENT_LEN == 0 { 0 } else { 8 };
        let dictionary_len = if flags & DICTIONARY == 0 { 0 } else { 4 };
        let len = 2 + content_len_len + dictionary_len + 1;
        let bytes = bytes.get_mut(..len)?;
        peek(bytes).then(|| Ok((Self::parse(bytes)?, len)))
    }

    fn parse(descriptor: &[u8]) -> Result<Self, Cause> {
        let Some(([flags, block_len, middle @ ..], checksum)) =
            descriptor.split_last().map(|(last, rest)| (rest, *last))
        else {
            return Err(Cause::Truncated);
        };
        if flags & VERSION_MASK != VERSION {
            let version = flags >> 6;
            return Err(Cause::Unsupported(format!("lz4 frame version {version}")));
        }
        let hashed = descriptor.get(..descriptor.len() - 1).unwrap_or_default();
        let [_, computed, ..] = xxh32(hashed, 0).to_le_bytes();
        Cause::compare_checksums("frame header", checksum, computed)?;
        if flags & FLAGS_RESERVED != 0 || block_len & BLOCK_LEN_RESERVED != 0 {
            return Err(Cause::unsupported(
                "reserved bits are set in a frame header",
            ));
        }
        if flags & DICTIONARY != 0 {
            let id = middle.last_chunk().copied().map_or(0, u32::from_le_bytes);
            return Err(Cause::Unsupported(format!(
                "the frame needs the dictionary with id {id}"
            )));
        }
        let code = block_len >> 4;
        let header = Self::new(*flags, code)
            .ok_or_else(|| Cause::Malformed(format!("block size code {code}")))?;
        Ok(Self {
            content_len: middle.first_chunk().copied().map(u64::from_le_bytes),
            ..header
        })
    }

    /// A header without content size; `None` for an unknown code of the block size.
    fn new(flags: u8, block_len_code: u8) -> Option<Self> {
        Some(Self {
            is_linked: flags & INDEPENDENT == 0,
            has_block_checksums: flags & BLOCK_CHECKSUMS != 0,
            has_content_checksum: flags & CONTENT_CHECKSUM != 0,
            content_len: None,
            max_block_len: block_len_from_code(block_len_code)?,
            is_legacy: false,
        })
    }

    pub(super) fn max_packed_len(&self) -> usize {
        if self.is_legacy {
            LEGACY_PACKED_LEN
        } else {
            self.max_block_len
        }
    }

    /// The [`SeekPoint::state`](crate::codec::SeekPoint::state) of a block: the flag byte in bits 0 to 7 and
    /// the block size code in bits 16 to 23; or bit 8 for legacy.
    pub(super) fn state(&self) -> u32 {
        if self.is_legacy {
            return STATE_LEGACY;
        }
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        let code = (4_u8..8).find(|code| block_len_from_code(*code) == Some(self.max_block_len));
        let flags = VERSION
            | flag(!self.is_linked, INDEPENDENT)
            | flag(self.has_block_checksums, BLOCK_CHECKSUMS)
            | flag(self.has_content_checksum, CONTENT_CHECKSUM);
        u32::from(flags) | u32::from(code.unwrap_or_default()) << 16
    }

    /// The frame of a seek point's state; `None` when it was not made by [`Self::state`].
    pub(super) fn from_state(state: u32) -> Option<Self> {
        if state == STATE_LEGACY {
            return Some(Self::LEGACY);
        }
        let [flags, _, code, _] = state.to_le_bytes();
        let header = Self::new(flags, code)?;
        (header.state() == state).then_some(header)
    }
}

fn block_len_from_code(code: u8) -> Option<usize> {
    (4..8).contains(&code).then(|| 1 << (8 + 2 * code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_are_those_of_the_format() {
        let lens = (3..9).map(block_len_from_code).collect::<Vec<_>>();
        let kib = |len: usize| Some(len << 10);
        assert_eq!(lens, [None, kib(64), kib(256), kib(1024), kib(4096), None]);
    }

    #[test]
    fn frame_header_round_trips_through_state() {
        for bits in 0..8_u8 {
            for code in 4..8 {
                let header = Header {
                    is_linked: bits & 1 != 0,
                    has_block_checksums: bits & 2 != 0,
                    has_content_checksum: bits & 4 != 0,
                    content_len: None,
                    max_block_len: block_len_from_code(code).unwrap(),
                    is_legacy: false,
                };
                assert_eq!(Header::from_state(header.state()), Some(header));
            }
        }
        assert_eq!(
            Header::from_state(Header::LEGACY.state()),
            Some(Header::LEGACY)
        );
        for state in [0, 1, 0x40, 0x0008_0040, u32::MAX, 0x101] {
            assert_eq!(Header::from_state(state), None);
        }
    }
}
