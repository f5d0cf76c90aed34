//! Mounts that one process serves.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::mount::{MountFlags, UnmountFlags, unmount};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

use crate::support::cgroup::Group;
use crate::support::deadline::processes_of;
use crate::support::fixture::{PROGRAM, TestDir, TestMount, monitor_of, pid_of};
use crate::support::http::{Resource, Response, Server};
use crate::support::mounts::is_mounted;
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::rounds;
use crate::support::wait;

const ARCHIVE: &str = "/a.tar.gz";
const MOUNTPOINTS: [&str; 5] = ["m0", "m1", "m2", "m3", "m4"];
const FILES: usize = 20;
const ARCHIVES: usize = 5;
/// Mountpoints of jobs, four for each archive.
const JOBS: [&str; 20] = [
    "j0", "j1", "j2", "j3", "j4", "j5", "j6", "j7", "j8", "j9", "j10", "j11", "j12", "j13", "j14",
    "j15", "j16", "j17", "j18", "j19",
];

/// An option that no other mount has.
const OTHER_FILE_SYSTEM: [&str; 2] = ["-o", "noexec"];

type Place = TestMount<Server>;

fn content(number: usize) -> Vec<u8> {
    Rng::new(number as u64 + 1).bytes(200_000)
}

fn archive(last: &str) -> Vec<u8> {
    packed_archive(last, Packing::Gzip)
}

fn packed_archive(last: &str, packing: Packing) -> Vec<u8> {
    let archive = (0..FILES).fold(Archive::new(), |archive, number| {
        archive.file(&format!("d/f{number}"), content(number))
    });
    let tar = archive.file("last", last).end();
    packing.pack(&tar.into()).to_vec()
}

fn place() -> Place {
    let directory = TestDir::with(&MOUNTPOINTS, Server::start());
    let place = TestMount::of(directory, &MOUNTPOINTS);
    place
        .server()
        .serve(ARCHIVE, Resource::new(archive("old")).etag("\"1\""));
    place
}

impl Place {
    fn server(&self) -> &Server {
        self
    }

    fn mount(&self, mountpoint: &str, flags: &[&str]) {
        let url = self.url(ARCHIVE);
        self.succeeds(&[&["mount"], flags, &[&url, mountpoint]].concat());
    }

    fn share(&self, mountpoint: &str) {
        self.mount(mountpoint, &[]);
    }

    /// Serves an archive at `path` whose second half comes only while the returned gate is open.
    fn stall_in_the_middle(&self, path: &str, last: &str) -> Arc<AtomicBool> {
        let resource = Resource::new(archive(last)).etag(&format!("\"{last}\""));
        let half = archive(last).len() as u64 / 2;
        let gate = Arc::<AtomicBool>::default();
        let is_open = Arc::clone(&gate);
        self.server().route(path, move |request| {
            let is_first_half = request.range().is_some_and(|(_, end)| end <= half);
            let answer = resource.answer(request);
            if is_first_half || is_open.load(Ordering::SeqCst) {
                answer
            } else {
                answer.stall_after(0)
            }
        });
        gate
    }

    /// Removes, cuts or overwrites a part of a random file of the disk cache or of the saved indexes.
    fn damage_cache(&self, rng: &mut Rng) {
        let directory = if rng.below(3) == 0 {
            "cache/index"
        } else {
            "cache/disk-cache"
        };
        let files = fs::read_dir(self.path(directory)).into_iter().flatten();
        let mut files: Vec<_> = files.map(|file| file.expect("there").path()).collect();
        if files.is_empty() {
            return;
        }
        let path =
            files.swap_remove(usize::try_from(rng.below(files.len() as u64)).expect("small"));
        let Ok(mut file) = File::options().write(true).open(&path) else {
            return;
        };
        let len = file.metadata().map_or(0, |metadata| metadata.len());
        let place = rng.below(len + 1);
        match rng.below(4) {
            0 => drop(fs::remove_file(path)),
            1 => drop(file.set_len(place)),
            _ => {
                file.seek(SeekFrom::Start(place)).expect("seekable");
                drop(file.write_all(&rng.bytes(1 << 16)));
            }
        }
    }

    /// Mounts as a job does.
    fn mount_in(&self, job: &Group, url: &str, mountpoint: &str) {
        let [shell, words @ ..] = job.prefix();
        let mut command = self.command_of(shell);
        command.args(words).arg(PROGRAM);
        command.args(["mount", url, mountpoint]);
        let output = command.output().expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
    }

    fn start_mount(&self, mountpoint: &str) -> Child {
        let mut command = self.command(&["mount", &self.url(ARCHIVE), mountpoint]);
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        command.spawn().expect("started")
    }

    fn file(&self, mountpoint: &str, number: usize) -> PathBuf {
        self.path(mountpoint).join(format!("d/f{number}"))
    }

    #[track_caller]
    fn compare(&self, mountpoint: &str) {
        self.compare_other(mountpoint, FILES);
    }

    /// As [`Self::compare`], without one file.
    #[track_caller]
    fn compare_other(&self, mountpoint: &str, without: usize) {
        for number in (0..FILES).filter(|&number| number != without) {
            let read = fs::read(self.file(mountpoint, number)).expect("readable");
            assert!(read == content(number), "{mountpoint}: f{number} is wrong");
        }
    }

    /// Compares a random file, whose bytes the kernel must ask for.
    #[track_caller]
    fn compare_from_server(&self, mountpoint: &str, rng: &mut Rng) {
        let number = usize::try_from(rng.below(FILES as u64)).expect("small");
        let path = self.file(mountpoint, number);
        let file = File::open(&path).expect("there");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("clean");
        let read = fs::read(&path).expect("readable");
        assert!(read == content(number), "{mountpoint}: f{number} is wrong");
    }

    fn pid(&self, mountpoint: &str) -> Pid {
        pid_of(&self.status_of(mountpoint)).expect("a number")
    }

    fn monitor(&self, mountpoint: &str) -> Pid {
        monitor_of(&self.status_of(mountpoint)).expect("a number")
    }

    fn daemon_sockets(&self) -> Vec<PathBuf> {
        let is_daemon = |path: &PathBuf| path.extension().is_some_and(|name| name == "daemon");
        self.runtime_files().into_iter().filter(is_daemon).collect()
    }

    fn runtime_files(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.path("tarfs")).into_iter().flatten();
        files.map(|file| file.expect("there").path()).collect()
    }

    /// Removes the socket of the daemon, which then ends with its last mount.
    fn remove_daemon_socket(&self) {
        let sockets = self.daemon_sockets();
        assert_eq!(sockets.len(), 1, "{sockets:?}");
        for socket in sockets {
            fs::remove_file(socket).expect("removable");
        }
    }

    /// Without mounts, a daemon removes what killed ones have left, and leaves nothing itself.
    #[track_caller]
    fn assert_nothing_is_left(&self) {
        let shown = self.succeeds(&["status", "--json"]);
        // Other mounts of this user have no part in it.
        assert!(
            !shown.contains(&self.root().display().to_string()),
            "{shown}"
        );
        self.put("a.tar", Archive::new().file("last", "").end());
        fs::create_dir_all(self.path("mnt")).expect("made");
        self.succeeds(&["mount", "a.tar", "mnt"]);
        self.succeeds(&["umount", "mnt"]);
        let start = Instant::now();
        loop {
            let left = (self.runtime_files(), processes_of(self.root()));
            if left.0.is_empty() && left.1.is_empty() {
                return;
            }
            assert!(start.elapsed() < wait::WAIT_TIMEOUT, "{left:?} are left");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until a process that is `wanted` serves a mount.
    fn wait_for_server(&self, mountpoint: &str, wanted: impl Fn(Pid) -> bool) {
        wait::wait_until("it serves the mount", || {
            let pid = self.own_status(mountpoint).as_ref().and_then(pid_of);
            pid.is_some_and(&wanted)
        });
    }

    /// The status of a mount, unless it counts as a bind mount of another one, because no process knows it.
    fn own_status(&self, mountpoint: &str) -> Option<Value> {
        let status = self.tarfs(&["status", mountpoint, "--json"]);
        let status: Value = serde_json::from_slice(&status.stdout).ok()?;
        let shown = status.get("mountpoint").and_then(Value::as_str);
        (shown == self.path(mountpoint).to_str()).then_some(status)
    }

    /// Starts a reader of the last file, and waits until it waits for an answer.
    fn start_waiting_reader(&self, mountpoint: &str) -> Child {
        let mut reader = self.command_of("cat");
        reader.arg(self.path(mountpoint).join("last"));
        reader.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut reader = reader.spawn().expect("started");
        wait_until_it_waits(&mut reader, &["request_wait_answer", "fuse"]);
        reader
    }

    fn last(&self, mountpoint: &str) -> String {
        fs::read_to_string(self.path(mountpoint).join("last")).expect("readable")
    }
}

/// Waits until a thread of `child` waits in a function of the kernel whose name has one of `parts`.
fn wait_until_it_waits(child: &mut Child, parts: &[&str]) {
    let threads = format!("/proc/{}/task", child.id());
    wait::wait_until("it waits", || {
        assert!(child.try_wait().expect("a child").is_none(), "it has ended");
        let threads = fs::read_dir(&threads).into_iter().flatten().flatten();
        let places = threads.map(|thread| fs::read_to_string(thread.path().join("wchan")));
        let mut places = places.filter_map(Result::ok);
        places.any(|place| parts.iter().any(|part| place.contains(part)))
    });
}

fn counter(status: &Value, name: &str) -> u64 {
    let counter = status.pointer(&format!("/counters/{name}"));
    counter.and_then(Value::as_u64).unwrap_or(0)
}

// Promises: shared-one
#[test]
fn mounts_that_start_together_cost_one_download_and_one_scan() {
    let place = place();
    let started = MOUNTPOINTS.map(|mountpoint| place.start_mount(mountpoint));
    for child in started {
        let output = child.wait_with_output().expect("a child");
        assert!(output.status.success(), "{}", stderr_text(&output));
    }
    for mountpoint in MOUNTPOINTS {
        place.compare(mountpoint);
    }
    let len = archive("old").len() as u64;
    let sent = place.sent_bytes(ARCHIVE);
    assert!(sent <= len * 102 / 100, "{sent} bytes of {len} were sent");
    let statuses = MOUNTPOINTS.map(|mountpoint| place.status_of(mountpoint));
    let (first, _) = statuses.split_first().expect("some");
    for status in &statuses {
        assert_eq!(status.get("pid"), first.get("pid"));
        assert_eq!(counter(status, "scans"), 1);
        assert!(counter(status, "served_bytes") <= 200_000 * FILES as u64 + 4096);
    }
}

// Promises: shared-one
#[test]
fn end_of_a_mount_leaves_others_with_the_same_archive() {
    let place = place();
    place.mount("m0", &["--no-disk-cache"]);
    place.mount("m1", &["--no-disk-cache"]);
    let requests = place.requests(ARCHIVE).len();
    place.mount("m2", &["--no-disk-cache"]);
    assert_eq!(
        place.requests(ARCHIVE).len(),
        requests,
        "the version is known"
    );
    let pid = place.pid("m1");
    place.succeeds(&["umount", "m0"]);
    assert!(!is_mounted(&place.path("m0")));
    place.compare("m1");
    assert_eq!(place.pid("m1"), pid);
    place.succeeds(&["umount", "m1"]);
    place.succeeds(&["umount", "--all"]);
    assert!(!is_mounted(&place.path("m2")));
}

// Promises: shared-version
#[test]
fn changed_local_archive_is_mounted_beside_its_old_version() {
    let place = place();
    place.put("a.tar.gz", archive("old"));
    place.succeeds(&["mount", "a.tar.gz", "m0"]);
    assert_eq!(place.last("m0"), "old");
    place.put("new", archive("new"));
    fs::rename(place.path("new"), place.path("a.tar.gz")).expect("renamed");
    place.succeeds(&["mount", "a.tar.gz", "m1"]);
    assert_eq!(place.last("m1"), "new");
    assert_eq!(place.pid("m0"), place.pid("m1"));
    place.compare("m0");
}

// Promises: shared-one
#[test]
fn isolated_mount_has_a_process_of_its_own() {
    let place = place();
    place.share("m0");
    place.mount("m1", &["--isolated"]);
    assert_ne!(place.pid("m0"), place.pid("m1"));
    place.compare("m1");
}

// Promises: shared-commands
#[test]
fn commands_have_the_index_and_the_blocks_of_a_mount() {
    let place = place();
    place.mount("m0", &["--no-disk-cache", "--wait-index"]);
    place.compare("m0");
    let url = place.url(ARCHIVE);
    let before = place.sent_bytes(ARCHIVE);
    let elsewhere = ["--cache-dir", "elsewhere"];
    let listed = place.succeeds(&[&["ls", &url][..], &elsewhere].concat());
    assert_eq!(listed, "d\nlast\n");
    let flags = ["cat", "--no-disk-cache", &url, "d/f7"];
    let read = place.tarfs(&[&flags[..], &elsewhere].concat());
    assert!(read.status.success() && read.stdout == content(7));
    let sent = place.sent_bytes(ARCHIVE) - before;
    // Each command asks for the first bytes, by which it learns the version.
    let len = archive("old").len() as u64;
    assert!(sent < len / 10, "{sent} bytes of {len} were sent again");
    let status = place.status_of("m0");
    assert!(counter(&status, "lent_spans") > 0);
}

// Promises: shared-commands
#[test]
fn commands_have_the_blocks_of_any_mount_of_an_archive() {
    let place = place();
    place.mount("m0", &["--no-disk-cache", "--wait-index"]);
    place.wait_until_index_is_saved();
    place.succeeds(&["umount", "m0"]);
    // The trees are two, and the first one has decoded nothing.
    place.mount("m1", &["--no-disk-cache", "--prefetch", "none"]);
    place.mount("m2", &["--no-disk-cache"]);
    place.compare("m2");
    let flags = ["cat", "--no-disk-cache", "--cache-dir", "elsewhere"];
    let read = place.tarfs(&[&flags[..], &[&place.url(ARCHIVE), "d/f7"]].concat());
    assert!(read.status.success() && read.stdout == content(7));
    assert!(counter(&place.status_of("m2"), "lent_spans") > 0);
}

// Promises: shared-commands, index-materialize
#[test]
fn materialize_has_blocks_of_mounts() {
    let place = place();
    // Formats with windows need no saved index.
    let elsewhere = ["--cache-dir", "elsewhere"];
    let packings = [
        (Packing::Gzip, &elsewhere[..]),
        (Packing::Lz4Linked, &elsewhere),
        (Packing::ZstdFrames, &[]),
        (Packing::XzBlocks, &[]),
        (Packing::Bzip2, &[]),
    ];
    for ((packing, cache), mountpoint) in packings.into_iter().zip(MOUNTPOINTS) {
        let path = format!("/{mountpoint}.tar");
        let packed = Resource::new(packed_archive("old", packing));
        place.server().serve(&path, packed.etag("\"1\""));
        let url = place.url(&path);
        place.succeeds(&["mount", "--no-disk-cache", "--wait-index", &url, mountpoint]);
        place.compare(mountpoint);
        let lent = || counter(&place.status_of(mountpoint), "lent_spans");
        let before = lent();
        let tree = format!("tree-{mountpoint}");
        fs::create_dir(place.path(&tree)).expect("made");
        place.succeeds(&[&["materialize", &url, "-C", &tree], cache].concat());
        assert!(lent() > before, "{packing:?}");
        place.compare(&tree);
    }
}

// Promises: shared-commands
#[test]
fn commands_wait_for_the_scan_of_a_mount() {
    let place = place();
    let gate = place.stall_in_the_middle(ARCHIVE, "old");
    place.share("m0");
    let mut listing = place.command(&["ls", &place.url(ARCHIVE)]);
    let listing = listing.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut listing = listing.spawn().expect("started");
    // It sleeps between two questions whether the scan has ended.
    wait_until_it_waits(&mut listing, &["nanosleep"]);
    gate.store(true, Ordering::SeqCst);
    let output = wait::finish_in_time(move || listing.wait_with_output().expect("a child"));
    assert_eq!(output.stdout, b"d\nlast\n", "{}", stderr_text(&output));
    place.compare("m0");
    let len = archive("old").len() as u64;
    let sent = place.sent_bytes(ARCHIVE);
    assert!(sent <= len * 102 / 100, "{sent} bytes of {len} were sent");
}

// Promises: shared-restart
#[test]
fn killed_daemon_is_followed_by_one_for_all_mounts() {
    let place = place();
    for mountpoint in MOUNTPOINTS {
        place.share(mountpoint);
    }
    place.wait_until_index_is_saved();
    let mut open = File::open(place.file("m3", 7)).expect("there");
    let before = place.pid("m0");
    kill_process(before, Signal::KILL).expect("running");
    for mountpoint in MOUNTPOINTS {
        place.compare(mountpoint);
    }
    let mut read = Vec::new();
    open.seek(SeekFrom::Start(0)).expect("sought");
    open.read_to_end(&mut read).expect("readable");
    assert!(read == content(7));
    drop(open);
    let after = place.pid("m0");
    assert_ne!(after, before);
    for mountpoint in MOUNTPOINTS {
        assert_eq!(place.pid(mountpoint), after, "{mountpoint}");
        place.succeeds(&["umount", mountpoint]);
    }
}

// Promises: shared-restart
#[test]
fn mount_that_sees_two_daemons_die_is_served_alone() {
    let place = place();
    place.share("m0");
    place.share("m1");
    place.mount("m2", &OTHER_FILE_SYSTEM);
    place.wait_until_index_is_saved();
    for _ in 0..2 {
        let before = place.pid("m0");
        kill_process(before, Signal::KILL).expect("running");
        for mountpoint in ["m0", "m1", "m2"] {
            place.wait_for_server(mountpoint, |pid| pid != before);
        }
    }
    let alone = place.pid("m0");
    assert_eq!(place.pid("m1"), alone, "one file system");
    assert_ne!(place.pid("m2"), alone);
    // It is of this program already.
    assert_eq!(place.succeeds(&["daemon", "upgrade"]), "");
    assert_eq!(place.pid("m0"), alone);
    for mountpoint in ["m0", "m1", "m2"] {
        place.compare(mountpoint);
        place.succeeds(&["umount", mountpoint]);
    }
}

// Promises: shared-restart
#[test]
fn mounts_of_one_connection_stay_in_one_process() {
    let place = place();
    place.share("m0");
    place.share("m1");
    place.wait_until_index_is_saved();
    let mut mounted = vec!["m0", "m1"];
    for round in 0..3 {
        let before = place.pid("m0");
        let process = pidfd_open(before, PidfdFlags::empty()).expect("running");
        kill_process(before, Signal::KILL).expect("running");
        for mountpoint in &mounted {
            place.wait_for_server(mountpoint, |pid| pid != before);
        }
        assert!(wait::process_exits(&process));
        for mountpoint in &mounted {
            assert_eq!(place.pid(mountpoint), place.pid("m0"), "{mountpoint}");
            place.compare(mountpoint);
        }
        // Its monitor sees fewer deaths than the others.
        if round == 0 {
            place.share("m2");
            assert_eq!(place.pid("m2"), place.pid("m0"));
            mounted.push("m2");
        }
    }
    let process = pidfd_open(place.pid("m0"), PidfdFlags::empty()).expect("running");
    for mountpoint in &mounted {
        place.succeeds(&["umount", mountpoint]);
    }
    assert!(wait::process_exits(&process), "it serves nothing");
}

// Promises: shared-restart
#[test]
fn takeover_of_a_hidden_mount_leaves_the_connection_to_others() {
    let place = place();
    let hidden = place.path("d");
    fs::create_dir_all(hidden.join("m")).expect("made");
    place.share("d/m");
    place.share("m1");
    place.wait_until_index_is_saved();
    let second = place.monitor("d/m");
    let (first, before) = (place.monitor("m1"), place.pid("m1"));
    // No path leads to the mount then, and none shows another mount at its mountpoint.
    rustix::mount::mount("none", &hidden, "tmpfs", MountFlags::empty(), None).expect("root");
    kill_process(first, Signal::STOP).expect("running");
    kill_process(before, Signal::KILL).expect("running");
    wait::wait_until("another process serves the hidden mount", || {
        let statuses = place.tarfs(&["status", "--json"]).stdout;
        let statuses = serde_json::Deserializer::from_slice(&statuses).into_iter::<Value>();
        let mut hidden = statuses
            .flatten()
            .filter(|status| monitor_of(status) == Some(second));
        hidden.any(|status| pid_of(&status).is_some_and(|pid| pid != before))
    });
    kill_process(first, Signal::CONT).expect("running");
    place.wait_for_server("m1", |pid| pid != before);
    place.compare("m1");
    unmount(&hidden, UnmountFlags::empty()).expect("idle");
    place.compare("d/m");
    assert_eq!(place.pid("d/m"), place.pid("m1"));
    place.succeeds(&["umount", "m1", "d/m"]);
}

// Promises: shared-restart
#[test]
fn mount_is_served_alone_if_no_daemon_can_be_reached() {
    let place = place();
    place.share("m0");
    place.wait_until_index_is_saved();
    rustix::mount::mount_bind(place.path("m0"), place.path("m1")).expect("root");
    let daemon = place.pid("m0");
    // No process can make a socket there.
    fs::remove_dir_all(place.path("tarfs")).expect("removable");
    kill_process(daemon, Signal::KILL).expect("running");
    for mountpoint in ["m0", "m1"] {
        place.compare_from_server(mountpoint, &mut Rng::new(1));
    }
    for mountpoint in ["m1", "m0"] {
        unmount(place.path(mountpoint), UnmountFlags::empty()).expect("idle");
    }
}

// Promises: shared-restart
#[test]
fn daemon_that_any_monitor_starts_serves_metrics_on_a_low_port() {
    let place = place();
    place.share("m0");
    place.mount("m1", &["--metrics", "127.0.77.1:81"]);
    place.wait_until_index_is_saved();
    let (second, before) = (place.monitor("m1"), place.pid("m1"));
    kill_process(second, Signal::STOP).expect("running");
    kill_process(before, Signal::KILL).expect("running");
    place.wait_for_server("m0", |pid| pid != before);
    kill_process(second, Signal::CONT).expect("running");
    place.wait_for_server("m1", |pid| pid != before);
    let url = place.status_of("m1").get("metrics").cloned();
    assert_eq!(url, Some("http://127.0.77.1:81/metrics".into()));
}

// Promises: shared-abandoned
#[test]
fn mount_of_a_killed_client_is_unmounted() {
    let place = place();
    place.share("m4");
    place.wait_until_index_is_saved();
    // On the same processor, this thread runs before the client returns from the system call that mounts.
    let all = sched_getaffinity(None).expect("readable");
    let mut one = CpuSet::new();
    one.set(
        (0..CpuSet::MAX_CPU)
            .find(|&cpu| all.is_set(cpu))
            .expect("some"),
    );
    sched_setaffinity(None, &one).expect("set");
    for _ in 0..rounds::rounds(10) {
        let table = File::open("/proc/self/mountinfo").expect("readable");
        let mut command = place.command_of("chrt");
        command.args(["--idle", "0", PROGRAM, "mount", &place.url(ARCHIVE), "m0"]);
        let mut child = command.spawn().expect("installed");
        let timeout = wait::WAIT_TIMEOUT.try_into().expect("short");
        // The end of another test's mount is a change, too.
        while !is_mounted(&place.path("m0")) {
            let mut polled = [PollFd::new(&table, PollFlags::PRI)];
            let count = poll(&mut polled, Some(&timeout)).expect("waited");
            assert!(count > 0, "it is not mounted");
        }
        child.kill().expect("a child");
        child.wait().expect("a child");
        wait::wait_until("it is unmounted, or kept", || {
            let monitor = place.own_status("m0").as_ref().and_then(monitor_of);
            !is_mounted(&place.path("m0")) || monitor.is_some()
        });
        drop(place.tarfs(&["umount", "m0"]));
    }
    sched_setaffinity(None, &all).expect("set");
    place.compare("m4");
}

// Promises: shared-pages
#[test]
fn mounts_with_equal_options_are_one_file_system() {
    let place = place();
    place.share("m0");
    place.share("m1");
    place.mount("m2", &OTHER_FILE_SYSTEM);
    let device = |mountpoint: &str| {
        let found = fs::metadata(place.path(mountpoint)).expect("there");
        found.dev()
    };
    assert_eq!(device("m0"), device("m1"));
    assert_ne!(device("m0"), device("m2"));
    // Each has its own place in the status.
    for mountpoint in ["m0", "m1", "m2"] {
        let shown = place.status_of(mountpoint);
        let shown = shown.get("mountpoint").and_then(Value::as_str);
        assert_eq!(shown, place.path(mountpoint).to_str());
    }
    // The first one is not special.
    let monitor = monitor_of(&place.status_of("m0")).expect("a number");
    let monitor = pidfd_open(monitor, PidfdFlags::empty()).expect("running");
    unmount(place.path("m0"), UnmountFlags::empty()).expect("idle");
    assert!(wait::process_exits(&monitor));
    place.compare("m1");
    place.share("m0");
    assert_eq!(device("m0"), device("m1"));
    // After a takeover, they are found again.
    place.wait_until_index_is_saved();
    let before = place.pid("m0");
    kill_process(before, Signal::KILL).expect("running");
    for mountpoint in ["m0", "m1"] {
        place.wait_for_server(mountpoint, |pid| pid != before);
    }
    place.share("m3");
    assert_eq!(device("m3"), device("m1"));
    for mountpoint in ["m1", "m3", "m0"] {
        place.compare(mountpoint);
        place.succeeds(&["umount", mountpoint]);
    }
}

// Promises: shared-pages
#[test]
fn mount_whose_attributes_were_changed_is_no_template_for_others() {
    let place = place();
    place.share("m0");
    place.wait_until_index_is_saved();
    let mut remount = place.command_of("mount");
    remount
        .args(["-o", "remount,bind,ro,suid"])
        .arg(place.path("m0"));
    assert!(remount.status().expect("started").success());
    let before = place.pid("m0");
    kill_process(before, Signal::KILL).expect("running");
    place.wait_for_server("m0", |pid| pid != before);
    place.share("m1");
    place.compare("m1");
    let table = fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let path = place.path("m1").display().to_string();
    let mut lines = table.lines().filter(|line| line.contains(&path));
    let line = lines.next().expect("mounted");
    assert!(line.contains("nosuid"), "{line}");
}

// Promises: shared-pages
#[test]
fn request_to_unmount_one_of_several_names_it() {
    let place = place();
    place.share("m0");
    place.share("m1");
    let status = place.status_of("m0");
    let device = status.get("device").and_then(Value::as_str).expect("known");
    let mount_id = status
        .get("mount_id")
        .and_then(Value::as_u64)
        .expect("known");
    let sockets = fs::read_dir(place.path("tarfs")).expect("readable");
    let mut sockets = sockets.map(|file| file.expect("there").path());
    let socket = sockets.find(|path| path.extension().is_some_and(|name| name == "sock"));
    let ask = |more: &str| {
        let mut stream = UnixStream::connect(socket.as_ref().expect("a socket")).expect("there");
        writeln!(stream, r#"{{"verb":"umount","device":"{device}"{more}}}"#).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        answer
    };
    assert!(ask("").contains("several mounts"));
    assert!(is_mounted(&place.path("m0")) && is_mounted(&place.path("m1")));
    assert!(ask(&format!(r#","mount_id":{mount_id}"#)).contains("unmounted"));
    assert!(!is_mounted(&place.path("m0")) && is_mounted(&place.path("m1")));
}

// Promises: shared-abort
#[test]
fn end_of_a_shared_connection_is_followed_by_a_new_one() {
    for others in [&["m1"][..], &["m1", "m2"]] {
        let place = place();
        for mountpoint in [&["m0"], others].concat() {
            place.share(mountpoint);
        }
        let monitor = monitor_of(&place.status_of("m0")).expect("a number");
        let monitor = pidfd_open(monitor, PidfdFlags::empty()).expect("running");
        unmount(place.path("m0"), UnmountFlags::FORCE).expect("idle");
        assert!(wait::process_exits(&monitor), "it was unmounted");
        for mountpoint in others {
            wait::wait_until("it answers", || {
                place.path(mountpoint).join("last").exists()
            });
            place.compare(mountpoint);
        }
        assert!(!is_mounted(&place.path("m0")));
    }
}

// Promises: shared-abort
#[test]
fn aborted_mount_of_a_killed_monitor_is_unmounted() {
    let place = place();
    for mountpoint in ["m0", "m1", "m2"] {
        place.share(mountpoint);
    }
    let killed = place.monitor("m1");
    let process = pidfd_open(killed, PidfdFlags::empty()).expect("running");
    kill_process(killed, Signal::KILL).expect("running");
    assert!(wait::process_exits(&process));
    unmount(place.path("m0"), UnmountFlags::FORCE).expect("idle");
    wait::wait_until("it is unmounted", || !is_mounted(&place.path("m1")));
    wait::wait_until("it answers", || place.path("m2").join("last").exists());
    place.compare("m2");
}

// Promises: shared-pages
#[test]
fn writable_mounts_of_one_file_system_have_files_of_their_own() {
    let place = place();
    for mountpoint in ["m0", "m1"] {
        place.mount(mountpoint, &["--writable"]);
        fs::write(place.path(mountpoint).join("last"), mountpoint).expect("writable");
    }
    place.wait_until_index_is_saved();
    let before = place.pid("m0");
    kill_process(before, Signal::KILL).expect("running");
    for mountpoint in ["m0", "m1"] {
        place.wait_for_server(mountpoint, |pid| pid != before);
        assert_eq!(place.last(mountpoint), mountpoint);
    }
    let monitor = monitor_of(&place.status_of("m0")).expect("a number");
    let monitor = pidfd_open(monitor, PidfdFlags::empty()).expect("running");
    place.succeeds(&["umount", "m0"]);
    assert!(wait::process_exits(&monitor));
    place.compare("m1");
    assert_eq!(place.last("m1"), "m1");
    place.succeeds(&["umount", "m1"]);
}

// Promises: shared-one
#[test]
fn warnings_of_a_shared_mount_reach_its_user() {
    let place = place();
    let mut tar = Archive::new().file("a", "one").file("b", "two").end();
    // A byte of the second header.
    tar[1024 + 100] ^= 1;
    place.put("bad.tar", tar);
    let alone = place.tarfs(&["mount", "--isolated", "--wait-index", "bad.tar", "m0"]);
    let shared = place.tarfs(&["mount", "--wait-index", "bad.tar", "m1"]);
    let text = stderr_text(&shared);
    assert!(text.contains("1 member is damaged"), "{text}");
    assert_eq!(text, stderr_text(&alone));
    let later = place.tarfs(&["mount", "--wait-index", "bad.tar", "m2"]);
    let text = stderr_text(&later);
    assert!(text.contains("1 member is damaged"), "{text}");
    // Another archive is none of its business.
    place.put("good.tar", Archive::new().file("a", "one").end());
    let other = place.tarfs(&["mount", "--wait-index", "good.tar", "m3"]);
    assert_eq!(stderr_text(&other), "");
}

// Promises: unmount-quick
#[test]
fn forced_unmount_ends_readers_although_others_use_the_archive() {
    let place = place();
    place.stall_in_the_middle(ARCHIVE, "old");
    place.share("m0");
    place.mount("m1", &OTHER_FILE_SYSTEM);
    let reader = place.start_waiting_reader("m0");
    place.succeeds(&["umount", "--lazy", "m0"]);
    let output = wait::finish_in_time(move || reader.wait_with_output().expect("a child"));
    assert!(!output.status.success());
    assert!(is_mounted(&place.path("m1")));
    let daemon = pidfd_open(place.pid("m1"), PidfdFlags::empty()).expect("running");
    place.succeeds(&["umount", "--lazy", "m1"]);
    place.remove_daemon_socket();
    assert!(wait::process_exits(&daemon), "its scan waits");
}

// Promises: shared-pages
#[test]
fn forced_unmount_of_one_of_several_leaves_readers_to_the_others() {
    let place = place();
    let gate = place.stall_in_the_middle(ARCHIVE, "old");
    place.share("m0");
    place.share("m1");
    let reader = place.start_waiting_reader("m0");
    place.succeeds(&["umount", "--lazy", "m0"]);
    assert!(!is_mounted(&place.path("m0")));
    gate.store(true, Ordering::SeqCst);
    place.compare("m1");
    let output = wait::finish_in_time(move || reader.wait_with_output().expect("a child"));
    assert_eq!(output.stdout, b"old", "{}", stderr_text(&output));
    place.succeeds(&["umount", "m1"]);
}

// Promises: shared-abandoned
#[test]
fn interrupted_mount_ends_its_scan_but_not_one_that_waits_for_the_same() {
    let place = place();
    let gate = place.stall_in_the_middle("/slow.tar.gz", "slow");
    let url = place.url("/slow.tar.gz");
    let mount = |mountpoint: &str| {
        let mut command = place.command(&["mount", "--wait-index", &url, mountpoint]);
        command.stderr(Stdio::piped()).spawn().expect("started")
    };
    let mut first = mount("m0");
    wait::wait_until("it waits for the server", || {
        place.requests("/slow.tar.gz").len() > 2
    });
    let second = mount("m1");
    kill_process(Pid::from_child(&first), Signal::INT).expect("running");
    assert!(!first.wait().expect("a child").success());
    gate.store(true, Ordering::SeqCst);
    let output = second.wait_with_output().expect("a child");
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert_eq!(place.last("m1"), "slow");
    // Without another one, nothing is left to wait for.
    gate.store(false, Ordering::SeqCst);
    let daemon = pidfd_open(place.pid("m1"), PidfdFlags::empty()).expect("running");
    let asked = place.requests("/slow.tar.gz").len();
    let url = format!("{url}?other");
    let mut command = place.command(&["mount", "--no-disk-cache", "--wait-index", &url, "m2"]);
    let mut third = command.stderr(Stdio::null()).spawn().expect("started");
    wait::wait_until("it waits for the server", || {
        place.requests("/slow.tar.gz").len() > asked + 2
    });
    kill_process(Pid::from_child(&third), Signal::INT).expect("running");
    third.wait().expect("a child");
    place.succeeds(&["umount", "m1"]);
    place.remove_daemon_socket();
    assert!(wait::process_exits(&daemon), "its scan waits");
}

// Promises: shared-memory
#[test]
fn archive_beside_large_ones_has_less_memory_and_is_decoded_all_the_same() {
    let place = place();
    let plain = Archive::new().file("last", "packed").end();
    let budget = |mountpoint: &str| {
        let status = place.status_of(mountpoint);
        let bytes = status.pointer("/memory/budget_bytes");
        bytes.and_then(Value::as_u64).map(|bytes| bytes >> 20)
    };
    for (mountpoint, mebibytes) in [("m0", 512), ("m1", 256), ("m2", 128), ("m3", 64)] {
        let name = format!("{mountpoint}.tar");
        place.put(&name, &plain);
        place.succeeds(&["mount", "--memory", "512M", &name, mountpoint]);
        assert_eq!(budget(mountpoint), Some(mebibytes));
    }
    place.put("a.tar", &plain);
    let mut xz = place.command_of("xz");
    xz.args(["--lzma2=preset=0,dict=64MiB", "a.tar"]);
    assert!(xz.status().expect("installed").success());
    place.succeeds(&["mount", "--no-disk-cache", "a.tar.xz", "m4"]);
    assert_eq!(budget("m4"), Some(32));
    assert_eq!(place.last("m4"), "packed");
    // A mount that ends leaves memory to later ones.
    place.succeeds(&["umount", "m0", "m4"]);
    place.succeeds(&["mount", "--no-disk-cache", "a.tar.xz", "m4"]);
    assert_eq!(budget("m4"), Some(128));
}

// Promises: shared-fair
#[test]
fn readers_of_a_silent_server_delay_no_other_archive() {
    let place = place();
    place.stall_in_the_middle("/slow.tar.gz", "slow");
    place.succeeds(&["mount", &place.url("/slow.tar.gz"), "m0"]);
    // More than an archive has threads.
    let readers = (0..16).map(|_| {
        let mut reader = place.command_of("cat");
        reader.arg(place.path("m0").join("last"));
        reader.stderr(Stdio::null()).spawn().expect("started")
    });
    let mut readers: Vec<_> = readers.collect();
    place.share("m1");
    place.share("m2");
    place.compare("m1");
    assert_eq!(place.pid("m0"), place.pid("m1"));
    place.succeeds(&["umount", "m1"]);
    place.compare("m2");
    for reader in &mut readers {
        let ended = reader.try_wait().expect("a child");
        assert!(ended.is_none(), "the server has answered");
    }
    place.succeeds(&["umount", "--lazy", "m0"]);
    for mut reader in readers {
        assert!(!reader.wait().expect("a child").success());
    }
}

// Promises: shared-restart
#[test]
fn kills_damage_and_outages_leave_nothing_and_harm_nobody() {
    for round in 0..rounds::rounds(6) {
        let place = place();
        let resource = Resource::new(archive("old")).etag("\"1\"");
        let back = Arc::new(Mutex::new(Instant::now()));
        let is_back = Arc::clone(&back);
        place.server().route(ARCHIVE, move |request| {
            if *is_back.lock().expect("no panic") <= Instant::now() {
                resource.answer(request)
            } else {
                Response::hang_up()
            }
        });
        place.share("m4");
        let mut rng = Rng::new(rounds::seed() + round);
        // A mount ends when its processes die again and again.
        let mut kills = 0;
        for _ in 0..12 {
            let number = usize::try_from(rng.below(4)).expect("small");
            let mountpoint = MOUNTPOINTS[number];
            match rng.below(7) {
                0 | 1 if !is_mounted(&place.path(mountpoint)) => {
                    let mut child = place.start_mount(mountpoint);
                    if rng.below(2) == 0 {
                        std::thread::sleep(Duration::from_millis(rng.below(30)));
                        child.kill().expect("a child");
                    }
                    child.wait().expect("a child");
                }
                2 if kills < 4 => {
                    kills += 1;
                    let status = place.tarfs(&["status", "m4", "--json"]);
                    let status = serde_json::from_slice(&status.stdout).ok();
                    if let Some(pid) = status.and_then(|status| pid_of(&status)) {
                        kill_process(pid, Signal::KILL).ok();
                    }
                }
                3 => place.damage_cache(&mut rng),
                4 => {
                    let away = Duration::from_millis(rng.below(300));
                    *back.lock().expect("no panic") = Instant::now() + away;
                }
                5 => {
                    let status = place.tarfs(&["status", mountpoint, "--json"]);
                    let status = serde_json::from_slice(&status.stdout).ok();
                    if let Some(pid) = status.and_then(|status| monitor_of(&status)) {
                        kill_process(pid, Signal::KILL).ok();
                    }
                }
                _ => drop(place.tarfs(&["umount", "--lazy", mountpoint])),
            }
            place.compare_from_server("m4", &mut rng);
        }
        for mountpoint in MOUNTPOINTS {
            wait::wait_until("it is unmounted", || {
                drop(place.tarfs(&["umount", "--lazy", mountpoint]));
                !is_mounted(&place.path(mountpoint))
            });
        }
        place.assert_nothing_is_left();
    }
}

// Promises: shared-upgrade
#[test]
fn upgraded_program_continues_the_mounts_of_the_old_one() {
    let place = place();
    fs::copy(PROGRAM, place.path("old")).expect("space");
    let old = |words: &[&str]| {
        let output = place.command_of(place.path("old")).args(words).output();
        let output = output.expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
    };
    let url = place.url(ARCHIVE);
    old(&["mount", &url, "m0"]);
    old(&["mount", "--writable", &url, "m1"]);
    // The old program is gone, as after an upgrade by a package.
    fs::remove_file(place.path("old")).expect("removable");
    place.wait_until_index_is_saved();
    let mut open = File::open(place.file("m0", 7)).expect("there");
    fs::write(place.file("m1", 3), "changed").expect("writable");
    let before = place.pid("m0");
    assert_eq!(place.pid("m1"), before);
    let told = place.succeeds(&["daemon", "upgrade"]);
    let pid = before.as_raw_pid();
    assert_eq!(told, format!("process {pid} has handed over 2 mounts\n"));
    place.share("m2");
    for mountpoint in ["m0", "m1"] {
        assert_eq!(place.pid(mountpoint), place.pid("m2"), "{mountpoint}");
    }
    let mut read = Vec::new();
    open.read_to_end(&mut read).expect("readable");
    assert!(read == content(7));
    place.compare("m0");
    assert_eq!(fs::read(place.file("m1", 3)).expect("readable"), b"changed");
    assert_eq!(place.succeeds(&["daemon", "upgrade"]), "");
    // The processes that keep the mounts are still those of the old program.
    let after = place.pid("m0");
    kill_process(after, Signal::KILL).expect("running");
    for mountpoint in ["m0", "m1", "m2"] {
        place.compare_other(mountpoint, 3);
        place.wait_for_server(mountpoint, |pid| pid != after);
        let program = format!("/proc/{}/exe", place.pid(mountpoint).as_raw_pid());
        assert_eq!(fs::read_link(program).expect("running"), Path::new(PROGRAM));
    }
    drop(open);
    place.succeeds(&["umount", "m0", "m1"]);
    assert!(!is_mounted(&place.path("m0")) && !is_mounted(&place.path("m1")));
}

// Promises: shared-upgrade
#[test]
fn mounts_that_cannot_be_continued_are_not_handed_over() {
    let place = place();
    fs::copy(PROGRAM, place.path("old")).expect("space");
    // Without a validator, another archive could look the same.
    place
        .server()
        .serve("/weak.tar.gz", Resource::new(archive("weak")));
    for (path, mountpoint) in [(ARCHIVE, "m0"), ("/weak.tar.gz", "m1")] {
        let mut command = place.command_of(place.path("old"));
        command.args(["mount", &place.url(path), mountpoint]);
        assert!(command.status().expect("started").success());
    }
    let before = place.pid("m0");
    let error = place.error_of(&["daemon", "upgrade"]);
    assert!(
        error.contains("m1") && error.contains("strong version"),
        "{error}"
    );
    assert_eq!(place.error_of(&["daemon", "upgrade"]), error, "as before");
    assert_eq!(place.pid("m0"), before);
    assert_eq!(place.last("m1"), "weak");
    // The new program makes new mounts nevertheless.
    place.share("m2");
    assert_ne!(place.pid("m2"), before);
}

// Promises: shared-upgrade
#[test]
fn mount_of_a_killed_monitor_is_named_by_the_upgrade() {
    let place = place();
    fs::copy(PROGRAM, place.path("old")).expect("space");
    for mountpoint in ["m0", "m1"] {
        let mut command = place.command_of(place.path("old"));
        command.args(["mount", &place.url(ARCHIVE), mountpoint]);
        assert!(command.status().expect("started").success());
    }
    place.wait_until_index_is_saved();
    let monitor = place.monitor("m1");
    kill_process(monitor, Signal::KILL).expect("running");
    let error = place.error_of(&["daemon", "upgrade"]);
    let mountpoint = place.path("m1").display().to_string();
    let advice = format!("`tarfs umount {mountpoint}`");
    assert!(
        error.contains("was killed") && error.contains(&advice),
        "{error}"
    );
    place.succeeds(&["umount", "m1"]);
    place.succeeds(&["daemon", "upgrade"]);
    place.compare("m0");
}

// Promises: shared-service
#[test]
fn daemon_of_a_service_manager_takes_mounts_over_and_hands_them_over_at_its_end() {
    let place = place();
    place.share("m0");
    place.wait_until_index_is_saved();
    for _ in 0..2 {
        let mut command = place.command(&["daemon", "run"]);
        let mut service = command.stderr(Stdio::null()).spawn().expect("started");
        let pid = Pid::from_child(&service);
        place.wait_for_server("m0", |server| server == pid);
        place.share("m1");
        assert_eq!(place.pid("m1"), pid);
        kill_process(pid, Signal::TERM).expect("running");
        assert!(!service.wait().expect("a child").success());
        place.compare("m0");
        place.compare("m1");
        place.succeeds(&["umount", "m1"]);
    }
}

// Promises: shared-job
#[test]
fn mount_ends_with_the_job_of_its_monitor() {
    let place = place();
    let job = Group::new();
    place.share("m1");
    place.mount_in(&job, &place.url(ARCHIVE), "m0");
    assert_eq!(place.pid("m0"), place.pid("m1"));
    job.kill();
    wait::wait_until("it is unmounted", || !is_mounted(&place.path("m0")));
    place.compare("m1");
}

// Promises: kill-dead
#[test]
fn next_daemon_unmounts_what_a_killed_job_has_left() {
    let place = place();
    let job = Group::new();
    place.mount_in(&job, &place.url(ARCHIVE), "m0");
    let daemon = place.pid("m0");
    place.share("m1");
    assert_eq!(place.pid("m1"), daemon);
    job.kill();
    place.compare("m1");
    wait::wait_until("it is unmounted", || !is_mounted(&place.path("m0")));
}

/// A job that has mounted an archive, and compares all of it again and again.
struct Job {
    mountpoint: &'static str,
    archive: usize,
    group: Group,
    is_killed: AtomicBool,
    /// How often it has compared all files.
    reads: AtomicUsize,
}

impl Job {
    /// Compares all files, whose bytes the kernel must ask for.
    fn read_all(&self, place: &Place) -> Result<(), String> {
        let error = |error| format!("{}: {error}", self.mountpoint);
        for number in 0..FILES {
            let file = File::open(place.file(self.mountpoint, number)).map_err(error)?;
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("clean");
            let mut read = Vec::new();
            (&file).read_to_end(&mut read).map_err(error)?;
            if read != content(number) {
                return Err(format!("{}: f{number} is wrong", self.mountpoint));
            }
        }
        let last = fs::read_to_string(place.path(self.mountpoint).join("last")).map_err(error)?;
        if last != self.archive.to_string() {
            return Err(format!("{} is of archive {last}", self.mountpoint));
        }
        self.reads.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Reads until it is killed, or fails.
    fn run(&self, place: &Place, failures: &Mutex<Vec<String>>) {
        while !self.is_killed.load(Ordering::SeqCst) {
            if let Err(failure) = self.read_all(place)
                && !self.is_killed.load(Ordering::SeqCst)
            {
                return failures.lock().expect("no panic").push(failure);
            }
        }
    }
}

/// Kills the jobs in a random order. After each, all others must have compared their files once more.
fn kill_jobs(place: &Place, jobs: &[Job], rng: &mut Rng, failures: &Mutex<Vec<String>>) {
    let mut living: Vec<_> = jobs.iter().collect();
    while !living.is_empty() {
        let victim = usize::try_from(rng.below(living.len() as u64)).expect("small");
        let victim = living.swap_remove(victim);
        victim.is_killed.store(true, Ordering::SeqCst);
        victim.group.kill();
        let before: Vec<_> = living
            .iter()
            .map(|job| job.reads.load(Ordering::SeqCst))
            .collect();
        wait::wait_until("the others go on", || {
            let mut pairs = living.iter().zip(&before);
            !failures.lock().expect("no panic").is_empty()
                || pairs.all(|(job, before)| job.reads.load(Ordering::SeqCst) > before + 1)
        });
        // Without a daemon, nothing removes the mount of a job that was killed with its server.
        drop(place.tarfs(&["umount", "--lazy", victim.mountpoint]));
        let path = place.path(victim.mountpoint);
        if is_mounted(&path) || !failures.lock().expect("no panic").is_empty() {
            // Ends the other threads, too.
            for job in living {
                job.is_killed.store(true, Ordering::SeqCst);
            }
            panic!("{} stays, or {failures:?}", path.display());
        }
    }
}

// Promises: shared-job, shared-restart
#[test]
fn jobs_killed_in_any_order_harm_no_other() {
    for round in 0..rounds::rounds(1) {
        let mut rng = Rng::new(rounds::seed() + round);
        let place = TestMount::of(TestDir::with(&JOBS, Server::start()), &JOBS);
        for number in 0..ARCHIVES {
            let resource = Resource::new(archive(&number.to_string())).etag("\"1\"");
            place.server().serve(&format!("/{number}.tar.gz"), resource);
        }
        let jobs = (0..).zip(JOBS).map(|(number, mountpoint)| Job {
            mountpoint,
            archive: number % ARCHIVES,
            group: Group::new(),
            is_killed: AtomicBool::default(),
            reads: AtomicUsize::default(),
        });
        let jobs: Vec<_> = jobs.collect();
        for job in &jobs {
            let url = place.url(&format!("/{}.tar.gz", job.archive));
            place.mount_in(&job.group, &url, job.mountpoint);
        }
        let failures = Mutex::default();
        std::thread::scope(|scope| {
            for job in &jobs {
                scope.spawn(|| job.run(&place, &failures));
            }
            kill_jobs(&place, &jobs, &mut rng, &failures);
        });
        place.assert_nothing_is_left();
    }
}

// Promises: shared-job
#[test]
fn mount_outlives_its_monitor_but_not_its_unmount() {
    let place = place();
    place.share("m0");
    place.share("m1");
    let monitor = monitor_of(&place.status_of("m0")).expect("a number");
    let process = pidfd_open(monitor, PidfdFlags::empty()).expect("running");
    kill_process(monitor, Signal::KILL).expect("running");
    assert!(wait::process_exits(&process));
    place.compare("m0");
    place.succeeds(&["umount", "m0"]);
    assert!(!is_mounted(&place.path("m0")));
}

// Promises: shared-identity
#[test]
fn wrong_credentials_see_nothing_of_a_mount_with_right_ones() {
    let place = place();
    let resource = Resource::new(archive("old")).etag("\"1\"");
    place.server().route(ARCHIVE, move |request| {
        if request.header("authorization") == Some("Bearer right") {
            resource.answer(request)
        } else {
            Response::new(401)
        }
    });
    let url = place.url(ARCHIVE);
    let mount = |header: &str, mountpoint: &str| {
        place.tarfs(&["mount", "--header", header, &url, mountpoint])
    };
    assert!(!mount("Authorization: Bearer wrong", "m0").status.success());
    let output = mount("Authorization: Bearer right", "m1");
    assert!(output.status.success(), "{}", stderr_text(&output));
    for header in ["Authorization: Bearer wrong", "Authorization: Bearer"] {
        assert!(!mount(header, "m2").status.success(), "{header}");
    }
    let output = mount("Authorization: Bearer right", "m3");
    assert!(output.status.success(), "{}", stderr_text(&output));
    place.compare("m3");
    let shown = place.succeeds(&["status", "--json"]);
    assert!(!shown.contains("Bearer"), "{shown}");
}

// Promises: shared-identity
#[test]
fn secrets_of_two_clients_stay_apart() {
    let place = place();
    let clients = [
        ("m0", "/first.tar.gz", "Bearer first-secret"),
        ("m1", "/second.tar.gz", "Bearer second-secret"),
    ];
    for (mountpoint, path, secret) in clients {
        let resource = Resource::new(archive("old")).etag("\"1\"");
        place.server().route(path, move |request| {
            if request.header("authorization") == Some(secret) {
                resource.answer(request)
            } else {
                Response::new(401)
            }
        });
        let header = format!("Authorization: {secret}");
        place.succeeds(&["mount", "--header", &header, &place.url(path), mountpoint]);
        place.wait_until_index_is_saved();
    }
    let before = place.pid("m0");
    assert_eq!(place.pid("m1"), before);
    kill_process(before, Signal::KILL).expect("running");
    let mut shown =
        place.succeeds(&["status", "--verbose"]) + &place.succeeds(&["status", "--json"]);
    for (mountpoint, path, secret) in clients {
        place.wait_for_server(mountpoint, |pid| pid != before);
        place.compare(mountpoint);
        let requests = place.requests(path);
        assert!(!requests.is_empty());
        for recorded in requests {
            assert_eq!(recorded.request.header("authorization"), Some(secret));
        }
        for pid in [place.pid(mountpoint), place.monitor(mountpoint)] {
            for file in ["cmdline", "environ", "comm"] {
                let path = format!("/proc/{}/{file}", pid.as_raw_pid());
                shown += &String::from_utf8_lossy(&fs::read(path).expect("readable"));
            }
        }
    }
    let mut directories = vec![place.path("tarfs"), place.path("cache")];
    while let Some(directory) = directories.pop() {
        for file in fs::read_dir(directory).into_iter().flatten() {
            let file = file.expect("there");
            let kind = file.file_type().expect("known");
            if kind.is_dir() {
                directories.push(file.path());
            } else if kind.is_file() {
                shown += &String::from_utf8_lossy(&fs::read(file.path()).expect("readable"));
            }
        }
    }
    shown += &place.succeeds(&["status", "--json"]);
    assert!(!shown.contains("-secret"));
}
