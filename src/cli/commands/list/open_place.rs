//! Opens SOURCE as a tree of files: the entries of an archive, of an index file or of a mount, or a directory of this
//! machine.

use std::ffi::OsString;
use std::io::{self, IsTerminal, stdout};
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use bytes::Bytes;

use crate::cli::args::TreeArgs;
use crate::cli::daemon::control_socket;
use crate::cli::environment;
use crate::cli::open_archive;
use crate::cli::ui::output;
use tarfs::ArchivePath;
use tarfs::archive::Volume;
use tarfs::index::format::Error as Cause;
use tarfs::index::store::{self, RowsToLoad};
use tarfs::index::{Index, Ino, MemoryLimit};
use tarfs::internal::error_chain::error_chain;
use tarfs::list::{
    DirectoryTree, FileKind, IndexTree, Name, SharedOutput, Start, Tree, Visitor, metadata_of,
    walk_parallel,
};
use tarfs::locate::SourceSpec;

/// Number of FUSE as a type of file systems, as in statfs(2).
const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;

/// Exit code if a part of a tree could not be examined or changed, or an expression is invalid, as of the namesakes.
pub(super) const EXIT_PARTIAL: u8 = 1;

/// A file at which a verb starts.
#[derive(Clone, Debug)]
pub(crate) struct StartPoint {
    /// Its path as it is shown.
    path: Vec<u8>,
    /// Its path in SOURCE; empty for SOURCE itself.
    inner_path: Vec<u8>,
    kind: FileKind,
    inode: u64,
    /// The file system that holds it; 0 in an archive.
    file_system: u64,
}

impl StartPoint {
    /// Walks over the directory, and returns whether the visitor ended the walk.
    pub(crate) fn walk<T: Tree + Send + 'static, V: Visitor<T>>(
        &self,
        tree: &Arc<T>,
        visitor: &Arc<V>,
        (path, directory): (&[u8], T::Directory),
        state: V::State,
        jobs: Option<NonZeroUsize>,
    ) -> anyhow::Result<ControlFlow<()>> {
        let start = Start {
            path: path.to_owned(),
            inode: self.inode,
            directory,
            state,
        };
        walk_parallel(tree, visitor, vec![start], jobs).context("cannot start a thread")
    }

    /// Its path in SOURCE, without a leading slash; empty for SOURCE itself.
    pub(crate) fn inner_path(&self) -> &[u8] {
        &self.inner_path
    }

    pub(crate) fn name(&self) -> Name<'_> {
        Name {
            name: &self.path,
            kind: self.kind,
            inode: self.inode,
        }
    }
}

/// A verb for any tree.
pub(crate) trait TreeVerb {
    /// Exit code if one of the given paths is missing.
    const EXIT_MISSING: u8 = EXIT_PARTIAL;

    /// Prepares it for `volume`, if SOURCE is an archive or an image.
    fn prepare(&mut self, volume: &dyn Volume) -> anyhow::Result<()> {
        let _ = volume;
        Ok(())
    }

    /// Whether it wants names in the order of their bytes, where they are stored in that order, too.
    fn is_sorted(&self) -> bool {
        false
    }

    /// Whether it uses attributes of files besides their types.
    fn needs_attributes(&self) -> bool {
        true
    }

    /// Whether it reads the contents of files, which an index alone does not have.
    fn reads_contents(&self) -> bool {
        false
    }

    /// Runs it at the files `starts`, which are names in `base`.
    fn run<T: Tree + Send + 'static>(
        self,
        tree: &Arc<T>,
        base: &T::Directory,
        starts: &[StartPoint],
        output: &Arc<SharedOutput>,
    ) -> anyhow::Result<()>;
}

/// Runs `verb` on SOURCE of `args`, at `paths` in it or at its root. Errors of paths and problems of the archive are printed.
pub(crate) fn run<V: TreeVerb>(
    args: &TreeArgs,
    paths: &[OsString],
    mut verb: V,
) -> anyhow::Result<ExitCode> {
    let root = [OsString::new()];
    let paths = if paths.is_empty() { &root } else { paths };
    if let Some(directory) = local_directory(&args.source.source) {
        let tree = Arc::new(DirectoryTree::new());
        let base = tree.base().context("cannot open the current directory")?;
        let found = paths.iter().map(|path| start_in_directory(directory, path));
        let starts: Vec<_> = found.flatten().collect();
        let has_all_paths = starts.len() == paths.len();
        let is_indexed = !verb.reads_contents();
        let index = is_indexed.then(|| mounted_index(directory, &starts, args));
        return match index.flatten() {
            Some(index) => {
                let tree = Arc::new(IndexTree::new(index, verb.is_sorted()));
                run_at(verb, &tree, &Ino::ROOT, &starts, has_all_paths)
            }
            None => run_at(verb, &tree, &base, &starts, has_all_paths),
        };
    }
    if let Some(index) = saved_index(args)? {
        let tree = IndexTree::new(Arc::new(index), verb.is_sorted());
        return run_on_index(verb, tree, paths);
    }
    let network = open_archive::start_network_runtime()?;
    let quiet = !io::stderr().is_terminal();
    let rows = if verb.needs_attributes() {
        RowsToLoad::All
    } else {
        RowsToLoad::Names
    };
    let volume = open_archive::open_tree(
        &args.source,
        &args.layers,
        &args.cache,
        &network,
        rows,
        quiet,
    )?;
    verb.prepare(&*volume)?;
    let index = volume
        .complete_index()
        .context("the index is not complete")?;
    let mut tree = IndexTree::new(index, verb.is_sorted());
    if verb.reads_contents() {
        tree = with_contents(tree, &volume);
    }
    run_on_index(verb, tree, paths)
}

fn run_on_index<V: TreeVerb>(
    verb: V,
    tree: IndexTree,
    paths: &[OsString],
) -> anyhow::Result<ExitCode> {
    let tree = Arc::new(tree);
    let found = paths.iter().map(|path| start_in_archive(&tree, path));
    let starts: Vec<_> = found.flatten().collect();
    let has_all_paths = starts.len() == paths.len();
    let code = run_at(verb, &tree, &Ino::ROOT, &starts, has_all_paths)?;
    match output::report_problems(tree.index()) {
        problems if problems == ExitCode::SUCCESS => Ok(code),
        problems => Ok(problems),
    }
}

/// The index in the file SOURCE, if it is an index file.
fn saved_index(args: &TreeArgs) -> anyhow::Result<Option<Index>> {
    let SourceSpec::Plain(path) = &args.source.source else {
        return Ok(None);
    };
    let limit = MemoryLimit::new(args.source.index_memory.0);
    match store::read(Path::new(path), &limit) {
        Ok(index) => Ok(Some(index)),
        Err(error) => match error.cause {
            // An archive, or a URL.
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
    directories.iter().find_map(|sockets| {
        let index = control_socket::request_index(sockets, device, &limit);
        let index = index.inspect_err(|error| tracing::debug!(%error, "the mount is walked"));
        index.ok().flatten().map(Arc::new)
    })
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

fn run_at<V: TreeVerb, T: Tree + Send + 'static>(
    verb: V,
    tree: &Arc<T>,
    base: &T::Directory,
    starts: &[StartPoint],
    has_all_paths: bool,
) -> anyhow::Result<ExitCode> {
    let output = standard_output(false);
    verb.run(tree, base, starts, &output)?;
    finish(&output)?;
    Ok(match (has_all_paths, output.has_failed()) {
        (false, _) => ExitCode::from(V::EXIT_MISSING),
        (true, true) => ExitCode::from(EXIT_PARTIAL),
        (true, false) => ExitCode::SUCCESS,
    })
}

/// The directory of this machine that `source` names, if it is one.
pub(crate) fn local_directory(source: &SourceSpec) -> Option<&Path> {
    match source {
        SourceSpec::Plain(path) if !path.as_bytes().contains(&b':') || Path::new(path).exists() => {
            Some(Path::new(path)).filter(|path| path.is_dir())
        }
        _ => None,
    }
}

fn start_in_directory(directory: &Path, inner: &OsString) -> Option<StartPoint> {
    let path = if inner.is_empty() {
        directory.to_owned()
    } else {
        directory.join(inner)
    };
    let inner = ArchivePath::sanitize(inner.as_bytes()).path;
    match metadata_of(&path) {
        Ok(found) => Some(StartPoint {
            path: path.as_os_str().as_bytes().to_owned(),
            inner_path: inner.as_bytes().to_owned(),
            kind: found.kind,
            inode: found.inode,
            file_system: found.file_system,
        }),
        Err(error) => {
            report(path.as_os_str().as_bytes(), &error);
            None
        }
    }
}

fn start_in_archive(tree: &IndexTree, path: &OsString) -> Option<StartPoint> {
    let clean = ArchivePath::sanitize(path.as_bytes()).path;
    let Some((kind, inode)) = tree.find(&clean) else {
        output::print_error(format_args!(
            "{clean}: not in the archive (`tarfs find` shows what is)"
        ));
        return None;
    };
    let path = match path.as_bytes() {
        b"" => b".".to_vec(),
        _ => path.clone().into_vec(),
    };
    let inner_path = clean.as_bytes().to_owned();
    Some(StartPoint {
        path,
        inner_path,
        kind,
        inode,
        file_system: 0,
    })
}

/// Prints an error about the file at `path`.
pub(crate) fn report(path: &[u8], error: &io::Error) {
    let path = tarfs::list::escape(path);
    output::print_error(format_args!("{path}: {}", error_chain(error)));
}

/// Standard output, and errors about files, which are printed unless `quiet`.
pub(crate) fn standard_output(quiet: bool) -> Arc<SharedOutput> {
    let is_terminal = stdout().is_terminal();
    Arc::new(SharedOutput::new(stdout(), is_terminal, move |error| {
        if !quiet {
            output::print_error(error);
        }
    }))
}

/// Ends the output of a verb. A reader of the pipe that has ended is no error.
pub(crate) fn finish(output: &SharedOutput) -> anyhow::Result<()> {
    match output.finish() {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write the output")
        }
        _ => Ok(()),
    }
}
