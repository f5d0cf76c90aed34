//! The rows of the index, exactly as in the file: little-endian, unpadded, any bits valid. Readers use rows
//! in place and check their values. docs/index-format.md has the byte tables.

use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::tar::{Device, Timestamp};

/// Bits of an offset into the arena.
const OFFSET_BITS: u32 = 44;

/// Marks a missing number of a dirent or inode.
pub(in crate::index) const NONE: u32 = u32::MAX;

/// The type bits of [`InodeRow::mode`], as in `st_mode`.
pub(in crate::index) const TYPE_MASK: u16 = 0o170_000;
pub(in crate::index) const FIFO: u16 = 0o010_000;
pub(in crate::index) const CHAR_DEVICE: u16 = 0o020_000;
pub(in crate::index) const DIRECTORY: u16 = 0o040_000;
pub(in crate::index) const BLOCK_DEVICE: u16 = 0o060_000;
pub(in crate::index) const FILE: u16 = 0o100_000;
pub(in crate::index) const SYMLINK: u16 = 0o120_000;
/// A hard link whose target is not known yet. Exists only while building, never in a file.
pub(in crate::index) const FORWARD_LINK: u16 = TYPE_MASK;

/// An inode. Its number is its index in the array; all zero when the number is unused.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(in crate::index) struct InodeRow {
    /// Location of the content, by type. File: plain offset of the payload. Symbolic link: arena offset of
    /// the target. Device: its number, major in the upper half. Directory: its first dirent.
    pub(in crate::index) data: U64,
    /// File: its size. Others: plain offset of their first header; 0 for an implied directory.
    pub(in crate::index) size: U64,
    pub(in crate::index) mtime_seconds: I64,
    pub(in crate::index) mtime_nanoseconds: U32,
    pub(in crate::index) uid: U32,
    pub(in crate::index) gid: U32,
    pub(in crate::index) links: U32,
    /// Directory: number of its dirents. Symbolic link: length of the target. File: number of records from its first
    /// header to its payload.
    pub(in crate::index) children: U32,
    /// The dirent under which it first appeared; [`NONE`] for the root.
    pub(in crate::index) dirent: U32,
    /// Its row among the extras; 0 for none.
    pub(in crate::index) extra: U32,
    /// The owner's row among the owner names; 0 is the empty name.
    pub(in crate::index) user: U16,
    /// In the same table.
    pub(in crate::index) group: U16,
    /// Type and permissions; 0 for a number without an entry.
    pub(in crate::index) mode: U16,
    pub(in crate::index) reserved: U16,
    pub(in crate::index) flags: U32,
}

impl InodeRow {
    /// A directory that only paths below it mention.
    pub(in crate::index) const IMPLIED: u32 = 1;

    /// A directory that only whiteouts below it mention, so that the layer does not contain it.
    pub(in crate::index) const WHITEOUT_ONLY: u32 = 2;

    /// The row of an implied directory, which no member describes. It depends neither on the run (GNU tar: time
    /// of extraction, umask) nor on the order of the members. Its time is 0, as in reproducible archives.
    pub(in crate::index) fn implied_directory() -> Self {
        Self {
            mode: (DIRECTORY | 0o755).into(),
            links: 2.into(),
            dirent: NONE.into(),
            flags: Self::IMPLIED.into(),
            ..Self::default()
        }
    }

    pub(in crate::index) fn is_implied(&self) -> bool {
        self.is_directory() && self.flags.get() & Self::IMPLIED != 0
    }

    /// Whether it is an [implied directory](Self::implied_directory) with unchanged attributes.
    pub(in crate::index) fn is_unchanged_implied(&self) -> bool {
        let scanned = Self {
            data: self.data,
            links: self.links,
            children: self.children,
            dirent: self.dirent,
            flags: self.flags,
            ..Self::implied_directory()
        };
        self.is_implied() && self.as_bytes() == scanned.as_bytes()
    }

    pub(in crate::index) fn is_whiteout_only(&self) -> bool {
        self.flags.get() & Self::WHITEOUT_ONLY != 0
    }

    pub(in crate::index) fn kind(&self) -> u16 {
        self.mode.get() & TYPE_MASK
    }

    pub(in crate::index) fn is_directory(&self) -> bool {
        self.kind() == DIRECTORY
    }

    pub(in crate::index) fn whole_piece(&self) -> PieceRow {
        PieceRow {
            offset: 0.into(),
            plain: self.data,
            len: self.size,
        }
    }

    pub(in crate::index) fn add_links(&mut self, more: u32) {
        self.links = self.links.get().saturating_add(more).into();
    }

    pub(in crate::index) fn remove_link(&mut self) {
        self.links = self.links.get().saturating_sub(1).into();
    }

    pub(in crate::index) fn mtime(&self) -> Timestamp {
        Timestamp {
            seconds: self.mtime_seconds.get(),
            nanoseconds: self.mtime_nanoseconds.get().min(999_999_999),
        }
    }

    pub(in crate::index) fn set_mtime(&mut self, mtime: Timestamp) {
        self.mtime_seconds = mtime.seconds.into();
        self.mtime_nanoseconds = mtime.nanoseconds.into();
    }

    pub(in crate::index) fn device(&self) -> Device {
        let number = self.data.get();
        Device {
            major: u32::try_from(number >> 32).unwrap_or_default(),
            minor: u32::try_from(number & 0xffff_ffff).unwrap_or_default(),
        }
    }

    pub(in crate::index) fn set_device(&mut self, device: Device) {
        self.data = (u64::from(device.major) << 32 | u64::from(device.minor)).into();
    }
}

/// A range of the arena in eight bytes. From the upper end: the type of a dirent's entry in 4 bits, the offset in
/// 44, and the length in 16.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub(in crate::index) struct Name(U64);

impl Name {
    /// `None` when offset or length does not fit.
    pub(in crate::index) fn new(offset: usize, len: usize) -> Option<Self> {
        let offset = u64::try_from(offset).ok();
        let offset = offset.filter(|&offset| offset < 1 << OFFSET_BITS)?;
        let len = u16::try_from(len).ok()?;
        Some(Self((offset << 16 | u64::from(len)).into()))
    }

    pub(in crate::index) fn offset(self) -> u64 {
        self.0.get() >> 16 & ((1 << OFFSET_BITS) - 1)
    }

    pub(in crate::index) fn len(self) -> u64 {
        self.0.get() & 0xffff
    }

    /// The type bits of the named entry's mode; 0 if the name is not in the tree.
    pub(in crate::index) fn kind(self) -> u16 {
        u16::try_from(self.0.get() >> 48).unwrap_or_default() & TYPE_MASK
    }

    pub(in crate::index) fn with_kind(self, kind: u16) -> Self {
        let range = self.0.get() & ((1 << (OFFSET_BITS + 16)) - 1);
        Self((range | u64::from(kind & TYPE_MASK) << 48).into())
    }
}

/// A name in a directory. Sorted in a file by parent, then entry, so listings have the archive's order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(in crate::index) struct Dirent {
    pub(in crate::index) name: Name,
    /// The inode it names. 0 marks a removed name, only while building.
    pub(in crate::index) ino: U32,
    pub(in crate::index) parent: U32,
}

/// A hard link, found by its name. Sorted by the offset of the name.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(in crate::index) struct LinkRow {
    /// Offset in the arena of the name of its dirent.
    pub(in crate::index) name_offset: U64,
    /// Plain offset of its first header.
    pub(in crate::index) header: U64,
}

/// Facts that only few entries have. Files without a map share rows with equal attributes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(in crate::index) struct ExtraRow {
    /// The first row.
    pub(in crate::index) xattr: U32,
    pub(in crate::index) xattr_count: U32,
    pub(in crate::index) piece: U32,
    pub(in crate::index) piece_count: U32,
    /// 1 when the file is sparse, even if it is one hole. Then the map lists the stored bytes.
    pub(in crate::index) sparse: U32,
    pub(in crate::index) reserved: U32,
    /// Sum of the bytes of the map's pieces.
    pub(in crate::index) stored_bytes: U64,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(in crate::index) struct XattrRow {
    pub(in crate::index) name: Name,
    pub(in crate::index) value_offset: U64,
    pub(in crate::index) value_len: U64,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(in crate::index) struct PieceRow {
    pub(in crate::index) offset: U64,
    pub(in crate::index) plain: U64,
    pub(in crate::index) len: U64,
}

/// A statement about lower layers. With a target: a hard link; without: a whiteout; without a name: opaque.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(in crate::index) struct UnresolvedRow {
    /// The name of the link, or the removed name.
    pub(in crate::index) name: Name,
    /// Offset of the target's path in the arena.
    pub(in crate::index) target_offset: U64,
    pub(in crate::index) target_len: U32,
    pub(in crate::index) parent: U32,
}

/// A span. It ends at the next span, and the last one at the end of the plain stream.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(in crate::index) struct SpanRow {
    pub(in crate::index) plain: U64,
    /// Index of the checksum of its first block.
    pub(in crate::index) checksum: U64,
    pub(in crate::index) packed: U64,
    pub(in crate::index) window_offset: U64,
    pub(in crate::index) window_len: U32,
    pub(in crate::index) state: U32,
    /// Bits of the packed byte before the seek point; [`SpanRow::NO_SEEK_POINT`] without one.
    pub(in crate::index) bit: U32,
    pub(in crate::index) flags: U32,
}

impl SpanRow {
    pub(in crate::index) const NO_SEEK_POINT: u32 = u32::MAX;
    /// The scan skipped its bytes, so its blocks have no checksums.
    pub(in crate::index) const UNHASHED: u32 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_sizes_that_the_format_promises() {
        assert_eq!(size_of::<InodeRow>(), 64);
        assert_eq!(size_of::<Dirent>(), 16);
        assert_eq!(size_of::<ExtraRow>(), 32);
        assert_eq!(size_of::<XattrRow>(), 24);
        assert_eq!(size_of::<PieceRow>(), 24);
        assert_eq!(size_of::<UnresolvedRow>(), 24);
        assert_eq!(size_of::<SpanRow>(), 48);
        assert_eq!(size_of::<LinkRow>(), 16);
    }

    #[test]
    fn a_name_keeps_type_offset_and_length_apart() {
        let (most, longest) = ((1 << 44) - 1, 0xffff);
        let name = Name::new(most, 0xffff).unwrap();
        for name in [name, name.with_kind(SYMLINK | 0o777)] {
            assert_eq!((name.offset(), name.len()), (most as u64, longest));
        }
        assert_eq!(name.kind(), 0);
        assert_eq!(name.with_kind(FILE).with_kind(SYMLINK).kind(), SYMLINK);
        assert!(Name::new(1 << 44, 0).is_none());
        assert!(Name::new(0, 1 << 16).is_none());
    }

    #[test]
    fn both_halves_of_a_device_number_survive() {
        let device = Device {
            major: u32::MAX,
            minor: 7,
        };
        let mut inode = InodeRow::default();
        inode.set_device(device);
        assert_eq!(inode.device(), device);
    }
}
