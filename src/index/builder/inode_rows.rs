//! Rows of new entries: attributes, owners, and maps of sparse files.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::Builder;
use super::build_tree::{MemberError, check_kind};
use crate::base::xattr::XATTR_NAME_MAX;
use crate::index::arrays::push_row;
use crate::index::storage::row_types::{
    BLOCK_DEVICE, CHAR_DEVICE, DIRECTORY, ExtraRow, FIFO, FILE, FORWARD_LINK, InodeRow, NONE,
    PieceRow, SYMLINK,
};
use crate::tar::{Member, MemberKind, RECORD, Segment};

/// Maximum bytes of the name of a user or group; longer ones are dropped. `useradd` takes 32.
pub(in crate::index) const MAX_OWNER_NAME_BYTES: usize = 1024;

fn type_bits(kind: &MemberKind) -> u16 {
    match kind {
        MemberKind::File => FILE,
        MemberKind::Directory => DIRECTORY,
        MemberKind::Symlink(_) => SYMLINK,
        MemberKind::HardLink(_) => FORWARD_LINK,
        MemberKind::CharDevice(_) => CHAR_DEVICE,
        MemberKind::BlockDevice(_) => BLOCK_DEVICE,
        MemberKind::Fifo => FIFO,
    }
}

fn hash_set(seed: u64, set: &[(&[u8], &[u8])]) -> u64 {
    let mut hasher = Xxh3::with_seed(seed);
    for (name, value) in set {
        for part in [*name, *value] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    hasher.digest()
}

impl Builder {
    pub(super) fn new_inode(
        &mut self,
        kind: &MemberKind,
        member: &Member,
    ) -> Result<InodeRow, MemberError> {
        check_kind(kind)?;
        let mut inode = self.attributes(type_bits(kind), member);
        inode.size = member.header.0.into();
        match kind {
            MemberKind::File => {
                inode.data = member.payload.start().0.into();
                inode.size = member.size.into();
                let headers = member.payload.start().0.saturating_sub(member.header.0);
                inode.children = u32::try_from(headers / RECORD).unwrap_or_default().into();
                let totals = &mut self.tree.index.totals;
                totals.stored_bytes = totals.stored_bytes.saturating_add(member.payload.len());
                if let Some(map) = &member.sparse {
                    inode.extra = self.sparse_map(inode.extra.get(), member, map)?.into();
                }
            }
            MemberKind::Symlink(target) => {
                // In any archive, because Linux has no other mode for a symbolic link.
                inode.mode = (SYMLINK | 0o777).into();
                inode.data = (self.tree.index.arrays.arena.push(target) as u64).into();
                inode.children = u32::try_from(target.len()).unwrap_or_default().into();
            }
            MemberKind::CharDevice(device) | MemberKind::BlockDevice(device) => {
                inode.set_device(*device);
            }
            MemberKind::Directory | MemberKind::HardLink(_) | MemberKind::Fifo => {}
        }
        Ok(inode)
    }

    pub(super) fn attributes(&mut self, type_bits: u16, member: &Member) -> InodeRow {
        let permissions = u16::try_from(member.mode & 0o7777).unwrap_or_default();
        let mut inode = InodeRow {
            uid: member.uid.into(),
            gid: member.gid.into(),
            user: self.owner_row(&member.user).into(),
            group: self.owner_row(&member.group).into(),
            mode: (type_bits | permissions).into(),
            extra: self.attribute_set(&member.xattrs).into(),
            dirent: NONE.into(),
            ..InodeRow::default()
        };
        inode.set_mtime(member.mtime);
        inode
    }

    fn sparse_map(
        &mut self,
        extra: u32,
        member: &Member,
        map: &[Segment],
    ) -> Result<u32, MemberError> {
        let count = |rows: usize| u32::try_from(rows).map_err(|_| MemberError::TooManyEntries);
        let arrays = &mut self.tree.index.arrays;
        let mut row = arrays
            .extras
            .get(extra as usize)
            .copied()
            .unwrap_or_default();
        let first = arrays.pieces.len();
        let mut plain = member.payload.start().0;
        for segment in map.iter().filter(|segment| segment.len > 0) {
            let piece = PieceRow {
                offset: segment.offset.into(),
                plain: plain.into(),
                len: segment.len.into(),
            };
            push_row(arrays.pieces.vec_mut(), piece);
            plain = plain.saturating_add(segment.len);
        }
        row.sparse = 1.into();
        row.piece = count(first)?.into();
        row.piece_count = count(arrays.pieces.len() - first)?.into();
        row.stored_bytes = (plain - member.payload.start().0).into();
        let number = count(arrays.extras.len())?;
        push_row(arrays.extras.vec_mut(), row);
        Ok(number)
    }

    /// The row of an owner's name; 0, the empty name, when the table is full.
    fn owner_row(&mut self, name: &[u8]) -> u16 {
        if name.is_empty() || name.len() > MAX_OWNER_NAME_BYTES {
            return 0;
        }
        let arrays = &mut self.tree.index.arrays;
        let hash = xxh3_64_with_seed(name, self.owners.seed);
        let is_same = |row: u32| u16::try_from(row).is_ok_and(|row| arrays.owner(row) == name);
        if let Some(row) = self.owners.find(hash, is_same) {
            return u16::try_from(row).unwrap_or_default();
        }
        let Some(row) = arrays.push_owner(name) else {
            return 0;
        };
        self.owners.add(hash, row.into());
        row
    }

    /// The row of extras for a set of attributes; 0 for none. Equal sets share a row.
    fn attribute_set(&mut self, xattrs: &[(Vec<u8>, Vec<u8>)]) -> u32 {
        let set: Vec<(&[u8], &[u8])> = xattrs
            .iter()
            .filter(|(name, _)| name.len() <= XATTR_NAME_MAX)
            .map(|(name, value)| (&**name, &**value))
            .collect();
        let arrays = &mut self.tree.index.arrays;
        let (Ok(row), Ok(first), Ok(count)) = (
            u32::try_from(arrays.extras.len()),
            u32::try_from(arrays.xattrs.len()),
            u32::try_from(set.len()),
        ) else {
            return 0;
        };
        if count == 0 {
            return 0;
        }
        let hash = hash_set(self.attribute_sets.seed, &set);
        let is_same = |row: u32| arrays.xattrs(row).eq(set.iter().copied());
        if let Some(known) = self.attribute_sets.find(hash, is_same) {
            return known;
        }
        for (name, value) in &set {
            arrays.push_xattr(name, value);
        }
        let extra = ExtraRow {
            xattr: first.into(),
            xattr_count: count.into(),
            ..ExtraRow::default()
        };
        push_row(arrays.extras.vec_mut(), extra);
        self.attribute_sets.add(hash, row);
        self.tree.index.totals.has_xattrs = true;
        row
    }
}
