//! The file of a journal, to which a run appends items.

use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, Stat, fstat};
use rustix::io::Errno;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::item::{ItemKind, ItemReader, MAX_ITEM_BYTES};
use super::load::{CheckpointInfo, JournalLoader, RecoveredState};
use crate::archive::ResumePoint;
use crate::base::archive_path::ArchivePath;
use crate::base::lock::LockHolder;
use crate::base::sync::Mutex;
use crate::materialize::error::{Error, errno_of};
use crate::materialize::sidecar::{self, StatSnapshot};
use crate::materialize::write::{
    DeferredLink, Directory, FieldEncoder, FileObserver, Job, PendingDirectory, umask,
};
use crate::tar::limits::{MAX_NAME_BYTES, MAX_XATTR_BYTES, MAX_XATTRS};

/// Suffix of a journal's name. The journal of `tree` is `.tree.tarfs-journal`.
const JOURNAL_SUFFIX: &[u8] = b".tarfs-journal";
const MAGIC: &[u8] = b"TARFSRUN 2";
/// Bytes at the start of a journal that hold the magic.
pub(super) const MAX_MAGIC_OFFSET: usize = 64;
/// Bytes of the numbers in a directory's item, with those of the lengths of its two paths.
const DIRECTORY_NUMBERS_BYTES: u64 = 14 * 8;
/// A directory's item has its path twice, and two lengths for each of its extended attributes.
const _: () = assert!(
    DIRECTORY_NUMBERS_BYTES + 2 * MAX_NAME_BYTES + MAX_XATTR_BYTES + 2 * 8 * MAX_XATTRS
        <= MAX_ITEM_BYTES as u64
);
/// Maximum size of a journal. A longer one is invalidated.
const MAX_JOURNAL_BYTES: u64 = 4 << 30;
const MAX_BUFFERED_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    pub(super) path: PathBuf,
    run_key: Vec<u8>,
    state: Mutex<WriteState>,
}

#[derive(Debug, Default)]
struct WriteState {
    buffer: Vec<u8>,
    /// File offset of the buffer.
    end: u64,
    chain: u64,
    /// Then no more items are written.
    is_invalid: bool,
}

/// Whether a file that exists is empty, or begins as a journal of any version.
fn is_journal(file: &File) -> io::Result<bool> {
    let mut head = [0; MAX_MAGIC_OFFSET];
    let len = file.read_at(&mut head, 0)?;
    let name = MAGIC.split(|&byte| byte == b' ').next().unwrap_or(MAGIC);
    Ok(len == 0 || head.windows(name.len()).any(|bytes| bytes == name))
}

impl Journal {
    /// Opens the journal of `directory`. Recovers its state if the run had the same `run_key`. Fails when it
    /// belongs to another user, or another run has locked it.
    pub(crate) fn open(
        directory: &Path,
        run_key: &str,
    ) -> Result<(Self, Option<RecoveredState>), Error> {
        let directory = std::fs::canonicalize(directory)
            .map_err(|error| Error::Destination(directory.to_owned(), errno_of(&error)))?;
        let path = sidecar::path(&directory, JOURNAL_SUFFIX)
            .ok_or_else(|| Error::Journal(directory.clone(), Errno::INVAL))?;
        let journal_error = |errno| Error::Journal(path.clone(), errno);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let top =
            rustix::fs::openat(CWD, &directory, flags, Mode::empty()).map_err(journal_error)?;
        let stat = fstat(&top).map_err(journal_error)?;
        let file = sidecar::open(&path, true).map_err(|errno| match errno {
            Errno::WOULDBLOCK => Error::InUse(path.clone(), LockHolder::default()),
            errno => journal_error(errno),
        })?;
        if !is_journal(&file).map_err(|error| journal_error(errno_of(&error)))? {
            return Err(journal_error(Errno::EXIST));
        }
        let mut text = FieldEncoder::default();
        text.bytes(MAGIC);
        text.bytes(run_key.as_bytes());
        text.number(stat.st_dev);
        text.number(stat.st_ino);
        text.bytes(&sidecar::boot_id());
        text.number(umask());
        let journal = Self {
            file,
            path: path.clone(),
            run_key: text.0,
            state: Mutex::default(),
        };
        let recovered = journal.load().unwrap_or_default();
        if recovered.is_none() {
            journal.restart()?;
        }
        Ok((journal, recovered))
    }

    pub(crate) fn restart(&self) -> Result<(), Error> {
        let mut state = self.state.lock();
        let restarted = self.file.set_len(0).and_then(|()| {
            *state = WriteState::default();
            state.add(ItemKind::RunKey, &self.run_key);
            self.flush(&mut state)
        });
        restarted.map_err(|error| Error::Journal(self.path.clone(), errno_of(&error)))
    }

    /// Records that member `number` has completed the entry at `path`, which has no links.
    pub(crate) fn record_entry(&self, number: u64, path: &ArchivePath, stat: &Stat) {
        let snapshot = StatSnapshot::of(stat);
        let mut fields = FieldEncoder::default();
        fields.number(number);
        fields.number(snapshot.inode);
        fields.number(snapshot.size.cast_unsigned());
        fields.number(snapshot.mtime.0.cast_unsigned());
        fields.number(snapshot.mtime.1);
        fields.number(snapshot.ctime.0.cast_unsigned());
        fields.number(snapshot.ctime.1);
        fields.bytes(path.as_bytes());
        self.add(ItemKind::Entry, &fields);
    }

    /// Records that `number` is a directory with deferred attributes. Without `parent`, its path has no links.
    pub(crate) fn record_directory(
        &self,
        number: u64,
        parent: Option<&Directory>,
        pending: &PendingDirectory,
    ) {
        let place = parent.map(|parent| parent.place_of(&pending.path));
        let mut fields = FieldEncoder::default();
        fields.number(number);
        fields.bytes(place.as_ref().unwrap_or(&pending.path).as_bytes());
        pending.encode(&mut fields);
        self.add(ItemKind::Directory, &fields);
    }

    /// Records that member `number` is a link to be made at the end.
    pub(crate) fn record_link(&self, number: u64, link: &DeferredLink) {
        let mut fields = FieldEncoder::default();
        fields.number(number);
        fields.bytes(link.path.as_bytes());
        fields.bytes(link.target.as_bytes());
        self.add(ItemKind::Link, &fields);
    }

    /// Records at once that the link count and so the ctime of `inode` are about to change.
    pub(crate) fn record_touch(&self, inode: u64) {
        let mut fields = FieldEncoder::default();
        fields.number(inode);
        self.add_and_flush(ItemKind::Touch, &fields);
    }

    /// Records at once that the entry of `job` is about to be replaced.
    pub(crate) fn record_replace(&self, job: &Job) {
        let mut fields = FieldEncoder::default();
        fields.bytes(job.directory.place_of(&job.path).as_bytes());
        self.add_and_flush(ItemKind::Replace, &fields);
    }

    /// Records at once that the directory of `job` is about to be made.
    pub(crate) fn record_make(&self, job: &Job) {
        let mut fields = FieldEncoder::default();
        fields.number(job.number);
        fields.bytes(job.directory.place_of(&job.path).as_bytes());
        self.add_and_flush(ItemKind::Make, &fields);
    }

    pub(super) fn add_and_flush(&self, kind: ItemKind, fields: &FieldEncoder) {
        let mut state = self.state.lock();
        state.add(kind, &fields.0);
        if self.flush(&mut state).is_err() {
            self.invalidate_locked(&mut state);
        }
    }

    fn add(&self, kind: ItemKind, fields: &FieldEncoder) {
        let mut state = self.state.lock();
        state.add(kind, &fields.0);
        let is_full = state.buffer.len() >= MAX_BUFFERED_BYTES;
        if fields.0.len() > MAX_ITEM_BYTES || is_full && self.flush(&mut state).is_err() {
            self.invalidate_locked(&mut state);
        }
    }

    /// Records that all members before the resume point are done. Returns whether that is in the file.
    pub(crate) fn checkpoint(&self, resume_point: &ResumePoint, progress: &CheckpointInfo) -> bool {
        let mut fields = FieldEncoder::default();
        fields.number(progress.before);
        fields.number(progress.members);
        fields.number(progress.entries);
        fields.number(progress.errors);
        fields.bytes(&progress.found);
        fields.bytes(&resume_point.encode());
        let mut state = self.state.lock();
        state.add(ItemKind::Checkpoint, &fields.0);
        self.flush(&mut state).is_ok() && !state.is_invalid
    }

    pub(crate) fn invalidate(&self) {
        self.invalidate_locked(&mut self.state.lock());
    }

    fn invalidate_locked(&self, state: &mut WriteState) {
        state.is_invalid = true;
        state.buffer = Vec::new();
        // Truncation works on a full disk, too. If it fails, we remove the journal.
        if self.file.set_len(0).is_err() {
            self.remove();
        }
    }

    pub(crate) fn remove(&self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(%error, "cannot remove the journal");
        }
    }

    fn flush(&self, state: &mut WriteState) -> io::Result<()> {
        if state.is_invalid {
            return Ok(());
        }
        if state.end.saturating_add(state.buffer.len() as u64) > MAX_JOURNAL_BYTES {
            self.invalidate_locked(state);
            return Ok(());
        }
        // A partly written item has no checksum. It stays in the buffer for a retry.
        self.file.write_all_at(&state.buffer, state.end)?;
        state.end += state.buffer.len() as u64;
        state.buffer.clear();
        Ok(())
    }

    /// Recovers the state up to the last checkpoint of this run, if any, and continues the file there.
    fn load(&self) -> io::Result<Option<RecoveredState>> {
        if self.file.metadata()?.len() > MAX_JOURNAL_BYTES {
            return Ok(None);
        }
        let mut items = ItemReader {
            input: BufReader::new(&self.file),
            chain: 0,
            end: 0,
        };
        if items.next_item()? != Some((ItemKind::RunKey, self.run_key.clone())) {
            return Ok(None);
        }
        let mut loader = JournalLoader::default();
        let mut last = None;
        // Items after the last checkpoint that invalidate earlier ones, or announce new directories.
        let mut tail = Vec::new();
        while let Some((kind, body)) = items.next_item()? {
            if loader.add_item(kind, &body).is_none() {
                break;
            }
            match kind {
                ItemKind::Checkpoint => {
                    last = Some((items.end, items.chain));
                    tail.clear();
                }
                ItemKind::Touch | ItemKind::Replace | ItemKind::Make => {
                    tail.push((kind, body));
                }
                ItemKind::RunKey | ItemKind::Entry | ItemKind::Directory | ItemKind::Link => {}
            }
        }
        let Some((end, chain)) = last else {
            return Ok(None);
        };
        let mut state = self.state.lock();
        state.end = end;
        state.chain = chain;
        for (kind, body) in tail {
            state.add(kind, &body);
        }
        self.flush(&mut state)?;
        self.file.set_len(state.end)?;
        Ok(loader.finish())
    }
}

impl WriteState {
    fn add(&mut self, kind: ItemKind, body: &[u8]) {
        if self.is_invalid || body.len() > MAX_ITEM_BYTES {
            return;
        }
        let mut item = Vec::with_capacity(body.len() + 5);
        let len = u32::try_from(body.len()).unwrap_or(u32::MAX);
        item.extend_from_slice(&len.to_le_bytes());
        item.push(kind as u8);
        item.extend_from_slice(body);
        self.chain = xxh3_64_with_seed(&item, self.chain);
        self.buffer.extend_from_slice(&item);
        self.buffer.extend_from_slice(&self.chain.to_le_bytes());
    }
}

impl FileObserver for Journal {
    fn file_complete(&self, job: &Job, fd: &OwnedFd) {
        if let Ok(stat) = fstat(fd) {
            self.record_entry(job.number, &job.directory.place_of(&job.path), &stat);
        }
    }
}
