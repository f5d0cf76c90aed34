//! Environment variables with settings of the user, for the program and the Python module alike.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::size::Size;

/// Variable with headers in the form of `--header`, one per line.
pub const HEADERS: &str = "TARFS_HEADERS";

/// Variable with the cache directory; also the default of a flag.
pub const CACHE_DIR: &str = "TARFS_CACHE_DIR";

/// Variable with the maximum size of the cache; also the default of a flag.
pub const CACHE_SIZE: &str = "TARFS_CACHE_SIZE";

/// Cache directory of the system.
pub const SYSTEM_CACHE_DIR: &str = "/var/cache/tarfs";

/// Directories whose names mean other files in another process.
const NAMES_OF_PROCESS: [&str; 4] = ["/dev/fd", "/dev/stdin", "/proc/self", "/proc/thread-self"];

/// Whether `path` names another file in another process.
pub fn is_name_of_process(path: &Path) -> bool {
    NAMES_OF_PROCESS.iter().any(|names| path.starts_with(names))
}

/// Environment of a user's process, as it was at one moment. A process that serves several users' commands acts for each
/// in its own.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Environment {
    /// Names and values, in the order of the names.
    variables: Vec<(OsString, OsString)>,
    /// A path, which need not be UTF-8, as serde's paths must be.
    directory: OsString,
}

impl Environment {
    /// The environment of this process.
    pub fn current() -> Self {
        Self::new(env::vars_os(), env::current_dir().unwrap_or_default())
    }

    /// An environment with `variables`, in which relative paths begin in `directory`.
    pub fn new(
        variables: impl IntoIterator<Item = (OsString, OsString)>,
        directory: PathBuf,
    ) -> Self {
        let mut variables: Vec<_> = variables.into_iter().collect();
        variables.sort_unstable();
        Self {
            variables,
            directory: directory.into(),
        }
    }

    /// As it is without the variable `name`.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.variables.retain(|(found, _)| found != name);
        self
    }

    /// Returns the variable `name`, unless it is unset or empty.
    pub fn variable(&self, name: &str) -> Option<&OsStr> {
        let mut values = self.variables();
        let (_, value) = values.find(|(found, _)| *found == name)?;
        (!value.is_empty()).then_some(value)
    }

    /// As [`variable`](Self::variable), if it is UTF-8.
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        self.variable(name)?.to_str().map(str::to_owned)
    }

    /// Names and values of all variables.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        let variables = self.variables.iter();
        variables.map(|(name, value)| (name.as_os_str(), value.as_os_str()))
    }

    /// The home directory: that of the variable `HOME`, or else of the system's database of users.
    pub(crate) fn home(&self) -> Option<PathBuf> {
        let home = self.variable("HOME").map(PathBuf::from);
        home.or_else(env::home_dir)
    }

    /// The directory in which relative paths begin.
    pub(crate) fn directory(&self) -> &Path {
        Path::new(&self.directory)
    }
}

impl fmt::Debug for Environment {
    /// Omits the values of variables, because some are secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Environment")
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}

/// Returns the variable `name`, unless it is unset or empty.
#[expect(
    clippy::disallowed_methods,
    reason = "the place that reads the environment"
)]
pub fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Whether the variable `name` is set, and empty.
#[expect(
    clippy::disallowed_methods,
    reason = "the place that reads the environment"
)]
pub fn is_empty(name: &OsStr) -> bool {
    env::var_os(name).is_some_and(|value| value.is_empty())
}

/// Returns the maximum size of the cache; `None` for the default.
///
/// # Errors
/// The variable holds no size.
pub fn cache_size() -> Result<Option<u64>, String> {
    let size = variable(CACHE_SIZE).map(|size| size.to_string_lossy().parse::<Size>());
    let size = size.transpose();
    size.map(|size| size.map(|size| size.0))
        .map_err(|error| format!("{CACHE_SIZE}: {error}"))
}

/// Returns the absolute path of the user's netrc file, which may not exist.
pub fn netrc() -> Option<PathBuf> {
    // Without HOME, the system's database of users names the directory.
    let home = || env::home_dir().map(|home| home.join(".netrc"));
    std::path::absolute(variable("NETRC").or_else(home)?).ok()
}

/// Returns the default directory for indexes and decoded data; `None` if the environment names none.
pub fn cache_dir() -> Option<PathBuf> {
    cache_dir_from(
        variable(CACHE_DIR),
        variable("XDG_CACHE_HOME"),
        variable("HOME"),
    )
    // systemd starts services without HOME.
    .or_else(|| {
        let is_root = rustix::process::geteuid().is_root();
        is_root.then(|| PathBuf::from(SYSTEM_CACHE_DIR))
    })
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
