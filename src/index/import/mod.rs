//! Makes an index from another program's table of contents of an archive; pure.
//!
//! The table is hostile input. It has no digests of tarfs' blocks, so the reader compares packed or plain bytes with
//! the digests of the table ([`SpanDigests`]).

mod estargz;
mod flatbuffer;
mod ztoc;

use super::builder::Builder;
use super::builder::build_tree::MemberError;
use super::memory_limit::TooMuchMemory;
use super::tree::{Index, Origin};
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::sha256::Sha256;
use crate::codec::seek_point::MAX_SPAN_LEN;
use crate::codec::{Compression, SeekPoint};
use crate::tar::{self, Device, Member, MemberKind, MemberTotals};

pub use estargz::import_estargz;
pub use ztoc::import_ztoc;

/// Maximum packed bytes from one seek point to the next, so that a reader fetches and verifies them at once.
const MAX_PACKED_SPAN_BYTES: u64 = 15 << 20;

/// Maximum ratio of plain to packed bytes in deflate, rounded up.
const MAX_RATIO: u64 = 1 << 11;

/// Number of members between two checks of the memory.
const MEMBERS_PER_MEMORY_CHECK: u64 = 1 << 10;

/// Why a table of contents is not used.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// It breaks the rules of its format.
    #[error("it is damaged: {0}")]
    Malformed(&'static str),
    /// It has something that tarfs does not know, or that the format does not describe well enough.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// It describes another archive.
    #[error("it belongs to an archive of another length")]
    Foreign,
    /// It exceeds a limit for archives.
    #[error("it exceeds a limit: {0}")]
    Limit(tar::Cause),
    /// Its index would take too much memory.
    #[error(transparent)]
    Memory(#[from] TooMuchMemory),
}

/// SHA-256 digests of packed bytes, or of the plain bytes of spans.
#[derive(Clone, Default, Debug)]
pub struct SpanDigests {
    /// Of packed bytes, in their order.
    packed: Vec<(Extent<Packed>, Sha256)>,
    /// Of each span.
    plain: Vec<Sha256>,
}

impl SpanDigests {
    /// The digest of the plain bytes of span number `span`, if it has one.
    pub fn plain(&self, span: u32) -> Option<Sha256> {
        self.plain.get(usize::try_from(span).ok()?).copied()
    }

    /// The digests of all ranges of packed bytes inside `extent`.
    pub fn inside(
        &self,
        extent: Extent<Packed>,
    ) -> impl Iterator<Item = &(Extent<Packed>, Sha256)> {
        let first = self
            .packed
            .partition_point(|(range, _)| range.start() < extent.start());
        let rest = self.packed.iter().skip(first);
        rest.take_while(move |(range, _)| range.end() <= extent.end())
    }
}

/// Builds an index from the entries and seek points of a table of contents.
#[derive(Debug)]
pub struct Importer {
    builder: Builder,
    limits: tar::Limits,
    totals: MemberTotals,
    members: u64,
}

impl Importer {
    /// For an archive with `limits`.
    pub fn new(mut builder: Builder, limits: &tar::Limits) -> Self {
        builder.set_compression(Compression::Gzip, None);
        Self {
            builder,
            limits: limits.clone(),
            totals: MemberTotals::default(),
            members: 0,
        }
    }

    /// Adds the next member. As in a scan, one that has no place in the tree is a problem, and no error.
    fn add_member(&mut self, member: &Member) -> Result<(), ImportError> {
        let counted = self.totals.add(member, &self.limits);
        counted.map_err(ImportError::Limit)?;
        if let Err(MemberError::TooManyEntries) = self.builder.add_member(member) {
            return Err(ImportError::Unsupported("so many entries"));
        }
        self.members += 1;
        if self.members.is_multiple_of(MEMBERS_PER_MEMORY_CHECK) {
            self.builder.check_memory()?;
        }
        Ok(())
    }

    /// Adds the plain bytes from `seek_point` to `end`, which the packed bytes up to `packed_end` decode to.
    fn add_spans(
        &mut self,
        seek_point: &SeekPoint,
        packed_end: Packed,
        end: Plain,
    ) -> Result<(), ImportError> {
        let packed = Extent::new(seek_point.packed, packed_end);
        let packed = packed.ok_or(ImportError::Malformed("the order of its spans"))?;
        if packed.len() > MAX_PACKED_SPAN_BYTES {
            return Err(ImportError::Unsupported("a span of that length"));
        }
        let mut start = seek_point.plain;
        if end.0.saturating_sub(start.0) > packed.len() * MAX_RATIO {
            return Err(ImportError::Malformed("the length of a span"));
        }
        while start < end {
            let span = Extent::with_len(start, MAX_SPAN_LEN.min(end.0 - start.0));
            let first = (start == seek_point.plain).then_some(seek_point);
            self.builder.add_span(span, None, first);
            start = span.end();
        }
        Ok(())
    }

    fn finish(mut self, origin: Origin) -> Result<Index, ImportError> {
        self.builder.add_undigested(origin.packed_bytes);
        self.builder.check_memory()?;
        Ok(self.builder.finish(origin))
    }
}

/// The kind of an entry `name` of the type `kind`; `None` if it is unknown or invalid.
fn member_kind(
    kind: &[u8],
    name: &[u8],
    link: Vec<u8>,
    device: impl FnOnce() -> Option<Device>,
) -> Option<MemberKind> {
    Some(match kind {
        // Programs disagree on whether such a file is a directory.
        b"reg" if name.ends_with(b"/") => return None,
        b"reg" => MemberKind::File,
        b"dir" => MemberKind::Directory,
        b"symlink" => MemberKind::Symlink(link),
        b"hardlink" => MemberKind::HardLink(link),
        b"char" => MemberKind::CharDevice(device()?),
        b"block" => MemberKind::BlockDevice(device()?),
        b"fifo" => MemberKind::Fifo,
        _ => return None,
    })
}
