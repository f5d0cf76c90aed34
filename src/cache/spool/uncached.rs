//! Reads and writes that leave nothing in the page cache, where the kernel can do so.
//!
//! What is read from a spool goes on into the page cache as a file of the mount, where it belongs:
//! the same bytes a second time, as pages of the spool, would push out what others need. Linux 6.14
//! has `RWF_DONTCACHE` for that (preadv2(2)), on file systems that know it; on others these are
//! reads and writes like any.

use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{Errno, ReadWriteFlags, preadv2, pwritev2};

/// `RWF_DONTCACHE` of linux/fs.h.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

/// Whether the file system has declined, which it does each time.
#[derive(Debug, Default)]
pub(super) struct Uncached {
    is_refused: AtomicBool,
}

impl Uncached {
    /// As [`FileExt::read_exact_at`].
    pub(super) fn read_exact_at(
        &self,
        file: &File,
        bytes: &mut [u8],
        offset: u64,
    ) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = rest_mut(bytes, done) {
            if self.is_refused() {
                return file.read_exact_at(rest, offset + done as u64);
            }
            let buffers = &mut [IoSliceMut::new(rest)];
            match preadv2(file, buffers, offset + done as u64, DONTCACHE) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => done += read,
                Err(error) => self.go_on(error)?,
            }
        }
        Ok(())
    }

    /// As [`FileExt::write_all_at`].
    pub(super) fn write_all_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            if self.is_refused() {
                return file.write_all_at(rest, offset + done as u64);
            }
            let buffers = &[IoSlice::new(rest)];
            match pwritev2(file, buffers, offset + done as u64, DONTCACHE) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => done += written,
                Err(error) => self.go_on(error)?,
            }
        }
        Ok(())
    }

    fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    /// Takes in an error after which it is to be tried again, in one way or the other.
    fn go_on(&self, error: Errno) -> io::Result<()> {
        match error {
            Errno::INTR => Ok(()),
            // Old kernels know no such call, or not the flag; the rest is the file system's word.
            Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP => {
                self.is_refused.store(true, Ordering::Relaxed);
                Ok(())
            }
            error => Err(error.into()),
        }
    }
}

fn rest_mut(bytes: &mut [u8], done: usize) -> Option<&mut [u8]> {
    bytes.get_mut(done..).filter(|rest| !rest.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is written comes back, on whatever file system that is.
    fn round_trip(directory: &std::path::Path) -> (Uncached, File) {
        let uncached = Uncached::default();
        let file = tempfile::tempfile_in(directory).expect("a file");
        let bytes: Vec<u8> = (0..=250).cycle().take(3 << 20).collect();
        uncached
            .write_all_at(&file, &bytes, 12_345)
            .expect("written");
        let mut read = vec![0; bytes.len()];
        uncached
            .read_exact_at(&file, &mut read, 12_345)
            .expect("read");
        assert!(read == bytes);
        let past = uncached.read_exact_at(&file, &mut read, 20_000);
        assert_eq!(
            past.expect_err("too short").kind(),
            ErrorKind::UnexpectedEof
        );
        (uncached, file)
    }

    #[test]
    fn a_file_system_that_knows_no_uncached_reads_is_asked_once() {
        // A tmpfs is nothing but page cache.
        let (uncached, _file) = round_trip("/dev/shm".as_ref());
        assert!(uncached.is_refused());
    }

    #[test]
    fn nothing_stays_in_the_page_cache() {
        let directory = tempfile::tempdir().expect("a directory");
        let (uncached, file) = round_trip(directory.path());
        if uncached.is_refused() {
            return;
        }
        file.sync_all().expect("synced");
        let mut bytes = vec![0; 1 << 20];
        uncached
            .read_exact_at(&file, &mut bytes, 1 << 20)
            .expect("read");
        let buffers = &mut [IoSliceMut::new(&mut bytes)];
        let cached = preadv2(&file, buffers, (1 << 20) + 8192, ReadWriteFlags::NOWAIT);
        assert_eq!(cached, Err(Errno::AGAIN));
    }
}
