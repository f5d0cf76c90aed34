//! Fixtures of the tests: a directory, and a mount in a directory.

use std::ffi::OsStr;
use std::fs;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::process::{Pid, geteuid};
use serde_json::Value;

use super::deadline::{Deadline, kill_processes};
use super::mounts::is_mounted;
use super::program::stderr_text;
use super::wait::wait_until;

/// The program under test.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_tarfs");

/// A directory in which the program runs and keeps its files, with the `state` of a test and a deadline.
pub(crate) struct TestDir<S = ()> {
    state: S,
    deadline: Deadline,
    directory: tempfile::TempDir,
}

impl TestDir {
    /// A new directory with these empty directories in it.
    pub(crate) fn new(names: &[&str]) -> Self {
        Self::with(names, ())
    }

    /// Like [`TestDir::new`], below `parent`.
    pub(crate) fn new_in(parent: &str, names: &[&str]) -> Self {
        let directory = tempfile::tempdir_in(parent).expect("a directory");
        Self::from_parts(directory, names, ())
    }
}

impl<S> TestDir<S> {
    /// Like [`TestDir::new`], with a state.
    pub(crate) fn with(names: &[&str], state: S) -> Self {
        Self::from_parts(tempfile::tempdir().expect("a directory"), names, state)
    }

    fn from_parts(directory: tempfile::TempDir, names: &[&str], state: S) -> Self {
        for name in names {
            fs::create_dir(directory.path().join(name)).expect("a new directory");
        }
        Self {
            state,
            deadline: Deadline::start(directory.path().to_owned()),
            directory,
        }
    }

    pub(crate) fn root(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.root().join(name)
    }

    /// Writes a file.
    pub(crate) fn put(&self, name: impl AsRef<Path>, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).expect("space");
    }

    /// A command that runs `program` in the directory.
    pub(crate) fn command_of(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(self.root())
            .env("XDG_RUNTIME_DIR", self.root())
            .env("TARFS_CACHE_DIR", self.path("cache"))
            .env("no_proxy", "*");
        command
    }

    /// A command that runs tarfs in the directory.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = self.command_of(PROGRAM);
        command.args(words);
        command
    }

    /// Runs tarfs in the directory.
    pub(crate) fn tarfs(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("started")
    }

    /// Standard output of a run that must succeed.
    #[track_caller]
    pub(crate) fn succeeds(&self, words: &[&str]) -> String {
        let output = self.tarfs(words);
        let text = stderr_text(&output);
        assert!(output.status.success(), "{words:?}: {text}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Error message of a run that must fail.
    #[track_caller]
    pub(crate) fn error_of(&self, words: &[&str]) -> String {
        self.failure_of(2, words)
    }

    /// Error message of a run that must end with the exit status `code`.
    #[track_caller]
    pub(crate) fn failure_of(&self, code: i32, words: &[&str]) -> String {
        let output = self.tarfs(words);
        let text = stderr_text(&output);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {text}");
        text
    }
}

impl<S> Drop for TestDir<S> {
    /// Opens closed directories, because only root can remove them as they are. A test that fails leaves
    /// no process, which could keep the test runner's output open.
    fn drop(&mut self) {
        if std::thread::panicking() {
            kill_processes(self.root());
        }
        if !geteuid().is_root() {
            let mut chmod = Command::new("chmod");
            drop(chmod.args(["-R", "u+rwX"]).arg(self.root()).output());
        }
        let is_late = self.deadline.has_passed() && !std::thread::panicking();
        assert!(!is_late, "its processes were killed, because it hung");
    }
}

impl<S> Deref for TestDir<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.state
    }
}

impl<S> DerefMut for TestDir<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.state
    }
}

/// A [`TestDir`] with mountpoints. Dropping it unmounts them.
pub(crate) struct TestMount<S = ()> {
    mountpoints: Vec<&'static str>,
    before_unmount: Option<Box<dyn Fn() + Send + Sync>>,
    directory: TestDir<S>,
}

impl TestMount {
    /// A directory with the mountpoint `mnt` and these empty directories.
    pub(crate) fn new(names: &[&str]) -> Self {
        Self::with(names, ())
    }
}

impl<S> TestMount<S> {
    /// Like [`TestMount::new`], with a state.
    pub(crate) fn with(names: &[&str], state: S) -> Self {
        let names = [&["mnt"], names].concat();
        Self::of(TestDir::with(&names, state), &["mnt"])
    }

    /// A mount in an existing directory. Dropping it unmounts in the order of the mountpoints.
    pub(crate) fn of(directory: TestDir<S>, mountpoints: &[&'static str]) -> Self {
        Self {
            mountpoints: mountpoints.to_vec(),
            before_unmount: None,
            directory,
        }
    }

    /// Makes [`Drop`] call `action` before it unmounts.
    pub(crate) fn before_unmount(mut self, action: impl Fn() + Send + Sync + 'static) -> Self {
        self.before_unmount = Some(Box::new(action));
        self
    }

    pub(crate) fn mounted(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path("mnt").join(name)
    }

    pub(crate) fn is_mounted(&self) -> bool {
        is_mounted(&self.path("mnt"))
    }

    /// The status, if a process serves the mount.
    pub(crate) fn try_status(&self) -> Option<Value> {
        let output = self.tarfs(&["status", "mnt", "--json"]);
        serde_json::from_slice(&output.stdout).ok()
    }

    #[track_caller]
    pub(crate) fn status_of(&self, mountpoint: &str) -> Value {
        let text = self.succeeds(&["status", mountpoint, "--json"]);
        serde_json::from_str(&text).expect("one mount")
    }

    #[track_caller]
    pub(crate) fn status(&self) -> Value {
        self.status_of("mnt")
    }

    /// A counter of the status.
    #[track_caller]
    pub(crate) fn counter(&self, name: &str) -> u64 {
        let status = self.status();
        let counter = status.pointer(&format!("/counters/{name}"));
        counter.and_then(Value::as_u64).expect("a counter")
    }

    /// The process that serves the mount.
    pub(crate) fn server_pid(&self) -> Option<Pid> {
        pid_of(&self.try_status()?)
    }

    /// Waits until the index is saved, which is the last thing that a scan does.
    pub(crate) fn wait_until_index_is_saved(&self) {
        let is_index = |path: &Path| path.extension().is_some_and(|name| name == "idx");
        wait_until("the index is saved", || {
            let saved = fs::read_dir(self.path("cache/index"));
            saved
                .into_iter()
                .flatten()
                .flatten()
                .any(|entry| is_index(&entry.path()))
        });
    }

    pub(crate) fn umount(&self) {
        self.succeeds(&["umount", "mnt"]);
    }
}

/// The process that serves a mount with this status.
pub(crate) fn pid_of(status: &Value) -> Option<Pid> {
    Pid::from_raw(i32::try_from(status.get("pid")?.as_i64()?).ok()?)
}

/// The process that keeps the mount with this status.
pub(crate) fn monitor_of(status: &Value) -> Option<Pid> {
    Pid::from_raw(i32::try_from(status.get("monitor")?.as_i64()?).ok()?)
}

impl<S> Deref for TestMount<S> {
    type Target = TestDir<S>;

    fn deref(&self) -> &TestDir<S> {
        &self.directory
    }
}

impl<S> DerefMut for TestMount<S> {
    fn deref_mut(&mut self) -> &mut TestDir<S> {
        &mut self.directory
    }
}

impl<S> Drop for TestMount<S> {
    #[expect(clippy::print_stderr, reason = "explains the failure")]
    fn drop(&mut self) {
        if let Some(action) = &self.before_unmount {
            action();
        }
        if std::thread::panicking()
            && let Ok(log) = fs::read_to_string(self.path("log"))
        {
            eprintln!("log of the mount:\n{log}");
        }
        for mountpoint in &self.mountpoints {
            if is_mounted(&self.path(mountpoint)) {
                drop(self.tarfs(&["umount", "--lazy", mountpoint]));
            }
        }
    }
}
