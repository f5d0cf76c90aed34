//! `materialize --atomic` and `--sync`: a tree appears completely or not at all.
//!
//! Run as root, for owners, mounts and other users.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::failing_syscall::{self, FailingSyscall};
use crate::support::fixture::{PROGRAM, TestDir};
use crate::support::http::{Resource, Server};
use crate::support::program::{self, stderr_text};
use crate::support::raw::{Archive, Header, random_bytes};
use crate::support::wait;

/// A directory with the archive `a.tar` and the output.
struct OpenDir;

type Place = TestDir<OpenDir>;

impl Place {
    fn open() -> Self {
        let place = TestDir::with(&["in"], OpenDir);
        // Other users write here, too.
        for path in [place.root(), &place.path("in")] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("ours");
        }
        place
    }

    fn with_archive(archive: impl AsRef<[u8]>) -> Self {
        let place = Self::open();
        place.put("a.tar", archive);
        place
    }

    /// Copies the program so that other users can run it. Returns a relative path.
    fn public_program(&self) -> &'static str {
        program::copy_to(&self.path("tarfs"));
        "./tarfs"
    }

    /// Runs a command in the directory.
    fn run(&self, command: &mut Command) -> Output {
        command
            .current_dir(self.root())
            .output()
            .expect("a program")
    }

    /// Extracts the archive to `in/out` with `--atomic` and more options.
    fn atomic(&self, more: &[&str]) -> Output {
        let arguments = ["materialize", "-q", "a.tar", "--atomic", "-C", "in/out"];
        self.run(Command::new(PROGRAM).args(arguments).args(more))
    }

    /// Like [`Self::atomic`], without `--atomic` and with a failing system call.
    fn with_failing_syscall(&self, refused: FailingSyscall, more: &[&str]) -> Output {
        let arguments = ["materialize", "-q", "a.tar", "-C", "in/out"];
        self.run(
            failing_syscall::with_failing_syscall(refused, PROGRAM)
                .args(arguments)
                .args(more),
        )
    }

    /// The names in `in`, where only `out` may appear.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("in")).expect("a directory");
        let mut names: Vec<_> = entries
            .map(|entry| entry.expect("an entry").file_name())
            .map(|name| name.into_string().expect("UTF-8"))
            .collect();
        names.sort();
        names
    }

    /// Extracts standard input to `in/out`.
    fn feed(&self, command: &mut Command) -> FedRun {
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
    fn staging_path(&self) -> PathBuf {
        wait_for(|| {
            let names = self.names();
            let hidden = names.iter().find(|name| name.starts_with(".out.tarfs-"))?;
            let tree = self.path("in").join(hidden);
            tree.join("top/a").exists().then_some(tree)
        })
    }
}

/// A run that reads its archive from standard input.
struct FedRun(Child);

impl FedRun {
    fn write(&mut self, bytes: &[u8]) {
        let stdin = self.0.stdin.as_mut().expect("open");
        stdin.write_all(bytes).expect("read");
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Closes the input and waits for the run.
    fn end(self) -> Output {
        self.0.wait_with_output().expect("an end")
    }
}

fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < wait::WAIT_TIMEOUT, "it does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[track_caller]
fn assert_success(output: &Output) {
    assert_eq!(
        (output.status.code(), stderr_text(output)),
        (Some(0), String::new())
    );
}

/// Asserts that the run failed and reported these words, in any lines.
#[track_caller]
fn assert_failed(output: &Output, words: &[&str]) {
    let text = stderr_text(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for word in words {
        assert_eq!(text.matches(word).count(), 1, "'{word}' in: {text}");
    }
}

fn assert_same_trees(one: &Path, other: &Path, more: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/compare-trees");
    let output = Command::new(script).args(more).args([one, other]).output();
    let output = output.expect("Python");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

fn shell(place: &Place, script: &str) {
    let output = place.run(Command::new("sh").args(["-ec", script]));
    assert!(
        output.status.success(),
        "{script}: {}",
        stderr_text(&output)
    );
}

/// Start of an archive, long enough that some files are written.
fn beginning() -> Archive {
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
const FIRST_BYTES: usize = 2_000_000;

/// An archive that is fed in two parts.
fn long() -> Vec<u8> {
    beginning().file("top/z", random_bytes(3_000_000)).end()
}

fn whole() -> Vec<u8> {
    beginning().file("top/z", random_bytes(300_000)).end()
}

/// An archive with a member for the root.
fn with_root(mode: u64) -> Vec<u8> {
    let root = Header::new("./", b'5').mode(mode).owner(5, 6);
    Archive::new()
        .add(root, "")
        .directory("d/")
        .file("d/f", "x")
        .end()
}

/// Script for a directory `$1` with special attributes and this owner.
fn special_directory(owner: &str) -> String {
    format!(
        "mkdir $1; chown {owner} $1; setfacl -m u:9:rwx $1; setfacl -d -m g:10:rx $1
         chmod 2750 $1; setfattr -n user.k -v v $1"
    )
}

#[test]
fn atomic_tree_equals_tree_written_in_place() {
    let user = "setpriv --reuid=65534 --regid=65534 --clear-groups";
    for archive in [whole(), with_root(0o1711), with_root(0o555)] {
        for (user, before) in [
            ("", String::new()),
            ("", special_directory("7:8")),
            (user, String::new()),
            (user, special_directory("65534:65534")),
        ] {
            let place = Place::with_archive(&archive);
            let program = place.public_program();
            let script = format!(
                "umask 027
                 set in/plain; {before}
                 test -d $1 || {user} mkdir $1
                 {user} {program} materialize -q a.tar -C $1
                 set in/out; {before}
                 {user} {program} materialize -q a.tar -C $1 --atomic"
            );
            shell(&place, &script);
            assert_eq!(place.names(), ["out", "plain"], "{script}");
            // Without a member for it, the root's mtime is the time of its last entry.
            let more: &[&str] = if archive == whole() {
                &["--ignore-mtime-of-root"]
            } else {
                &[]
            };
            assert_same_trees(&place.path("in/plain"), &place.path("in/out"), more);
        }
    }
}

#[test]
fn nothing_appears_before_tree_is_complete() {
    let place = Place::open();
    let mut fed = place.feed(&mut Command::new(PROGRAM));
    fed.write(&long()[..FIRST_BYTES]);
    let tree = place.staging_path();
    assert_eq!(place.names().len(), 1);
    let mode = fs::metadata(&tree).expect("there").mode();
    assert_eq!(mode & 0o7777, 0o700, "not for others yet");
    fed.write(&long()[FIRST_BYTES..]);
    assert_success(&fed.end());
    assert_eq!(place.names(), ["out"]);
    let last = fs::read(place.path("in/out/top/z")).expect("there");
    assert_eq!(last, random_bytes(3_000_000));
}

#[test]
fn staging_directory_is_private_in_set_group_id_parent() {
    for group in [65534, 100] {
        let place = Place::open();
        let script = format!("chgrp {group} in && chmod 2777 in && setfacl -d -m g:10:rx in");
        shell(&place, &script);
        let mut user = Command::new("setpriv");
        let program = place.public_program();
        user.args(["--reuid=65534", "--regid=65534", "--clear-groups", program]);
        let mut fed = place.feed(&mut user);
        fed.write(&long()[..FIRST_BYTES]);
        let tree = place.staging_path();
        let mode = fs::metadata(&tree).expect("there").mode();
        assert_eq!(mode & 0o777, 0o700, "not for others yet");
        fed.write(&long()[FIRST_BYTES..]);
        assert_success(&fed.end());
        shell(
            &place,
            "setpriv --reuid=65534 --regid=65534 --clear-groups mkdir in/plain",
        );
        let [made, plain] = ["in/out", "in/plain"]
            .map(|name| fs::metadata(place.path(name)).expect("there"))
            .map(|status| (status.mode() & 0o777, status.gid()));
        assert_eq!(made, plain);
    }
}

#[test]
fn incomplete_atomic_tree_does_not_appear() {
    let not_whole = "in/out: nothing was written there, because the tree is incomplete";
    let damaged = beginning().add(Header::new("top/bad", b'0').damaged(), "");
    let damaged = damaged.file("top/z", random_bytes(5000)).end();
    let truncated = beginning().file("top/z", random_bytes(5000)).unfinished();
    let truncated = truncated.get(..truncated.len() - 3000).expect("longer");
    let refused = beginning().file("../up", "x").file("/a/../b", "x").end();
    for (archive, words) in [
        (&damaged[..], &["not a header", not_whole][..]),
        (truncated, &["top/z", not_whole]),
        (&refused, &["2 entries are missing", not_whole]),
    ] {
        for before in [&[][..], &["out"]] {
            let place = Place::with_archive(archive);
            for name in before {
                fs::create_dir(place.path("in").join(name)).expect("fresh");
            }
            assert_failed(&place.atomic(&[]), words);
            assert_eq!(place.names(), before);
        }
    }
    let place = Place::with_archive(whole());
    assert_failed(
        &place.atomic(&["top/none"]),
        &["top/none: not in", not_whole],
    );
    assert_eq!(place.names(), Vec::<String>::new());
}

#[test]
fn unfinished_tree_of_another_user_is_removed_in_any_mode() {
    let place = Place::with_archive(beginning().file("top/closed/../x", "").end());
    let program = place.public_program();
    let script = format!(
        "setpriv --reuid=65534 --regid=65534 --clear-groups \
         {program} materialize a.tar --atomic -C in/out"
    );
    let output = place.run(Command::new("sh").args(["-c", &script]));
    assert_failed(
        &output,
        &["the name contains '..'", "nothing was written there"],
    );
    assert_eq!(place.names(), Vec::<String>::new());
}

#[test]
fn existing_destination_is_reported_before_fetching() {
    let server = Server::start();
    server.serve("/a.tar", Resource::new(whole()));
    let place = Place::open();
    shell(
        &place,
        "mkdir in/full in/mounted; echo kept >in/full/file; echo kept >in/file",
    );
    symlink("nowhere", place.path("in/dangling")).expect("made");
    let refused = |directory: &str, words: &[&str]| {
        let script = format!(
            "mount -t tmpfs tmpfs in/mounted
             exec {PROGRAM} materialize {} --atomic -C '{directory}'",
            server.url("/a.tar")
        );
        let output = place.run(Command::new("unshare").args(["-m", "sh", "-ec", &script]));
        assert_failed(&output, words);
        assert_eq!(stderr_text(&output).lines().count(), 1);
    };
    refused(
        "in/full",
        &["in/full: is there already and not empty", "remove it, or"],
    );
    refused("in/full/", &["in/full/: is there already and not empty"]);
    refused(
        "in/mounted",
        &["in/mounted: is a mount point", "without --atomic"],
    );
    refused("in/file", &["in/file: cannot open", "Not a directory"]);
    refused("in/dangling", &["in/dangling: cannot open", "No such file"]);
    refused(
        "in/none/out",
        &["in/none: cannot open", "No such file", "make the directory"],
    );
    for nameless in [".", "/", "in/.."] {
        refused(nameless, &["has no name"]);
    }
    assert!(server.requests("/a.tar").is_empty());
    assert_eq!(place.names(), ["dangling", "file", "full", "mounted"]);
    assert_eq!(
        fs::read(place.path("in/full/file")).expect("kept"),
        b"kept\n"
    );
}

#[test]
fn link_to_empty_directory_stays_and_leads_to_tree() {
    let place = Place::with_archive(whole());
    fs::create_dir(place.path("in/elsewhere")).expect("fresh");
    symlink("elsewhere", place.path("in/out")).expect("made");
    assert_success(&place.atomic(&[]));
    assert_eq!(place.names(), ["elsewhere", "out"]);
    assert!(place.path("in/out").is_symlink());
    assert!(place.path("in/elsewhere/top/z").exists());
}

#[test]
fn destination_created_meanwhile_is_not_replaced() {
    let empty = "mkdir in/out";
    let full = "mkdir -p in/out; echo kept >in/out/file";
    let link = "ln -s nowhere in/out";
    let noreplace =
        || failing_syscall::with_failing_syscall(failing_syscall::RENAME_NOREPLACE, PROGRAM);
    let plain = || Command::new(PROGRAM);
    let kernels: [&dyn Fn() -> Command; 2] = [&plain, &noreplace];
    for program in kernels {
        for (before, meanwhile) in [("", empty), ("", full), ("", link), (empty, full)] {
            let place = Place::open();
            shell(&place, before);
            let mut fed = place.feed(&mut program());
            fed.write(&long()[..FIRST_BYTES]);
            place.staging_path();
            shell(&place, meanwhile);
            let inode = fs::symlink_metadata(place.path("in/out"))
                .expect("made")
                .ino();
            fed.write(&long()[FIRST_BYTES..]);
            assert_failed(&fed.end(), &["in/out: is there already"]);
            assert_eq!(place.names(), ["out"]);
            let now = fs::symlink_metadata(place.path("in/out"))
                .expect("there")
                .ino();
            assert_eq!(now, inode);
            assert_eq!(place.path("in/out/file").exists(), meanwhile == full);
        }
    }
}

#[test]
fn atomic_tree_appears_without_rename_noreplace_support() {
    let place = Place::with_archive(whole());
    assert_success(&place.with_failing_syscall(failing_syscall::RENAME_NOREPLACE, &["--atomic"]));
    assert_eq!(place.names(), ["out"]);
    assert!(place.path("in/out/top/z").exists());
}

/// Resets signal handlers, because the test runner may ignore signals, as a shell does for background jobs.
fn with_default_signals(mut env: Command) -> Command {
    env.args(["--default-signal", PROGRAM]);
    env
}

#[test]
fn signal_during_atomic_run_leaves_nothing() {
    for (signal, number) in [(Signal::TERM, 15), (Signal::INT, 2), (Signal::HUP, 1)] {
        let server = Server::start();
        let resource = Resource::new(long()).without_ranges();
        server.route("/a.tar", move |request| {
            resource.answer(request).stall_after(FIRST_BYTES)
        });
        let place = Place::open();
        let child = with_default_signals(Command::new("env"))
            .args(["materialize", "-q", &server.url("/a.tar")])
            .args(["--atomic", "-C", "in/out"])
            .current_dir(place.root())
            .stderr(Stdio::piped())
            .spawn()
            .expect("started");
        let tree = place.staging_path();
        wait_for(|| tree.join("top/z").exists().then_some(()));
        kill_process(Pid::from_child(&child), signal).expect("alive");
        let output = child.wait_with_output().expect("an end");
        assert_eq!(output.status.signal(), Some(number));
        assert_eq!(stderr_text(&output), "");
        assert_eq!(place.names(), Vec::<String>::new());
    }
}

#[test]
fn failed_removal_is_reported_unless_second_signal_comes() {
    assert!(is_interrupted_in_time(false), "nothing was too late");
    // On a busy machine, the second of retried removals may be over too early.
    assert!(
        (0..5).any(|_| is_interrupted_in_time(true)),
        "always too late"
    );
}

/// Sends one or two signals to a run that cannot remove its tree. Returns whether that was in time.
fn is_interrupted_in_time(second: bool) -> bool {
    let place = Place::open();
    let mut fed = place.feed(&mut with_default_signals(
        failing_syscall::with_failing_syscall(failing_syscall::UNLINKAT, "/usr/bin/env"),
    ));
    fed.write(long().get(..FIRST_BYTES).expect("longer"));
    let tree = place.staging_path();
    // Keep the input open, because the end of the archive would end the run.
    let _open = fed.0.stdin.take();
    let start = Instant::now();
    kill_process(fed.pid(), Signal::TERM).expect("alive");
    if second {
        wait::wait_until("the first is heard", || {
            !is_pending(fed.pid(), Signal::TERM)
        });
        // Give the run time to handle the first signal.
        std::thread::sleep(Duration::from_millis(50));
        kill_process(fed.pid(), Signal::INT).expect("alive");
    }
    let took = start.elapsed();
    let output = fed.end();
    if second && took > Duration::from_millis(500) && output.status.signal() == Some(15) {
        return false;
    }
    assert_eq!(output.status.signal(), Some(if second { 2 } else { 15 }));
    let leftover = format!("in/{}: cannot remove", place.names().concat());
    assert_eq!(
        stderr_text(&output).contains(&leftover),
        !second,
        "{}",
        stderr_text(&output)
    );
    assert!(tree.join("top/a").exists());
    true
}

/// Whether a signal to the process is still pending.
fn is_pending(process: Pid, signal: Signal) -> bool {
    let status =
        fs::read_to_string(format!("/proc/{}/status", process.as_raw_pid())).unwrap_or_default();
    let pending = status.lines().filter_map(|line| {
        let mask = line
            .strip_prefix("ShdPnd:")
            .or_else(|| line.strip_prefix("SigPnd:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    let mask = 1 << (signal.as_raw() - 1);
    pending.fold(0, |all, mask| all | mask) & mask != 0
}

#[test]
fn signal_ignored_at_start_stays_ignored() {
    let place = Place::open();
    let mut nohup = Command::new("sh");
    nohup.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", PROGRAM]);
    let mut fed = place.feed(&mut nohup);
    fed.write(&long()[..FIRST_BYTES]);
    place.staging_path();
    kill_process(fed.pid(), Signal::HUP).expect("alive");
    fed.write(&long()[FIRST_BYTES..]);
    assert_success(&fed.end());
    assert_eq!(place.names(), ["out"]);
}

#[test]
fn leftovers_of_killed_atomic_run_do_not_block_next_run() {
    let place = Place::with_archive(whole());
    let mut fed = place.feed(&mut Command::new(PROGRAM));
    fed.write(&long()[..FIRST_BYTES]);
    let left = place.staging_path();
    kill_process(fed.pid(), Signal::KILL).expect("alive");
    assert_eq!(fed.end().status.signal(), Some(9));
    assert!(left.join("top/a").exists());
    assert_success(&place.atomic(&[]));
    assert_eq!(place.names().len(), 2);
    assert!(place.path("in/out/top/z").exists());
}

#[test]
fn sync_runs_once_and_only_with_flag() {
    let synced = |more: &[&str]| {
        let place = Place::with_archive(whole());
        fs::create_dir(place.path("in/out")).expect("fresh");
        let arguments = ["materialize", "-q", "a.tar", "-C", "in/out", "--stats"];
        let output = place.run(Command::new(PROGRAM).args(arguments).args(more));
        assert_eq!(output.status.code(), Some(0), "{}", stderr_text(&output));
        assert!(place.path("in/out/top/z").exists());
        stderr_text(&output).contains("synced_file_systems: 1\n")
    };
    assert!(!synced(&[]));
    assert!(!synced(&["--atomic"]));
    assert!(synced(&["--sync"]));
    assert!(synced(&["--sync", "--atomic"]));
}

#[test]
fn failed_sync_is_an_error_and_tree_does_not_appear() {
    let errors = &["in/out: cannot sync to disk", "Input/output error"];
    let place = Place::with_archive(whole());
    assert_failed(
        &place.with_failing_syscall(failing_syscall::SYNCFS, &["--sync", "--atomic"]),
        errors,
    );
    assert_eq!(place.names(), Vec::<String>::new());
    fs::create_dir(place.path("in/out")).expect("fresh");
    assert_failed(
        &place.with_failing_syscall(failing_syscall::SYNCFS, &["--sync"]),
        errors,
    );
    assert_success(&place.with_failing_syscall(failing_syscall::SYNCFS, &[]));
    // The tree has already appeared when the sync of its name fails.
    fs::remove_dir_all(place.path("in/out")).expect("there");
    let output = place.with_failing_syscall(failing_syscall::FSYNC, &["--sync", "--atomic"]);
    assert_failed(&output, &["in: cannot sync to disk", "Input/output error"]);
    assert!(place.path("in/out/top/z").exists());
}
