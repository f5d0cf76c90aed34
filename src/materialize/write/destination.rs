//! Confined destination: opens directories one component at a time, without following links.
//!
//! The kernel never follows a link for us. A [`Directory`] is an open descriptor, so an entry made in it
//! stays in that directory even if the names above change. Consecutive members of one directory need no new
//! lookup.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Resource;

use super::pool::WriterPool;
use crate::base::archive_path::ArchivePath;
use crate::base::posix_acl;
use crate::base::resolve::{self, ResolveError, Step, Tree};
use crate::materialize::error::{StepError, WithAction};

/// Maximum number of cached open directories, in each of the two generations.
///
/// Archives are in depth-first order, so the most recent directories matter most. The queues need the
/// remaining descriptors.
const MAX_CACHED_DIRECTORIES: usize = 128;
/// Longer paths are not cached; each member walks them again.
const MAX_CACHED_PATH_BYTES: usize = 4096;

/// An open directory; clones share the descriptor.
#[derive(Clone, Debug)]
pub(crate) struct Directory(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    fd: OwnedFd,
    identity: Identity,
    /// New entries inherit an ACL, which changes their modes.
    inherits_acl: bool,
    /// The path without links, if the lookup followed links.
    resolved_path: OnceLock<ArchivePath>,
    /// Observed owner of new files, see [`Directory::ownership`].
    ownership: AtomicU8,
    /// Number of open directories of this root.
    open: Arc<AtomicUsize>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Identity of a directory, independent of the path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    pub(crate) fn of(stat: &rustix::fs::Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }

    /// The numbers for the journal.
    pub(crate) fn numbers(self) -> [u64; 2] {
        [self.device, self.inode]
    }

    /// The identity from the numbers in the journal.
    pub(crate) fn from_numbers([device, inode]: [u64; 2]) -> Self {
        Self { device, inode }
    }
}

/// Owner of the entries that we make in a directory.
///
/// It can differ from the process owner: in set-group-id directories, and on `grpid` and idmapped mounts.
/// So we look at the first file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ownership {
    /// No file was made yet.
    Unknown,
    /// The process' user and group.
    ProcessOwner,
    /// Another user or group.
    OtherOwner,
}

impl Directory {
    pub(crate) fn identity(&self) -> Identity {
        self.0.identity
    }

    pub(crate) fn inherits_acl(&self) -> bool {
        self.0.inherits_acl
    }

    /// Path of `name` without links, if the lookup of this directory followed links.
    ///
    /// Those links may change later. `None` means that the requested path has no links.
    pub(crate) fn resolved_path_of(&self, name: &[u8]) -> Option<ArchivePath> {
        let mut place = self.0.resolved_path.get()?.clone();
        place.push(name);
        Some(place)
    }

    pub(crate) fn ownership(&self) -> Ownership {
        match self.0.ownership.load(Ordering::Relaxed) {
            1 => Ownership::ProcessOwner,
            2 => Ownership::OtherOwner,
            _ => Ownership::Unknown,
        }
    }

    pub(crate) fn set_ownership(&self, ownership: Ownership) {
        let number = match ownership {
            Ownership::Unknown => 0,
            Ownership::ProcessOwner => 1,
            Ownership::OtherOwner => 2,
        };
        self.0.ownership.store(number, Ordering::Relaxed);
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

/// A directory that was made because a member's path needs it.
#[derive(Debug)]
pub(crate) struct Implied {
    /// The path, without links.
    pub(crate) path: ArchivePath,
    pub(crate) identity: Identity,
}

/// Maximum bytes of recorded implied paths. A small member can imply very many directories.
const MAX_IMPLIED_BYTES: usize = 64 << 20;

/// The destination directory, with a cache of open directories below it.
#[derive(Debug)]
pub(crate) struct DestinationRoot {
    top: Directory,
    cache: DirectoryCache,
    /// The most recently resolved directory.
    last: Option<(Vec<u8>, Directory)>,
    open: Arc<AtomicUsize>,
    /// Number of open directories at which the cache is dropped and the queues are drained.
    max_open_directories: usize,
    /// Number of replaced links and directories when the cache was last valid.
    seen_replacements: usize,
    /// Whether a lookup has ever followed links.
    has_followed_links: bool,
    /// Implied directories made since the last [`DestinationRoot::take_implied`].
    implied: Vec<Implied>,
    implied_bytes: usize,
}

impl DestinationRoot {
    /// Opens the destination. Links in its own path are followed, because the user chose it.
    ///
    /// # Errors
    /// When the path is not a directory, or cannot be opened.
    pub(crate) fn open(path: &Path) -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self::at(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
    }

    /// Uses an open directory as the destination.
    ///
    /// # Errors
    /// When fstat(2) fails.
    pub(crate) fn at(fd: OwnedFd) -> Result<Self, Errno> {
        let open = Arc::new(AtomicUsize::new(0));
        let files = rustix::process::getrlimit(Resource::Nofile)
            .current
            .unwrap_or(u64::MAX);
        Ok(Self {
            top: {
                let inherits_acl = has_default_acl(&fd);
                new_directory(fd, inherits_acl, &open)?
            },
            cache: DirectoryCache::default(),
            last: None,
            open,
            max_open_directories: usize::try_from(files / 2)
                .unwrap_or(usize::MAX)
                .clamp(32, 4096),
            seen_replacements: 0,
            has_followed_links: false,
            implied: Vec::new(),
            implied_bytes: 0,
        })
    }

    /// The destination directory.
    pub(crate) fn top(&self) -> &Directory {
        &self.top
    }

    /// Opens the directory at `path`, and makes missing ones if `missing` allows it.
    ///
    /// # Errors
    /// When the path leads outside or through a non-directory, or a step fails.
    pub(crate) fn resolve_directory(
        &mut self,
        path: &[u8],
        missing: IfMissing,
        writers: &mut WriterPool,
    ) -> Result<Directory, ResolveError<StepError>> {
        if path.is_empty() {
            return Ok(self.top.clone());
        }
        self.invalidate_replaced(writers);
        if let Some((last, directory)) = &self.last
            && last == path
        {
            return Ok(directory.clone());
        }
        let directory = match self.cache.get(path) {
            Some(directory) => directory,
            None => self.walk(path, missing, writers)?,
        };
        self.last = Some((path.to_vec(), directory.clone()));
        Ok(directory)
    }

    /// Caches a directory that was just made or found at `path`.
    pub(crate) fn cache_directory(&mut self, path: &[u8], directory: Directory) {
        self.cache.insert(path, directory);
    }

    /// Forgets `path`, because it is about to be replaced by a non-directory.
    pub(crate) fn invalidate(&mut self, path: &[u8]) {
        if self.cache.invalidate(path) {
            self.last = None;
        }
    }

    /// Like [`DestinationRoot::invalidate`], for a replacement that a writer makes later.
    ///
    /// It also forgets other paths that lead through the entry of this name in `parent`.
    pub(crate) fn invalidate_aliases(&mut self, parent: &Directory, path: &[u8]) {
        if self.has_followed_links && may_be_directory(parent, path) {
            self.clear_cache();
        }
        self.invalidate(path);
    }

    fn invalidate_replaced(&mut self, writers: &WriterPool) {
        let replacements = writers.replacements();
        if self.seen_replacements != replacements {
            self.seen_replacements = replacements;
            self.clear_cache();
        }
    }

    /// Empties the cache.
    pub(crate) fn clear_cache(&mut self) {
        self.cache = DirectoryCache::default();
        self.last = None;
    }

    /// Implied directories made since the last call. If there are very many, the last ones are missing.
    pub(crate) fn take_implied(&mut self) -> Vec<Implied> {
        std::mem::take(&mut self.implied)
    }

    fn note_implied(&mut self, path: ArchivePath, identity: Identity) {
        self.implied_bytes = self.implied_bytes.saturating_add(path.as_bytes().len());
        if self.implied_bytes <= MAX_IMPLIED_BYTES {
            self.implied.push(Implied { path, identity });
        }
    }

    /// Walks from the deepest cached directory. At a link it restarts from the root, because `..` behind
    /// the link needs all directories above.
    fn walk(
        &mut self,
        path: &[u8],
        missing: IfMissing,
        writers: &mut WriterPool,
    ) -> Result<Directory, ResolveError<StepError>> {
        let (mut here, mut depth) = self.deepest_cached(path);
        while depth < path.len() {
            let rest = path.get(depth..).unwrap_or_default();
            let name = rest.split(|&byte| byte == b'/').next().unwrap_or_default();
            let step = self
                .resolver(missing, writers)
                .step(&here, name)
                .map_err(ResolveError::Tree)?;
            here = match step {
                Step::Directory(directory) => directory,
                Step::Missing => {
                    let made = self.resolver(missing, writers).imply(&here, name);
                    let made = made.map_err(ResolveError::Tree)?;
                    let above = path.get(..depth + name.len()).unwrap_or_default();
                    self.note_implied(ArchivePath::sanitize(above).path, made.identity());
                    made
                }
                Step::Other => {
                    return Err(ResolveError::Path(resolve::PathError::NotADirectory));
                }
                Step::Link(_) => return self.walk_following_links(path, missing, writers),
            };
            depth += name.len();
            self.cache
                .insert(path.get(..depth).unwrap_or_default(), here.clone());
            depth += 1;
        }
        Ok(here)
    }

    fn walk_following_links(
        &mut self,
        path: &[u8],
        missing: IfMissing,
        writers: &mut WriterPool,
    ) -> Result<Directory, ResolveError<StepError>> {
        self.has_followed_links = true;
        let components = path.split(|&byte| byte == b'/');
        let mut resolver = self.resolver(missing, writers);
        let found = resolve::directory_with_path(&mut resolver, components);
        let made = std::mem::take(&mut resolver.made);
        let (directory, place) = found?;
        let mut above = place.clone();
        // If one directory was made, all below it were made too. So these are the last components.
        for identity in made.into_iter().rev() {
            let Some((parent, _)) = above.split_last() else {
                break;
            };
            self.note_implied(std::mem::replace(&mut above, parent), identity);
        }
        // The directory was just opened for this lookup, unless it is the destination itself.
        if !place.is_root() {
            drop(directory.0.resolved_path.set(place));
        }
        self.cache.insert(path, directory.clone());
        Ok(directory)
    }

    /// The deepest cached directory on `path`, and the offset of the remaining path.
    fn deepest_cached(&mut self, path: &[u8]) -> (Directory, usize) {
        let mut end = path.len().min(MAX_CACHED_PATH_BYTES);
        while let Some(slash) = path.iter().take(end).rposition(|&byte| byte == b'/') {
            if let Some(directory) = self.cache.get(path.get(..slash).unwrap_or_default()) {
                return (directory, slash + 1);
            }
            end = slash;
        }
        (self.top.clone(), 0)
    }

    fn resolver<'a>(&'a mut self, missing: IfMissing, writers: &'a mut WriterPool) -> Resolver<'a> {
        Resolver {
            root: self,
            missing,
            writers,
            made: Vec::new(),
        }
    }

    /// Opens `name` in `parent` if it is a directory.
    pub(crate) fn open_child(
        &mut self,
        parent: &Directory,
        name: &[u8],
        writers: &mut WriterPool,
    ) -> Result<Directory, Errno> {
        self.limit_open_directories(writers);
        let fd = open_directory(parent, name)?;
        let inherits_acl = has_default_acl(&fd);
        self.child_directory(parent, name, fd, inherits_acl)
    }

    /// Opens the directory `name` that was just made in `parent`. It inherits the default ACL of its
    /// parent.
    pub(crate) fn open_new(
        &mut self,
        parent: &Directory,
        name: &[u8],
        writers: &mut WriterPool,
    ) -> Result<Directory, Errno> {
        self.limit_open_directories(writers);
        let fd = open_directory(parent, name)?;
        self.child_directory(parent, name, fd, parent.inherits_acl())
    }

    /// Wraps `fd`, the directory `name` in `parent`.
    fn child_directory(
        &self,
        parent: &Directory,
        name: &[u8],
        fd: OwnedFd,
        inherits_acl: bool,
    ) -> Result<Directory, Errno> {
        let child = new_directory(fd, inherits_acl, &self.open)?;
        if let Some(place) = parent.resolved_path_of(name) {
            drop(child.0.resolved_path.set(place));
        }
        Ok(child)
    }

    /// Closes directories if too many are open.
    fn limit_open_directories(&mut self, writers: &mut WriterPool) {
        if self.open.load(Ordering::Relaxed) >= self.max_open_directories {
            self.clear_cache();
            writers.wait_for_all();
        }
    }
}

/// Policy for missing directories of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IfMissing {
    /// Create them.
    Create,
    /// Fail.
    Fail,
}

/// The real directories, as the tree that the resolver walks.
struct Resolver<'a> {
    root: &'a mut DestinationRoot,
    missing: IfMissing,
    writers: &'a mut WriterPool,
    /// Directories made during the walk.
    made: Vec<Identity>,
}

impl Resolver<'_> {
    /// The step for `name` in `parent`, which does not exist.
    fn missing_step(&self, parent: &Directory, name: &[u8]) -> Step<Directory> {
        // The deferred link is not made yet, so its type is unknown. Only lookups of link targets can wait
        // for it.
        if self.missing == IfMissing::Create && self.writers.reserved_names().contains(parent, name)
        {
            Step::Other
        } else {
            Step::Missing
        }
    }
}

impl Tree for Resolver<'_> {
    type Directory = Directory;
    type Error = StepError;

    fn root(&self) -> Directory {
        self.root.top.clone()
    }

    fn step(&mut self, parent: &Directory, name: &[u8]) -> Result<Step<Directory>, StepError> {
        self.writers.wait_for_name(parent.identity(), name);
        match self.root.open_child(parent, name, self.writers) {
            Ok(directory) => return Ok(Step::Directory(directory)),
            Err(Errno::NOENT) => return Ok(self.missing_step(parent, name)),
            Err(Errno::NOTDIR | Errno::LOOP) => {}
            Err(errno) => return Err(errno).with_action("open a directory on the way"),
        }
        match rustix::fs::readlinkat(parent, name, Vec::new()) {
            Ok(target) => Ok(Step::Link(target.into_bytes())),
            Err(Errno::INVAL) => Ok(Step::Other),
            Err(Errno::NOENT) => Ok(Step::Missing),
            Err(errno) => Err(errno).with_action("read a link on the way"),
        }
    }

    fn imply(&mut self, parent: &Directory, name: &[u8]) -> Result<Directory, StepError> {
        const ACTION: &str = "create a parent directory";
        if self.missing == IfMissing::Fail {
            return Err(Errno::NOENT).with_action("open a directory on the way");
        }
        self.writers.entry_quota().acquire().with_action(ACTION)?;
        let permissions = Mode::from_raw_mode(0o777);
        rustix::fs::mkdirat(parent, name, permissions).with_action(ACTION)?;
        let made = self.root.open_new(parent, name, self.writers);
        let made = made.with_action("open a parent directory")?;
        self.made.push(made.identity());
        Ok(made)
    }
}

fn open_directory(parent: &Directory, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(parent, name, flags | OFlags::RDONLY, Mode::empty()) {
        // We may not read it, but if its mode allows, entries can be made in it.
        Err(Errno::ACCESS) => rustix::fs::openat(parent, name, flags | OFlags::PATH, Mode::empty()),
        result => result,
    }
}

/// Whether new entries in this directory inherit an ACL.
fn has_default_acl(fd: &OwnedFd) -> bool {
    rustix::fs::fgetxattr_query(fd, posix_acl::Kind::Default.attribute()).is_ok()
}

fn new_directory(
    fd: OwnedFd,
    inherits_acl: bool,
    open: &Arc<AtomicUsize>,
) -> Result<Directory, Errno> {
    let identity = Identity::of(&rustix::fs::fstat(&fd)?);
    open.fetch_add(1, Ordering::Relaxed);
    Ok(Directory(Arc::new(Handle {
        fd,
        identity,
        inherits_acl,
        resolved_path: OnceLock::new(),
        ownership: AtomicU8::new(0),
        open: Arc::clone(open),
    })))
}

/// lstat(2) of `name` in `directory`.
pub(crate) fn lstat_at(directory: &Directory, name: &[u8]) -> Result<rustix::fs::Stat, Errno> {
    rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Whether the entry at `path` may be a directory or a link to one. Its last component is in `parent`.
fn may_be_directory(parent: &Directory, path: &[u8]) -> bool {
    let name = path.rsplit(|&byte| byte == b'/').next();
    lstat_at(parent, name.unwrap_or_default())
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile)
}

/// Open directories by path, in two generations.
///
/// When the young generation is full, it becomes the old one, and the old one is closed. Recently used
/// directories stay, without an ordered list.
#[derive(Debug, Default)]
struct DirectoryCache {
    young: HashMap<Vec<u8>, Directory>,
    old: HashMap<Vec<u8>, Directory>,
}

impl DirectoryCache {
    fn get(&mut self, path: &[u8]) -> Option<Directory> {
        if let Some(directory) = self.young.get(path) {
            return Some(directory.clone());
        }
        let directory = self.old.remove(path)?;
        self.insert(path, directory.clone());
        Some(directory)
    }

    fn insert(&mut self, path: &[u8], directory: Directory) {
        if path.len() > MAX_CACHED_PATH_BYTES {
            return;
        }
        if self.young.len() >= MAX_CACHED_DIRECTORIES {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(path.to_vec(), directory);
    }

    /// Forgets `path` and everything below it. Returns whether `path` was cached.
    fn invalidate(&mut self, path: &[u8]) -> bool {
        if !self.young.contains_key(path) && !self.old.contains_key(path) {
            return false;
        }
        let below = |key: &[u8]| {
            key.strip_prefix(path)
                .is_some_and(|rest| matches!(rest.first(), None | Some(b'/')))
        };
        self.young.retain(|key, _| !below(key));
        self.old.retain(|key, _| !below(key));
        true
    }
}

/// Last component of a path; empty for the root.
pub(crate) fn name_of(path: &ArchivePath) -> &[u8] {
    path.components().next_back().unwrap_or_default()
}

/// Path of the parent directory; empty for the root and its direct entries.
pub(crate) fn parent_of(path: &ArchivePath) -> &[u8] {
    let bytes = path.as_bytes();
    let slash = bytes.iter().rposition(|&byte| byte == b'/');
    bytes.get(..slash.unwrap_or(0)).unwrap_or_default()
}
