//! Local files and block devices.

use std::fs::{File as StdFile, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::BoxStream;

use super::pipe::Pipe;
use super::{Access, Cause, Doubt, Error, Fingerprint, Location, Source, Validator};
use crate::base::buffer_pool::Buffer;
use crate::base::change_time;
use crate::base::extent::Packed;
use crate::base::random_reads::{RandomReads, Wait};
use crate::base::stats::Stats;

/// An open local file. Renaming or replacing it has no effect. A write to it is detected.
#[derive(Debug)]
pub struct File {
    opened: Arc<OpenFile>,
    location: Location,
    fingerprint: Fingerprint,
}

#[derive(Debug)]
struct OpenFile {
    file: StdFile,
    random_reads: RandomReads,
    state: FileState,
    stats: Arc<Stats>,
}

/// State of a file that a write changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct FileState {
    size: u64,
    mtime_ns: i128,
}

impl FileState {
    fn of(metadata: &Metadata) -> Self {
        Self {
            size: metadata.size(),
            mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// Timeout until the clock passes a file's change time, because small inodes of ext store seconds.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);

/// Pause between checks; a tick of the clock takes 1 to 10 ms.
const SETTLE_PAUSE: Duration = Duration::from_millis(2);

/// Opens `path`: files and block devices by range, FIFOs and character devices as a stream. Blocks on a
/// FIFO without a writer.
pub(super) fn open(path: &Path, stats: Arc<Stats>) -> Result<Arc<dyn Source>, Cause> {
    let mut file = StdFile::open(path)?;
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    let name = path.to_string_lossy();
    if kind.is_dir() {
        return Err(Cause::Unsupported("a directory".to_owned()));
    }
    if kind.is_fifo() || kind.is_char_device() {
        return Ok(Arc::new(Pipe::new(&name, file, stats)));
    }
    if kind.is_block_device() {
        let version = (metadata, Some(Doubt::Device));
        let len = file.seek(SeekFrom::End(0))?;
        return Ok(new_source(file, &version, len, &name, stats));
    }
    let version = version(&file)?;
    let len = version.0.size();
    Ok(new_source(file, &version, len, &name, stats))
}

/// Wraps the open `file`, which must be regular. The user sees it as `name`.
pub(super) fn from_file(
    file: StdFile,
    name: &str,
    stats: Arc<Stats>,
) -> Result<Arc<dyn Source>, Cause> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(Cause::Unsupported("a file that is not regular".to_owned()));
    }
    let version = version(&file)?;
    let len = version.0.size();
    Ok(new_source(file, &version, len, name, stats))
}

/// Returns the metadata of a regular file, and the doubt about its version, if any.
///
/// Waits for the next tick of the clock if the file changed in this one. A later change in the same tick
/// would get the same change time.
fn version(file: &StdFile) -> Result<(Metadata, Option<Doubt>), Cause> {
    let start = Instant::now();
    loop {
        // Read the clock first. A later change is visible below, or gets a later change time.
        let now = change_time::now();
        let metadata = file.metadata()?;
        if !change_time::is_trustworthy(file, &metadata) {
            return Ok((metadata, Some(Doubt::FileSystem)));
        }
        if change_time::is_settled(&metadata, now) {
            return Ok((metadata, None));
        }
        let is_in_future = metadata.ctime() > now.tv_sec.saturating_add(1);
        if is_in_future || start.elapsed() >= SETTLE_TIMEOUT {
            return Ok((metadata, Some(Doubt::Unsettled)));
        }
        std::thread::sleep(SETTLE_PAUSE);
    }
}

fn new_source(
    file: StdFile,
    (metadata, doubt): &(Metadata, Option<Doubt>),
    len: u64,
    name: &str,
    stats: Arc<Stats>,
) -> Arc<dyn Source> {
    Arc::new(File {
        location: Location::from_file(name, metadata.dev(), metadata.ino()),
        fingerprint: Fingerprint {
            len: Some(len),
            validator: Validator::File {
                dev: metadata.dev(),
                ino: metadata.ino(),
                mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
                ctime_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
                doubt: *doubt,
            },
        },
        opened: Arc::new(OpenFile {
            file,
            random_reads: RandomReads::default(),
            state: FileState::of(metadata),
            stats,
        }),
    })
}

fn nanoseconds(seconds: i64, nanoseconds: i64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
}

impl OpenFile {
    fn fill(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Cause> {
        let filled = self.file.read_exact_at(buffer, offset);
        self.check_read(filled, buffer.len())
    }

    /// Checks the result of a read of `len` bytes.
    fn check_read(&self, filled: io::Result<()>, len: usize) -> Result<(), Cause> {
        // Check after the read, so that every write before it is detected.
        if FileState::of(&self.file.metadata()?) != self.state {
            return Err(Cause::Changed);
        }
        filled.map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Cause::Truncated,
            _ => Cause::from(error),
        })?;
        self.stats.source_read_bytes.add(len as u64);
        Ok(())
    }
}

impl Source for File {
    fn location(&self) -> &str {
        self.location.as_str()
    }

    fn locator(&self) -> &str {
        self.location.locator()
    }

    fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    fn access(&self) -> Access {
        Access::Ranges
    }

    fn read_at(&self, offset: Packed, mut buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>> {
        let open_file = Arc::clone(&self.opened);
        let work = move || {
            open_file
                .fill(offset.0, &mut buffer)
                .map(|()| buffer.freeze())
        };
        async move {
            // The task fails only if the runtime ends.
            let done = tokio::task::spawn_blocking(work).await;
            done.unwrap_or(Err(Cause::Cancelled))
                .map_err(|cause| Error::new(self.location(), cause))
        }
        .boxed()
    }

    fn can_read_inline(&self) -> bool {
        true
    }

    fn read_inline(
        &self,
        offset: Packed,
        bytes: &mut [u8],
        wait: Wait,
    ) -> Option<Result<(), Error>> {
        let open_file = &self.opened;
        let filled = open_file
            .random_reads
            .read(&open_file.file, bytes, offset.0, wait)?;
        let filled = open_file.check_read(filled, bytes.len());
        Some(filled.map_err(|cause| Error::new(self.location(), cause)))
    }

    fn stream(&self) -> BoxStream<'_, Result<Bytes, Error>> {
        super::stream_by_ranges(self)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn fresh_file_is_opened_after_the_clock_tick_of_its_change() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let path = directory.path().join("file");
        for round in 0..20 {
            fs::write(&path, [round; 100]).expect("written");
            let source = open(&path, Arc::default()).expect("a file");
            let now = change_time::now();
            assert!(source.fingerprint().is_strong(), "{}", source.fingerprint());
            let changed = fs::metadata(&path).expect("there");
            assert!(change_time::is_settled(&changed, now), "in the same tick");
        }
    }

    #[test]
    fn a_file_on_another_file_system_is_doubtful() {
        let source = open(Path::new("/proc/version"), Arc::default()).expect("a file");
        assert_eq!(source.fingerprint().doubt(), Some(Doubt::FileSystem));
    }
}
