//! A directory with an archive of many files, and the errors of runs that write there.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use super::fixture::TestDir;
use super::program::{self, stderr_text};
use super::raw::Archive;

/// A directory that other users can access, with the archive `a.tar` of many files and a copy of the
/// program.
pub(crate) struct ManyFiles;

pub(crate) type Place = TestDir<ManyFiles>;

impl Place {
    pub(crate) fn with_archive() -> Self {
        let place = TestDir::with(&[], ManyFiles);
        let many = (0..50).fold(Archive::new().directory("d"), |archive, number| {
            let top = archive.file(&format!("f{number}"), "top");
            top.file(&format!("d/f{number}"), "below")
        });
        place.put("a.tar", many.end());
        fs::set_permissions(place.root(), Permissions::from_mode(0o755)).expect("ours");
        program::copy_to(&place.path("tarfs"));
        place
    }

    /// Like [`TestDir::tarfs`], as a user who owns nothing here.
    pub(crate) fn run_as_nobody(&self, words: &[&str]) -> Output {
        Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(self.path("tarfs"))
            .args(words)
            .current_dir(self.root())
            .env("TARFS_CACHE_DIR", "/nonexistent")
            .output()
            .expect("setpriv is installed")
    }
}

pub(crate) fn error_lines(output: &Output) -> Vec<String> {
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(output));
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines().map(str::to_owned).collect()
}

pub(crate) fn make(path: &Path, mode: u32) {
    fs::create_dir(path).expect("fresh");
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("ours");
}
