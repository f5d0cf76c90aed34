//! Ledger of complete entries, in a file beside the copy. A later mount reuses them.
//!
//! It has one slot of 64 bytes for each entry, at the offset given by the entry's number. The first slot
//! identifies the tree. The row in a slot is valid only if its checksum fits this tree and entry, and the file's
//! attributes equal it, with times to the nanosecond.
//!
//! Within one boot, this detects every change, because each write changes a file's ctime. After a crash, data
//! may not have reached the disk. So after a reboot, the content must have the recorded hash, too.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use rustix::fs::Stat;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::materialize::sidecar::StatSnapshot;

const SLOT_BYTES: usize = 64;
/// Size of the checksum at the end of a slot, over all other bytes.
const CHECKSUM_BYTES: usize = 8;
/// Bytes of a read when all slots are read.
const READ_BYTES: usize = 8192 * SLOT_BYTES;

const MAGIC: [u8; 8] = *b"TARFSDIR";
/// A ledger of another version counts as that of another tree.
const VERSION: u64 = 1;

/// Row of the ledger: attributes of a complete entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LedgerRow {
    snapshot: StatSnapshot,
    /// xxh3-64 of its stored bytes.
    pub(super) hash: u64,
    boot_id: u64,
}

#[derive(Debug)]
pub(super) struct Ledger {
    file: File,
    /// Seed of the checksums. It invalidates rows of other trees.
    seed: u64,
    boot_id: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TreeId {
    /// Hash of the archive's content and options.
    pub(super) content: u128,
    /// The inode of the directory.
    pub(super) directory: u64,
}

impl Ledger {
    /// Opens the ledger in `file` if it is that of `tree_id`; otherwise returns the file.
    pub(super) fn open(
        file: File,
        tree_id: TreeId,
        boot_id: u64,
    ) -> io::Result<Result<Self, File>> {
        let mut slot = [0; SLOT_BYTES];
        let is_full_slot = match file.read_exact_at(&mut slot, 0) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            Err(error) => return Err(error),
        };
        Ok(if is_full_slot && slot == header(tree_id) {
            Ok(Self::new(file, tree_id, boot_id))
        } else {
            Err(file)
        })
    }

    /// Creates an empty ledger in `file` and discards the old contents.
    pub(super) fn create(file: File, tree_id: TreeId, boot_id: u64) -> io::Result<Self> {
        file.set_len(0)?;
        file.write_all_at(&header(tree_id), 0)?;
        Ok(Self::new(file, tree_id, boot_id))
    }

    fn new(file: File, tree_id: TreeId, boot_id: u64) -> Self {
        let (low, high) = halves(tree_id.content);
        let seed = low ^ high ^ tree_id.directory.rotate_left(32);
        Self {
            file,
            seed,
            boot_id,
        }
    }

    /// The valid row of entry `number`, if any.
    pub(super) fn get(&self, number: u32) -> Option<LedgerRow> {
        let mut slot = [0; SLOT_BYTES];
        let offset = slot_offset(number);
        self.file.read_exact_at(&mut slot, offset).ok()?;
        self.parse(number, &slot)
    }

    /// Calls `found` for each entry up to `last` that was recorded in the current boot.
    pub(super) fn for_each_recent(&self, last: u32, mut found: impl FnMut(u32)) -> io::Result<()> {
        let mut slots = BufReader::with_capacity(READ_BYTES, &self.file);
        slots.seek(SeekFrom::Start(slot_offset(1)))?;
        let mut slot = [0; SLOT_BYTES];
        for number in 1..=last {
            match slots.read_exact(&mut slot) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                read => read?,
            }
            let row = self.parse(number, &slot);
            if row.is_some_and(|row| self.is_recent(&row)) {
                found(number);
            }
        }
        Ok(())
    }

    pub(super) fn is_recent(&self, row: &LedgerRow) -> bool {
        row.boot_id == self.boot_id
    }

    /// Records that entry `number`, whose stored bytes have `hash`, is complete.
    pub(super) fn put(&self, number: u32, stat: &Stat, hash: u64) -> io::Result<()> {
        let snapshot = StatSnapshot::of(stat);
        let mut slot = slot([
            snapshot.inode,
            snapshot.size.cast_unsigned(),
            snapshot.mtime.0.cast_unsigned(),
            snapshot.ctime.0.cast_unsigned(),
            snapshot.mtime.1 | snapshot.ctime.1 << 32,
            hash,
            self.boot_id,
        ]);
        write_checksum(&mut slot, self.seed ^ u64::from(number));
        self.file.write_all_at(&slot, slot_offset(number))
    }

    fn parse(&self, number: u32, slot: &[u8; SLOT_BYTES]) -> Option<LedgerRow> {
        let mut sealed = *slot;
        write_checksum(&mut sealed, self.seed ^ u64::from(number));
        if sealed != *slot {
            return None;
        }
        let (words, _) = slot.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        let (inode, size) = (words.next()?, words.next()?.cast_signed());
        let mtime = words.next()?.cast_signed();
        let ctime = words.next()?.cast_signed();
        let nanoseconds = words.next()?;
        Some(LedgerRow {
            snapshot: StatSnapshot {
                inode,
                size,
                mtime: (mtime, nanoseconds & u64::from(u32::MAX)),
                ctime: (ctime, nanoseconds >> 32),
            },
            hash: words.next()?,
            boot_id: words.next()?,
        })
    }
}

impl LedgerRow {
    pub(super) fn matches(&self, stat: &Stat) -> bool {
        self.snapshot == StatSnapshot::of(stat)
    }
}

fn slot_offset(number: u32) -> u64 {
    u64::from(number) * SLOT_BYTES as u64
}

fn header(tree_id: TreeId) -> [u8; SLOT_BYTES] {
    let (low, high) = halves(tree_id.content);
    let mut header = slot([
        u64::from_le_bytes(MAGIC),
        VERSION,
        low,
        high,
        tree_id.directory,
        0,
        0,
    ]);
    write_checksum(&mut header, 0);
    header
}

fn slot(words: [u64; 7]) -> [u8; SLOT_BYTES] {
    let mut slot = [0; SLOT_BYTES];
    for (offset, word) in slot.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *offset = word.to_le_bytes();
    }
    slot
}

/// Writes the checksum at the end of the slot. Its seed depends on the slot, so a slot is invalid at any
/// other offset. An unused slot is all zeros, which is invalid, because the checksum of zeros is not zero.
fn write_checksum(slot: &mut [u8; SLOT_BYTES], seed: u64) {
    if let Some((content, sum)) = slot.split_last_chunk_mut::<CHECKSUM_BYTES>() {
        *sum = xxh3_64_with_seed(content, seed).to_le_bytes();
    }
}

fn halves(number: u128) -> (u64, u64) {
    let half = |number| u64::try_from(number & u128::from(u64::MAX)).unwrap_or_default();
    (half(number), half(number >> 64))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TREE_ID: TreeId = TreeId {
        content: 7 << 70 | 3,
        directory: 12,
    };

    fn ledger(file: &File, boot_id: u64) -> Ledger {
        Ledger::new(file.try_clone().expect("a descriptor"), TREE_ID, boot_id)
    }

    fn stat() -> Stat {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(5).expect("long enough");
        rustix::fs::fstat(file).expect("open")
    }

    #[test]
    fn ledger_row_matches_only_the_unchanged_file() {
        let file = tempfile::tempfile().expect("a file");
        let (ledger, stat) = (ledger(&file, 1), stat());
        ledger.put(20_000, &stat, 99).expect("written");
        let row = ledger.get(20_000).expect("there");
        assert_eq!(row.hash, 99);
        assert!(row.matches(&stat) && ledger.is_recent(&row));
        for touch in [
            |stat: &mut Stat| stat.st_size += 1,
            |stat: &mut Stat| stat.st_ino += 1,
            |stat: &mut Stat| stat.st_mtime_nsec ^= 1,
            |stat: &mut Stat| stat.st_ctime_nsec ^= 1,
            |stat: &mut Stat| stat.st_ctime += 1,
        ] {
            let mut touched = stat;
            touch(&mut touched);
            assert!(!row.matches(&touched));
        }
        assert_eq!(ledger.get(19_999), None);
        assert_eq!(ledger.get(20_001), None);
    }

    #[test]
    fn only_ledger_rows_of_this_boot_are_recent() {
        let file = tempfile::tempfile().expect("a file");
        let stat = stat();
        ledger(&file, 1).put(3, &stat, 0).expect("written");
        let now = ledger(&file, 2);
        now.put(9000, &stat, 0).expect("written");
        now.put(5, &stat, 0).expect("written");
        let mut recent = Vec::new();
        now.for_each_recent(9000, |number| recent.push(number))
            .expect("read");
        assert_eq!(recent, [5, 9000]);
        recent.clear();
        now.for_each_recent(8999, |number| recent.push(number))
            .expect("read");
        assert_eq!(recent, [5]);
        assert!(!now.is_recent(&now.get(3).expect("there")));
    }

    #[test]
    fn damaged_moved_or_foreign_ledger_row_is_ignored() {
        let file = tempfile::tempfile().expect("a file");
        let (ledger, stat) = (ledger(&file, 1), stat());
        ledger.put(3, &stat, 1).expect("written");
        let mut good = [0; SLOT_BYTES];
        file.read_exact_at(&mut good, slot_offset(3))
            .expect("there");
        for at in 0..SLOT_BYTES {
            let mut bad = good;
            bad[at] ^= 1;
            assert_eq!(ledger.parse(3, &bad), None, "byte {at}");
        }
        assert_eq!(ledger.parse(4, &good), None);
        assert_eq!(ledger.parse(3, &[0; SLOT_BYTES]), None);
        let other = TreeId {
            content: TREE_ID.content + 1,
            ..TREE_ID
        };
        let other = Ledger::new(file, other, 1);
        assert_eq!(other.get(3), None);
    }

    // Promises: copy-owner
    #[test]
    fn ledger_of_another_tree_is_not_opened() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ledger");
        let open = || {
            let mut options = std::fs::OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            options.open(&path).expect("ours")
        };
        let theirs = |tree_id| Ledger::open(open(), tree_id, 1).expect("readable").is_ok();
        assert!(!theirs(TREE_ID), "it is empty");
        let stat = stat();
        let ledger = Ledger::create(open(), TREE_ID, 1).expect("written");
        ledger.put(1, &stat, 0).expect("written");
        assert!(theirs(TREE_ID));
        let moved = TreeId {
            directory: 13,
            ..TREE_ID
        };
        let other = TreeId {
            content: 8,
            ..TREE_ID
        };
        assert!(!theirs(moved) && !theirs(other));
        let fresh = Ledger::create(open(), TREE_ID, 1).expect("written");
        assert_eq!(fresh.get(1), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_at_most_the_ledger_record_of_one_number(
            content in proptest::collection::vec(any::<u8>(), SLOT_BYTES - CHECKSUM_BYTES),
            number: u32,
        ) {
            let ledger = ledger(&tempfile::tempfile().expect("a file"), 1);
            let mut slot = [0; SLOT_BYTES];
            slot[..content.len()].copy_from_slice(&content);
            prop_assert_eq!(ledger.parse(number, &slot), None);
            write_checksum(&mut slot, ledger.seed ^ u64::from(number));
            prop_assert!(ledger.parse(number, &slot).is_some());
            prop_assert_eq!(ledger.parse(number ^ 1, &slot), None);
        }
    }
}
