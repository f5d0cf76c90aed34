//! What the environment says; the only place that asks it, but for the defaults of two flags.

use std::env;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use tracing::Level;

/// What a process of a mount is there for; set by the one of them that starts it.
pub(super) const ROLE: &str = "TARFS_ROLE";

/// What a process of a mount is there for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    /// To serve it, in the background of the one that the user started.
    Background,
    /// To watch over who serves it.
    Supervisor,
    /// To serve it after the one before has died.
    Successor,
    /// To serve it first, for the supervisor that the user started in the foreground.
    SupervisedWorker,
}

impl Role {
    const ALL: [Self; 4] = [
        Self::Background,
        Self::Supervisor,
        Self::Successor,
        Self::SupervisedWorker,
    ];

    /// As it stands in the environment.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::Supervisor => "keeper",
            Self::Successor => "successor",
            Self::SupervisedWorker => "led",
        }
    }
}

/// Where the sockets of a user's mounts are, if the session says so.
pub(super) const RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";

/// Where the sockets of the system's mounts are.
const SYSTEM_RUNTIME_DIR: &str = "/run/tarfs";

/// Where the cache is, if the user says so; the flag's default, too.
pub(super) const CACHE_DIR: &str = "TARFS_CACHE_DIR";

/// How much the cache may take, if the user says so: the default of a flag, which is who asks for it.
pub(super) const CACHE_SIZE: &str = "TARFS_CACHE_SIZE";

/// Where the cache of the system's mounts is.
const SYSTEM_CACHE_DIR: &str = "/var/cache/tarfs";

/// Holds headers, as `--header` has them, one a line.
pub(super) const HEADERS: &str = "TARFS_HEADERS";

/// The environment's word called `name`, unless it is missing or empty.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place that reads the environment"
)]
fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Beginning of the names of variables that hold arguments which may be secrets. The number of the argument
/// follows. Other users can read the arguments of a process, and not its environment.
const ARGUMENT_PREFIX: &str = "TARFS_ARGUMENT_";

/// The command line of this process, with the secrets that [`pass_arguments`] has hidden.
pub(super) fn arguments() -> Vec<OsString> {
    let shown = env::args_os();
    if role().is_none() {
        return shown.collect();
    }
    let full = |number: usize| variable(&format!("{ARGUMENT_PREFIX}{number}"));
    let arguments = shown.enumerate();
    arguments
        .map(|(number, shown)| full(number).map_or(shown, PathBuf::into_os_string))
        .collect()
}

/// Gives `command`, this program once more, the arguments `words`, of which others see no more than `shown`.
pub(super) fn pass_arguments<'a>(
    command: &'a mut Command,
    words: &[OsString],
    shown: &[OsString],
) -> &'a mut Command {
    for (number, (word, shown)) in (1..).zip(words.iter().zip(shown)) {
        let name = format!("{ARGUMENT_PREFIX}{number}");
        if word == shown {
            command.env_remove(name);
        } else {
            command.env(name, word);
        }
        command.arg(shown);
    }
    command
}

/// What this process was started for by another of its mount; `None` when the user started it.
pub(super) fn role() -> Option<Role> {
    let word = variable(ROLE)?;
    Role::ALL
        .into_iter()
        .find(|role| word == Path::new(role.name()))
}

/// Has `command`, this program once more, listed by the name that this process was called by: who ends a
/// system spares those with an `@` in front.
pub(super) fn copy_argv0(command: &mut Command) -> &mut Command {
    match env::args_os().next() {
        Some(name) => command.arg0(name),
        None => command,
    }
}

/// The text of [`HEADERS`], if there is one.
pub(super) fn headers() -> Option<OsString> {
    variable(HEADERS).map(PathBuf::into_os_string)
}

/// The socket of a service manager that wants to hear how this process is, as `sd_notify(3)` has it.
pub(super) fn notify_socket() -> Option<OsString> {
    variable("NOTIFY_SOCKET").map(PathBuf::into_os_string)
}

/// Device and inode of the stream that leads to the journal, as systemd.exec(5) has it.
pub(super) fn journal_stream() -> Option<(u64, u64)> {
    let stream = variable("JOURNAL_STREAM")?;
    let (device, inode) = stream.to_str()?.split_once(':')?;
    Some((device.parse().ok()?, inode.parse().ok()?))
}

/// What the log is to tell, if `TARFS_LOG` names a level: `error`, `warn`, `info`, `debug`, `trace`.
pub(super) fn log_level() -> Option<Level> {
    variable("TARFS_LOG")?.to_str()?.parse().ok()
}

/// Where the sockets of this user's mounts are.
pub(super) fn runtime_dir() -> PathBuf {
    runtime_dir_from(
        variable(RUNTIME_DIR)
            .filter(|path| is_owned_by_user(path))
            .as_deref(),
        rustix::process::geteuid().as_raw(),
    )
}

/// Whether `path` belongs to this user, as the specification wants it of a runtime directory: after
/// `su` or `sudo -E` it can be another user's. What is missing counts as own.
fn is_owned_by_user(path: &Path) -> bool {
    let found = std::fs::metadata(path);
    found.map_or(true, |found| {
        found.uid() == rustix::process::geteuid().as_raw()
    })
}

/// Where the sockets of the mounts are that this user may ask: their own, and for root those of the
/// system, which mount(8) makes, too.
pub(super) fn runtime_dirs() -> Vec<PathBuf> {
    let own = runtime_dir();
    let system = PathBuf::from(SYSTEM_RUNTIME_DIR);
    // They may be one directory with two names, as /run and /var/run are.
    let is_own = matches!((own.canonicalize(), system.canonicalize()), (Ok(own), Ok(system)) if own == system);
    let more = is_root() && own != system && !is_own;
    [Some(own), more.then_some(system)]
        .into_iter()
        .flatten()
        .collect()
}

/// Whether this is root's process.
pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn runtime_dir_from(xdg: Option<&Path>, uid: u32) -> PathBuf {
    match xdg {
        // The specification says that a relative path is to be ignored.
        Some(directory) if directory.is_absolute() => directory.join("tarfs"),
        _ if uid == 0 => PathBuf::from(SYSTEM_RUNTIME_DIR),
        _ => PathBuf::from(format!("/tmp/tarfs-{uid}")),
    }
}

/// Where what goes with a mount may lie, best first: on a disk rather than in memory.
pub(super) fn scratch_dirs() -> Vec<PathBuf> {
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

/// Where indexes and decoded data are kept, unless a flag says otherwise.
///
/// # Errors
/// When the environment names no directory at all.
pub(super) fn cache_dir() -> anyhow::Result<PathBuf> {
    cache_dir_from(
        variable(CACHE_DIR),
        variable("XDG_CACHE_HOME"),
        variable("HOME"),
    )
    // As the system starts it.
    .or_else(|| is_root().then(|| PathBuf::from(SYSTEM_CACHE_DIR)))
    .context("no place for the cache: set --cache-dir, TARFS_CACHE_DIR, XDG_CACHE_HOME or HOME")
}

/// Where what the system mounts keeps its indexes and decoded data, unless a flag says otherwise.
pub(super) fn system_cache_dir() -> PathBuf {
    variable(CACHE_DIR).unwrap_or_else(|| PathBuf::from(SYSTEM_CACHE_DIR))
}

/// Processors that this process may use, at least one.
pub(super) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn cache_dir_from(
    own: Option<PathBuf>,
    xdg: Option<PathBuf>,
    home: Option<PathBuf>,
) -> Option<PathBuf> {
    own.or_else(|| {
        xdg.filter(|directory| directory.is_absolute())
            .map(|directory| directory.join("tarfs"))
    })
    .or_else(|| home.map(|home| home.join(".cache/tarfs")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_dir_is_that_of_the_session() {
        let xdg = Path::new("/run/user/7");
        assert_eq!(
            runtime_dir_from(Some(xdg), 7),
            Path::new("/run/user/7/tarfs")
        );
        assert_eq!(runtime_dir_from(None, 0), Path::new("/run/tarfs"));
        assert_eq!(runtime_dir_from(None, 7), Path::new("/tmp/tarfs-7"));
        assert_eq!(
            runtime_dir_from(Some(Path::new("relative")), 7),
            Path::new("/tmp/tarfs-7")
        );
    }

    #[test]
    fn scratch_dir_prefers_tmpdir() {
        let own = Some(PathBuf::from("/big"));
        assert_eq!(scratch_dirs_from(own, None), [Path::new("/big")]);
        let run = Path::new("/run");
        let usual = ["/var/tmp", "/tmp", "/run"].map(PathBuf::from);
        assert_eq!(scratch_dirs_from(None, Some(run)), usual);
    }

    #[test]
    fn cache_dir_follows_the_most_specific_variable() {
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(
            cache_dir_from(path("/a"), path("/b"), path("/c")),
            path("/a")
        );
        assert_eq!(
            cache_dir_from(None, path("/b"), path("/c")),
            path("/b/tarfs")
        );
        assert_eq!(
            cache_dir_from(None, path("b"), path("/c")),
            path("/c/.cache/tarfs")
        );
        assert_eq!(cache_dir_from(None, None, None), None);
    }
}
