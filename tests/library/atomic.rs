//! `materialize --atomic` and `--sync`: a tree appears completely or not at all.
//!
//! `tests/mount` has the tests with other owners, users and mounts.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::atomic::{
    FIRST_BYTES, Place, assert_failed, assert_success, beginning, long, shell, whole,
};
use crate::support::failing_syscall;
use crate::support::fixture::PROGRAM;
use crate::support::http::{Resource, Server};
use crate::support::program::{is_signal_pending, stderr_text};
use crate::support::raw::{Header, random_bytes};
use crate::support::wait;

// Promises: atomic-same, atomic-whole
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

// Promises: atomic-whole
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

// Promises: atomic-destination
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

// Promises: atomic-not-replaced
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

// Promises: atomic-not-replaced
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

// Promises: atomic-ended
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
        wait::wait_until("all is written", || tree.join("top/z").exists());
        kill_process(Pid::from_child(&child), signal).expect("alive");
        let output = child.wait_with_output().expect("an end");
        assert_eq!(output.status.signal(), Some(number));
        assert_eq!(stderr_text(&output), "");
        assert_eq!(place.names(), Vec::<String>::new());
    }
}

// Promises: atomic-ended
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
        wait::wait_until("the first is received", || {
            !is_signal_pending(fed.pid(), Signal::TERM)
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

// Promises: atomic-ended
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

// Promises: atomic-ended
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

// Promises: write-sync
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

// Promises: write-sync, atomic-sync
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
    // Only root writes to the closed directory of a tree that is there.
    shell(&place, "chmod -R u+w in/out; rm -r in/out; mkdir in/out");
    assert_success(&place.with_failing_syscall(failing_syscall::SYNCFS, &[]));
    shell(&place, "chmod -R u+w in/out; rm -r in/out");
    // The tree has already appeared when the sync of its name fails.
    let output = place.with_failing_syscall(failing_syscall::FSYNC, &["--sync", "--atomic"]);
    assert_failed(&output, &["in: cannot sync to disk", "Input/output error"]);
    assert!(place.path("in/out/top/z").exists());
}
