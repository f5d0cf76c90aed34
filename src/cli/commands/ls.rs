//! `tarfs ls`: lists an archive's entries from its index.

use std::ffi::OsString;
use std::io::{self, BufWriter, IsTerminal, Write, stdout};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::{Context, ensure};

use crate::cli::args::{CacheArgs, LayerArgs, SourceArgs};
use crate::cli::open_archive;
use crate::cli::ui::output;
use tarfs::ArchivePath;
use tarfs::index::{Entry, Index, Ino};
use tarfs::list::{self, Columns, json};

/// Arguments of `tarfs ls`.
#[derive(clap::Args, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct LsArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    layers: LayerArgs,

    #[command(flatten)]
    cache: CacheArgs,

    /// List this entry, or the contents of this directory
    #[arg(value_name = "PATH")]
    path: Option<OsString>,

    /// Show type, mode, links, owner, size and time of each entry
    #[arg(short, long)]
    long: bool,

    /// List subdirectories too, with full paths
    #[arg(short = 'R', long)]
    recursive: bool,

    /// Print one JSON object per line for each entry
    #[arg(long, conflicts_with = "long")]
    json: bool,

    /// Show numeric IDs of owners
    #[arg(short, long)]
    numeric_uid_gid: bool,
}

pub(crate) fn run(args: &LsArgs) -> anyhow::Result<ExitCode> {
    if args.source.source.is_place() {
        return list_archives(args);
    }
    let network = open_archive::start_network_runtime()?;
    let quiet = !io::stderr().is_terminal();
    let volume = open_archive::open_tree(
        &args.source,
        &args.layers,
        &args.cache,
        &network,
        true,
        quiet,
    )?;
    list(args, &volume.index())
}

/// Prints the paths of the archives that a mount of SOURCE shows as directories.
fn list_archives(args: &LsArgs) -> anyhow::Result<ExitCode> {
    let has_flag = args.path.is_some() || args.long || args.json || args.layers.is_set();
    ensure!(
        !has_flag,
        "SOURCE is a directory of archives, of which only the names are listed (name one of them)"
    );
    let network = open_archive::start_network_runtime()?;
    let LsArgs {
        source,
        layers,
        cache,
        ..
    } = args;
    let (tree, context) = open_archive::tree_context(source, layers, cache, &network, true)?;
    let listing = context.list_place(&tree.source)?;
    listing.notes.iter().for_each(output::print_error);
    // A name has no control characters.
    let lines = listing
        .archives
        .iter()
        .map(|archive| format!("{}\n", archive.path));
    output::print_text(&lines.collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

fn list(args: &LsArgs, index: &Index) -> anyhow::Result<ExitCode> {
    let path = ArchivePath::sanitize(args.path.as_deref().unwrap_or_default().as_bytes()).path;
    let from = index
        .find(&path)
        .with_context(|| format!("{path}: not in the archive (`tarfs ls -R` shows what is)"))?
        .ino();
    let listing = Listing { args, index, from };
    let mut output = BufWriter::new(stdout().lock());
    match listing.write(&mut output).and_then(|()| output.flush()) {
        // The reader of the pipe has ended.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        result => {
            result.context("cannot write the listing")?;
            Ok(output::report_problems(index))
        }
    }
}

struct Listing<'a> {
    args: &'a LsArgs,
    index: &'a Index,
    from: Ino,
}

impl Listing<'_> {
    fn write(&self, output: &mut impl Write) -> io::Result<()> {
        let escaped = stdout().is_terminal();
        let mut columns = Columns::new(self.args.numeric_uid_gid, escaped);
        if self.args.long {
            // The widths need a separate walk, which is cheaper than storing all entries.
            self.entries()
                .for_each(|(_, entry)| columns.measure(&entry));
        }
        for (path, entry) in self.entries() {
            let name = self.name(&path);
            let line = if self.args.json {
                json::object(&path, &entry).into_bytes()
            } else if self.args.long {
                columns.line(name, &entry)
            } else if escaped {
                list::escape(name).into_bytes()
            } else {
                name.to_vec()
            };
            output.write_all(&line)?;
            output.write_all(b"\n")?;
        }
        Ok(())
    }

    fn entries(&self) -> impl Iterator<Item = (ArchivePath, Entry<'_>)> {
        list::walk(self.index, self.from, self.args.recursive)
    }

    fn name<'p>(&self, path: &'p ArchivePath) -> &'p [u8] {
        if self.args.recursive {
            return path.as_bytes();
        }
        path.components().next_back().unwrap_or(b".")
    }
}
