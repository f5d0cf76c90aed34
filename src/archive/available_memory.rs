//! How much memory there is to spare for what may be taken away at any time.

use std::fs;
use std::path::{Path, PathBuf};

/// Where control groups are, if the system has but the one hierarchy of cgroups(7), version 2.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Bytes that programs could have without anyone being short of memory, or what this process'
/// control group is allowed if that is less; 0 when the system does not tell.
pub(super) fn available_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let group = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = cgroup_path(&group).map(|group| memory_limits(Path::new(CGROUP_ROOT), &group));
    let limits = limits.into_iter().flatten();
    limits
        .chain([parse_available(&meminfo)])
        .min()
        .unwrap_or_default()
}

/// What the text of `/proc/meminfo` says of it.
fn parse_available(meminfo: &str) -> u64 {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or_default().saturating_mul(1024)
}

/// This process' group in the one hierarchy, from the root on, by its cgroups(7) text.
fn cgroup_path(groups: &str) -> Option<PathBuf> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(PathBuf::from(path))
}

/// The limits of `group` below `groups`, and of those that it is part of.
fn memory_limits(groups: &Path, group: &Path) -> Vec<u64> {
    let limit = |group: &Path| {
        let limit = fs::read_to_string(groups.join(group).join("memory.max")).ok()?;
        // Or "max".
        limit.trim().parse().ok()
    };
    group.ancestors().filter_map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_the_least_of_system_and_cgroups() {
        let text = "MemTotal:  100 kB\nMemAvailable:   24 kB\nBuffers: 1 kB\n";
        assert_eq!(parse_available(text), 24 * 1024);
        assert_eq!(parse_available("MemAvailable:"), 0);
        assert_eq!(
            cgroup_path("1:name=systemd:/x\n0::/a/b\n"),
            Some(PathBuf::from("a/b"))
        );
        let groups = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(groups.path().join("a/b")).expect("made");
        for (group, limit) in [("a", "4096\n"), ("a/b", "max\n")] {
            let file = groups.path().join(group).join("memory.max");
            fs::write(file, limit).expect("written");
        }
        assert_eq!(memory_limits(groups.path(), Path::new("a/b")), [4096]);
        assert!(available_bytes() > 0);
    }
}
