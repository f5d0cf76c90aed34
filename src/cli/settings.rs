//! What the environment says; the only place that asks it.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tracing::Level;

/// Set for the process that a mount leaves in the background, by the one that waits for it.
pub(super) const BACKGROUND: &str = "TARFS_BACKGROUND";

/// Holds headers, as `--header` has them, one a line.
pub(super) const HEADERS: &str = "TARFS_HEADERS";

/// The environment's word called `name`, unless it is missing or empty.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place that reads the environment"
)]
fn word(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Whether this process was started to stay in the background.
pub(super) fn is_background() -> bool {
    word(BACKGROUND).is_some()
}

/// The text of [`HEADERS`], if there is one.
pub(super) fn headers() -> Option<OsString> {
    word(HEADERS).map(PathBuf::into_os_string)
}

/// What the log is to tell, if `TARFS_LOG` names a level: `error`, `warn`, `info`, `debug`, `trace`.
pub(super) fn log_level() -> Option<Level> {
    word("TARFS_LOG")?.to_str()?.parse().ok()
}

/// Where the sockets of this user's mounts are.
pub(super) fn runtime_dir() -> PathBuf {
    runtime_dir_from(
        word("XDG_RUNTIME_DIR").as_deref(),
        rustix::process::geteuid().as_raw(),
    )
}

fn runtime_dir_from(xdg: Option<&Path>, uid: u32) -> PathBuf {
    match xdg {
        // The specification says that a relative path is to be ignored.
        Some(directory) if directory.is_absolute() => directory.join("tarfs"),
        _ if uid == 0 => PathBuf::from("/run/tarfs"),
        _ => PathBuf::from(format!("/tmp/tarfs-{uid}")),
    }
}

/// Where indexes and decoded data are kept, unless a flag says otherwise.
///
/// # Errors
/// When the environment names no directory at all.
pub(super) fn cache_dir() -> anyhow::Result<PathBuf> {
    cache_dir_from(
        word("TARFS_CACHE_DIR"),
        word("XDG_CACHE_HOME"),
        word("HOME"),
    )
    .context("no place for the cache: set --cache-dir, TARFS_CACHE_DIR, XDG_CACHE_HOME or HOME")
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
    fn sockets_lie_where_the_session_says() {
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
    fn the_cache_lies_where_the_nearest_word_says() {
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
