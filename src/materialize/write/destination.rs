//! Confined destination: opens directories one component at a time, without following links.
//!
//! A [`Directory`] is an open descriptor, so an entry made in it stays there even if the names above change.
//! Consecutive members of one directory need no new lookup.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{FileType, Mode, Stat};
use rustix::io::Errno;
use rustix::process::Resource;

use super::context::Context;
use super::directory::{Directory, lstat_at, name_of, parent_of};
use super::pool::WriterPool;
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::{self, Component, PathLookup, ResolveError};
use crate::materialize::error::{StepError, WithAction};

/// Maximum number of cached open directories, in each of the two generations. Archives are in depth-first
/// order, so recent directories matter most. The queues need descriptors, too.
const MAX_CACHED_DIRECTORIES: usize = 128;
/// Longer paths are not cached; each member walks them again.
const MAX_CACHED_PATH_BYTES: usize = 4096;

/// The destination directory, with a cache of open directories below it, and the writers.
#[derive(Debug)]
pub(crate) struct Destination {
    pub(crate) context: Arc<Context>,
    pub(crate) writers: WriterPool,
    pub(crate) top: Directory,
    pub(crate) cache: DirectoryCache,
    last: Option<(Vec<u8>, Directory)>,
    /// Open directories at which the cache is dropped and the queues are drained.
    pub(crate) max_open_directories: usize,
    /// Number of replaced links and directories when the cache was last valid.
    seen_replacements: usize,
    /// Whether a lookup has ever followed links.
    has_followed_links: bool,
}

impl Destination {
    pub(crate) fn new(top: Directory, context: Arc<Context>, writers: WriterPool) -> Self {
        let files = rustix::process::getrlimit(Resource::Nofile)
            .current
            .unwrap_or(u64::MAX);
        Self {
            context,
            writers,
            top,
            cache: DirectoryCache::default(),
            last: None,
            max_open_directories: usize::try_from(files / 2)
                .unwrap_or(usize::MAX)
                .clamp(32, 4096),
            seen_replacements: 0,
            has_followed_links: false,
        }
    }

    /// Opens the directory at `path`, and makes missing ones if `missing` allows it.
    pub(crate) fn resolve_directory(
        &mut self,
        path: &[u8],
        missing: IfMissing,
    ) -> Result<Directory, ResolveError<StepError>> {
        if path.is_empty() {
            return Ok(self.top.clone());
        }
        let replacements = self.context.replacements.load(Ordering::Acquire);
        if self.seen_replacements != replacements {
            self.seen_replacements = replacements;
            self.clear_cache();
        }
        if let Some((last, directory)) = &self.last
            && last == path
        {
            return Ok(directory.clone());
        }
        let directory = match self.cache.get(path) {
            Some(directory) => directory,
            None => self.walk(path, missing)?,
        };
        self.last = Some((path.to_vec(), directory.clone()));
        Ok(directory)
    }

    /// Whether the way to `path` goes through the link in its own place.
    pub(crate) fn goes_through_itself(&mut self, path: &ArchivePath) -> bool {
        let components = parent_of(path).split(|&byte| byte == b'/');
        let mut resolver = self.resolver(IfMissing::Fail);
        let found = resolve::parent(&mut resolver, components, name_of(path));
        found.is_ok_and(|(_, is_own_link)| is_own_link)
    }

    /// lstat(2) of `path`.
    pub(crate) fn stat(&mut self, path: &ArchivePath) -> Option<Stat> {
        if path.is_root() {
            return rustix::fs::fstat(&self.top).ok();
        }
        let parent = self.resolve_directory(parent_of(path), IfMissing::Fail);
        lstat_at(&parent.ok()?, name_of(path)).ok()
    }

    /// Forgets `path` before it is replaced by a non-directory.
    pub(crate) fn invalidate(&mut self, path: &[u8]) {
        if self.cache.invalidate(path) {
            self.last = None;
        }
    }

    /// Like [`Destination::invalidate`] before a writer replaces it, also for other paths through this entry.
    pub(crate) fn invalidate_aliases(&mut self, parent: &Directory, path: &ArchivePath) {
        // The entry may be a directory or a link to one.
        let may_be_directory = || {
            lstat_at(parent, name_of(path))
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile)
        };
        if self.has_followed_links && may_be_directory() {
            self.clear_cache();
        }
        self.invalidate(path.as_bytes());
    }

    fn clear_cache(&mut self) {
        self.cache = DirectoryCache::default();
        self.last = None;
    }

    /// Walks from the deepest cached directory. At a link it restarts from the root, for a `..` behind it.
    fn walk(
        &mut self,
        path: &[u8],
        missing: IfMissing,
    ) -> Result<Directory, ResolveError<StepError>> {
        let (mut here, mut depth) = self.deepest_cached(path);
        while depth < path.len() {
            let rest = path.get(depth..).unwrap_or_default();
            let name = rest.split(|&byte| byte == b'/').next().unwrap_or_default();
            let step = self
                .resolver(missing)
                .step(&here, name)
                .map_err(ResolveError::Tree)?;
            here = match step {
                Component::Directory(directory) => directory,
                Component::Missing => {
                    let made = self.resolver(missing).imply(&here, name);
                    made.map_err(ResolveError::Tree)?
                }
                // An update replaces a link on its way, and goes no other way if it cannot.
                Component::Link(_) if self.context.replace_rules.get().is_some() => {
                    return Err(ResolveError::Path(resolve::PathError::NotADirectory));
                }
                Component::Other => {
                    return Err(ResolveError::Path(resolve::PathError::NotADirectory));
                }
                Component::Link(_) => return self.walk_following_links(path, missing),
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
    ) -> Result<Directory, ResolveError<StepError>> {
        self.has_followed_links = true;
        let components = path.split(|&byte| byte == b'/');
        let found = resolve::directory_with_path(&mut self.resolver(missing), components);
        let (directory, place) = found?;
        // The directory was just opened for this lookup, unless it is the destination itself.
        let directory = if place.is_root() {
            let top = directory.duplicate();
            top.with_action("open the destination behind a link")
                .map_err(ResolveError::Tree)?
        } else {
            directory
        };
        directory.set_resolved_path(place);
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

    fn resolver(&mut self, missing: IfMissing) -> Resolver<'_> {
        Resolver {
            destination: self,
            missing,
        }
    }

    pub(crate) fn open_child(
        &mut self,
        parent: &Directory,
        name: &[u8],
        is_new: bool,
    ) -> Result<Directory, Errno> {
        if self.top.open_count() >= self.max_open_directories {
            self.clear_cache();
            self.writers.wait_for_all();
        }
        parent.open_child(name, is_new)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IfMissing {
    Create,
    Fail,
}

/// The real directories, as the resolver walks them.
struct Resolver<'a> {
    destination: &'a mut Destination,
    missing: IfMissing,
}

impl PathLookup for Resolver<'_> {
    type Directory = Directory;
    type Error = StepError;

    fn root(&self) -> Directory {
        self.destination.top.clone()
    }

    fn step(&mut self, parent: &Directory, name: &[u8]) -> Result<Component<Directory>, StepError> {
        let destination = &mut *self.destination;
        destination.writers.wait_for_name(parent.identity(), name);
        match destination.open_child(parent, name, false) {
            Ok(directory) => return Ok(Component::Directory(directory)),
            // The deferred link does not exist yet, so its type is unknown. Only link targets wait for it.
            Err(Errno::NOENT)
                if self.missing == IfMissing::Create
                    && destination.context.reserved_names.contains(parent, name) =>
            {
                return Ok(Component::Other);
            }
            Err(Errno::NOENT) => return Ok(Component::Missing),
            Err(Errno::NOTDIR | Errno::LOOP) => {}
            Err(errno) => return Err(errno).with_action("open a directory on the way"),
        }
        match rustix::fs::readlinkat(parent, name, Vec::new()) {
            Ok(target) => Ok(Component::Link(target.into_bytes())),
            Err(Errno::INVAL) => Ok(Component::Other),
            Err(Errno::NOENT) => Ok(Component::Missing),
            Err(errno) => Err(errno).with_action("read a link on the way"),
        }
    }

    fn imply(&mut self, parent: &Directory, name: &[u8]) -> Result<Directory, StepError> {
        const ACTION: &str = "create a parent directory";
        if self.missing == IfMissing::Fail {
            return Err(Errno::NOENT).with_action("open a directory on the way");
        }
        let quota = &self.destination.context.entry_quota;
        quota.acquire().with_action(ACTION)?;
        let permissions = Mode::from_raw_mode(0o777);
        let is_new = match rustix::fs::mkdirat(parent, name, permissions) {
            // The process that writes another shard was faster.
            Err(Errno::EXIST) => false,
            made => made.with_action(ACTION).map(|()| true)?,
        };
        let made = self.destination.open_child(parent, name, is_new);
        made.with_action("open a parent directory")
    }
}

/// Open directories by path, in two generations. When the young generation is full, it replaces the old one,
/// which is closed. Recently used directories stay, without an ordered list.
#[derive(Debug, Default)]
pub(crate) struct DirectoryCache {
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

    pub(crate) fn insert(&mut self, path: &[u8], directory: Directory) {
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
