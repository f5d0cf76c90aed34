//! A directory in which the program runs, and the outcomes of its runs.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use rustix::process::geteuid;

use super::fixture::TestDir;
use super::mounts::mount_lines;
use super::program;
use super::raw::{Archive, Header, random_bytes};

/// A directory in which the program runs.
pub(crate) struct Place {
    pub(crate) directory: TestDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let directory = TestDir::new(&["cache", "run", "out", "mnt"]);
        Self { directory }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path(name)
    }

    /// Writes a file.
    pub(crate) fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        self.directory.put(name, content);
    }

    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.directory.command_of(program);
        command
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn tarfs(&self) -> Command {
        self.command(env!("CARGO_BIN_EXE_tarfs"))
    }

    /// Makes all files here those of a user for whom permissions count, who can run the program as `./tarfs`.
    pub(crate) fn give_to_user(&self) {
        program::copy_to(&self.path("tarfs"));
        if geteuid().is_root() {
            let owner = ["-R", "65534:65534", "."];
            let given = self.command("chown").args(owner).status();
            assert!(given.expect("coreutils").success());
        }
    }

    /// A command that runs `program` as that user.
    pub(crate) fn command_of_user(&self, program: &str) -> Command {
        if !geteuid().is_root() {
            return self.command(program);
        }
        let mut command = self.command("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command.arg(program);
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Outcome {
        Outcome::of(self.tarfs().args(arguments))
    }

    /// The outcome of a run that must succeed without a message on standard error.
    pub(crate) fn succeeds(&self, arguments: &[&str]) -> Outcome {
        let outcome = self.run(arguments);
        assert_eq!(
            (outcome.code, outcome.complaints.as_str()),
            (0, ""),
            "{arguments:?}"
        );
        outcome
    }

    /// The error line of a run that must fail. It contains each of `words` once.
    pub(crate) fn fails(&self, arguments: &[&str], words: &[&str]) -> String {
        self.run(arguments).failure(words)
    }

    pub(crate) fn mounts(&self) -> usize {
        mount_lines(self.directory.root()).len()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.mounts() > 0 {
            drop(self.run(&["umount", "--lazy", "mnt"]));
        }
    }
}

/// Exit status and output of a run.
pub(crate) struct Outcome {
    pub(crate) code: i32,
    pub(crate) output: Vec<u8>,
    pub(crate) complaints: String,
}

impl Outcome {
    pub(crate) fn of(command: &mut Command) -> Self {
        command.output().expect("a program").into()
    }

    #[track_caller]
    pub(crate) fn failure(self, words: &[&str]) -> String {
        self.failure_of(2, words)
    }

    /// The error line of a run that ends with `code`. It contains each of `words` once.
    #[track_caller]
    pub(crate) fn failure_of(self, code: i32, words: &[&str]) -> String {
        let text = self.complaints;
        assert_eq!(self.code, code, "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.starts_with("tarfs: "), "{text}");
        for word in words {
            assert_eq!(text.matches(word).count(), 1, "'{word}' in: {text}");
        }
        assert!(!text.contains("os error"), "{text}");
        text
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.output).expect("UTF-8")
    }

    pub(crate) fn lines(&self) -> Vec<&str> {
        self.text().lines().collect()
    }
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            output: output.stdout,
            complaints: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
}

/// A small tree with most kinds of entries, and some hundred kilobytes that do not compress.
pub(crate) fn sample() -> Vec<u8> {
    Archive::new()
        .directory("top/")
        .file("top/a", "hello\n")
        .add(Header::new("top/b", b'0').mode(0o4755).owner(7, 8), "bee")
        .symlink("top/link", "a")
        .hard_link("top/hard", "top/a")
        .directory("top/sub/")
        .file("top/sub/noise", random_bytes(300_000))
        .file("top/sub/last", "end\n")
        .end()
}
