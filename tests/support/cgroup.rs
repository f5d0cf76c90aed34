//! Control groups of the unified hierarchy, for jobs that are killed as a whole.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Words of a shell that enters the group `$0`, and then runs the rest of its words.
const ENTER: &str = r#"echo $$ >"$0/cgroup.procs" && exec "$@""#;

static NUMBER: AtomicUsize = AtomicUsize::new(0);

/// A control group. Dropping it kills its processes.
pub(crate) struct Group(PathBuf);

impl Group {
    pub(crate) fn new() -> Self {
        let table = fs::read_to_string("/proc/self/mountinfo").expect("mounted");
        let hierarchy = table.lines().find_map(|line| {
            let (mount, kind) = line.split_once(" - ")?;
            kind.starts_with("cgroup2 ")
                .then(|| mount.split(' ').nth(4).expect("a path"))
        });
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        let name = format!("tarfs-test-{}-{number}", std::process::id());
        let group = Path::new(hierarchy.expect("the tests need cgroup2")).join(name);
        fs::create_dir(&group).expect("root may");
        Self(group)
    }

    /// Words before those of a command that runs in the group.
    pub(crate) fn prefix(&self) -> [&OsStr; 4] {
        [
            "sh".as_ref(),
            "-c".as_ref(),
            ENTER.as_ref(),
            self.0.as_ref(),
        ]
    }

    /// Kills all its processes, as the end of a job does.
    pub(crate) fn kill(&self) {
        fs::write(self.0.join("cgroup.kill"), "1").expect("Linux 5.14");
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
        let start = std::time::Instant::now();
        while fs::remove_dir(&self.0).is_err() && start.elapsed() < super::wait::WAIT_TIMEOUT {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}
