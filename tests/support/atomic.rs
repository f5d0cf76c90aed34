//! Runs of `materialize --atomic` that a test feeds, interrupts or lets fail.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::Pid;

use super::failing_syscall::{self, FailingSyscall};
use super::fixture::{PROGRAM, TestDir};
use super::program::{self, stderr_text};
use super::raw::{Archive, Header, random_bytes};
use super::wait::wait_for;

/// A directory with the archive `a.tar` and the output.
pub(crate) struct OpenDir;

pub(crate) type Place = TestDir<OpenDir>;

impl Place {
    pub(crate) fn open() -> Self {
        let place = TestDir::with(&["in"], OpenDir);
        // Other users write here, too.
        for path in [place.root(), &place.path("in")] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("ours");
        }
        place
    }

    pub(crate) fn with_archive(archive: impl AsRef<[u8]>) -> Self {
        let place = Self::open();
        place.put("a.tar", archive);
        place
    }

    /// Copies the program so that other users can run it. Returns a relative path.
    pub(crate) fn public_program(&self) -> &'static str {
        program::copy_to(&self.path("tarfs"));
        "./tarfs"
    }

    /// Runs a command in the directory.
    pub(crate) fn run(&self, command: &mut Command) -> Output {
        command
            .current_dir(self.root())
            .output()
            .expect("a program")
    }

    /// Extracts the archive to `in/out` with `--atomic` and more options.
    pub(crate) fn atomic(&self, more: &[&str]) -> Output {
        let arguments = ["materialize", "-q", "a.tar", "--atomic", "-C", "in/out"];
        self.run(Command::new(PROGRAM).args(arguments).args(more))
    }

    /// Like [`Self::atomic`], without `--atomic` and with a failing system call.
    pub(crate) fn with_failing_syscall(&self, refused: FailingSyscall, more: &[&str]) -> Output {
        let arguments = ["materialize", "-q", "a.tar", "-C", "in/out"];
        self.run(
            failing_syscall::with_failing_syscall(refused, PROGRAM)
                .args(arguments)
                .args(more),
        )
    }

    /// The names in `in`, where only `out` may appear.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("in")).expect("a directory");
        let mut names: Vec<_> = entries
            .map(|entry| entry.expect("an entry").file_name())
            .map(|name| name.into_string().expect("UTF-8"))
            .collect();
        names.sort();
        names
    }

    /// Extracts standard input to `in/out`.
    pub(crate) fn feed(&self, command: &mut Command) -> FedRun {
        let child = command
            .args(["materialize", "-q", "-", "--chunk-size", "64K"])
            .args(["--atomic", "-C", "in/out"])
            .current_dir(self.root())
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        FedRun(child.expect("started"))
    }

    /// Waits until a file is written to the staging directory. Returns its path.
    pub(crate) fn staging_path(&self) -> PathBuf {
        wait_for("a file in the staging directory", || {
            let names = self.names();
            let hidden = names.iter().find(|name| name.starts_with(".out.tarfs-"))?;
            let tree = self.path("in").join(hidden);
            tree.join("top/a").exists().then_some(tree)
        })
    }
}

/// A run that reads its archive from standard input.
pub(crate) struct FedRun(pub(crate) Child);

impl FedRun {
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let stdin = self.0.stdin.as_mut().expect("open");
        stdin.write_all(bytes).expect("read");
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Closes the input and waits for the run.
    pub(crate) fn end(self) -> Output {
        self.0.wait_with_output().expect("an end")
    }
}

#[track_caller]
pub(crate) fn assert_success(output: &Output) {
    assert_eq!(
        (output.status.code(), stderr_text(output)),
        (Some(0), String::new())
    );
}

/// Asserts that the run failed and reported these words, in any lines.
#[track_caller]
pub(crate) fn assert_failed(output: &Output, words: &[&str]) {
    let text = stderr_text(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for word in words {
        assert_eq!(text.matches(word).count(), 1, "'{word}' in: {text}");
    }
}

pub(crate) fn shell(place: &Place, script: &str) {
    let output = place.run(Command::new("sh").args(["-ec", script]));
    assert!(
        output.status.success(),
        "{script}: {}",
        stderr_text(&output)
    );
}

/// Start of an archive, long enough that some files are written.
pub(crate) fn beginning() -> Archive {
    Archive::new()
        .directory("top/")
        .file("top/a", "hello\n")
        .add(Header::new("top/closed/", b'5').mode(0o555), "")
        .file("top/closed/file", random_bytes(100_000))
        .symlink("top/link", "a")
        .hard_link("top/hard", "top/a")
        .add(Header::new("top/b", b'0').mode(0o4755).owner(7, 8), "bee")
}

/// Size of the first part of [`long`]. It ends in the last file.
pub(crate) const FIRST_BYTES: usize = 2_000_000;

/// An archive that is fed in two parts.
pub(crate) fn long() -> Vec<u8> {
    beginning().file("top/z", random_bytes(3_000_000)).end()
}

pub(crate) fn whole() -> Vec<u8> {
    beginning().file("top/z", random_bytes(300_000)).end()
}
