//! BGZF: gzip members of at most 64 KiB that store their own length.
//!
//! So they can be decoded independently (SAM format specification, section 4.1).

use bytes::Bytes;

use super::header::Header;
use super::trailer::{MemberChecksum, Trailer};
use crate::base::buffer_pool::Buffer;
use crate::base::extent::{Packed, Plain};
use crate::codec::gzip::sys::{Inflate, StopAt, StopReason};
use crate::codec::job::MAX_PARTS_PER_JOB;
use crate::codec::{Cause, Compression, Error};

/// Maximum plain bytes of a BGZF member.
const MAX_PLAIN_LEN: usize = 64 << 10;

/// Whole members, one after the other.
#[derive(Debug, Default)]
pub(super) struct Group {
    members: Vec<Member>,
    /// Number of input bytes.
    pub(super) packed_len: usize,
    /// Number of plain bytes.
    pub(super) plain_len: usize,
}

#[derive(Debug)]
struct Member {
    /// Range of the deflate stream in the input of the group.
    deflate: std::ops::Range<usize>,
    trailer: Trailer,
}

impl Group {
    /// Cuts whole BGZF members off `input`, until their plain bytes reach `wanted_len`.
    ///
    /// `None` when there are none, or the first is empty, so that a long row of empty members is scanned only
    /// once. It trusts the stored lengths. Only [`Group::decode`] can find them wrong.
    pub(super) fn parse(input: &[u8], wanted_len: usize) -> Option<Self> {
        let mut group = Self::default();
        while group.plain_len < wanted_len && group.members.len() < MAX_PARTS_PER_JOB {
            let Some((member, len)) = Member::parse_at(input, group.packed_len) else {
                break;
            };
            group.packed_len = len;
            group.plain_len += member.plain_len();
            if group.plain_len == 0 {
                break;
            }
            group.members.push(member);
        }
        (group.plain_len > 0).then_some(group)
    }

    /// Decodes into `buffer`, which has [`Group::plain_len`] bytes.
    ///
    /// `input` is the input of [`Group::parse`], and begins at `packed`.
    ///
    /// # Errors
    /// When a member is malformed, or its checksum or length is wrong.
    pub(super) fn decode(
        self,
        input: &[u8],
        packed: Packed,
        mut buffer: Buffer,
    ) -> Result<Bytes, Error> {
        let mut inflate = Inflate::new();
        let mut plain_len = 0;
        for member in &self.members {
            let rest = buffer.get_mut(plain_len..).unwrap_or_default();
            let decoded = member.decode(&mut inflate, input, rest);
            plain_len += decoded.map_err(|cause| {
                let start = packed.0.saturating_add(member.deflate.start as u64);
                cause.at(Compression::Gzip, Packed(start))
            })?;
        }
        Ok(buffer.freeze())
    }
}

impl Member {
    /// The member at `start`, and its end; `None` when it is not BGZF or incomplete.
    fn parse_at(input: &[u8], start: usize) -> Option<(Self, usize)> {
        let rest = input.get(start..)?;
        let mut header = Header::default();
        let header_len = header.push(rest).ok()?;
        let len = header.member_len.filter(|_| header.is_done())?;
        let (deflate, bytes) = rest.get(header_len..len)?.split_last_chunk::<8>()?;
        let mut trailer = Trailer::default();
        trailer.push(bytes);
        let member = Self {
            deflate: start + header_len..start + header_len + deflate.len(),
            trailer,
        };
        // Without a member after it, the length is not that of BGZF.
        let plausible = rest
            .get(len..len + 2)
            .is_none_or(|next| next == b"\x1f\x8b");
        (plausible && member.plain_len() <= MAX_PLAIN_LEN).then_some((member, start + len))
    }

    fn plain_len(&self) -> usize {
        self.trailer.plain_len() as usize
    }

    /// Decodes to the start of `output`, and returns the number of bytes.
    fn decode(
        &self,
        inflate: &mut Inflate,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<usize, Cause> {
        let deflate = input.get(self.deflate.clone()).unwrap_or_default();
        inflate.reset();
        let progress = inflate.decode(deflate, output, StopAt::StreamEnd);
        match progress.reason {
            StopReason::StreamEnd if progress.consumed == deflate.len() => {}
            StopReason::Damaged(text) => return Err(Cause::Malformed(text)),
            _ => {
                return Err(Cause::malformed("a BGZF member is not as long as it says"));
            }
        }
        let mut check = MemberChecksum::new(Plain(0));
        check.update(output.get(..progress.produced).unwrap_or_default());
        check.compare(&self.trailer, Plain(progress.produced as u64))?;
        Ok(progress.produced)
    }
}
