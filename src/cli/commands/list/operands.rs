//! Opens SOURCE as a tree of files: the entries of an archive, of an index file or of a mount, or a directory of this
//! machine.

use std::ffi::OsString;
use std::io::{self, ErrorKind, IsTerminal, stdout};
use std::iter;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use tokio::runtime::Runtime;

use crate::cli::args::{SourceArgs, TreeArgs};
use crate::cli::environment;
use crate::cli::exit_status;
use crate::cli::open_archive;
use crate::cli::shards;
use crate::cli::ui::output::{self, UsageError};
use tarfs::archive::{TreeOrigin, Volume};
use tarfs::index::format::Error as Cause;
use tarfs::index::store::{self, RowsToLoad};
use tarfs::index::{Index, LazyIndex, MemoryLimit, ShardPlan};
use tarfs::internal::escape::escape;
use tarfs::internal::resolve::without_dots;
use tarfs::locate::SourceSpec;
use tarfs::serve;
use tarfs::source::local_path;
use tarfs::tree::{
    DirectoryTree, FileKind, FollowedLinks, IndexTree, Item, Name, OpenDirectory, ResolvedFile,
    SharedOutput, Start, Tree, Visitor, followed_metadata_of, is_link_loop, metadata_of,
    walk_parallel,
};

/// Number of FUSE as a type of file systems, as in statfs(2).
const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;

/// A file at which a verb starts.
#[derive(Clone, Debug)]
pub(crate) struct StartPoint {
    /// Its path as it is shown.
    path: Vec<u8>,
    /// PATH without needless slashes and dots, or one of several directories as it is given; empty for SOURCE itself.
    pub label: Vec<u8>,
    /// The path that JSON has: in an archive without a leading slash and links; empty for SOURCE itself.
    pub inner_path: Vec<u8>,
    kind: FileKind,
    inode: u64,
    /// The number of its directory; 0 for SOURCE itself.
    pub parent: u64,
    /// The file system that holds it; 0 in an archive.
    file_system: u64,
}

impl StartPoint {
    pub(crate) fn name(&self) -> Name<'_> {
        Name {
            name: &self.path,
            kind: self.kind,
            inode: self.inode,
        }
    }
}

/// Needs of a verb.
#[expect(clippy::struct_excessive_bools, reason = "each is a need of its own")]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Needs {
    /// Names in the order of their bytes, where they are stored in that order, too.
    pub order: bool,
    /// Names and types of files, or all attributes.
    pub rows: RowsToLoad,
    /// The contents of files, which an index alone does not have.
    pub contents: bool,
    /// The links that are followed.
    pub links: FollowedLinks,
    /// Whether files behind links are examined, followed or not.
    pub targets: bool,
    /// Whether a tree is made of the output, so that it comes only from those who may choose one.
    pub is_written: bool,
}

impl Needs {
    /// Opens SOURCE of `args`, with the threads for its network.
    fn open_volume(self, args: &TreeArgs) -> anyhow::Result<(Arc<dyn Volume>, Runtime)> {
        let (source, layers, cache) = (&args.source, &args.layers, &args.cache);
        let origin = if self.is_written {
            TreeOrigin::WRITTEN
        } else {
            TreeOrigin::SHOWN
        };
        let opened = open_archive::open_tree(source, layers, cache, origin, self.rows)?;
        Ok((opened.1, opened.0))
    }

    /// The tree of `index`.
    fn tree(self, index: LazyIndex<Arc<Index>>) -> IndexTree {
        let tree = IndexTree::new(index, self.order);
        if self.is_written {
            tree.for_other_machines()
        } else {
            tree
        }
    }

    /// Checks that the tree of `index` may be written if it is to be.
    fn check(self, index: &Index, args: &TreeArgs) -> anyhow::Result<()> {
        ensure!(
            !(self.is_written && index.origin().is_truncated) || args.source.allow_truncated,
            "the archive is truncated (--allow-truncated takes its readable part)"
        );
        Ok(())
    }
}

/// The operands of a verb, opened: SOURCE as a tree of files, and the files at which the verb starts.
pub(crate) struct Operands {
    pub tree: OpenTree,
    pub starts: Vec<StartPoint>,
    pub output: Arc<SharedOutput>,
    /// Whether more than one file was named at which to start.
    pub has_several: bool,
    /// Whether each PATH was found and opened.
    pub has_all_paths: bool,
    jobs: Option<NonZeroUsize>,
    /// The archive or image, and the threads for its network.
    archive: Option<(Arc<dyn Volume>, Runtime)>,
    /// Whether the problems of the index are those of SOURCE.
    has_problems: bool,
}

/// A tree that a verb walks.
pub(crate) enum OpenTree {
    Index(Arc<IndexTree>),
    Directory {
        tree: Arc<DirectoryTree>,
        /// The tree of the starting points, at which more links may be followed.
        starts: Arc<DirectoryTree>,
        /// The current directory.
        base: OpenDirectory,
    },
}

impl OpenTree {
    fn of_directory(links: FollowedLinks) -> anyhow::Result<Self> {
        let tree = Arc::new(DirectoryTree::new().following(links));
        let base = tree.base().context("cannot open the current directory")?;
        let starts = match links {
            FollowedLinks::Starts => Arc::new(DirectoryTree::new().following(FollowedLinks::All)),
            _ => Arc::clone(&tree),
        };
        Ok(Self::Directory { tree, starts, base })
    }
}

impl Operands {
    /// Opens SOURCE of `args`, and finds `paths` in it, or its root. If SOURCE is a directory of this machine, `paths` are
    /// more of its files, as of the namesakes of a verb. Prints those that are missing.
    pub(crate) fn open(args: &TreeArgs, paths: &[OsString], needs: Needs) -> anyhow::Result<Self> {
        let (mut archive, mut starts) = (None, Vec::new());
        let directory = local_start(&args.source, paths);
        let directory = directory.as_deref();
        if let Some(directory) = directory {
            let mut given = args.source.given.clone();
            if needs.is_written {
                // The tree of a mount may be truncated.
                given = given.without(&["allow_truncated"]);
            }
            given.check_directory(directory)?;
        }
        let operands = operands(directory, paths);
        let has_several = operands.len() > 1;
        let tree = if let Some(directory) = directory {
            let start = |path| start_here(Path::new(path), has_several, needs.links);
            let found = operands.iter().map(start);
            starts.extend(found.flatten());
            // The index of a mount does not know what links lead to outside.
            let has_index = !needs.contents && !needs.targets && needs.links != FollowedLinks::All;
            let index = has_index.then(|| mounted_index(directory, &starts, args));
            if let Some(index) = index.flatten() {
                needs.check(&index, args)?;
                let device = starts.first().map_or(0, |start| start.file_system);
                let tree = needs.tree(LazyIndex::new(index)).with_file_system(device);
                OpenTree::Index(Arc::new(tree))
            } else {
                OpenTree::of_directory(needs.links)?
            }
        } else {
            let tree = if let Some(index) = saved_index(args)? {
                needs.check(&index, args)?;
                needs.tree(LazyIndex::new(Arc::new(index)))
            } else {
                let (volume, network) = needs.open_volume(args)?;
                let tree = volume_tree(&volume, needs)?;
                archive = Some((volume, network));
                tree
            };
            let start = |path| start_in_archive(&tree, path, needs.links);
            let found = operands.iter().map(start);
            starts.extend(found.flatten());
            OpenTree::Index(Arc::new(tree.following(needs.links)))
        };
        Ok(Self {
            has_several,
            has_all_paths: starts.len() == operands.len(),
            tree,
            starts,
            output: standard_output(false)?,
            jobs: args.jobs.jobs,
            archive,
            has_problems: directory.is_none(),
        })
    }

    pub(crate) fn plan(&self, count: u32) -> anyhow::Result<ShardPlan> {
        match (&self.archive, &self.tree) {
            (None, OpenTree::Index(tree)) => Ok(ShardPlan::new(tree.index().tree()?, count)),
            (archive, _) => {
                let (volume, _) = archive.as_ref().context("a directory has no shards")?;
                let plan = shards::plan_of(&**volume, count);
                let plan = plan.map_err(|error| match volume.as_archive() {
                    Some(_) => error,
                    None => UsageError(error.to_string()).into(),
                });
                Ok(plan?.2)
            }
        }
    }

    /// Walks over the directory `item`, which is called `path`. Returns its state if it cannot be opened, and breaks if the
    /// visitor ended the walk.
    pub(crate) fn walk<T: Tree + Send + 'static, V: Visitor<T>>(
        &self,
        tree: &Arc<T>,
        visitor: &Arc<V>,
        (item, path): (&Item<'_, T>, &[u8]),
        state: V::State,
    ) -> ControlFlow<(), Option<V::State>> {
        let directory = match item.open() {
            Ok(directory) => directory,
            Err(error) => {
                self.output.report(item.path(), &error);
                return ControlFlow::Continue(Some(state));
            }
        };
        let start = Start {
            path: path.to_owned(),
            inode: item.inode(),
            directory,
            state,
        };
        walk_parallel(tree, visitor, vec![start], self.jobs).map_continue(|()| None)
    }

    /// Ends the output, and prints the problems of the archive. Returns the exit code, which is `missing` if one of the
    /// paths was, or the output could not be written.
    pub(crate) fn finish(&self, missing: u8) -> ExitCode {
        let is_written = finish(&self.output);
        let code = match (self.has_all_paths && is_written, self.output.has_failed()) {
            (false, _) => ExitCode::from(missing),
            (true, true) => ExitCode::from(exit_status::PARTIAL),
            (true, false) => ExitCode::SUCCESS,
        };
        let report = |index: &_| output::report_problems(index, code);
        match &self.tree {
            OpenTree::Index(tree) if self.has_problems => tree.index().read(report).unwrap_or(code),
            _ => code,
        }
    }
}

fn volume_tree(volume: &Arc<dyn Volume>, needs: Needs) -> anyhow::Result<IndexTree> {
    let index = volume.complete_index();
    let index = index.context("the index is not complete")?;
    let tree = needs.tree(index);
    Ok(if needs.contents {
        with_contents(tree, volume)
    } else {
        tree
    })
}

/// The index in the file SOURCE, if it is an index file.
fn saved_index(args: &TreeArgs) -> anyhow::Result<Option<Index>> {
    let Some(path) = args.source.source.local_path() else {
        return Ok(None);
    };
    let limit = MemoryLimit::new(args.source.index_memory.0);
    match store::read(&path, &limit) {
        Ok(index) => {
            args.source.given.check_index_file(&path)?;
            let (entries, most) = (index.member_count(), args.source.max_entries);
            ensure!(
                most.is_none_or(|most| entries <= most),
                "{}: its {entries} entries are more than --max-entries",
                path.display()
            );
            Ok(Some(index))
        }
        Err(error) => match error.cause {
            // An archive.
            Cause::NotAnIndex | Cause::NotAFile | Cause::Io(_) => Ok(None),
            _ => Err(error.into()),
        },
    }
}

/// The index of the process that serves the mount with all of `starts`, if there is one and it shows its entries.
fn mounted_index(directory: &Path, starts: &[StartPoint], args: &TreeArgs) -> Option<Arc<Index>> {
    let file_system = rustix::fs::statfs(directory).ok()?;
    let device = starts.first()?.file_system;
    let is_shared = starts.iter().all(|start| start.file_system == device);
    if u64::try_from(file_system.f_type) != Ok(FUSE_SUPER_MAGIC) || !is_shared {
        return None;
    }
    let device = (rustix::fs::major(device), rustix::fs::minor(device));
    let limit = MemoryLimit::new(args.source.index_memory.0);
    let directories = environment::runtime_dirs();
    let index = directories.iter().find_map(|sockets| {
        let index = serve::request_index(sockets, device, &limit);
        let index = index.inspect_err(|error| tracing::debug!(%error, "the mount is walked"));
        index.ok().flatten()
    })?;
    if index.is_published() {
        output::print_error(format_args!(
            "note: the tree of the mount comes from a published index (`tarfs status` names it)"
        ));
    }
    Some(Arc::new(index))
}

/// The same tree, with the contents of `volume`.
pub(crate) fn with_contents(tree: IndexTree, volume: &Arc<dyn Volume>) -> IndexTree {
    let volume = Arc::clone(volume);
    tree.with_contents(move |ino, offset, len| {
        let read = volume.read_blocking(ino, offset, len);
        // A slice would keep memory for which other reads wait.
        let copied = read.map(|bytes| Bytes::copy_from_slice(&bytes));
        copied.map_err(io::Error::other)
    })
}

/// The directory of this machine that `source` names, if it is one.
pub(crate) fn local_directory(source: &SourceSpec) -> Option<PathBuf> {
    source.local_path().filter(|path| path.is_dir())
}

/// Refuses a directory of this machine as SOURCE. `hint` says what to do instead, or why.
pub(crate) fn ensure_archive(source: &SourceSpec, hint: &str) -> anyhow::Result<()> {
    match local_directory(source) {
        Some(name) => bail!(
            "{}: is a directory, not an archive ({hint})",
            name.display()
        ),
        None => Ok(()),
    }
}

/// The files at which a verb starts: `directory` and `paths` of this machine, or `paths` in an archive, or its root.
fn operands(directory: Option<&Path>, paths: &[OsString]) -> Vec<OsString> {
    let Some(directory) = directory else {
        let root = paths.is_empty().then(OsString::new);
        return root.into_iter().chain(paths.iter().cloned()).collect();
    };
    let here =
        |path: &OsString| local_path(path).map_or_else(|| path.clone(), PathBuf::into_os_string);
    let first = directory.as_os_str().to_owned();
    iter::once(first).chain(paths.iter().map(here)).collect()
}

/// `path` without slashes at its end.
pub(super) fn without_slashes(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&byte| byte != b'/');
    path.get(..=end.unwrap_or(0)).unwrap_or_default()
}

/// The file of this machine at `path`.
fn start_here(path: &Path, is_one_of_several: bool, links: FollowedLinks) -> Option<StartPoint> {
    let label = match path.as_os_str().as_bytes() {
        _ if !is_one_of_several => b"",
        path => path,
    };
    let (label, mut path) = (label.to_owned(), path.to_owned());
    let mut found = metadata_of(&path);
    if matches!(&found, Ok(found) if found.kind == FileKind::Symlink) {
        match links {
            FollowedLinks::StartDirectories if path.is_dir() => {
                // With a slash the kernel follows it.
                path.push("");
                found = metadata_of(&path);
            }
            FollowedLinks::Starts | FollowedLinks::All => found = followed_metadata_of(&path),
            FollowedLinks::StartDirectories | FollowedLinks::None => {}
        }
    }
    match found {
        Ok(found) => {
            let above = match path.parent() {
                _ if label.is_empty() => None,
                Some(above) if found.kind != FileKind::Directory => {
                    metadata_of(&Path::new(".").join(above)).ok()
                }
                _ => metadata_of(&path.join("..")).ok(),
            };
            Some(StartPoint {
                path: path.into_os_string().into_vec(),
                inner_path: without_slashes(&label).to_owned(),
                label,
                kind: found.kind,
                inode: found.inode,
                parent: above.map_or(0, |above| above.inode),
                file_system: found.file_system,
            })
        }
        Err(error) => {
            report(path.as_os_str().as_bytes(), &error);
            None
        }
    }
}

/// SOURCE as a file of this machine: a directory, or a missing file beside directories, as of the namesakes.
///
/// A missing file is opened as an archive if its name resembles one elsewhere, or a flag is for archives.
fn local_start(source: &SourceArgs, paths: &[OsString]) -> Option<PathBuf> {
    let path = source.source.local_path()?;
    let is_archive =
        || source.source.resembles_other_source() || source.given.check_directory(&path).is_err();
    let is_directory = |path: &OsString| local_path(path).is_some_and(|path| path.is_dir());
    let is_start = match std::fs::metadata(&path) {
        Ok(found) => found.is_dir(),
        Err(error) => {
            matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
                && !is_archive()
                && paths.iter().any(is_directory)
        }
    };
    is_start.then(|| path.clone())
}

fn start_in_archive(tree: &IndexTree, path: &OsString, links: FollowedLinks) -> Option<StartPoint> {
    let shown = match path.as_bytes() {
        b"" => b".",
        path => path,
    };
    let found = match tree.resolve(path.as_bytes(), false) {
        Ok(link) if links != FollowedLinks::None && link.kind == FileKind::Symlink => {
            let only_directories = links == FollowedLinks::StartDirectories;
            let wanted =
                |found: &ResolvedFile| !only_directories || found.kind == FileKind::Directory;
            match tree.resolve_link(path.as_bytes()) {
                Err(error) if only_directories && is_link_loop(&error) => Ok(link),
                target => target.map(|target| target.filter(wanted).unwrap_or(link)),
            }
        }
        found => found,
    };
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            report_entry(shown, &error);
            return None;
        }
    };
    Some(StartPoint {
        path: shown.to_vec(),
        label: without_dots(path.as_bytes()),
        parent: if found.path.is_empty() {
            0
        } else {
            found.parent
        },
        inner_path: found.path,
        kind: found.kind,
        inode: found.inode,
        file_system: 0,
    })
}

/// Prints an error about the entry at `path` of an archive.
pub(crate) fn report_entry(path: &[u8], error: &io::Error) {
    if error.kind() == io::ErrorKind::NotFound {
        let path = escape(path);
        let reason = "not in the archive (`tarfs find` shows what is)";
        return output::print_error(format_args!("{path}: {reason}"));
    }
    report(path, error);
}

/// Prints an error about the file at `path`.
pub(crate) fn report(path: &[u8], error: &io::Error) {
    let path = escape(path);
    output::print_error(format_args!("{path}: {}", output::describe(error)));
}

/// Standard output, and errors about files, which are printed unless `quiet`.
pub(crate) fn standard_output(quiet: bool) -> io::Result<Arc<SharedOutput>> {
    let is_terminal = stdout().is_terminal();
    let print = move |error: &str| {
        if !quiet {
            output::print_error(error);
        }
    };
    Ok(Arc::new(SharedOutput::new(
        output::standard_output()?,
        is_terminal,
        print,
        output::describe,
    )))
}

/// Ends the output of a verb, and reports an error of writing. A reader of the pipe that has ended is no error.
/// Returns whether all is written.
pub(crate) fn finish(written: &SharedOutput) -> bool {
    match written.finish() {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let reason = output::describe(&error);
            written.fail(&format!("cannot write the output: {reason}"));
            false
        }
        _ => true,
    }
}
