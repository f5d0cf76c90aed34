//! A push parser for tar: bytes in, events out; pure, so it never reads, seeks or waits. Also encodes headers.
//!
//! The caller pushes plain bytes into a [`Parser`], and pulls members and their payloads. The dialects are
//! v7, ustar (POSIX.1-1988), pax (POSIX.1-2001), GNU and star, as GNU tar 1.34 reads them.
//!
//! The parser follows GNU tar's extraction in these points:
//! - Only files have payloads; a size in the header of another type is ignored. Dumpdirs (`D`) are
//!   directories, and their listings are skipped.
//! - A file is a directory without payload if its name ends in a slash.
//! - Unknown types are files. Volume labels (`V`) are skipped. Continuations from another volume (`M`) are
//!   lost.
//! - A pax name has priority over a long name (`L`), and both over the header's. Of several extensions of one
//!   kind before a header, only the last counts.
//! - A pax header for one member counts on top of global ones, in any order.
//! - A pax size replaces the member's size, never that of an extension in between (CVE-2025-62518). So does
//!   `GNU.sparse.size` or `GNU.sparse.realsize` without a sparse map.
//! - Text ends at its first NUL, and so do numbers in pax headers. A malformed pax header is reported, and
//!   the keywords before the fault count. An invalid value leaves the header's field in force.
//! - An invalid field of a header counts as −1: time 23:59:59 on the eve of the epoch, owner 4294967295
//!   (which chown(2) takes for "no change"), all permissions.
//! - A bad record, or a header with a bad size, is skipped up to the next header, with the extensions before
//!   it.
//! - The first of two zero records, a single one, or just the last byte ends the archive.
//! - A pax `uid` or `gid` beats the name in the header. A pax `uname` or `gname` does not count.
//!
//! `docs/semantics.md` lists the differences from GNU tar. In both, an empty `SCHILY.xattr` is an empty attribute.

mod assemble;
mod encode;
mod error;
mod extension_search;
mod header;
pub(crate) mod limits;
mod old_sparse;
mod parser;
mod pax;
mod sparse;
mod totals;

use crate::base::extent::{Extent, Plain};

pub use crate::base::time::Timestamp;
pub(crate) use assemble::apply_records;
pub(crate) use encode::{END, encode_header, padding};
pub use error::{Cause, Error, Limit, TruncatedIn, Warning};
pub(crate) use extension_search::ends_with_extension;
pub use limits::Limits;
pub use parser::{Event, Options, Parser};
pub(crate) use totals::MemberTotals;

/// Bytes in a tar record (POSIX calls it that; GNU tar says "block").
pub const RECORD: u64 = 512;

/// A member: its header with every extension applied, and the extent of its payload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Offset of its first header record, extensions included: the member's identity.
    pub header: Plain,
    /// Extent of the payload, without padding and without the map that pax 1.0 puts before it.
    pub payload: Extent<Plain>,
    /// The name as stored, extensions applied; not sanitized yet.
    pub name: Vec<u8>,
    /// The type of the member.
    pub kind: MemberKind,
    /// Permission bits, set-user-id, set-group-id and sticky: the low twelve bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Name of the owner; empty when the header has none.
    pub user: Vec<u8>,
    /// Name of the group; empty when the header has none.
    pub group: Vec<u8>,
    /// Time of last modification.
    pub mtime: Timestamp,
    /// Size of the file for a reader, holes included; 0 for all but files.
    pub size: u64,
    /// For a sparse file, the pieces of the payload, ascending and apart; else `None`.
    pub sparse: Option<Vec<Segment>>,
    /// Extended attributes by full name (`user.comment`), values as bytes.
    ///
    /// ACLs are tar's text under their pax keywords `SCHILY.acl.access` and `SCHILY.acl.default`, or Linux' bytes
    /// under `system.posix_acl_access` and `system.posix_acl_default`.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Whether global pax headers before it have keywords that set attributes, so that its own header may lack some.
    pub has_global_keywords: bool,
}

impl Member {
    /// A member without payload and attributes at the front of the archive: mode 0644, owner 0:0, time 0.
    pub fn new(name: impl Into<Vec<u8>>, kind: MemberKind) -> Self {
        Self {
            header: Plain(0),
            payload: Extent::default(),
            name: name.into(),
            kind,
            mode: 0o644,
            uid: 0,
            gid: 0,
            user: Vec::new(),
            group: Vec::new(),
            mtime: Timestamp::default(),
            size: 0,
            sparse: None,
            xattrs: Vec::new(),
            has_global_keywords: false,
        }
    }
}

/// The type of a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MemberKind {
    /// A regular file. As in GNU tar, contiguous files and unknown types count as such.
    File,
    /// A directory.
    Directory,
    /// A symbolic link to this target, as stored.
    Symlink(Vec<u8>),
    /// Another name of the member with this name, as stored; not sanitized yet.
    HardLink(Vec<u8>),
    /// A character device.
    CharDevice(Device),
    /// A block device.
    BlockDevice(Device),
    /// A FIFO.
    Fifo,
}

/// A device number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Device {
    /// The driver.
    pub major: u32,
    /// The device of the driver.
    pub minor: u32,
}

impl Device {
    /// The number as mknod(2) and FUSE take it. `None` if Linux, which has 12 bits for the major and 20 for
    /// the minor number, would cut it to that of another device.
    pub fn linux_number(self) -> Option<u32> {
        let Self { major, minor } = self;
        let fits = major < 1 << 12 && minor < 1 << 20;
        fits.then_some((minor & 0xff) | (major << 8) | ((minor & 0xf_ff00) << 12))
    }
}

/// A stored piece of a sparse file. Everything between pieces is a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}
