//! `tarfs copy`: copies a directory of this machine, as `cp -a` does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, ensure};

use super::args::{AtomicArg, DryRunArg, ExistingArgs, SelectionArgs, WriteArgs};
use super::output::{Output, Stream};
use crate::cli::daemon::inherited_fds::raise_open_file_limit;
use tarfs::internal::directory::{create_missing_dir, resolve_destination};
use tarfs::materialize::{self, Materializer, Options, Staging};
use tarfs::source::{local_path, redact};

/// Arguments of `tarfs copy`.
#[derive(clap::Args, Debug)]
pub(crate) struct CopyArgs {
    /// The directory whose contents are copied; a slash at its end makes no difference
    #[arg(value_name = "DIRECTORY")]
    source: PathBuf,

    /// Write to this directory, which is made if it is missing
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    #[command(flatten)]
    selection: SelectionArgs,

    #[command(flatten)]
    existing: ExistingArgs,

    #[command(flatten)]
    write: WriteArgs,

    #[command(flatten)]
    atomic: AtomicArg,

    #[command(flatten)]
    dry_run: DryRunArg,
}

pub(crate) fn run(args: &CopyArgs) -> anyhow::Result<ExitCode> {
    let source = &local_path(args.source.as_os_str()).with_context(|| {
        // As a whole, because a password may have blanks.
        let name = redact(&args.source.to_string_lossy());
        format!(
            "{name}: names no directory of this machine (a file URL has %3F for ? and %23 for #)"
        )
    })?;
    check_source(source)?;
    ensure_apart(source, &args.directory)?;
    let (options, jobs) = args.write.for_directory(Options {
        selection: args.selection.selection(),
        existing: args.existing.policy(),
        ..args.write.options()
    });
    let output = Output::new(
        &args.directory,
        options,
        &args.write,
        args.dry_run.is_set,
        false,
        Stream::Names,
    );
    let staging = args
        .atomic
        .is_set
        .then(|| Staging::new(&args.directory, Arc::clone(&output.stats)));
    if args.dry_run.is_set {
        ensure_there(&args.directory)?;
    } else if !args.atomic.is_set {
        make_destination(&args.directory)?;
    }
    raise_open_file_limit();
    let copy = |sink: Materializer| {
        let _progress = output.show_progress("copying", None);
        (
            Ok(true),
            sink.copy_directory(source, jobs, args.dry_run.is_set),
        )
    };
    output.end(match staging.transpose()? {
        Some(staging) => output.to_disk_atomically(&Arc::new(staging), None, None, copy),
        None => output.to_disk("run it again", None, copy),
    })
}

/// Checks that the source is a directory, before a destination is made for it.
fn check_source(source: &Path) -> anyhow::Result<()> {
    let name = source.display();
    ensure!(
        !fs::metadata(source).is_ok_and(|found| !found.is_dir()),
        "{name}: is not a directory (an archive is written by `tarfs materialize {name} -C DIR`)"
    );
    let opened = fs::read_dir(source);
    opened.with_context(|| format!("{name}: cannot read the directory"))?;
    Ok(())
}

/// Refuses a destination, which may be missing, that is in the directory `source`.
pub(super) fn ensure_apart(source: &Path, directory: &Path) -> anyhow::Result<()> {
    match (resolve_destination(directory), fs::canonicalize(source)) {
        (Ok(place), Ok(within)) if place.starts_with(&within) => {
            Err(materialize::Error::ContainsDestination(source.to_owned()).into())
        }
        _ => Ok(()),
    }
}

/// Refuses a missing destination of a dry run, which makes none and would have nothing to compare with.
pub(super) fn ensure_there(directory: &Path) -> anyhow::Result<()> {
    ensure!(
        directory.exists(),
        "{}: is missing, and --dry-run does not make it (make the directory first)",
        directory.display()
    );
    Ok(())
}

/// Makes the destination if it is missing, as cp and rsync do.
pub(super) fn make_destination(directory: &Path) -> anyhow::Result<()> {
    let name = || format!("{}: cannot make the directory", directory.display());
    create_missing_dir(directory, 0o777).with_context(name)?;
    Ok(materialize::check_empty_destination(directory)?)
}
