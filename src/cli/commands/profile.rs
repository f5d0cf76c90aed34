//! `tarfs profile`: merges access profiles into one, and cuts it at a size.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};

use crate::cli::args::Size;
use crate::cli::ui::output;
use tarfs::internal::bounded_read::read_text;
use tarfs::internal::publish::publish_private;
use tarfs::serve::access_profile::{
    MAX_PROFILE_BYTES, ProfileRange, merge_profiles, parse_profile,
};

/// Arguments of `tarfs profile`.
#[derive(clap::Args, Debug)]
pub(crate) struct ProfileArgs {
    /// Profiles that `mount --record` wrote
    #[arg(required = true, value_name = "PROFILE")]
    profiles: Vec<PathBuf>,

    /// Write the merged profile to this file [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Keep the first ranges, of at most SIZE together
    #[arg(id = "max_profile_size", long = "max-size", value_name = "SIZE")]
    max_size: Option<Size>,
}

pub(crate) fn run(args: &ProfileArgs) -> anyhow::Result<ExitCode> {
    let read = |path: &PathBuf| read_profile(path).with_context(|| path.display().to_string());
    let profiles: anyhow::Result<Vec<_>> = args.profiles.iter().map(read).collect();
    let max_bytes = args.max_size.map_or(u64::MAX, |size| size.0);
    let text = merge_profiles(profiles?, max_bytes)?;
    ensure!(
        text.len() <= MAX_PROFILE_BYTES,
        "together they are longer than a profile may be (cut them with --max-size)"
    );
    match &args.output {
        Some(path) => publish_private(path, |mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("cannot write {}", path.display()))?,
        None => output::print_text(&text)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn read_profile(path: &Path) -> anyhow::Result<Vec<ProfileRange>> {
    let text = read_text(File::open(path)?, MAX_PROFILE_BYTES as u64)?;
    Ok(parse_profile(&text)?.collect::<Result<_, _>>()?)
}
