//! Reads and writes one index file.

use std::fs::{File, OpenOptions};
use std::io::BufWriter;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{io, thread};

use bytes::Bytes;
use rustix::fs::{Advice, MemfdFlags, OFlags, fadvise, memfd_create};

use super::error::{Error, store_error};
use crate::base::publish;
use crate::base::sync::Mutex;
use crate::base::thread::{processors, scoped_thread};
use crate::index::format::framed::{PackedIndex, Packing};
use crate::index::format::{Error as Cause, framed};
use crate::index::{Index, MemoryLimit};

/// Bytes of an index file that the kernel is asked to read before they are needed.
const READ_AHEAD_BYTES: u64 = 16 << 20;

/// Bytes of an index that a thread loads at once.
const LOAD_BYTES: usize = 512 << 10;

/// Most threads that load an index.
const MAX_THREADS: usize = 16;

/// The rows of a saved index that are loaded before it is used. Damage of any is found before that.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum RowsToLoad {
    /// All.
    #[default]
    All,
    /// Names and types of the entries. Others are verified, and loaded when they are used.
    Names,
}

/// Reads the index file at `path`. The caller checks the origin.
///
/// # Errors
/// When it cannot be read, or is not a complete and undamaged index of this version.
pub fn read(path: &Path, limit: &MemoryLimit) -> Result<Index, Error> {
    let loaded = open(path).and_then(|file| load(file, limit, RowsToLoad::All));
    let path = path.to_owned();
    loaded.map_err(|cause| Error { path, cause })
}

/// The framed form of `index` in a file without a name, in memory.
///
/// # Errors
/// When it cannot be written, or a row of `index` cannot be loaded.
pub fn write_unnamed(index: &Index) -> io::Result<File> {
    let file = File::from(memfd_create("tarfs-index", MemfdFlags::CLOEXEC)?);
    let out = BufWriter::with_capacity(BUFFER_BYTES, &file);
    framed::write(index, &index.origin.locator, Packing::Small, out)?;
    Ok(file)
}

/// Writes `index` in its framed form to `path` atomically, over an existing file, into an existing directory.
/// Its mode follows the umask, because the file is for the machines that may read the archive.
///
/// # Errors
/// When it cannot be written. An existing file is unchanged then.
pub fn write(path: &Path, index: &Index) -> Result<(), Error> {
    let written = publish::publish(path, |temporary| {
        let file = BufWriter::with_capacity(BUFFER_BYTES, File::create_new(temporary)?);
        framed::write(index, &index.origin.locator, Packing::Small, file)
    });
    written.map_err(|error| store_error(path, error))
}

/// Opens a regular file; does not block on a FIFO.
pub(super) fn open(path: &Path) -> Result<File, Cause> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(Cause::NotAFile);
    }
    Ok(file)
}

pub(super) const BUFFER_BYTES: usize = 64 << 10;

/// An index file on this machine.
#[derive(Debug)]
struct LocalFile(File);

impl PackedIndex for LocalFile {
    fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        let len = usize::try_from(range.end.saturating_sub(range.start));
        let mut bytes = vec![0; len.map_err(io::Error::other)?];
        self.0.read_exact_at(&mut bytes, range.start)?;
        Ok(bytes.into())
    }

    /// Nothing more than [`MissingRow`](super::storage::MissingRow) says.
    fn report_failure(&self, _: &io::Error) {}

    fn min_request_bytes(&self) -> u64 {
        0
    }
}

pub(super) fn open_file(file: File, limit: &MemoryLimit) -> Result<Index, Cause> {
    let len = file.metadata()?.len();
    framed::open_saved(Box::new(LocalFile(file)), len, limit).map_err(find_damage)
}

pub(super) fn load(file: File, limit: &MemoryLimit, rows: RowsToLoad) -> Result<Index, Cause> {
    // Only advice. The kernel reads on while frames are unpacked.
    fadvise(
        &file,
        0,
        NonZeroU64::new(READ_AHEAD_BYTES),
        Advice::WillNeed,
    )
    .ok();
    let index = open_file(file, limit)?;
    let ranges = index.bytes_to_load(rows == RowsToLoad::Names);
    let parts: Vec<_> = ranges
        .into_iter()
        .flat_map(|range| {
            let starts = range.clone().step_by(LOAD_BYTES);
            starts.map(move |start| start..range.end.min(start + LOAD_BYTES))
        })
        .collect();
    let loaded = load_parts(&index, &parts).and_then(|()| index.verify_packed_rows());
    loaded.map_err(|error| find_damage(error.into()))?;
    Ok(index)
}

/// Loads `parts` of the index file of `index`, on all processors.
fn load_parts(index: &Index, parts: &[Range<usize>]) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let result = Mutex::new(Ok(()));
    let load = || {
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = index.load_bytes(part) {
                *result.lock() = Err(error);
                break;
            }
        }
    };
    let threads = processors().min(parts.len()).min(MAX_THREADS);
    thread::scope(|scope| {
        for _ in 1..threads {
            // This thread loads what others do not.
            scoped_thread(scope, "tarfs-load", load).ok();
        }
        load();
    });
    result.into_inner()
}

/// Tells damage from failed reading: a file that is shorter than it says, or does not decode.
fn find_damage(error: Cause) -> Cause {
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    match error {
        Cause::Io(error) if matches!(error.kind(), InvalidData | UnexpectedEof) => Cause::Checksum,
        other => other,
    }
}
