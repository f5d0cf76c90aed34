//! Journal of a resumable run, in a file beside the tree. `--resume` continues from it.
//!
//! The run appends items for complete entries, and for directories and links to be finished at the end. A
//! checkpoint says that all members before a certain member are done, and where that member is in the source.
//! Each item has a checksum over itself and all items before it, so a reader stops at a torn item.
//! Items after the last checkpoint are dropped, because their members are made again.
//!
//! A journal is valid for the current boot, the same version of the source, the same directory, umask and
//! options. It is used only if every entry is still as recorded.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, Stat, fstat};
use rustix::io::Errno;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::archive::ResumePoint;
use crate::base::archive_path::ArchivePath;
use crate::base::lock::LockHolder;
use crate::base::sync::Mutex;
use crate::materialize::error::{Error, errno_of};
use crate::materialize::sidecar::{self, StatSnapshot};
use crate::materialize::write::{
    DeferredLink, Directory, FieldDecoder, FieldEncoder, FileObserver, Identity, Job,
    PendingDirectory, name_of, parent_of, umask,
};
use crate::tar::limits::{MAX_NAME_BYTES, MAX_XATTR_BYTES, MAX_XATTRS};

/// Suffix of a journal's name. The journal of `tree` is `.tree.tarfs-journal`.
const JOURNAL_SUFFIX: &[u8] = b".tarfs-journal";
const MAGIC: &[u8] = b"TARFSRUN 2";
/// Bytes at the start of a journal that hold the magic.
const MAX_MAGIC_OFFSET: usize = 64;
/// Maximum size of an item. A larger one invalidates the journal.
const MAX_ITEM_BYTES: usize = 8 << 20;
/// Bytes of the numbers in a directory's item, with those of the lengths of its two paths.
const DIRECTORY_NUMBERS_BYTES: u64 = 14 * 8;
/// A directory's item has its path twice, and two lengths for each of its extended attributes.
const _: () = assert!(
    DIRECTORY_NUMBERS_BYTES + 2 * MAX_NAME_BYTES + MAX_XATTR_BYTES + 2 * 8 * MAX_XATTRS
        <= MAX_ITEM_BYTES as u64
);
/// Maximum size of a journal. A longer one is invalidated.
const MAX_JOURNAL_BYTES: u64 = 4 << 30;
const MAX_CACHED_PATHS: usize = 4096;
const MAX_BUFFERED_BYTES: usize = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ItemKind {
    RunKey = 1,
    Entry = 2,
    Directory = 3,
    Link = 4,
    Checkpoint = 5,
    Touch = 6,
    Replace = 7,
    Make = 8,
}

impl ItemKind {
    const ALL: [Self; 8] = [
        Self::RunKey,
        Self::Entry,
        Self::Directory,
        Self::Link,
        Self::Checkpoint,
        Self::Touch,
        Self::Replace,
        Self::Make,
    ];
}

#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    /// Without symbolic links.
    top: PathBuf,
    /// Paths without links.
    directory_paths: Mutex<HashMap<Identity, ArchivePath>>,
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

#[derive(Debug)]
pub(crate) struct RecoveredState {
    pub(crate) resume_point: ResumePoint,
    pub(crate) progress: CheckpointInfo,
    /// In the order of the journal.
    pub(crate) tree_items: Vec<TreeItem>,
    pub(crate) directories: Vec<PendingDirectory>,
    pub(crate) links: Vec<DeferredLink>,
    /// Directories that only unfinished members may have made.
    pub(crate) new_directories: HashSet<ArchivePath>,
}

/// Item about the tree. Its path has no links.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum TreeItem {
    /// An entry was complete.
    Complete(ArchivePath, StatSnapshot),
    /// The inode's link count was about to change, which changes its ctime.
    Touched(u64),
    /// The entry was about to be replaced, or is a directory, which is checked when it gets its attributes.
    Unchecked(ArchivePath),
}

/// Progress recorded in a checkpoint.
#[derive(Debug)]
pub(crate) struct CheckpointInfo {
    /// Number of members before the resume point.
    pub(crate) before: u64,
    /// Minimum number of members that are done.
    pub(crate) members: u64,
    /// Entries made by the finished members.
    pub(crate) entries: u64,
    pub(crate) errors: u64,
    /// For each requested path, whether it was found.
    pub(crate) found: Vec<u8>,
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
            top: directory,
            directory_paths: Mutex::default(),
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

    /// Path of the last component of `path` in `directory` without links, which may later lead elsewhere.
    pub(crate) fn resolved_path(&self, directory: &Directory, path: &ArchivePath) -> ArchivePath {
        if path.is_root() {
            return path.clone();
        }
        let mut directory_paths = self.directory_paths.lock();
        if directory_paths.len() >= MAX_CACHED_PATHS {
            directory_paths.clear();
        }
        let place = directory_paths
            .entry(directory.identity())
            .or_insert_with(|| {
                let fd = format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd());
                let place = std::fs::read_link(fd).ok();
                let below = place
                    .as_deref()
                    .and_then(|place| place.strip_prefix(&self.top).ok());
                below.map_or_else(
                    || ArchivePath::sanitize(parent_of(path)).path,
                    |below| ArchivePath::sanitize(below.as_os_str().as_bytes()).path,
                )
            });
        let mut place = place.clone();
        place.push(name_of(path));
        place
    }

    /// Records that member `number` has completed the entry at `path`, which has no links.
    pub(super) fn record_entry(&self, number: u64, path: &ArchivePath, stat: &Stat) {
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
    pub(super) fn record_directory(
        &self,
        number: u64,
        parent: Option<&Directory>,
        pending: &PendingDirectory,
    ) {
        let path = parent.map(|parent| self.resolved_path(parent, &pending.path));
        let mut fields = FieldEncoder::default();
        fields.number(number);
        fields.bytes(path.as_ref().unwrap_or(&pending.path).as_bytes());
        pending.encode(&mut fields);
        self.add(ItemKind::Directory, &fields);
    }

    /// Records that member `number` is a link to be made at the end.
    pub(super) fn record_link(&self, number: u64, link: &DeferredLink) {
        let mut fields = FieldEncoder::default();
        fields.number(number);
        fields.bytes(link.path.as_bytes());
        fields.bytes(link.target.as_bytes());
        self.add(ItemKind::Link, &fields);
    }

    /// Records at once that the link count and so the ctime of `inode` are about to change.
    pub(super) fn record_touch(&self, inode: u64) {
        let mut fields = FieldEncoder::default();
        fields.number(inode);
        self.add_and_flush(ItemKind::Touch, &fields);
    }

    /// Records at once that the entry of `job` is about to be replaced.
    pub(super) fn record_replace(&self, job: &Job) {
        let mut fields = FieldEncoder::default();
        fields.bytes(self.resolved_path(&job.directory, &job.path).as_bytes());
        self.add_and_flush(ItemKind::Replace, &fields);
    }

    /// Records at once that the directory of `job` is about to be made.
    pub(super) fn record_make(&self, job: &Job) {
        let mut fields = FieldEncoder::default();
        fields.number(job.number);
        fields.bytes(self.resolved_path(&job.directory, &job.path).as_bytes());
        self.add_and_flush(ItemKind::Make, &fields);
    }

    fn add_and_flush(&self, kind: ItemKind, fields: &FieldEncoder) {
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

/// Reads items while their checksums are right.
struct ItemReader<'a> {
    input: BufReader<&'a File>,
    chain: u64,
    end: u64,
}

impl ItemReader<'_> {
    fn next_item(&mut self) -> io::Result<Option<(ItemKind, Vec<u8>)>> {
        let mut head = [0; 5];
        if !self.read_exact_or_eof(&mut head)? {
            return Ok(None);
        }
        let [first, second, third, fourth, kind] = head;
        let len = u32::from_le_bytes([first, second, third, fourth]) as usize;
        let kind = ItemKind::ALL.into_iter().find(|all| *all as u8 == kind);
        let Some(kind) = kind.filter(|_| len <= MAX_ITEM_BYTES) else {
            return Ok(None);
        };
        // The item's length may be wrong, so the buffer grows only with the data.
        let mut item = head.to_vec();
        (&mut self.input).take(len as u64).read_to_end(&mut item)?;
        let mut sum = [0; 8];
        if item.len() != head.len() + len || !self.read_exact_or_eof(&mut sum)? {
            return Ok(None);
        }
        let chain = xxh3_64_with_seed(&item, self.chain);
        if chain != u64::from_le_bytes(sum) {
            return Ok(None);
        }
        self.chain = chain;
        self.end += (item.len() + sum.len()) as u64;
        Ok(Some((kind, item.split_off(head.len()))))
    }

    fn read_exact_or_eof(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        match self.input.read_exact(buffer) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Items read so far, with the numbers of their members.
#[derive(Debug, Default)]
struct JournalLoader {
    /// Each item belongs to the member of that number, or to any member.
    tree_items: Vec<(Option<u64>, TreeItem)>,
    directories: Vec<(u64, PendingDirectory)>,
    links: Vec<(u64, DeferredLink)>,
    /// Places where something was replaced, with the number of links before. Those had no place there any more.
    replaced: HashMap<ArchivePath, usize>,
    new_directories: Vec<(u64, ArchivePath)>,
    checkpoint: Option<(ResumePoint, CheckpointInfo)>,
}

impl JournalLoader {
    /// `None` for an invalid item, of which nothing is added.
    fn add_item(&mut self, kind: ItemKind, body: &[u8]) -> Option<()> {
        let mut fields = FieldDecoder(body);
        match kind {
            ItemKind::RunKey => return None,
            ItemKind::Entry => {
                let number = fields.number()?;
                let snapshot = StatSnapshot {
                    inode: fields.number()?,
                    size: fields.number()?.cast_signed(),
                    mtime: (fields.number()?.cast_signed(), fields.number()?),
                    ctime: (fields.number()?.cast_signed(), fields.number()?),
                };
                let whole = TreeItem::Complete(fields.path()?, snapshot);
                fields.end()?;
                self.tree_items.push((Some(number), whole));
            }
            ItemKind::Directory => {
                let number = fields.number()?;
                let unchecked = TreeItem::Unchecked(fields.path()?);
                let pending = PendingDirectory::decode(&mut fields)?;
                fields.end()?;
                self.tree_items.push((Some(number), unchecked));
                self.directories.push((number, pending));
            }
            ItemKind::Link => {
                let number = fields.number()?;
                let (path, target) = (fields.path()?, fields.path()?);
                fields.end()?;
                self.links.push((number, DeferredLink { path, target }));
            }
            ItemKind::Checkpoint => {
                let checkpoint = parse_checkpoint(&mut fields)?;
                fields.end()?;
                self.checkpoint = Some(checkpoint);
            }
            // These items invalidate others, so they count after the last checkpoint, too.
            ItemKind::Touch => {
                let touched = TreeItem::Touched(fields.number()?);
                fields.end()?;
                self.tree_items.push((None, touched));
            }
            ItemKind::Replace => {
                let path = fields.path()?;
                fields.end()?;
                self.replaced.insert(path.clone(), self.links.len());
                self.tree_items.push((None, TreeItem::Unchecked(path)));
            }
            ItemKind::Make => {
                let made = (fields.number()?, fields.path()?);
                fields.end()?;
                self.new_directories.push(made);
            }
        }
        Some(())
    }

    fn finish(mut self) -> Option<RecoveredState> {
        let mut count = 0;
        self.links.retain(|(_, link)| {
            count += 1;
            let replaced = self.replaced.get(&link.path);
            replaced.is_none_or(|&before| count > before)
        });
        let (resume_point, progress) = self.checkpoint?;
        let done = progress.members;
        let items = self.tree_items.into_iter();
        let items = items.filter(|(number, _)| number.is_none_or(|number| number < done));
        let made = self.new_directories.into_iter();
        let made = made.filter(|(number, _)| *number >= done);
        Some(RecoveredState {
            resume_point,
            progress,
            tree_items: items.map(|(_, item)| item).collect(),
            directories: items_before(self.directories, done),
            links: items_before(self.links, done),
            new_directories: made.map(|(_, path)| path).collect(),
        })
    }
}

fn items_before<T>(items: Vec<(u64, T)>, end: u64) -> Vec<T> {
    let before = items.into_iter().filter(|(number, _)| *number < end);
    before.map(|(_, item)| item).collect()
}

fn parse_checkpoint(fields: &mut FieldDecoder<'_>) -> Option<(ResumePoint, CheckpointInfo)> {
    let (before, members) = (fields.number()?, fields.number()?);
    let progress = CheckpointInfo {
        before,
        members: members.max(before),
        entries: fields.number()?,
        errors: fields.number()?,
        found: fields.bytes()?.to_vec(),
    };
    Some((ResumePoint::decode(fields.bytes()?)?, progress))
}

impl FileObserver for Journal {
    fn file_complete(&self, job: &Job, fd: &OwnedFd) {
        if let Ok(stat) = fstat(fd) {
            self.record_entry(
                job.number,
                &self.resolved_path(&job.directory, &job.path),
                &stat,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::materialize::error::Problems;
    use crate::materialize::options::Options;
    use crate::materialize::test_support::member;
    use crate::materialize::write::Context;
    use crate::tar::{Member, MemberKind, Timestamp};

    fn resume_point(member: u64) -> ResumePoint {
        let mut bytes = vec![0; 80];
        bytes[8..16].copy_from_slice(&member.to_le_bytes());
        ResumePoint {
            globals: Arc::new(vec![b"12 uname=me\n".to_vec()]),
            ..ResumePoint::decode(&bytes).expect("a plain one at the front")
        }
    }

    fn path(name: &str) -> ArchivePath {
        ArchivePath::sanitize(name.as_bytes()).path
    }

    fn progress(members: u64) -> CheckpointInfo {
        CheckpointInfo {
            before: members,
            members,
            entries: 5,
            errors: 3,
            found: vec![1, 0],
        }
    }

    /// A directory with an entry of member 0, a link of member 1, and checkpoints after both.
    fn written() -> (tempfile::TempDir, PathBuf) {
        let base = tempfile::tempdir().expect("a directory");
        let out = base.path().join("out");
        std::fs::create_dir(&out).expect("made");
        let (journal, recovered) = Journal::open(&out, "owner").expect("new");
        assert!(recovered.is_none());
        let stat = rustix::fs::stat(&out).expect("there");
        journal.record_entry(0, &path("a"), &stat);
        assert!(journal.checkpoint(&resume_point(1024), &progress(1)));
        let link = DeferredLink {
            path: path("b"),
            target: path("../a"),
        };
        journal.record_link(1, &link);
        // The item of a member that is made again.
        journal.record_entry(7, &path("z"), &stat);
        assert!(journal.checkpoint(&resume_point(4096), &progress(2)));
        journal.record_touch(99);
        (base, out)
    }

    /// A directory whose path and attributes are as large as an archive may have them.
    fn largest_directory() -> PendingDirectory {
        let size = |limit: u64| usize::try_from(limit).expect("small");
        let names = (0..MAX_XATTRS).map(|number| format!("user.{number}").into_bytes());
        let mut xattrs: Vec<_> = names.map(|name| (name, Vec::new())).collect();
        let name_bytes: usize = xattrs.iter().map(|(name, _)| name.len()).sum();
        xattrs[5].1 = vec![b'x'; size(MAX_XATTR_BYTES) - name_bytes];
        let member = Member {
            mode: 0o6751,
            uid: u32::MAX - 1,
            gid: 77,
            user: b"root".to_vec(),
            group: b"nosuch".to_vec(),
            mtime: Timestamp {
                seconds: -5,
                nanoseconds: 999_999_999,
            },
            xattrs,
            ..member(b"d", MemberKind::Directory)
        };
        let options = Options {
            same_owner: true,
            same_permissions: true,
            ..Options::for_this_user()
        };
        let context = Context::new(&options, Problems::new(None), Arc::default());
        let path = path(&"d".repeat(size(MAX_NAME_BYTES)));
        let identity = Identity {
            device: u64::MAX,
            inode: 1 << 40,
        };
        PendingDirectory::new(path, identity, true, member, &context.policy)
    }

    fn reopened(out: &Path) -> Option<RecoveredState> {
        Journal::open(out, "owner").expect("a journal").1
    }

    #[test]
    fn journal_recovers_items_before_the_last_checkpoint() {
        let (_base, out) = written();
        for _ in 0..2 {
            let recovered = reopened(&out).expect("a past");
            let progress = &recovered.progress;
            assert_eq!((progress.before, progress.members), (2, 2));
            assert_eq!((progress.entries, progress.errors), (5, 3));
            assert_eq!(recovered.resume_point, resume_point(4096));
            assert_eq!(progress.found, [1, 0]);
            // Touch items after the last checkpoint survive every reopening.
            let [TreeItem::Complete(whole, _), TreeItem::Touched(99)] =
                recovered.tree_items.as_slice()
            else {
                panic!("{:?}", recovered.tree_items);
            };
            assert_eq!(*whole, path("a"));
            assert_eq!(recovered.links.len(), 1);
        }
    }

    #[test]
    fn largest_directory_is_recovered_with_all_attributes() {
        let base = tempfile::tempdir().expect("a directory");
        let out = base.path().join("out");
        std::fs::create_dir(&out).expect("made");
        let (journal, _) = Journal::open(&out, "owner").expect("new");
        let pending = largest_directory();
        journal.record_directory(0, None, &pending);
        assert!(journal.checkpoint(&resume_point(1024), &progress(1)));
        drop(journal);
        let recovered = reopened(&out).expect("a past");
        assert!(recovered.directories == [pending], "an attribute is lost");
    }

    #[test]
    fn journal_item_with_bytes_behind_its_fields_is_invalid() {
        let base = tempfile::tempdir().expect("a directory");
        let out = base.path().join("out");
        std::fs::create_dir(&out).expect("made");
        let (journal, _) = Journal::open(&out, "owner").expect("new");
        let stat = rustix::fs::stat(&out).expect("there");
        let mut numbered_path = FieldEncoder::default();
        numbered_path.number(3_u64);
        numbered_path.bytes(b"a");
        journal.record_entry(0, &path("a"), &stat);
        journal.record_directory(0, None, &largest_directory());
        let (path, target) = (path("b"), path("a"));
        journal.record_link(0, &DeferredLink { path, target });
        assert!(journal.checkpoint(&resume_point(1024), &progress(1)));
        journal.record_touch(99);
        let path_only = FieldEncoder(numbered_path.0[8..].to_vec());
        journal.add_and_flush(ItemKind::Replace, &path_only);
        journal.add_and_flush(ItemKind::Make, &numbered_path);

        let file = File::open(&journal.path).expect("there");
        let mut items = ItemReader {
            input: BufReader::new(&file),
            chain: 0,
            end: 0,
        };
        let mut kinds = Vec::new();
        while let Some((kind, mut body)) = items.next_item().expect("readable") {
            kinds.push(kind);
            let is_valid = |body: &[u8]| JournalLoader::default().add_item(kind, body).is_some();
            assert_eq!(is_valid(&body), kind != ItemKind::RunKey, "{kind:?}");
            body.push(0);
            assert!(!is_valid(&body), "{kind:?}");
        }
        assert_eq!(kinds, ItemKind::ALL);
    }

    #[test]
    fn journal_of_another_run_is_discarded() {
        let (_base, out) = written();
        assert!(Journal::open(&out, "other").expect("ours").1.is_none());
        assert!(reopened(&out).is_none());
    }

    #[test]
    fn second_run_cannot_lock_the_journal() {
        let (_base, out) = written();
        let _first = Journal::open(&out, "owner").expect("ours");
        let second = Journal::open(&out, "owner");
        assert!(matches!(second, Err(Error::InUse(..))));
    }

    #[test]
    fn invalidated_journal_is_never_recovered() {
        let (_base, out) = written();
        let (journal, recovered) = Journal::open(&out, "owner").expect("ours");
        assert!(recovered.is_some());
        journal.invalidate();
        assert!(!journal.checkpoint(&resume_point(8192), &progress(3)));
        drop(journal);
        assert!(reopened(&out).is_none());
    }

    #[test]
    fn damaged_journal_keeps_checkpoints_before_the_damage() {
        let (base, out) = written();
        let file = base.path().join(".out.tarfs-journal");
        let whole = std::fs::read(&file).expect("there");
        let ends: Vec<usize> = {
            let file = File::open(&file).expect("there");
            let mut items = ItemReader {
                input: BufReader::new(&file),
                chain: 0,
                end: 0,
            };
            let ends = std::iter::from_fn(|| {
                items.next_item().expect("readable")?;
                usize::try_from(items.end).ok()
            });
            ends.collect()
        };
        // The first checkpoint follows the run key and an entry, the second one a link and an entry.
        let (first, second) = (ends[2], ends[5]);
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x40;
            for bytes in [damaged, whole[..at].to_vec()] {
                std::fs::write(&file, bytes).expect("written");
                let Ok((_, recovered)) = Journal::open(&out, "owner") else {
                    // Without its magic it may be any file of the user.
                    assert!(at < MAX_MAGIC_OFFSET, "{at}");
                    continue;
                };
                let members = recovered.map(|recovered| recovered.progress.members);
                let expected = if at >= second {
                    Some(2)
                } else {
                    (at >= first).then_some(1)
                };
                assert_eq!(members, expected, "{at}");
            }
        }
    }

    proptest! {
        /// A right checksum does not prove that the fields of an item are valid.
        #[test]
        fn any_bytes_are_a_journal_item_or_nothing(
            kind in proptest::sample::select(ItemKind::ALL.to_vec()),
            numbers in proptest::collection::vec(prop_oneof![0_u64..20, any::<u64>()], 0..30),
            text in proptest::collection::vec(any::<u8>(), 0..20),
        ) {
            let mut body: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
            body.extend(text);
            let mut loader = JournalLoader::default();
            let nothing = format!("{loader:?}");
            let is_item = loader.add_item(kind, &body).is_some();
            prop_assert_eq!(format!("{loader:?}") == nothing, !is_item);
        }
    }
}
