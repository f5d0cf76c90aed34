//! Flags of the verbs that write trees.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::runtime::Runtime;

use crate::cli::args::{
    self, QuietArg, SavedIndexArgs, Size, SourceArgs, StatsArg, XattrArgs, heading,
};
use crate::cli::open_archive;
use tarfs::Stats;
use tarfs::archive::TreeOrigin;
use tarfs::index::MemoryLimit;
use tarfs::locate::OpenContext;
use tarfs::materialize::{Existing, Glob, Options, Selection};

/// How a tree is written, and what the verb prints.
#[derive(clap::Args, Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct WriteArgs {
    /// Do not set the owners of files [default, except for root]
    #[arg(long, help_heading = heading::OWNERSHIP, hide_short_help = true)]
    pub(super) no_same_owner: bool,

    /// Set the owners of files [default for root]
    #[arg(long, conflicts_with = "no_same_owner",
          help_heading = heading::OWNERSHIP, hide_short_help = true)]
    pub(super) same_owner: bool,

    /// Apply the umask to modes [default of archives, except for root]
    #[arg(long, help_heading = heading::OWNERSHIP, hide_short_help = true)]
    pub(super) no_same_permissions: bool,

    /// Set the exact modes of files [default for root, and of directories]
    #[arg(short = 'p', long, conflicts_with = "no_same_permissions",
          help_heading = heading::OWNERSHIP, hide_short_help = true)]
    pub(super) same_permissions: bool,

    #[command(flatten)]
    pub(super) xattrs: XattrArgs,

    /// Number of threads that write files [default: 2 to 4 by processors, 16 on network file systems]
    ///
    /// FUSE counts as a network file system, because each file costs a round trip there. A directory is copied by one
    /// thread a processor, and more, up to 64, while they wait for the file system.
    #[arg(long, value_name = "N", value_parser = args::count_parser::<usize>(1..=64),
          help_heading = heading::LIMITS, hide_short_help = true)]
    pub(super) writers: Option<usize>,

    /// Return only when all data is on the disk
    #[arg(long = "sync", hide_short_help = true)]
    pub(super) waits_for_disk: bool,

    /// List each entry when it is written
    #[arg(short, long)]
    pub(super) verbose: bool,

    #[command(flatten)]
    pub(super) quiet: QuietArg,

    #[command(flatten)]
    pub(super) stats: StatsArg,
}

impl WriteArgs {
    /// Options for a tree of an archive. The verb adds what it selects and its limits.
    pub(super) fn options(&self) -> Options {
        let defaults = Options::for_this_user();
        Options {
            same_owner: (defaults.same_owner || self.same_owner) && !self.no_same_owner,
            same_permissions: (defaults.same_permissions || self.same_permissions)
                && !self.no_same_permissions,
            xattrs: self.xattrs.filter(),
            writers: self.writers,
            sync: self.waits_for_disk,
            ..defaults
        }
    }

    /// Changes `options` to those for the tree of a directory of this machine, and returns the number of threads, too.
    /// Owners are those of this machine, and modes are exact for any user.
    pub(super) fn for_directory(&self, options: Options) -> (Options, Option<NonZeroUsize>) {
        let options = Options {
            numeric_owner: true,
            same_permissions: !self.no_same_permissions,
            copies_directory: true,
            // The threads of the walk write.
            writers: Some(1),
            ..options
        };
        (options, self.writers.and_then(NonZeroUsize::new))
    }
}

/// How the archive of a tree is read.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct ArchiveArgs {
    #[command(flatten)]
    pub(super) saved: SavedIndexArgs,

    /// Use the numeric IDs of owners, not their names
    #[arg(long, help_heading = heading::OWNERSHIP, hide_short_help = true)]
    pub(super) numeric_owner: bool,

    /// Refuse an archive whose files or unpacked stream are larger than this [default: no limit]
    ///
    /// Holes of sparse files count.
    #[arg(long, value_name = "SIZE", help_heading = heading::LIMITS, hide_short_help = true)]
    pub(super) max_unpacked_size: Option<Size>,
}

impl ArchiveArgs {
    /// Adds what the flags of the archive say to `options`.
    pub(super) fn apply(&self, source: &SourceArgs, options: Options) -> Options {
        Options {
            numeric_owner: self.numeric_owner,
            max_entries: source.max_entries.unwrap_or(u64::MAX),
            index_memory: MemoryLimit::new(source.index_memory.0),
            ..options
        }
    }

    pub(super) fn open_context(
        &self,
        source: &SourceArgs,
        stats: &Arc<Stats>,
        quiet: bool,
    ) -> anyhow::Result<(Runtime, OpenContext)> {
        let mut spec = open_archive::spec_with_cache_size(source, &self.saved.cache_dir)?;
        self.saved.apply(&mut spec.cache, TreeOrigin::WRITTEN);
        spec.archive.max_unpacked_len = self.max_unpacked_size.map(|size| size.0);
        open_archive::start(&spec, source, stats, quiet)
    }
}

/// Selection of entries by their names.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct SelectionArgs {
    /// Remove this many leading components of each name
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = args::count_parser::<usize>(0..=u64::MAX),
          help_heading = heading::SELECTION)]
    pub(super) strip_components: usize,

    /// Skip entries that match this pattern of GNU tar; repeatable
    #[arg(long, value_name = "PATTERN", value_parser = args::glob_parser(), help_heading = heading::SELECTION)]
    pub(super) exclude: Vec<Glob>,

    /// Write only entries that match this pattern of GNU tar; repeatable
    #[arg(long, value_name = "PATTERN", value_parser = args::glob_parser(), help_heading = heading::SELECTION)]
    pub(super) include: Vec<Glob>,
}

impl SelectionArgs {
    pub(super) fn selection(&self) -> Selection {
        Selection {
            strip_components: self.strip_components,
            exclude: self.exclude.clone(),
            include: self.include.clone(),
            ..Selection::default()
        }
    }
}

/// The directory that is written to.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct DestinationArg {
    /// Write to this directory, which must exist [default: .]
    #[arg(short = 'C', long, value_name = "DIR")]
    pub(super) directory: Option<PathBuf>,
}

impl DestinationArg {
    pub(super) fn path(&self) -> &Path {
        self.directory.as_deref().unwrap_or(Path::new("."))
    }
}

/// `--atomic`
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub(crate) struct AtomicArg {
    /// Create DIR completely or not at all; it must be missing or empty
    #[arg(id = "atomic", long = "atomic", requires = "directory",
          conflicts_with_all = ["ExistingArgs", "dry_run"], help_heading = heading::EXISTING)]
    pub(super) is_set: bool,
}

/// `--dry-run`
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub(crate) struct DryRunArg {
    /// Print what would be done, and write nothing
    #[arg(id = "dry_run", long = "dry-run", conflicts_with = "waits_for_disk")]
    pub(super) is_set: bool,
}

/// Treatment of files that exist already.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct ExistingArgs {
    /// Keep existing files, and count each as an error
    #[arg(short = 'k', long, conflicts_with = "skip_old_files", help_heading = heading::EXISTING)]
    pub(super) keep_old_files: bool,

    /// Keep existing files silently
    #[arg(long, help_heading = heading::EXISTING)]
    pub(super) skip_old_files: bool,
}

impl ExistingArgs {
    pub(super) fn policy(&self) -> Existing {
        match (self.keep_old_files, self.skip_old_files) {
            (true, _) => Existing::Keep,
            (_, true) => Existing::Skip,
            _ => Existing::Replace,
        }
    }
}
