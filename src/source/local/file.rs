//! Local files and block devices.

use std::fs::{File as StdFile, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::FutureExt;
use rustix::fs::{CWD, ResolveFlags, fstatfs};
use rustix::process::geteuid;
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::pipe::Pipe;
use crate::base::buffer_pool::Buffer;
use crate::base::extent::Packed;
use crate::base::random_reads::{RandomReads, Wait};
use crate::base::regular_file;
use crate::base::stats::Stats;
use crate::source::{
    Access, Cause, Doubt, Error, Fingerprint, Location, ReadMode, Reading, Source, SourceInfo,
    Validator, location_text,
};

/// An open local file. Renaming or replacing it has no effect. A write to it is detected.
#[derive(Debug)]
pub struct File {
    opened: Arc<OpenFile>,
    info: SourceInfo,
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

/// Opens files and block devices by range, FIFOs (waits for a writer) and character devices as a stream.
pub(crate) fn open(path: &Path, stats: Arc<Stats>) -> Result<Arc<dyn Source>, Cause> {
    let mut file = StdFile::open(path)?;
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err(Cause::Unsupported("a directory".to_owned()));
    }
    if kind.is_fifo() || kind.is_char_device() {
        return Ok(Arc::new(Pipe::new(
            &location_text(path.as_os_str()),
            file,
            stats,
        )));
    }
    if kind.is_block_device() {
        let version = (metadata, Some(Doubt::Device));
        let len = file.seek(SeekFrom::End(0))?;
        return Ok(new_source(file, &version, len, path, stats));
    }
    from_file(file, path, stats)
}

/// Wraps the open `file` at `path`, which must be regular.
pub(super) fn from_file(
    file: StdFile,
    path: &Path,
    stats: Arc<Stats>,
) -> Result<Arc<dyn Source>, Cause> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(Cause::Unsupported("a file that is not regular".to_owned()));
    }
    let version = version(&file)?;
    let len = version.0.size();
    Ok(new_source(file, &version, len, path, stats))
}

/// Opens the regular file at `path`, which vouches for the file `archive`.
pub(crate) fn open_beside(
    path: &Path,
    archive: &Path,
    stats: Arc<Stats>,
) -> Result<Arc<dyn Source>, Cause> {
    let opened = regular_file::open(CWD, path, ResolveFlags::empty())?;
    let opened = opened.ok_or_else(|| Cause::Unsupported("a file that is not regular".into()))?;
    let owner = std::fs::metadata(archive)?.uid();
    check_writers(CWD, path, &opened, owner)?;
    from_file(opened, path, stats)
}

/// Checks that only root, this user and the owner of an archive can have written `file`, found at `path`.
pub(super) fn check_writers(
    directory: impl AsFd,
    path: impl AsRef<Path>,
    file: &StdFile,
    archive_owner: u32,
) -> Result<(), Cause> {
    let owners = [0, geteuid().as_raw(), archive_owner];
    let foreign = regular_file::foreign_writer_at(directory, path, file, &owners)?;
    foreign.map_or(Ok(()), |writer| Err(Cause::ForeignWriter(writer)))
}

/// Metadata of a regular file, and the doubt about its version, if any.
///
/// Waits for the clock's next tick if the file changed in this one, or a later change would get the same
/// time.
fn version(file: &StdFile) -> Result<(Metadata, Option<Doubt>), Cause> {
    let start = Instant::now();
    loop {
        // Read the clock first. A later change is visible below, or gets a later change time.
        let now = change_clock();
        let metadata = file.metadata()?;
        if !keeps_change_times(file, &metadata) {
            return Ok((metadata, Some(Doubt::FileSystem)));
        }
        if is_settled(&metadata, now) {
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
    path: &Path,
    stats: Arc<Stats>,
) -> Arc<dyn Source> {
    Arc::new(File {
        info: SourceInfo {
            location: Location::from_file(path, metadata.dev(), metadata.ino()),
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
            access: Access::Ranges,
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
    fn info(&self) -> &SourceInfo {
        &self.info
    }

    fn read<'a>(&'a self, offset: Packed, mut buffer: Buffer, _: ReadMode<'a>) -> Reading<'a> {
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
}

/// Magic numbers of file systems whose change times only this kernel sets.
///
/// Others take them from a server, a process, or an image. Overlayfs is not listed, because it does so for
/// lower layers and reuses device numbers.
const TRUSTED_FILE_SYSTEMS: [u32; 7] = [
    0x0000_EF53, // ext2, ext3, ext4
    0x5846_5342, // xfs
    0x9123_683E, // btrfs
    0xF2F5_2010, // f2fs
    0x2FC1_2FC1, // zfs
    0xCA45_1A4E, // bcachefs
    0x0102_1994, // tmpfs
];

const LOOP_MAJOR: u32 = 7;

/// Whether this kernel sets a new change time for each change of `file`; false if unknown.
fn keeps_change_times(file: impl AsFd, metadata: &Metadata) -> bool {
    // Any program may have written the image file of a loop device.
    let is_loop = rustix::fs::major(metadata.dev()) == LOOP_MAJOR;
    // On some machines `f_type` is a signed word, but the magic numbers have 32 bits.
    let is_trusted = |f_type: i128| {
        let mut trusted = TRUSTED_FILE_SYSTEMS.iter();
        trusted.any(|&magic| i128::from(magic) == f_type & 0xFFFF_FFFF)
    };
    !is_loop && fstatfs(file).is_ok_and(|system| is_trusted(system.f_type.into()))
}

/// The clock from which the kernel sets change times.
fn change_clock() -> Timespec {
    clock_gettime(ClockId::RealtimeCoarse)
}

/// Whether every change after `now` gets a change time other than that of `metadata`.
fn is_settled(metadata: &Metadata, now: Timespec) -> bool {
    let changed = (metadata.ctime(), metadata.ctime_nsec());
    // Small inodes of ext store only seconds.
    let now_nsec = if changed.1 == 0 { 0 } else { now.tv_nsec };
    changed < (now.tv_sec, now_nsec)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    // Promises: version-file
    #[test]
    fn fresh_file_is_opened_after_the_clock_tick_of_its_change() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let path = directory.path().join("file");
        for round in 0..20 {
            fs::write(&path, [round; 100]).expect("written");
            let source = open(&path, Arc::default()).expect("a file");
            let now = change_clock();
            assert!(source.fingerprint().is_strong(), "{}", source.fingerprint());
            let changed = fs::metadata(&path).expect("there");
            assert!(is_settled(&changed, now), "in the same tick");
        }
    }

    // Promises: version-file
    #[test]
    fn a_file_on_another_file_system_is_doubtful() {
        let source = open(Path::new("/proc/version"), Arc::default()).expect("a file");
        assert_eq!(source.fingerprint().doubt(), Some(Doubt::FileSystem));
    }

    // Promises: version-file
    #[test]
    fn change_times_of_tmpfs_are_trusted_and_of_proc_are_not() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "").unwrap();
        for (path, expected) in [(path.as_path(), true), ("/proc/version".as_ref(), false)] {
            let file = StdFile::open(path).unwrap();
            let metadata = file.metadata().unwrap();
            assert_eq!(keeps_change_times(&file, &metadata), expected);
        }
    }

    // Promises: version-file
    #[test]
    fn a_change_is_settled_when_the_clock_has_ticked() {
        let file = tempfile::tempfile().unwrap();
        let metadata = file.metadata().unwrap();
        let at = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
        let (seconds, nanoseconds) = (metadata.ctime(), metadata.ctime_nsec());
        assert!(!is_settled(&metadata, at(seconds - 1, 999_999_999)));
        assert!(!is_settled(&metadata, at(seconds, nanoseconds)));
        assert!(is_settled(&metadata, at(seconds + 1, 0)));
        let is_next = is_settled(&metadata, at(seconds, nanoseconds + 1));
        assert_eq!(
            is_next,
            nanoseconds != 0,
            "whole seconds tick once a second"
        );
    }
}
