//! Which files are whole, in a file beside the tree: what a restart may believe.
//!
//! One slot of 64 bytes an entry, at the place that its number says; the first slot says whose
//! tree it is. A record counts only when its checksum is right, for this tree and this entry, and
//! when what lies in the tree is to the nanosecond what was written down. That tells everything as
//! long as the system runs, because the kernel changes a file's ctime with every write. After the
//! system was started anew even what was written down may not have reached the disk before it
//! went, so then the content itself has to have the hash in the record.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::Stat;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes of a slot.
const SLOT: usize = 64;
/// What its last bytes are: a checksum of all others.
const SUM: usize = 8;
/// Slots read at once.
const BATCH_SLOTS: u32 = 8192;

const MAGIC: [u8; 8] = *b"TARFSDIR";
/// A ledger of another version is another tree's.
const VERSION: u64 = 1;

/// A file as it was when it was whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    inode: u64,
    size: u64,
    mtime: (i64, u32),
    ctime: (i64, u32),
    /// xxh3-64 of its stored bytes.
    pub(super) hash: u64,
    /// When it was written: which start of the system.
    boot: u64,
}

/// The open ledger of one tree.
#[derive(Debug)]
pub(super) struct Ledger {
    file: File,
    /// Makes the records of one tree worthless to another.
    seed: u64,
    boot: u64,
}

/// Whose tree it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Owner {
    /// What is written there.
    pub(super) content: u128,
    /// The inode of the directory.
    pub(super) directory: u64,
}

impl Ledger {
    /// The ledger in `file`, if it is that of `owner`; `boot` tells one start of the system from
    /// another.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(super) fn open(file: File, owner: Owner, boot: u64) -> io::Result<Result<Self, File>> {
        let mut slot = [0; SLOT];
        let is_whole = match file.read_exact_at(&mut slot, 0) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            Err(error) => return Err(error),
        };
        Ok(if is_whole && slot == header(owner) {
            Ok(Self::new(file, owner, boot))
        } else {
            Err(file)
        })
    }

    /// An empty ledger in `file`, whatever it held.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn create(file: File, owner: Owner, boot: u64) -> io::Result<Self> {
        file.set_len(0)?;
        file.write_all_at(&header(owner), 0)?;
        Ok(Self::new(file, owner, boot))
    }

    fn new(file: File, owner: Owner, boot: u64) -> Self {
        let seed = fold(owner.content) ^ owner.directory.rotate_left(32);
        Self { file, seed, boot }
    }

    /// What is known of entry `number`.
    pub(super) fn get(&self, number: u32) -> Option<Record> {
        let mut slot = [0; SLOT];
        let place = place(number);
        self.file.read_exact_at(&mut slot, place).ok()?;
        self.parse(number, &slot)
    }

    /// The entries up to number `last` of which a record was written since the system was started.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(super) fn recent(&self, last: u32, mut found: impl FnMut(u32)) -> io::Result<()> {
        let mut first = 1;
        while first <= last {
            let count = (last - first).saturating_add(1).min(BATCH_SLOTS);
            let mut slots = vec![0; count as usize * SLOT];
            let len = read_up_to(&self.file, &mut slots, place(first))?;
            let (slots, _) = slots.split_at(len);
            for (number, slot) in (first..).zip(slots.chunks_exact(SLOT)) {
                let record = slot.try_into().ok();
                let record = record.and_then(|slot| self.parse(number, slot));
                if record.is_some_and(|record| record.boot == self.boot) {
                    found(number);
                }
            }
            if len < count as usize * SLOT {
                return Ok(());
            }
            first += count;
        }
        Ok(())
    }

    /// Whether `record` was written since the system was started.
    pub(super) fn is_recent(&self, record: &Record) -> bool {
        record.boot == self.boot
    }

    /// Writes down that entry `number` is whole, with stored bytes of this `hash`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn put(&self, number: u32, stat: &Stat, hash: u64) -> io::Result<()> {
        let record = Record {
            hash,
            boot: self.boot,
            ..Record::of(stat)
        };
        self.file
            .write_all_at(&self.slot(number, &record), place(number))
    }

    fn slot(&self, number: u32, record: &Record) -> [u8; SLOT] {
        let nanoseconds = u64::from(record.mtime.1) | u64::from(record.ctime.1) << 32;
        let mut slot = slot([
            record.inode,
            record.size,
            record.mtime.0.cast_unsigned(),
            record.ctime.0.cast_unsigned(),
            nanoseconds,
            record.hash,
            record.boot,
        ]);
        seal(&mut slot, self.seed ^ u64::from(number));
        slot
    }

    fn parse(&self, number: u32, slot: &[u8; SLOT]) -> Option<Record> {
        let mut sealed = *slot;
        seal(&mut sealed, self.seed ^ u64::from(number));
        if sealed != *slot {
            return None;
        }
        let (words, _) = slot.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        let (inode, size) = (words.next()?, words.next()?);
        let mtime = words.next()?.cast_signed();
        let ctime = words.next()?.cast_signed();
        let nanoseconds = words.next()?;
        let half = |word| u32::try_from(word & u64::from(u32::MAX)).ok();
        Some(Record {
            inode,
            size,
            mtime: (mtime, half(nanoseconds)?),
            ctime: (ctime, half(nanoseconds >> 32)?),
            hash: words.next()?,
            boot: words.next()?,
        })
    }
}

impl Record {
    fn of(stat: &Stat) -> Self {
        let nanoseconds = |value| u32::try_from(value).unwrap_or(u32::MAX);
        Self {
            inode: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(u64::MAX),
            mtime: (stat.st_mtime, nanoseconds(stat.st_mtime_nsec)),
            ctime: (stat.st_ctime, nanoseconds(stat.st_ctime_nsec)),
            hash: 0,
            boot: 0,
        }
    }

    /// Whether what `stat` tells of has not been touched since.
    pub(super) fn fits(&self, stat: &Stat) -> bool {
        let found = Self {
            hash: self.hash,
            boot: self.boot,
            ..Self::of(stat)
        };
        *self == found
    }
}

fn place(number: u32) -> u64 {
    u64::from(number) * SLOT as u64
}

fn header(owner: Owner) -> [u8; SLOT] {
    let (low, high) = halves(owner.content);
    let mut header = slot([
        u64::from_le_bytes(MAGIC),
        VERSION,
        low,
        high,
        owner.directory,
        0,
        0,
    ]);
    seal(&mut header, 0);
    header
}

fn slot(words: [u64; 7]) -> [u8; SLOT] {
    let mut slot = [0; SLOT];
    for (place, word) in slot.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *place = word.to_le_bytes();
    }
    slot
}

/// Writes the checksum behind what it is of. Seeds are all different, so a slot is worthless
/// anywhere else; one that was never written is full of zeros, which is no checksum of zeros.
fn seal(slot: &mut [u8; SLOT], seed: u64) {
    if let Some((content, sum)) = slot.split_last_chunk_mut::<SUM>() {
        *sum = xxh3_64_with_seed(content, seed).to_le_bytes();
    }
}

fn halves(number: u128) -> (u64, u64) {
    let half = |number| u64::try_from(number & u128::from(u64::MAX)).unwrap_or_default();
    (half(number), half(number >> 64))
}

fn fold(number: u128) -> u64 {
    let (low, high) = halves(number);
    low ^ high
}

/// Fills `buffer`, or as much of it as the file has.
fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut len = 0;
    while let Some(rest) = buffer.get_mut(len..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset + len as u64) {
            Ok(0) => break,
            Ok(read) => len += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner = Owner {
        content: 7 << 70 | 3,
        directory: 12,
    };

    fn ledger(file: &File, boot: u64) -> Ledger {
        Ledger::new(file.try_clone().expect("a descriptor"), OWNER, boot)
    }

    fn stat() -> Stat {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(5).expect("long enough");
        rustix::fs::fstat(file).expect("open")
    }

    #[test]
    fn a_record_is_found_under_its_number_and_fits_what_it_is_of() {
        let file = tempfile::tempfile().expect("a file");
        let (ledger, stat) = (ledger(&file, 1), stat());
        ledger.put(20_000, &stat, 99).expect("written");
        let record = ledger.get(20_000).expect("there");
        assert_eq!(record.hash, 99);
        assert!(record.fits(&stat) && ledger.is_recent(&record));
        for touch in [
            |stat: &mut Stat| stat.st_size += 1,
            |stat: &mut Stat| stat.st_ino += 1,
            |stat: &mut Stat| stat.st_mtime_nsec ^= 1,
            |stat: &mut Stat| stat.st_ctime_nsec ^= 1,
            |stat: &mut Stat| stat.st_ctime += 1,
        ] {
            let mut touched = stat;
            touch(&mut touched);
            assert!(!record.fits(&touched));
        }
        assert_eq!(ledger.get(19_999), None);
        assert_eq!(ledger.get(20_001), None);
    }

    #[test]
    fn only_records_since_the_system_was_started_are_recent() {
        let file = tempfile::tempfile().expect("a file");
        let stat = stat();
        ledger(&file, 1).put(3, &stat, 0).expect("written");
        let now = ledger(&file, 2);
        now.put(9000, &stat, 0).expect("written");
        now.put(5, &stat, 0).expect("written");
        let mut recent = Vec::new();
        now.recent(9000, |number| recent.push(number))
            .expect("read");
        assert_eq!(recent, [5, 9000]);
        recent.clear();
        now.recent(8999, |number| recent.push(number))
            .expect("read");
        assert_eq!(recent, [5]);
        assert!(!now.is_recent(&now.get(3).expect("there")));
    }

    #[test]
    fn a_damaged_moved_or_foreign_record_is_none() {
        let file = tempfile::tempfile().expect("a file");
        let (ledger, stat) = (ledger(&file, 1), stat());
        ledger.put(3, &stat, 1).expect("written");
        let mut good = [0; SLOT];
        file.read_exact_at(&mut good, place(3)).expect("there");
        for at in 0..SLOT {
            let mut bad = good;
            bad[at] ^= 1;
            assert_eq!(ledger.parse(3, &bad), None, "byte {at}");
        }
        assert_eq!(ledger.parse(4, &good), None);
        assert_eq!(ledger.parse(3, &[0; SLOT]), None);
        let other = Owner {
            content: OWNER.content + 1,
            ..OWNER
        };
        let other = Ledger::new(file, other, 1);
        assert_eq!(other.get(3), None);
    }

    #[test]
    fn a_ledger_is_its_owners_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ledger");
        let open = || {
            let mut options = std::fs::OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            options.open(&path).expect("ours")
        };
        let theirs = |owner| Ledger::open(open(), owner, 1).expect("readable").is_ok();
        assert!(!theirs(OWNER), "it is empty");
        let stat = stat();
        let ledger = Ledger::create(open(), OWNER, 1).expect("written");
        ledger.put(1, &stat, 0).expect("written");
        assert!(theirs(OWNER));
        let moved = Owner {
            directory: 13,
            ..OWNER
        };
        let other = Owner {
            content: 8,
            ..OWNER
        };
        assert!(!theirs(moved) && !theirs(other));
        let fresh = Ledger::create(open(), OWNER, 1).expect("written");
        assert_eq!(fresh.get(1), None);
    }
}
