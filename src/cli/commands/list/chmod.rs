//! `tarfs chmod`: changes the modes of files.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use rustix::fs::Mode;
use rustix::process::umask;

use super::change::{self, ChangeFlags};
use tarfs::change::Attributes;
use tarfs::tree::apply_mode;

/// Arguments of `tarfs chmod`.
#[derive(clap::Args, Debug)]
pub(crate) struct ChmodArgs {
    /// Octal or symbolic mode, such as u+rwX,go-w; with --reference, the first PATH
    #[arg(value_name = "MODE", required = true, allow_hyphen_values = true)]
    mode: OsString,

    /// Files to change
    #[arg(value_name = "PATH", required_unless_present = "reference")]
    paths: Vec<OsString>,

    #[command(flatten)]
    flags: ChangeFlags,
}

pub(crate) fn run(args: &ChmodArgs) -> anyhow::Result<ExitCode> {
    let mut paths = args.paths.clone();
    let mode = match args.flags.reference() {
        Err(code) => return Ok(code),
        Ok(Some(found)) => {
            paths.insert(0, args.mode.clone());
            // Five digits set all bits of directories, too.
            format!("{:05o}", found.mode)
        }
        Ok(None) => args.mode.to_string_lossy().into_owned(),
    };
    if apply_mode(&mode, 0, false, 0).is_none() {
        return Ok(change::invalid("mode", args.mode.as_bytes()));
    }
    // The one way to read it is to set it.
    let mask = umask(Mode::empty());
    umask(mask);
    let attributes = Attributes::Mode {
        mode,
        umask: mask.as_raw_mode(),
        // Only a mode that stands where options do.
        reports_umask: args.mode.as_bytes().starts_with(b"-")
            && args.flags.reference.is_none()
            && !std::env::args_os()
                .take_while(|word| *word != args.mode)
                .any(|word| word == "--"),
    };
    args.flags.run(attributes, false, &paths)
}
