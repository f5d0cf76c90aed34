//! Opens SOURCE as a tree of files: the entries of an archive, or a directory of this machine.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;

use super::args::{CacheArgs, LayerArgs, SourceArgs};
use super::open_archive;
use super::ui::output;
use tarfs::ArchivePath;
use tarfs::internal::error_chain::error_chain;
use tarfs::list::{DirectoryTree, FileKind, IndexTree, Name, SharedOutput, Tree, metadata_of};
use tarfs::locate::SourceSpec;

/// Exit code if a part of a tree could not be examined, as of find(1) and du(1).
const EXIT_PARTIAL: u8 = 1;

/// A file at which a verb starts.
#[derive(Clone, Debug)]
pub(crate) struct StartPoint {
    /// Its path as it is shown.
    path: Vec<u8>,
    kind: FileKind,
    inode: u64,
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

/// A verb for any tree.
pub(crate) trait TreeVerb {
    /// Runs it at the files `starts`, which are names in `base`. Returns whether it examined all of them.
    fn run<T: Tree + Send + 'static>(
        self,
        tree: &Arc<T>,
        base: &T::Directory,
        starts: &[StartPoint],
    ) -> anyhow::Result<bool>;
}

/// Runs `verb` on SOURCE, at `paths` in it or at its root. Errors of paths and problems of the archive are printed.
pub(crate) fn run(
    (source, layers, cache): (&SourceArgs, &LayerArgs, &CacheArgs),
    paths: &[OsString],
    verb: impl TreeVerb,
) -> anyhow::Result<ExitCode> {
    if let Some(directory) = local_directory(&source.source) {
        let tree = Arc::new(DirectoryTree::new());
        let base = tree.base().context("cannot open the current directory")?;
        let shown = paths.iter().map(|path| directory.join(path));
        let shown: Vec<PathBuf> = match paths {
            [] => vec![directory.to_owned()],
            _ => shown.collect(),
        };
        let found = shown
            .into_iter()
            .filter_map(|path| start_in_directory(&path));
        let (starts, count): (Vec<_>, _) = (found.collect(), paths.len().max(1));
        let is_complete = verb.run(&tree, &base, &starts)? && starts.len() == count;
        return Ok(exit_code(is_complete));
    }
    let network = open_archive::start_network_runtime()?;
    let quiet = !io::stderr().is_terminal();
    let volume = open_archive::open_tree(source, layers, cache, &network, true, quiet)?;
    let index = volume
        .complete_index()
        .context("the index is not complete")?;
    let tree = Arc::new(IndexTree::new(index));
    let root = [OsString::new()];
    let paths = if paths.is_empty() { &root } else { paths };
    let found = paths.iter().map(|path| start_in_archive(&tree, path));
    let starts: Vec<_> = found.flatten().collect();
    let is_complete = verb.run(&tree, &IndexTree::BASE, &starts)? && starts.len() == paths.len();
    match output::report_problems(tree.index()) {
        code if code == ExitCode::SUCCESS => Ok(exit_code(is_complete)),
        code => Ok(code),
    }
}

fn exit_code(is_complete: bool) -> ExitCode {
    match is_complete {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_PARTIAL),
    }
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

fn start_in_directory(path: &Path) -> Option<StartPoint> {
    match metadata_of(path) {
        Ok(found) => Some(StartPoint {
            path: path.as_os_str().as_bytes().to_owned(),
            kind: found.kind,
            inode: found.inode,
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
    Some(StartPoint { path, kind, inode })
}

/// Prints an error about the file at `path`.
pub(crate) fn report(path: &[u8], error: &io::Error) {
    let path = tarfs::list::escape(path);
    output::print_error(format_args!("{path}: {}", error_chain(error)));
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
