//! Completions of values that only the running program knows.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use clap_complete::engine::CompletionCandidate;
use tarfs::fuse::MountOptions;

use super::environment;
use tarfs::serve;

/// Mountpoints of the mounts that this user may query.
pub(crate) fn mountpoints() -> Vec<CompletionCandidate> {
    environment::runtime_dirs()
        .iter()
        .filter_map(|directory| serve::list_statuses(directory).ok())
        .flatten()
        .map(|status| CompletionCandidate::new(OsStr::from_bytes(status.mountpoint_bytes())))
        .collect()
}

/// Options that continue `current`, a list with commas.
pub(crate) fn mount_options(current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else {
        return Vec::new();
    };
    let (before, last) = current.rsplit_once(',').unwrap_or(("", current));
    let prefix = &current[..current.len() - last.len()];
    let flags = MountOptions::flag_names().map(str::to_owned);
    let values = MountOptions::value_names().map(|name| format!("{name}="));
    flags
        .chain(values)
        .filter(|option| option.starts_with(last) && !before.split(',').any(|set| set == option))
        .map(|option| CompletionCandidate::new(format!("{prefix}{option}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap_complete::engine::complete;

    use super::*;
    use crate::cli::command_line::whole_command;

    fn completed(current: &str) -> Vec<String> {
        let candidates = mount_options(OsStr::new(current));
        let values = candidates.iter().map(CompletionCandidate::get_value);
        values
            .map(|value| value.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn help_has_the_verbs_of_verbs() {
        let words = ["tarfs", "help", "cache", "l"].map(OsString::from).to_vec();
        let found = complete(&mut whole_command(), words, 3, None).expect("valid");
        let found: Vec<_> = found.iter().map(CompletionCandidate::get_value).collect();
        assert_eq!(found, ["list"]);
    }

    #[test]
    fn mount_options_are_completed_after_commas() {
        assert_eq!(completed("no"), ["noexec", "nosymfollow"]);
        assert_eq!(completed("uid=7,no"), ["uid=7,noexec", "uid=7,nosymfollow"]);
        assert_eq!(completed("noexec,no"), ["noexec,nosymfollow"]);
        assert_eq!(completed("x"), [""; 0]);
    }

    #[test]
    fn completed_mount_options_are_valid() {
        let all = completed("");
        assert!(all.contains(&"uid=".to_owned()), "{all:?}");
        for option in all {
            let value = if option.ends_with('=') { "7" } else { "" };
            let mut options = MountOptions::default();
            assert_eq!(options.apply(&format!("{option}{value}")), Ok(()));
        }
    }
}
