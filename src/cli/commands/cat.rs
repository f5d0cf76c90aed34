//! `tarfs cat`: prints files of an archive or image.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;

use super::list::operands;
use crate::cli::args::{CacheArgs, LayerArgs, SourceArgs};
use crate::cli::exit_status;
use crate::cli::open_archive;
use crate::cli::ui::output;
use tarfs::archive::{ReadError, TreeOrigin, Volume};
use tarfs::index::Ino;
use tarfs::index::store::RowsToLoad;
use tarfs::tree::{FileKind, IndexTree};

const READ_BYTES: u32 = 1 << 20;

/// Arguments of `tarfs cat`.
#[derive(clap::Args, Debug)]
pub(crate) struct CatArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    layers: LayerArgs,

    #[command(flatten)]
    cache: CacheArgs,

    /// Print these files, in this order; symbolic links are followed inside SOURCE
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
}

pub(crate) fn run(args: &CatArgs) -> anyhow::Result<ExitCode> {
    operands::ensure_archive(&args.source.source, "use cat(1) for its files")?;
    let (source, layers, cache) = (&args.source, &args.layers, &args.cache);
    let (_network, volume) =
        open_archive::open_tree(source, layers, cache, TreeOrigin::WRITTEN, RowsToLoad::All)?;
    let index = volume.complete_index();
    let index = index.context("the archive is not indexed")?;
    let tree = IndexTree::new(index, false);
    let mut output = output::binary_stdout()?;
    let mut status = 0;
    for path in &args.paths {
        let path = path.as_bytes();
        let printed = find(&tree, path).and_then(|ino| print(&volume, ino, &mut output));
        match printed {
            Ok(()) => {}
            Err(Failure::Output(error)) if error.kind() == ErrorKind::BrokenPipe => break,
            Err(Failure::Output(error)) => {
                return Err(error).context("cannot write the output");
            }
            Err(Failure::Path(error)) => {
                status = exit_status::PARTIAL.max(status);
                operands::report_entry(path, &error);
            }
            Err(Failure::Content(error)) => {
                status = exit_status::FAILURE.max(status);
                operands::report_entry(path, &io::Error::other(error));
            }
        }
    }
    match output.flush() {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("cannot write the output")
        }
        _ => {
            let code = ExitCode::from(status);
            let report = |index: &_| output::report_problems(index, code);
            Ok(tree.index().read(report).unwrap_or(code))
        }
    }
}

/// Why a file is not printed.
enum Failure {
    /// No file has this path.
    Path(io::Error),
    /// The content is damaged, cut or unavailable.
    Content(ReadError),
    Output(io::Error),
}

/// The regular file at `path`.
fn find(tree: &IndexTree, path: &[u8]) -> Result<Ino, Failure> {
    let found = tree.resolve(path, true).map_err(Failure::Path)?;
    let refuse = |text: &str| Err(Failure::Path(io::Error::other(text.to_owned())));
    match found.kind {
        FileKind::File => u32::try_from(found.inode)
            .map(Ino)
            .or_else(|_| refuse("has no number")),
        FileKind::Directory => refuse("is a directory"),
        _ => refuse("is not a regular file"),
    }
}

fn print(volume: &Arc<dyn Volume>, ino: Ino, output: &mut impl Write) -> Result<(), Failure> {
    let mut offset = 0;
    loop {
        let read = volume.read_before_cut(ino, offset, READ_BYTES);
        let bytes = read.map_err(Failure::Content)?;
        if bytes.is_empty() {
            return Ok(());
        }
        output.write_all(&bytes).map_err(Failure::Output)?;
        offset += bytes.len() as u64;
    }
}
