//! Memory that is available for reclaimable data.

use std::fs;
use std::path::{Path, PathBuf};

/// Root of the control groups, if the system has only the cgroups(7) hierarchy of version 2.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Bytes available without pressure on other programs, within the control group's limit; 0 if unknown.
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

fn parse_available(meminfo: &str) -> u64 {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or_default().saturating_mul(1024)
}

/// Parses `/proc/self/cgroup`: this process' group in the version 2 hierarchy, see cgroups(7).
fn cgroup_path(groups: &str) -> Option<PathBuf> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(PathBuf::from(path))
}

/// Memory limits of `group` below `groups`, and of its ancestors.
fn memory_limits(groups: &Path, group: &Path) -> Vec<u64> {
    let limit = |group: &Path| {
        let limit = fs::read_to_string(groups.join(group).join("memory.max")).ok()?;
        // Without a limit, the file contains "max".
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
