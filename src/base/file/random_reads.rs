//! Short random reads of a file, without the kernel's read-ahead.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use rustix::fs::{Advice, fadvise};
use rustix::io::{ReadWriteFlags, preadv2};

/// Devices that a read on the calling thread may wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// None: the read succeeds only from the page cache.
    NoWait,
    /// A local disk.
    ForDisk,
}

/// Length from which reads use the kernel's read-ahead, because they are probably sequential.
const MAX_RANDOM_LEN: usize = 128 << 10;

/// Second descriptor of a file for short reads, opened on first use.
#[derive(Debug, Default)]
pub(crate) struct RandomReads {
    /// Opened separately, because fadvise(2) applies to a descriptor. `None` if that failed.
    file: OnceLock<Option<File>>,
}

impl RandomReads {
    /// Fills `bytes` from `offset` of `file`, the same at each call. `None` if [`Wait::NoWait`] forbids it.
    pub(crate) fn read(
        &self,
        file: &File,
        bytes: &mut [u8],
        offset: u64,
        wait: Wait,
    ) -> Option<io::Result<()>> {
        if wait == Wait::NoWait {
            let wanted = bytes.len();
            let buffers = &mut [IoSliceMut::new(bytes)];
            let read = preadv2(file, buffers, offset, ReadWriteFlags::NOWAIT);
            return (read == Ok(wanted)).then_some(Ok(()));
        }
        let is_short = bytes.len() < MAX_RANDOM_LEN;
        let short = is_short.then(|| self.file(file)).flatten();
        Some(short.unwrap_or(file).read_exact_at(bytes, offset))
    }

    fn file(&self, file: &File) -> Option<&File> {
        let open = || {
            let file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
            fadvise(&file, 0, None, Advice::Random).ok()?;
            Some(file)
        };
        self.file.get_or_init(open).as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write};

    use super::*;

    #[test]
    fn random_read_of_any_length_returns_the_right_bytes() {
        let mut file = tempfile::tempfile().expect("a file");
        let content: Vec<u8> = (0..300_000_u32).map(|n| (n % 251) as u8).collect();
        file.write_all(&content).expect("written");
        let reads = RandomReads::default();
        for (offset, len) in [(0, 1), (5, 4096), (7, 200_000), (299_999, 1)] {
            for wait in [Wait::ForDisk, Wait::NoWait] {
                let mut bytes = vec![0; len];
                let read = reads.read(&file, &mut bytes, offset as u64, wait);
                read.expect("just written").expect("there");
                assert_eq!(bytes, content[offset..offset + len], "{len} at {offset}");
            }
        }
        let mut bytes = [0; 2];
        let past = reads.read(&file, &mut bytes, 299_999, Wait::ForDisk);
        let past = past.expect("read").expect_err("too short");
        assert_eq!(past.kind(), ErrorKind::UnexpectedEof);
        assert!(
            reads
                .read(&file, &mut bytes, 299_999, Wait::NoWait)
                .is_none()
        );
    }
}
