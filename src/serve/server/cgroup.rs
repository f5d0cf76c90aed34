//! Control group of a process: whether the job that it belongs to has ended.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Prefix of the line of the unified hierarchy in `/proc/PID/cgroup`; see cgroups(7).
const UNIFIED: &str = "0::";

/// Control group of a process in the unified hierarchy.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct ControlGroup(PathBuf);

impl ControlGroup {
    /// The group of process `pid`. `None` if it is that of the system, which does not end.
    pub(super) fn of(pid: u32) -> Option<Self> {
        let path = group_path(&pid.to_string())?;
        let group = hierarchy()?.join(path.trim_start_matches('/'));
        (path != "/" && group.is_dir()).then_some(Self(group))
    }

    /// Whether no process is left in it and the groups below.
    pub(super) fn has_ended(&self) -> bool {
        let events = fs::read_to_string(self.0.join("cgroup.events"));
        match events {
            Ok(events) => events.lines().any(|line| line == "populated 0"),
            Err(_) => !self.0.exists(),
        }
    }
}

/// Path of the group of `process` in the unified hierarchy.
fn group_path(process: &str) -> Option<String> {
    let groups = fs::read_to_string(Path::new("/proc").join(process).join("cgroup")).ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix(UNIFIED))?;
    Some(path.to_owned())
}

/// Directory on which the root of the unified hierarchy is mounted.
fn hierarchy() -> Option<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    table.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, directory) = (fields.next()?, fields.next()?);
        (kind.starts_with("cgroup2 ") && root == "/").then(|| directory.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: shared-job
    #[test]
    fn group_has_ended_when_no_process_is_left() {
        let directory = tempfile::tempdir().expect("a directory");
        let group = ControlGroup(directory.path().to_owned());
        let write = |populated: u8| {
            let events = format!("populated {populated}\nfrozen 0\n");
            fs::write(directory.path().join("cgroup.events"), events).expect("written");
        };
        write(1);
        assert!(!group.has_ended());
        write(0);
        assert!(group.has_ended());
        drop(directory);
        assert!(group.has_ended(), "it is removed");
        let own = ControlGroup::of(std::process::id());
        assert!(own.is_none_or(|own| !own.has_ended()));
    }
}
