//! Bytes in, events out; pure: this layer never reads, seeks or waits.
//!
//! A [`Parser`] is fed plain bytes and pulled for members and their payloads, in the dialects
//! v7, ustar (POSIX.1-1988), pax (POSIX.1-2001), GNU and star, as GNU tar reads them.

mod error;
mod gnu;
mod header;
pub mod limits;
mod member;
mod parser;
mod pax;
mod sparse;

use crate::base::extent::{Extent, Plain};

pub use error::{Cause, Error, Part, Warning};
pub use limits::{Limit, Limits};
pub use parser::{Event, Options, Parser};

/// Bytes in a tar record (POSIX calls it that; GNU tar says "block").
pub const RECORD: u64 = 512;

/// A member: its header with every extension applied, and where its payload lies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Where its first header record lies, extensions included: the member's identity.
    pub header: Plain,
    /// Where its payload lies, without padding; of a sparse file the stored pieces only, without
    /// the map that pax 1.0 puts in front of them.
    pub payload: Extent<Plain>,
    /// The name as stored, extensions applied; not yet brought below the root.
    pub name: Vec<u8>,
    /// What it is.
    pub kind: Kind,
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
    /// Bytes of the file as a reader sees it, holes included; 0 for everything but files.
    pub size: u64,
    /// Of a sparse file: what the payload's pieces are, in order, ascending and apart. `None`
    /// when the payload is the content.
    pub sparse: Option<Vec<Segment>>,
    /// Extended attributes by full name (`user.comment`, `security.capability`), values as bytes.
    /// ACLs stand here as the text that tar carries, under their pax keywords
    /// `SCHILY.acl.access` and `SCHILY.acl.default`.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// What a member is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A regular file; contiguous files and unknown types count as such, as in GNU tar.
    File,
    /// A directory.
    Directory,
    /// A symbolic link to this target, as stored.
    Symlink(Vec<u8>),
    /// Another name of the member called this, as stored; not yet brought below the root.
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
    /// Which driver.
    pub major: u32,
    /// Which of its devices.
    pub minor: u32,
}

/// A time since (or before) 1970-01-01 00:00:00 UTC; `nanoseconds` is below 10⁹ and counts
/// forward also when `seconds` is negative.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Timestamp {
    /// Whole seconds, rounded down.
    pub seconds: i64,
    /// The rest.
    pub nanoseconds: u32,
}

/// A piece of a sparse file that is stored: everything between pieces is a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Where it lies in the file.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
}
