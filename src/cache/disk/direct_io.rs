//! Reads and writes that bypass the page cache, where the kernel supports it.
//! The page cache holds the bytes as a file of the mount. A second copy of them would evict pages that others
//! need, and take as long to create. So aligned parts use `O_DIRECT` (open(2)), and others leave the page
//! cache after use (`RWF_DONTCACHE`, preadv2(2), since Linux 6.14), where supported. A buffered write stays
//! in the page cache until it is on disk, and a read before that waits for the disk.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags, preadv2, pwritev2};

use crate::base::free_list::ALIGNMENT;

/// `RWF_DONTCACHE` of linux/fs.h.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

#[derive(Debug, Default)]
pub(super) struct DirectIo {
    /// The file with `O_DIRECT`, opened on first use, because many files are opened only for inspection.
    direct: OnceLock<Option<File>>,
    /// Whether the file system rejected `RWF_DONTCACHE`, which it then does each time.
    is_unsupported: AtomicBool,
}

impl DirectIo {
    pub(super) fn read_exact_at(
        &self,
        file: &File,
        bytes: &mut [u8],
        offset: u64,
    ) -> io::Result<()> {
        let blocks = aligned_range(bytes, offset);
        let (middle, end) = (offset + blocks.start as u64, offset + blocks.end as u64);
        let (bytes, after) = bytes.split_at_mut(blocks.end);
        let (before, blocks) = bytes.split_at_mut(blocks.start);
        self.read_part(file, before, offset)?;
        let direct = self.direct(file);
        if direct.is_none_or(|direct| direct.read_exact_at(blocks, middle).is_err()) {
            self.read_part(file, blocks, middle)?;
        }
        self.read_part(file, after, end)
    }

    /// As [`FileExt::write_all_at`]. With `is_buffered` it does not wait for the disk.
    pub(super) fn write_all_at(
        &self,
        file: &File,
        bytes: &[u8],
        offset: u64,
        is_buffered: bool,
    ) -> io::Result<()> {
        let blocks = aligned_range(bytes, offset);
        let (middle, end) = (offset + blocks.start as u64, offset + blocks.end as u64);
        let (bytes, after) = bytes.split_at(blocks.end);
        let (before, blocks) = bytes.split_at(blocks.start);
        self.write_part(file, before, offset)?;
        let direct = self.direct(file).filter(|_| !is_buffered);
        if direct.is_none_or(|direct| direct.write_all_at(blocks, middle).is_err()) {
            self.write_part(file, blocks, middle)?;
        }
        self.write_part(file, after, end)
    }

    /// Reopens `file`, which is open for reading and writing, with `O_DIRECT`.
    fn direct(&self, file: &File) -> Option<&File> {
        let open = || {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let mut options = OpenOptions::new();
            let flags = OFlags::DIRECT.bits().cast_signed();
            options.read(true).write(true).custom_flags(flags);
            options.open(path).ok()
        };
        self.direct.get_or_init(open).as_ref()
    }

    fn read_part(&self, file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let done = self.try_dontcache(bytes.len(), || {
            preadv2(file, &mut [IoSliceMut::new(bytes)], offset, DONTCACHE)
        });
        let rest = bytes.get_mut(done..).unwrap_or_default();
        file.read_exact_at(rest, offset + done as u64)
    }

    fn write_part(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let done = self.try_dontcache(bytes.len(), || {
            pwritev2(file, &[IoSlice::new(bytes)], offset, DONTCACHE)
        });
        let rest = bytes.get(done..).unwrap_or_default();
        file.write_all_at(rest, offset + done as u64)
    }

    /// Returns how many of `len` bytes `call` handled. An ordinary call handles the rest and reports errors.
    fn try_dontcache(&self, len: usize, call: impl FnOnce() -> rustix::io::Result<usize>) -> usize {
        if len == 0 || self.is_unsupported.load(Ordering::Relaxed) {
            return 0;
        }
        call().unwrap_or_else(|error| {
            // Old kernels lack the system call or the flag; `EOPNOTSUPP` is from the file system.
            if matches!(error, Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP) {
                self.is_unsupported.store(true, Ordering::Relaxed);
            }
            0
        })
    }
}

/// The range of `bytes` (maybe empty) that is block-aligned both in memory and in the file at `offset`.
fn aligned_range(bytes: &[u8], offset: u64) -> std::ops::Range<usize> {
    let alignment = ALIGNMENT as u64;
    let head = usize::try_from(offset.wrapping_neg() % alignment).unwrap_or(usize::MAX);
    let is_memory_aligned = (bytes.as_ptr().addr() as u64 + head as u64).is_multiple_of(alignment);
    let behind = bytes.len().saturating_sub(head);
    let len = behind - behind % ALIGNMENT;
    if is_memory_aligned && len > 0 {
        head..head + len
    } else {
        0..0
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;
    use crate::base::free_list::FreeList;

    /// Writes bytes and reads them back, in memory that begins `phase` bytes off their offset.
    fn round_trip(direct_io: &DirectIo, file: &File, offset: u64, phase: u64, is_buffered: bool) {
        let list = FreeList::new(0);
        for len in [1, 4095, 4096, 10_000, 3 << 20] {
            let mut bytes = list.allocate(len, offset + phase);
            for (number, byte) in bytes.iter_mut().enumerate() {
                *byte = u8::try_from(number % 251).expect("small");
            }
            let written = direct_io.write_all_at(file, &bytes, offset, is_buffered);
            written.expect("written");
            let mut read = list.allocate(len, offset + phase);
            let got = direct_io.read_exact_at(file, &mut read, offset);
            got.expect("read");
            assert!(*read == *bytes, "{len} bytes at {offset}");
        }
        let mut long = list.allocate(4 << 20, offset + phase);
        let past = direct_io.read_exact_at(file, &mut long, offset);
        let past = past.expect_err("too short");
        assert_eq!(past.kind(), ErrorKind::UnexpectedEof);
    }

    fn round_trips(directory: &std::path::Path) -> (DirectIo, File) {
        let file = tempfile::tempfile_in(directory).expect("a file");
        let direct_io = DirectIo::default();
        for is_buffered in [false, true] {
            for (offset, phase) in [(0, 0), (8192, 0), (12_345, 0), (12_345, 1), (511, 512)] {
                round_trip(&direct_io, &file, offset, phase, is_buffered);
            }
        }
        (direct_io, file)
    }

    #[test]
    fn direct_io_reads_back_bytes_of_any_alignment() {
        let directory = tempfile::tempdir().expect("a directory");
        round_trips(directory.path());
    }

    #[test]
    fn direct_io_falls_back_on_tmpfs() {
        round_trips("/dev/shm".as_ref());
    }

    #[test]
    fn aligned_range_covers_whole_blocks() {
        let list = FreeList::new(0);
        let at = |offset, phase, len| aligned_range(&list.allocate(len, phase), offset);
        assert_eq!(at(0, 0, 8192), 0..8192);
        assert_eq!(at(1, 1, 8192), 4095..4095 + 4096);
        assert_eq!(at(1, 1, 4095), 0..0);
        assert_eq!(at(1, 1, 8190), 0..0, "not a whole one");
        assert_eq!(at(1, 2, 8192), 0..0, "out of phase");
        assert_eq!(at(5, 5, 100), 0..0);
    }
}
