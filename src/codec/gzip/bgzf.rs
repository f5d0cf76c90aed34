//! BGZF (SAM specification, 4.1): independent gzip members of at most 64 KiB that store their length.

use bytes::Bytes;

use super::header::Header;
use super::trailer::{MemberChecksum, Trailer};
use crate::base::buffer_pool::Buffer;
use crate::base::extent::{Packed, Plain};
use crate::codec::gzip::sys::{Inflate, StopAt, StopReason};
use crate::codec::job::MAX_PARTS_PER_JOB;
use crate::codec::{Cause, Compression, Error};

const MAX_PLAIN_LEN: usize = 64 << 10;

#[derive(Default)]
pub(super) struct Group {
    members: Vec<Member>,
    pub(super) packed_len: usize,
    pub(super) plain_len: usize,
}

struct Member {
    /// Range of the deflate stream in the input of the group.
    deflate: std::ops::Range<usize>,
    trailer: Trailer,
}

impl Group {
    /// Cuts BGZF members off `input` for `wanted_len` plain bytes. Only [`Group::decode`] checks lengths.
    /// `None` if the first is empty or there is none, so that a row of empty members is scanned only once.
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

    /// Decodes the input of [`Group::parse`], which begins at `packed`, into [`Group::plain_len`] bytes.
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
