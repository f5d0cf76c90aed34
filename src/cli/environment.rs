//! Environment variables of the program alone.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tarfs::internal::environment::variable;
use tarfs::list::Drawing;
use tracing::Level;

pub(crate) use tarfs::internal::environment::{CACHE_DIR, CACHE_SIZE, SYSTEM_CACHE_DIR, cache_dir};
pub(crate) use tarfs::serve::{RUNTIME_DIR, SYSTEM_RUNTIME_DIR, runtime_dir, runtime_dirs};

/// Variables of a service manager: `sd_notify(3)`, systemd.exec(5).
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
const JOURNAL_STREAM: &str = "JOURNAL_STREAM";

/// Whether systemd does not kill this process at shutdown, because its `argv[0]` begins with `@`.
pub(crate) fn is_kept_at_shutdown() -> bool {
    let name = env::args_os().next().unwrap_or_default();
    name.as_encoded_bytes().starts_with(b"@")
}

/// Gives `command` our `argv[0]`, because systemd does not kill processes with `@` in front at shutdown.
pub(crate) fn copy_argv0(command: &mut Command) -> &mut Command {
    match env::args_os().next() {
        Some(name) => command.arg0(name),
        None => command,
    }
}

/// Returns the service manager's socket; see `sd_notify(3)`.
pub(crate) fn notify_socket() -> Option<OsString> {
    variable(NOTIFY_SOCKET).map(PathBuf::into_os_string)
}

/// Returns device and inode of the stream that leads to the journal; see systemd.exec(5).
pub(crate) fn journal_stream() -> Option<(u64, u64)> {
    let stream = variable(JOURNAL_STREAM)?;
    let (device, inode) = stream.to_str()?.split_once(':')?;
    Some((device.parse().ok()?, inode.parse().ok()?))
}

/// Variable with the log level: `error`, `warn`, `info`, `debug` or `trace`.
pub(crate) const LOG_LEVEL: &str = "TARFS_LOG";

/// Variable with the shell that asks for completions. Only clap reads it.
pub(crate) const COMPLETE: &str = "TARFS_COMPLETE";

pub(crate) fn log_level() -> Option<Level> {
    variable(LOG_LEVEL)?.to_str()?.parse().ok()
}

/// Variables that a service manager sets for a process in the foreground.
pub(crate) fn of_service() -> impl Iterator<Item = (&'static str, OsString)> {
    let names = [NOTIFY_SOCKET, JOURNAL_STREAM].into_iter();
    names.filter_map(|name| Some((name, variable(name)?.into_os_string())))
}

/// Variables of a daemon, which serves for processes with other ones.
pub(crate) fn of_daemon() -> impl Iterator<Item = (&'static str, OsString)> {
    let names = ["PATH", LOG_LEVEL].into_iter();
    names.filter_map(|name| Some((name, variable(name)?.into_os_string())))
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns candidates for temporary directories of a mount, best first: disks before memory.
pub(crate) fn scratch_dirs() -> Vec<PathBuf> {
    scratch_dirs_from(variable("TMPDIR"), runtime_dir().parent())
}

fn scratch_dirs_from(own: Option<PathBuf>, runtime: Option<&Path>) -> Vec<PathBuf> {
    if let Some(own) = own {
        return vec![own];
    }
    let usual = ["/var/tmp", "/tmp"].map(PathBuf::from);
    usual
        .into_iter()
        .chain(runtime.map(Path::to_owned))
        .collect()
}

pub(crate) fn system_cache_dir() -> PathBuf {
    variable(CACHE_DIR).unwrap_or_else(|| PathBuf::from(SYSTEM_CACHE_DIR))
}

/// Lines of pictures that the locale of the environment can show.
pub(crate) fn drawing() -> Drawing {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
        .into_iter()
        .find_map(variable);
    let locale = locale
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase();
    if locale.contains("utf-8") || locale.contains("utf8") {
        Drawing::Unicode
    } else {
        Drawing::Ascii
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_dir_prefers_tmpdir() {
        let own = Some(PathBuf::from("/big"));
        assert_eq!(scratch_dirs_from(own, None), [Path::new("/big")]);
        let run = Path::new("/run");
        let usual = ["/var/tmp", "/tmp", "/run"].map(PathBuf::from);
        assert_eq!(scratch_dirs_from(None, Some(run)), usual);
    }
}
