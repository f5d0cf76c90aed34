//! Directories of the sockets of mounts.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::base::environment::variable;

/// Directory of the sockets of mounts of the system, and of root without a session.
pub const SYSTEM_RUNTIME_DIR: &str = "/run/tarfs";

/// Variable with the directory of a user's session.
pub const RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";

/// Directory of the sockets of this user's mounts.
pub fn runtime_dir() -> PathBuf {
    runtime_dir_from(
        variable(RUNTIME_DIR)
            .filter(|path| is_owned_by_user(path))
            .as_deref(),
        rustix::process::geteuid().as_raw(),
    )
}

/// Whether this user owns `path`, as XDG requires. After `su`, another may. A missing path counts as owned.
fn is_owned_by_user(path: &Path) -> bool {
    let found = std::fs::metadata(path);
    found.map_or(true, |found| {
        found.uid() == rustix::process::geteuid().as_raw()
    })
}

/// Returns the socket directories of this user's mounts, for root also of the system's and mount(8)'s.
pub fn runtime_dirs() -> Vec<PathBuf> {
    let own = runtime_dir();
    let system = PathBuf::from(SYSTEM_RUNTIME_DIR);
    // Both may be one directory with two names, such as /run and /var/run.
    let is_own = matches!((own.canonicalize(), system.canonicalize()), (Ok(own), Ok(system)) if own == system);
    let more = rustix::process::geteuid().is_root() && own != system && !is_own;
    [Some(own), more.then_some(system)]
        .into_iter()
        .flatten()
        .collect()
}

fn runtime_dir_from(xdg: Option<&Path>, uid: u32) -> PathBuf {
    match xdg {
        // The XDG specification says to ignore relative paths.
        Some(directory) if directory.is_absolute() => directory.join("tarfs"),
        _ if uid == 0 => PathBuf::from(SYSTEM_RUNTIME_DIR),
        _ => PathBuf::from(format!("/tmp/tarfs-{uid}")),
    }
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
}
