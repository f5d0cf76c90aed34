//! Writes layers: streams each once, from the bottom, then builds the merged tree.
//!
//! A layer's index grows in memory while it is streamed. Its files are written to a hidden directory of the
//! destination, named by their inodes. [`layers::merge`](crate::layers::merge) then gives the merged tree, as
//! for a mount. Directories are made from the root on, and files are renamed to their places. A directory
//! gets its attributes when all its entries exist. No path of a layer is ever looked up on disk.

use std::collections::HashMap;

use rustix::fs::{AtFlags, Mode};
use rustix::io::Errno;

use super::error::{Cause, Error, StepError, WithAction};
use super::tree_writer::{ADD_ENTRY, TreeWriter};
use super::write::{Destination, Directory, Identity, Job, PendingDirectory, member_of, mtime_of};
use crate::base::archive_path::ArchivePath;
use crate::index::{
    Builder, Entry, EntryKind, Index, Ino, LayerIno, MemberError, MemoryLimit, MergeError,
    MergedIndex, Options, Origin, Placement,
};
use crate::layers::{WhiteoutFormat, merge};
use crate::tar::Member;
use crate::tree::remove_tree;

const MOVE_FILE: &str = "move the file to its place";
const CREATE_LINK: &str = "create the hard link";
const OPEN_PARENT: &str = "return to the parent directory";

/// Directory in the destination for files of layers before they are moved to their places.
pub const UNPLACED_FILES: &str = ".tarfs-layers";

/// Number of consecutive inodes whose files share a directory in [`UNPLACED_FILES`].
const FILES_PER_DIRECTORY: u32 = 256;

/// Maximum number of open directories in [`UNPLACED_FILES`].
const MAX_OPEN_DIRECTORIES: usize = 16;

/// Maximum number of open ancestors of the current directory.
const MAX_OPEN_ANCESTORS: usize = 16;

#[derive(Debug)]
pub(super) struct LayerState {
    whiteouts: WhiteoutFormat,
    memory: MemoryLimit,
    builder: Option<Builder>,
    /// Of the layers below the current one.
    indexes: Vec<Index>,
    unplaced_top: Option<Directory>,
    /// Name and directory for the next files.
    current_directory: Option<(Vec<u8>, Directory)>,
}

impl LayerState {
    pub(super) fn new(whiteouts: WhiteoutFormat, memory: MemoryLimit) -> Self {
        Self {
            whiteouts,
            memory,
            builder: None,
            indexes: Vec::new(),
            unplaced_top: None,
            current_directory: None,
        }
    }

    /// Starts the next layer. All layers together have at most `max_entries` entries.
    pub(super) fn begin_layer(&mut self, max_entries: u32) {
        let used = self.indexes.iter().map(Index::member_count);
        let used = u32::try_from(used.fold(0, u64::saturating_add)).unwrap_or(u32::MAX);
        let builder = Builder::new(Options {
            max_entries: max_entries.saturating_sub(used),
            whiteouts: Some(self.whiteouts),
            ..Options::default()
        });
        self.builder = Some(builder.with_memory_limit(&self.memory));
    }

    /// Ends the current layer, if there is one. Returns the bytes of its files, holes included.
    pub(super) fn end_layer(&mut self) -> u64 {
        let builder = self.builder.take();
        let index = builder.map(|builder| builder.finish(Origin::default()));
        let file_bytes = index.as_ref().map_or(0, Index::file_bytes);
        self.indexes.extend(index);
        file_bytes
    }

    /// Adds a member of the current layer. Returns a regular file, for its payload to be written.
    pub(super) fn apply_member(
        &mut self,
        mut member: Member,
        tree: &mut TreeWriter,
    ) -> Option<Job> {
        let builder = self.builder.as_mut()?;
        let name = ArchivePath::sanitize(&member.name);
        // Owners in layers are numbers, because the names refer to the account files in the image.
        member.user.clear();
        member.group.clear();
        let placed = builder.add_member(&member);
        let problems = &tree.context.problems;
        if let Err(error) = builder.check_memory() {
            problems.stop(error.into());
            return None;
        }
        match placed {
            Ok(Placement::Entry(ino))
                if builder.index().entry(ino).map(|entry| entry.kind())
                    == Some(EntryKind::File) =>
            {
                tree.report_stripped_prefix(name.stripped);
                return self.unplaced_file(ino, member, name.path, tree);
            }
            Ok(_) => tree.report_stripped_prefix(name.stripped),
            Err(MemberError::TooManyEntries) => {
                let limit = tree.context.entry_quota.limit;
                problems.stop(Error::TooManyEntries(name.path, limit));
            }
            // The index lists it as a problem.
            Err(_) => {}
        }
        None
    }

    fn unplaced_file(
        &mut self,
        ino: Ino,
        mut member: Member,
        path: ArchivePath,
        tree: &mut TreeWriter,
    ) -> Option<Job> {
        let name = file_name(self.indexes.len(), ino);
        let directory = match self.unplaced_directory(ino, &mut tree.destination) {
            Ok(directory) => directory,
            Err(error) => {
                tree.context.failed_files.lock().insert(name);
                let (top, missing_bytes) = (&tree.destination.top, member.payload.len());
                tree.context
                    .record_failure(&path, top, error, missing_bytes);
                return None;
            }
        };
        let whiteouts = self.whiteouts;
        member
            .xattrs
            .retain(|(name, _)| !whiteouts.hides_xattr(name));
        Some(Job {
            name: Some(name),
            ..Job::new(directory, path, member)
        })
    }

    fn unplaced_directory(
        &mut self,
        ino: Ino,
        destination: &mut Destination,
    ) -> Result<Directory, StepError> {
        let name = directory_name(self.indexes.len(), ino);
        if let Some((_, directory)) = self
            .current_directory
            .as_ref()
            .filter(|(last, _)| *last == name)
        {
            return Ok(directory.clone());
        }
        let top = UNPLACED_FILES.as_bytes();
        let unplaced_top = make_unplaced_top(&mut self.unplaced_top, top, destination)?;
        let directory = make_private_directory(&unplaced_top, &name, destination)?;
        self.current_directory = Some((name, directory.clone()));
        Ok(directory)
    }

    /// Builds the merged tree and removes unplaced files that are not in it. The caller has waited for all
    /// files, and calls [`finish_root`] afterwards.
    pub(super) fn place_all(mut self, tree: &mut TreeWriter) -> Option<MergedIndex> {
        // The current layer, if it ended with an error.
        self.end_layer();
        let all: Vec<&Index> = self.indexes.iter().collect();
        let merged = merge(&all, self.whiteouts, &self.memory);
        let problems = &tree.context.problems;
        let merged = match merged {
            _ if problems.fatal().is_some() => None,
            Ok(merged) => Some(merged),
            Err(error) => {
                problems.stop(match error {
                    MergeError::TooMuchMemory(error) => error.into(),
                    MergeError::TooLarge => {
                        let limit = tree.context.entry_quota.limit;
                        Error::TooManyEntries(ArchivePath::root(), limit)
                    }
                });
                None
            }
        };
        drop(self.indexes);
        let mut name = UNPLACED_FILES.as_bytes().to_vec();
        if let Some(merged) = &merged {
            report_left_out(&merged.index, tree);
            name = find_unused_name(&merged.index, name, self.unplaced_top.is_some(), tree);
            let placement = TreePlacement {
                tree: &mut *tree,
                merged,
                unplaced_top: self.unplaced_top,
                name: name.clone(),
                open: HashMap::new(),
            };
            placement.place_entries();
        }
        let removed = remove_tree(&tree.destination.top, &name);
        if let Err(error) = removed.with_action("remove the directory of unplaced files") {
            let mut path = ArchivePath::root();
            path.push(&name);
            tree.context.problems.add(&path, error);
        }
        merged
    }
}

fn make_unplaced_top(
    unplaced_top: &mut Option<Directory>,
    name: &[u8],
    destination: &mut Destination,
) -> Result<Directory, StepError> {
    if let Some(unplaced_top) = unplaced_top {
        return Ok(unplaced_top.clone());
    }
    let top = destination.top.clone();
    let made = make_private_directory(&top, name, destination)?;
    Ok(unplaced_top.insert(made).clone())
}

fn make_private_directory(
    parent: &Directory,
    name: &[u8],
    destination: &mut Destination,
) -> Result<Directory, StepError> {
    const ACTION: &str = "create a directory for unplaced files";
    rustix::fs::mkdirat(parent, name, Mode::RWXU).with_action(ACTION)?;
    let made = destination.open_child(parent, name, true);
    made.with_action(ACTION)
}

/// Reports entries that are not in the merged tree.
fn report_left_out(index: &Index, tree: &TreeWriter) {
    let problems = &tree.context.problems;
    for problem in index.problems() {
        let path = problem.path.clone().unwrap_or_default();
        problems.add(&path, Cause::LeftOut(problem.what.clone()));
    }
    let reported = index.problems().len() as u64;
    problems.add_count(index.problem_count().saturating_sub(reported));
}

/// Unused name in the tree's root for unplaced files. An existing directory `name` is renamed to a new one.
fn find_unused_name(index: &Index, name: Vec<u8>, is_there: bool, tree: &TreeWriter) -> Vec<u8> {
    let is_taken = |name: &[u8]| index.lookup(Ino::ROOT, name).is_some();
    if !is_taken(&name) {
        return name;
    }
    // A directory has fewer entries than this range.
    let mut free = (0..=u32::MAX).map(|number| format!("{UNPLACED_FILES}-{number}").into_bytes());
    let free = free.find(|name| !is_taken(name));
    let free = free.unwrap_or_else(|| name.clone());
    if !is_there {
        return free;
    }
    let top = &tree.destination.top;
    match rustix::fs::renameat(top, &*name, top, &*free).with_action(MOVE_FILE) {
        Ok(()) => free,
        Err(error) => {
            let path = ArchivePath::root();
            tree.context.record_failure(&path, top, error, 0);
            name
        }
    }
}

/// Sets the destination's attributes, if a member describes it.
pub(super) fn finish_root(index: &Index, tree: &TreeWriter) {
    let entry = index.entry(Ino::ROOT);
    if let Some(entry) = entry.filter(|entry| !entry.is_implied()) {
        finish_directory(entry, &tree.destination.top, &ArchivePath::root(), tree);
    }
}

fn finish_directory(
    entry: Entry<'_>,
    directory: &Directory,
    path: &ArchivePath,
    tree: &TreeWriter,
) {
    let (identity, mut member) = (directory.identity(), member_of(entry));
    let context = &tree.context;
    if entry.is_implied()
        && let Ok(stat) = rustix::fs::fstat(directory)
    {
        member.mtime = mtime_of(&stat);
    }
    let pending = PendingDirectory::new(path.clone(), identity, true, member, &context.policy);
    if let Err(error) = pending.apply_to(directory, context) {
        context.problems.add(path, error);
    }
}

struct Ancestor {
    ino: Ino,
    next_child: u32,
    identity: Identity,
    /// `None` for a distant ancestor, which was closed.
    directory: Option<Directory>,
}

impl Ancestor {
    fn new(ino: Ino, directory: Directory) -> Self {
        Self {
            ino,
            next_child: 0,
            identity: directory.identity(),
            directory: Some(directory),
        }
    }
}

struct TreePlacement<'a> {
    tree: &'a mut TreeWriter,
    merged: &'a MergedIndex,
    unplaced_top: Option<Directory>,
    name: Vec<u8>,
    /// Open directories in it, by name.
    open: HashMap<Vec<u8>, Directory>,
}

impl TreePlacement<'_> {
    /// Makes all entries below the root, until a fatal error.
    fn place_entries(mut self) {
        let top = self.tree.destination.top.clone();
        let mut path = ArchivePath::root();
        let mut ancestors = vec![Ancestor::new(Ino::ROOT, top)];
        while let Some(here) = ancestors.last_mut() {
            if self.tree.context.problems.fatal().is_some() {
                return;
            }
            let Some(directory) = here.directory.clone() else {
                return;
            };
            let index = &self.merged.index;
            if let Some(child) = index.children(here.ino, here.next_child).next() {
                here.next_child = child.number + 1;
                let Some(entry) = index.entry(child.ino) else {
                    continue;
                };
                let mut place = path.clone();
                place.push(child.name);
                if let Some((place, made)) = self.place_child(entry, directory, place) {
                    path = place;
                    ancestors.push(Ancestor::new(child.ino, made));
                    let far = ancestors.len().saturating_sub(MAX_OPEN_ANCESTORS);
                    // The root always stays open.
                    if let Some(far) = ancestors.get_mut(far).filter(|_| far > 0) {
                        far.directory = None;
                    }
                }
                continue;
            }
            let entry = index.entry(here.ino);
            ancestors.pop();
            if let Err(error) = self.leave_directory(&mut ancestors, entry, &directory, &path) {
                let context = &self.tree.context;
                return context.record_failure(&path, &directory, error, 0);
            }
            let above = path.split_last().map(|(above, _)| above);
            path = above.unwrap_or_default();
        }
    }

    /// Makes `entry` at `path`, in `directory`. Returns a directory and its path.
    fn place_child(
        &mut self,
        entry: Entry<'_>,
        directory: Directory,
        path: ArchivePath,
    ) -> Option<(ArchivePath, Directory)> {
        let context = &self.tree.context;
        context.problems.entry(&path);
        if let Err(error) = context.entry_quota.acquire().with_action(ADD_ENTRY) {
            context.record_failure(&path, &directory, error, 0);
            return None;
        }
        let job = Job::new(directory, path, member_of(entry));
        if entry.kind() != EntryKind::Directory {
            self.place_entry(job, entry);
            return None;
        }
        let made = self.tree.try_make_directory(&job);
        let context = &self.tree.context;
        match made {
            Ok(made) => made.map(|(directory, _)| {
                context.stats.written_entries.increment();
                (job.path, directory)
            }),
            Err(error) => {
                context.record_job_failure(&job, error, 0);
                None
            }
        }
    }

    /// Returns from `directory` to the last of `ancestors`, and sets its attributes.
    fn leave_directory(
        &mut self,
        ancestors: &mut [Ancestor],
        entry: Option<Entry<'_>>,
        directory: &Directory,
        path: &ArchivePath,
    ) -> Result<(), StepError> {
        let Some(above) = ancestors.last_mut() else {
            return Ok(());
        };
        // Reopen the parent first, because the directory's final mode may deny access.
        if above.directory.is_none() {
            let parent = self.tree.destination.open_child(directory, b"..", false);
            let parent = parent.with_action(OPEN_PARENT)?;
            if parent.identity() != above.identity {
                return Err(Errno::STALE).with_action(OPEN_PARENT);
            }
            above.directory = Some(parent);
        }
        if let Some(entry) = entry {
            finish_directory(entry, directory, path, self.tree);
        }
        Ok(())
    }

    /// Makes one name of a non-directory entry.
    fn place_entry(&mut self, job: Job, entry: Entry<'_>) {
        let is_file = entry.kind() == EntryKind::File;
        if !is_file && entry.link_count() < 2 {
            return self.tree.make_entry(job);
        }
        let Some(origin) = self.merged.layer_ino(entry.ino()) else {
            return;
        };
        let name = file_name(origin.layer as usize, origin.ino);
        let placed = self.try_place_entry(&job, entry, origin, &name);
        let context = &self.tree.context;
        match placed {
            Err(StepError { errno, .. })
                if errno == Errno::NOENT && context.failed_files.lock().contains(&name) => {}
            Err(error) => context.record_job_failure(&job, error, 0),
            // A file was already counted when it was written.
            Ok(()) if is_file && entry.link_count() < 2 => {}
            Ok(()) => context.stats.written_entries.increment(),
        }
    }

    fn try_place_entry(
        &mut self,
        job: &Job,
        entry: Entry<'_>,
        origin: LayerIno,
        name: &[u8],
    ) -> Result<(), StepError> {
        let directory = directory_name(origin.layer as usize, origin.ino);
        let from = self.open_unplaced_directory(&directory)?;
        let (to, to_name) = (&job.directory, job.name());
        if entry.link_count() < 2 {
            return rustix::fs::renameat(&from, name, to, to_name).with_action(MOVE_FILE);
        }
        let link = || rustix::fs::linkat(&from, name, to, to_name, AtFlags::empty());
        match link() {
            Err(Errno::NOENT) if entry.kind() != EntryKind::File => {
                self.tree.make_entry(Job {
                    directory: from.clone(),
                    path: job.path.clone(),
                    name: Some(name.to_vec()),
                    member: job.member.clone(),
                    number: 0,
                    atime: None,
                });
                link().with_action(CREATE_LINK)
            }
            linked => linked.with_action(CREATE_LINK),
        }
    }

    fn open_unplaced_directory(&mut self, name: &[u8]) -> Result<Directory, StepError> {
        if let Some(directory) = self.open.get(name) {
            return Ok(directory.clone());
        }
        let destination = &mut self.tree.destination;
        // Even without any file in the layers, a special file can have several names.
        let unplaced_top = make_unplaced_top(&mut self.unplaced_top, &self.name, destination)?;
        let opened = destination.open_child(&unplaced_top, name, false);
        let directory = match opened {
            Err(Errno::NOENT) => make_private_directory(&unplaced_top, name, destination)?,
            opened => opened.with_action(MOVE_FILE)?,
        };
        if self.open.len() >= MAX_OPEN_DIRECTORIES {
            self.open.clear();
        }
        self.open.insert(name.to_vec(), directory.clone());
        Ok(directory)
    }
}

fn directory_name(layer: usize, ino: Ino) -> Vec<u8> {
    format!("{layer}-{}", ino.0 / FILES_PER_DIRECTORY).into_bytes()
}

/// Name of an unplaced file, unique among all layers.
fn file_name(layer: usize, ino: Ino) -> Vec<u8> {
    format!("{layer}-{}", ino.0).into_bytes()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::index::MemoryLimit;
    use crate::materialize::test_support::{feed, member};
    use crate::materialize::{Materializer, Summary};
    use crate::tar::{self, Timestamp};

    /// For each path: kind with size or target, mtime, owner and group, link count.
    type TreeListing = BTreeMap<String, (String, i64, (u32, u32), u64)>;

    fn list_index(index: &Index) -> TreeListing {
        let mut listing = TreeListing::new();
        let root = index.entry(Ino::ROOT).expect("there");
        let own = (
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw(),
        );
        let is_root = rustix::process::geteuid().is_root();
        let time = root.mtime().seconds;
        listing.insert(String::new(), ("d".to_owned(), time, own, 0));
        let mut pending = vec![(String::new(), Ino::ROOT)];
        while let Some((path, ino)) = pending.pop() {
            for child in index.children(ino, 0) {
                let name = std::str::from_utf8(child.name).expect("ASCII");
                let path = format!("{path}/{name}");
                let entry = index.entry(child.ino).expect("there");
                let links = entry.link_count().into();
                let (what, links) = match entry.kind() {
                    EntryKind::Directory => (format!("d {:o}", entry.mode()), 0),
                    EntryKind::File => (format!("f {}", entry.size()), links),
                    EntryKind::Symlink(target) => (format!("l {}", target.escape_ascii()), links),
                    _ => ("other".to_owned(), links),
                };
                if entry.kind() == EntryKind::Directory {
                    pending.push((path.clone(), child.ino));
                }
                // Only root gives entries, implied directories included, to their owners.
                let owner = if is_root {
                    (entry.uid(), entry.gid())
                } else {
                    own
                };
                listing.insert(path, (what, entry.mtime().seconds, owner, links));
            }
        }
        listing
    }

    fn list_disk(root: &Path) -> TreeListing {
        let mut listing = TreeListing::new();
        let stat = fs::metadata(root).expect("there");
        let owner = (stat.uid(), stat.gid());
        listing.insert(String::new(), ("d".to_owned(), stat.mtime(), owner, 0));
        let mut pending = vec![(String::new(), root.to_owned())];
        while let Some((above, directory)) = pending.pop() {
            for entry in fs::read_dir(directory).expect("listed") {
                let entry = entry.expect("listed");
                let stat = entry.metadata().expect("there");
                let name = entry.file_name().into_string().expect("ASCII");
                let path = format!("{above}/{name}");
                let kind = stat.file_type();
                let (what, links) = if kind.is_dir() {
                    pending.push((path.clone(), entry.path()));
                    (format!("d {:o}", stat.mode() & 0o7777), 0)
                } else if kind.is_symlink() {
                    let target = fs::read_link(entry.path()).expect("a link");
                    (format!("l {}", target.display()), stat.nlink())
                } else if kind.is_char_device() {
                    ("other".to_owned(), stat.nlink())
                } else {
                    (format!("f {}", stat.len()), stat.nlink())
                };
                let owner = (stat.uid(), stat.gid());
                listing.insert(path, (what, stat.mtime(), owner, links));
            }
        }
        listing
    }

    fn build_index(layer: &[(Member, Vec<u8>)], whiteouts: WhiteoutFormat) -> Index {
        let mut builder = Builder::new(Options {
            whiteouts: Some(whiteouts),
            ..Options::default()
        });
        for (member, _) in layer {
            // The index lists refused members as problems.
            builder.add_member(member).ok();
        }
        builder.finish(Origin::default())
    }

    fn write_layers(
        layers: &[Vec<(Member, Vec<u8>)>],
        place: &Path,
        whiteouts: WhiteoutFormat,
    ) -> Summary {
        let mut options = crate::materialize::Options::for_this_user();
        options.same_permissions = true;
        options.writers = Some(2);
        let mut materializer =
            Materializer::new(place, options, std::sync::Arc::default()).expect("a directory");
        materializer.begin_layers(whiteouts);
        for layer in layers {
            materializer.begin_layer();
            let members = layer.iter();
            feed(
                &mut materializer,
                members.map(|(member, content)| (member.clone(), content.as_slice())),
            );
            materializer.end_layer().expect("nothing fatal");
        }
        materializer.finish().expect("nothing fatal")
    }

    #[derive(Clone, Debug)]
    enum Step {
        File(String),
        Directory(String, u32),
        Symlink(String, String),
        Hard(String, String),
        Device(String),
        Marked(String),
    }

    /// Members with distinct contents and times.
    fn members(layers: &[Vec<Step>]) -> Vec<Vec<(Member, Vec<u8>)>> {
        let mut count = 0;
        let mut one = |step: &Step| {
            count += 1;
            let plain = |name: &str, kind| Member {
                uid: count % 3,
                gid: count % 2,
                // Owners in layers are numbers, so these names have no effect.
                user: b"daemon".to_vec(),
                group: b"daemon".to_vec(),
                mtime: Timestamp {
                    seconds: i64::from(count),
                    nanoseconds: 0,
                },
                ..member(name.as_bytes(), kind)
            };
            let len = usize::try_from(count).expect("few");
            match step {
                Step::File(name) => {
                    let (sized, content) = (plain(name, tar::MemberKind::File), vec![7; len]);
                    let payload = crate::base::extent::Extent::with_len(
                        crate::base::extent::Plain(512),
                        len as u64,
                    );
                    let size = len as u64;
                    (
                        Member {
                            payload,
                            size,
                            ..sized
                        },
                        content,
                    )
                }
                Step::Directory(name, mode) => {
                    let mode = *mode;
                    (
                        Member {
                            mode,
                            ..plain(name, tar::MemberKind::Directory)
                        },
                        Vec::new(),
                    )
                }
                Step::Symlink(name, target) => (
                    plain(name, tar::MemberKind::Symlink(target.as_bytes().to_vec())),
                    Vec::new(),
                ),
                Step::Hard(name, target) => (
                    plain(name, tar::MemberKind::HardLink(target.as_bytes().to_vec())),
                    Vec::new(),
                ),
                Step::Device(name) => (
                    plain(name, tar::MemberKind::CharDevice(tar::Device::default())),
                    Vec::new(),
                ),
                Step::Marked(name) => {
                    let directory = plain(name, tar::MemberKind::Directory);
                    let xattrs = vec![(b"user.overlay.opaque".to_vec(), b"y".to_vec())];
                    (
                        Member {
                            mode: 0o755,
                            xattrs,
                            ..directory
                        },
                        Vec::new(),
                    )
                }
            }
        };
        let mut one_layer = |layer: &Vec<Step>| layer.iter().map(&mut one).collect();
        layers.iter().map(&mut one_layer).collect()
    }

    fn layers() -> impl Strategy<Value = Vec<Vec<Step>>> {
        let path = || "[abc](/[abc]){0,2}";
        let step = prop_oneof![
            4 => path().prop_map(Step::File),
            2 => (path(), 0o700..=0o777_u32).prop_map(|(path, mode)| Step::Directory(path, mode)),
            1 => (path(), "(\\.\\./)?[abc](/[abc])?").prop_map(|(path, target)| Step::Symlink(path, target)),
            2 => (path(), path()).prop_map(|(path, target)| Step::Hard(path, target)),
            2 => "([abc]/){0,2}\\.wh\\.[abc]".prop_map(Step::File),
            1 => "([abc]/){0,2}\\.wh\\.\\.wh\\.\\.opq".prop_map(Step::File),
            1 => "([abc]/){0,2}\\.wh\\.[abc]/[abc]".prop_map(Step::File),
            2 => ("([abc]/){0,2}\\.wh\\.([abc]|\\.wh\\.(opq|aufs))", path())
                .prop_map(|(path, target)| Step::Hard(path, target)),
            1 => ("([abc]/){0,2}\\.wh\\.c/[abc]", path())
                .prop_map(|(path, target)| Step::Hard(path, target)),
            2 => ("([abc]/){0,2}\\.wh\\.[abc]", path(), "[abc]").prop_map(|(path, target, name)| {
                Step::Hard(path, format!("{target}/{name}"))
            }),
            1 => path().prop_map(Step::Device),
            1 => path().prop_map(Step::Marked),
        ];
        let layer = prop::collection::vec(step, 0..10);
        prop::collection::vec(layer, 1..4)
    }

    /// Checks that the tree on disk matches the merged index, and that the same entries are left out.
    fn check_written_layers(
        steps: &[Vec<Step>],
        whiteouts: WhiteoutFormat,
    ) -> Result<(), TestCaseError> {
        let layers = members(steps);
        let indexes: Vec<_> = layers
            .iter()
            .map(|layer| build_index(layer, whiteouts))
            .collect();
        let indexes: Vec<_> = indexes.iter().collect();
        let merged = merge(&indexes, whiteouts, &MemoryLimit::none()).expect("few");
        let expected = list_index(&merged.index);
        let place = tempfile::tempdir().expect("a directory");
        let summary = write_layers(&layers, place.path(), whiteouts);
        let found = list_disk(place.path());
        prop_assert_eq!(found, expected, "{:#?}", summary.problems);
        prop_assert_eq!(
            summary.errors,
            merged.index.problem_count(),
            "{:#?}",
            summary.problems
        );
        Ok(())
    }

    /// Writes `a` and `b` as one layer. Calls `interfere` after each with the directory of unplaced files.
    fn write_two_files(interfere: impl Fn(&Path, usize)) -> (Vec<String>, TreeListing) {
        let place = tempfile::tempdir().expect("a directory");
        let unplaced = place.path().join(UNPLACED_FILES);
        let mut options = crate::materialize::Options::for_this_user();
        options.writers = Some(1);
        let mut materializer =
            Materializer::new(place.path(), options, std::sync::Arc::default()).expect("opened");
        materializer.begin_layers(WhiteoutFormat::Oci);
        materializer.begin_layer();
        for (count, name) in [b"a", b"b"].into_iter().enumerate() {
            feed(
                &mut materializer,
                [crate::materialize::test_support::file(name, b"content")],
            );
            materializer.tree.destination.writers.wait_for_all();
            interfere(&unplaced, count);
        }
        materializer.end_layer().expect("nothing fatal");
        let summary = materializer.finish().expect("nothing fatal");
        let reported = summary.problems.iter().map(ToString::to_string);
        (reported.collect(), list_disk(place.path()))
    }

    #[test]
    fn file_removed_before_it_is_placed_is_reported() {
        let (reported, listing) = write_two_files(|unplaced, count| {
            if count == 1 {
                fs::remove_file(unplaced.join("0-0/0-2")).expect("removed");
            }
        });
        assert_eq!(
            reported,
            ["a: cannot move the file to its place: No such file or directory (os error 2)"]
        );
        assert_eq!(listing.keys().collect::<Vec<_>>(), ["", "/b"]);
    }

    #[test]
    fn file_that_cannot_be_created_is_reported_once() {
        let (reported, _) = write_two_files(|unplaced, count| {
            if count == 0 {
                fs::remove_dir_all(unplaced.join("0-0")).expect("removed");
            }
        });
        assert_eq!(reported.len(), 2, "{reported:?}");
        assert!(
            reported[0].starts_with("b: cannot create the file"),
            "{reported:?}"
        );
        assert!(
            reported[1].starts_with("a: cannot move the file"),
            "{reported:?}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        // Promises: layer-written
        #[test]
        fn written_layers_equal_the_merged_index(steps in layers(), oci in any::<bool>()) {
            let whiteouts = if oci { WhiteoutFormat::Oci } else { WhiteoutFormat::Overlay };
            check_written_layers(&steps, whiteouts)?;
        }
    }
}
