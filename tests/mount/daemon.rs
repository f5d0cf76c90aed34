//! `tarfs mount` by a process of its own: detaching, and ending.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{CWD, FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, mknodat};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

use crate::support::fixture::{TestMount, monitor_of, pid_of};
use crate::support::namespace::NamespaceProcess;
use crate::support::packing::Packing;
use crate::support::program::{is_signal_pending, stderr_text, stop};
use crate::support::raw::Archive;
use crate::support::wait::{self, process_exits};

/// An archive, a mountpoint and a runtime directory.
struct ArchiveFile;

type Place = TestMount<ArchiveFile>;

impl Place {
    fn with_archive() -> Self {
        let place = TestMount::with(&[], ArchiveFile);
        place.put("a.tar", Archive::new().file("file", "").end());
        place
    }

    fn verb(&self, verb: &str) -> Command {
        self.command(&[verb])
    }

    fn mount_command(&self) -> Command {
        let mut command = self.verb("mount");
        command.args(["--isolated".into(), self.path("a.tar"), self.path("mnt")]);
        command
    }

    fn mount(&self) {
        let output = self.mount_command().output().expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
        assert_eq!(stderr_text(&output), "");
        assert!(self.path("mnt/file").exists());
    }

    fn umount_with(&self, more: &[&str]) -> Output {
        let mut command = self.verb("umount");
        command.args(more).arg(self.path("mnt"));
        command.output().expect("started")
    }

    /// The statuses of all mounts in this directory. Root also sees those of the system.
    fn statuses(&self) -> Vec<Value> {
        let output = self.verb("status").arg("--json").output();
        let output = output.expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let statuses = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("a status"));
        let is_here = |status: &Value| {
            let mountpoint = status.get("mountpoint").and_then(Value::as_str);
            mountpoint.is_some_and(|path| Path::new(path).starts_with(self.root()))
        };
        statuses.filter(is_here).collect()
    }

    fn only_status(&self) -> Value {
        let mut statuses = self.statuses();
        assert_eq!(statuses.len(), 1, "{statuses:?}");
        statuses.remove(0)
    }

    /// The process that serves the mount, and a handle to wait for its end.
    fn server(&self) -> (Pid, OwnedFd) {
        let pid = pid_of(&self.only_status()).expect("a number");
        (pid, pidfd_open(pid, PidfdFlags::empty()).expect("running"))
    }

    /// The processes that serve mounts.
    fn servers(&self) -> Vec<Pid> {
        let statuses = self.statuses();
        let pids = statuses
            .iter()
            .map(|status| pid_of(status).expect("a number"));
        pids.collect()
    }

    fn is_answering(&self) -> bool {
        let output = self.verb("status").arg(self.path("mnt")).output();
        output.expect("started").status.success()
    }

    /// The process that keeps the mount.
    fn monitor_pid(&self) -> Pid {
        monitor_of(&self.only_status()).expect("a number")
    }

    fn monitor(&self) -> OwnedFd {
        pidfd_open(self.monitor_pid(), PidfdFlags::empty()).expect("running")
    }
}

// Promises: unmount-ways
#[test]
fn umount_leaves_no_process() {
    let place = Place::with_archive();
    place.mount();
    let (_, process) = place.server();
    let output = place.umount_with(&[]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(process_exits(&process));
    assert!(!place.is_mounted());
    let sockets = fs::read_dir(place.path("tarfs")).expect("there");
    assert_eq!(sockets.count(), 0);
}

// Promises: unmount-ways
#[test]
fn signal_unmounts_and_leaves_no_process() {
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::with_archive();
        place.mount();
        let (pid, process) = place.server();
        kill_process(pid, signal).expect("running");
        assert!(process_exits(&process));
        assert!(!place.is_mounted());
    }
}

// Promises: unmount-ways
#[test]
fn foreign_unmount_leaves_no_process() {
    for helper in ["fusermount3 -u", "umount"] {
        let place = Place::with_archive();
        place.mount();
        let (_, process) = place.server();
        let mut words = helper.split(' ');
        let helped = Command::new(words.next().expect("a word"))
            .args(words)
            .arg(place.path("mnt"))
            .status();
        assert!(helped.expect("installed").success());
        assert!(process_exits(&process));
    }
}

// Promises: unmount-busy
#[test]
fn busy_mount_stays_until_second_signal_or_lazy() {
    let place = Place::with_archive();
    place.mount();
    let (pid, process) = place.server();
    let user = fs::File::open(place.path("mnt/file")).expect("there");
    let refused = place.umount_with(&[]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        stderr_text(&refused).contains("in use"),
        "{}",
        stderr_text(&refused)
    );
    assert!(place.is_mounted());
    // Two equal signals at the same time would count as one.
    kill_process(pid, Signal::TERM).expect("running");
    kill_process(pid, Signal::INT).expect("running");
    assert!(process_exits(&process));
    assert!(!place.is_mounted());
    drop(user);

    let place = Place::with_archive();
    place.mount();
    let user = fs::File::open(place.path("mnt/file")).expect("there");
    let output = place.umount_with(&["--lazy"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(!place.is_mounted());
    drop(user);
}

// Promises: start-messages
#[test]
fn umount_of_stacked_mounts_takes_the_upper_first() {
    let place = Place::with_archive();
    place.mount();
    let output = place.mount_command().output().expect("started");
    assert!(output.status.success());
    let told = stderr_text(&output);
    assert!(
        told.contains("hides a mount of the type fuse.tarfs"),
        "{told}"
    );
    for is_left in [true, false] {
        assert!(place.umount_with(&[]).status.success());
        assert_eq!(place.path("mnt/file").exists(), is_left);
    }
    assert!(!place.is_mounted());
}

// Promises: unmount-number
#[test]
fn daemon_keeps_serving_mount_below_another() {
    let place = Place::with_archive();
    let restarted = place.mount_command().arg("--restart").status();
    assert!(restarted.expect("started").success());
    let (lower, process) = place.server();
    let covered = place.mount_command().stderr(Stdio::null()).status();
    assert!(covered.expect("started").success());
    kill_process(lower, Signal::KILL).expect("running");
    assert!(process_exits(&process));
    wait::wait_until("both mounts are served", || place.servers().len() == 2);
    assert!(!place.servers().contains(&lower));
    for _ in 0..2 {
        assert!(place.path("mnt/file").exists());
        assert!(place.umount_with(&[]).status.success());
    }
    assert!(!place.is_mounted());
}

// Promises: process-inherits
#[test]
fn process_names_follow_the_program_name() {
    let place = Place::with_archive();
    let output = place.mount_command().arg0("@tarfs").output();
    assert!(output.expect("started").status.success());
    let (pid, _) = place.server();
    for pid in [pid, place.monitor_pid()] {
        let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).expect("running");
        assert!(line.starts_with(b"@tarfs\0"), "{line:?}");
    }
}

// Promises: kill-unmounts
#[test]
fn mount_of_killed_process_is_unmounted() {
    for how in ["in the background", "--foreground"] {
        let place = Place::with_archive();
        let mut served = None;
        match how {
            "--foreground" => {
                let mut command = place.mount_command();
                served = Some(
                    command
                        .arg(how)
                        .stderr(Stdio::null())
                        .spawn()
                        .expect("started"),
                );
                wait::wait_until("it is mounted", || place.path("mnt/file").exists());
                wait::wait_until("it answers", || place.is_answering());
            }
            _ => place.mount(),
        }
        let (pid, process) = place.server();
        let monitor = place.monitor();
        let user = fs::File::open(place.path("mnt/file")).expect("there");
        kill_process(pid, Signal::KILL).expect("running");
        assert!(process_exits(&process));
        assert!(process_exits(&monitor), "{how}");
        assert!(!place.is_mounted(), "{how}");
        drop((user, served.map(|mut served| served.wait())));
    }
}

// Promises: kill-dead
#[test]
fn dead_mount_can_be_unmounted_or_mounted_over() {
    let place = Place::with_archive();
    for _ in 0..2 {
        let output = place.mount_command().output().expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
        let (pid, process) = place.server();
        kill_process(place.monitor_pid(), Signal::KILL).expect("running");
        kill_process(pid, Signal::KILL).expect("running");
        assert!(process_exits(&process));
        assert!(place.is_mounted());
    }
    let output = place.umount_with(&[]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(!place.is_mounted());
}

// Promises: start-messages
#[test]
fn mount_over_nonempty_directory_is_reported() {
    let place = Place::with_archive();
    fs::write(place.path("mnt/hidden"), "").expect("written");
    let output = place.mount_command().output().expect("started");
    assert!(output.status.success());
    assert!(
        stderr_text(&output).contains("hides what is in that directory"),
        "{}",
        stderr_text(&output)
    );
    assert!(place.umount_with(&[]).status.success());
    assert!(place.path("mnt/hidden").exists());
}

// Promises: log-place
#[test]
fn log_file_has_messages_of_the_start() {
    let (place, hides) = (Place::with_archive(), "hides what is in that directory");
    fs::write(place.path("mnt/hidden"), "").expect("written");
    let mut command = place.mount_command();
    let output = command.arg("--log-file").arg(place.path("log")).output();
    let output = output.expect("started");
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(stderr_text(&output).contains(hides));
    let log = fs::read_to_string(place.path("log")).expect("written");
    assert_eq!(log.matches(hides).count(), 1, "{log}");
    assert!(place.umount_with(&[]).status.success());
}

#[test]
fn umount_rejects_foreign_mounts() {
    let place = Place::with_archive();
    let output = place.umount_with(&[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr_text(&output).contains("is not a tarfs mount"),
        "{}",
        stderr_text(&output)
    );
    let proc = place.verb("umount").arg("/proc").output().expect("started");
    assert_eq!(proc.status.code(), Some(2));
    assert!(Path::new("/proc/self").exists());
}

// Promises: start-answers
#[test]
fn startup_errors_reach_the_terminal() {
    let place = Place::with_archive();
    let mut missing = place.verb("mount");
    missing.arg(place.path("a.tar")).arg(place.path("missing"));
    let output = missing.output().expect("started");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr_text(&output).contains("missing"),
        "{}",
        stderr_text(&output)
    );
    let output = place.mount_command().args(["-o", "sparkle"]).output();
    let output = output.expect("started");
    assert!(!output.status.success());
    assert!(stderr_text(&output).contains("unknown mount option `sparkle`"));
    let output = place.mount_command().args(["--root", "nowhere"]).output();
    let output = output.expect("started");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr_text(&output).contains("nowhere: not in the archive"),
        "{}",
        stderr_text(&output)
    );
    assert!(!place.is_mounted());
}

// Promises: status-private, status-json
#[test]
fn status_shows_all_mounts_or_one() {
    let place = Place::with_archive();
    place.mount();
    let status = place.only_status();
    let text = |name: &str| status.get(name).and_then(Value::as_str);
    assert!(text("source").is_some_and(|source| source.contains("a.tar")));
    assert_eq!(text("mountpoint"), place.path("mnt").to_str());
    assert!(status.pointer("/counters/served_bytes").is_some());
    assert!(status.get("resident_bytes").and_then(Value::as_u64) > Some(0));
    let words = place.verb("status").arg(place.path("mnt")).output();
    let words = words.expect("started");
    assert!(String::from_utf8_lossy(&words.stdout).contains("entries"));
    let other = place.verb("status").arg(place.root()).output();
    assert_eq!(other.expect("started").status.code(), Some(2));
}

/// The process knows its mount by an old path, which another mount has now.
// Promises: unmount-number
#[test]
fn status_by_path_means_the_present_mount() {
    let place = Place::with_archive();
    let second = Archive::new().file("second", "").end();
    fs::write(place.path("b.tar"), second).expect("written");
    let mnt = place.path("x/mnt");
    let mount = |archive: &str| {
        fs::create_dir_all(&mnt).expect("made");
        let mut command = place.verb("mount");
        let output = command.arg(place.path(archive)).arg(&mnt).output();
        let output = output.expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
    };
    let (moved, other) = (place.path("y/mnt"), place.path("z/mnt"));
    let run = |verb: &str, path: &Path| {
        let output = place.verb(verb).arg(path).output();
        output.expect("started").status.success()
    };
    mount("a.tar");
    fs::rename(place.path("x"), place.path("y")).expect("renamed");
    mount("b.tar");
    assert!(run("status", &moved), "by the name that it has now");
    // The first of those that answer.
    fs::rename(place.path("x"), place.path("z")).expect("renamed");
    mount("a.tar");
    assert!(run("umount", &mnt));
    assert!(moved.join("file").exists() && other.join("second").exists());
    assert!(!run("umount", &mnt), "nothing is there any more");
    assert!(run("umount", &moved) && run("umount", &other));
    assert!(!moved.join("file").exists() && !other.join("second").exists());
}

// Promises: unmount-number
#[test]
fn mount_of_another_namespace_is_not_found() {
    let place = Place::with_archive();
    let script = r#""$TARFS" mount a.tar mnt && touch ready"#;
    let elsewhere = NamespaceProcess::start(place.root(), script, |command| {
        command
            .env("TARFS", env!("CARGO_BIN_EXE_tarfs"))
            .env("XDG_RUNTIME_DIR", place.root())
            .env("TARFS_CACHE_DIR", place.path("cache"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
    });
    wait::wait_until("it is mounted", || place.path("ready").exists());
    let (pid, process) = place.server();
    assert!(!place.umount_with(&[]).status.success(), "nothing is there");
    let inside = elsewhere.path_inside(&place.path("mnt/file"));
    assert!(fs::metadata(inside).is_ok(), "it is still mounted there");
    drop(elsewhere);
    // Its processes keep the namespace alive.
    kill_process(pid, Signal::TERM).expect("running");
    assert!(process_exits(&process));
}

/// A mount namespace copied while the mount was there, as for a container.
// Promises: unmount-copies
#[test]
fn umount_reports_copy_in_another_namespace() {
    let place = Place::with_archive();
    place.mount();
    let (_, process) = place.server();
    let elsewhere = NamespaceProcess::start(place.root(), "touch ready", |command| command);
    wait::wait_until("it has a copy", || place.path("ready").exists());
    let output = place.umount_with(&[]);
    let said = stderr_text(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("another mount namespace"), "{said}");
    assert!(!place.is_mounted());
    let inside = elsewhere.path_inside(&place.path("mnt/file"));
    assert!(fs::read(inside).is_ok(), "it is served there");
    drop(elsewhere);
    assert!(process_exits(&process), "no process is left to serve");
}

// Promises: unmount-ways
#[test]
fn ignored_hangup_leaves_the_mount() {
    let place = Place::with_archive();
    let mount = place.mount_command();
    let mut nohup = Command::new("sh");
    nohup
        .args(["-c", "trap '' HUP; exec \"$0\" \"$@\""])
        .arg(mount.get_program())
        .args(mount.get_args())
        .arg("--foreground")
        .stderr(Stdio::null());
    for (name, value) in mount.get_envs() {
        nohup.env(name, value.unwrap_or_default());
    }
    let mut server = nohup.spawn().expect("started");
    wait::wait_until("it answers", || place.is_answering());
    let (pid, _) = place.server();
    kill_process(pid, Signal::HUP).expect("running");
    kill_process(pid, Signal::HUP).expect("running");
    wait::wait_until("the signal is received", || {
        !is_signal_pending(pid, Signal::HUP)
    });
    assert!(place.is_answering() && place.is_mounted());
    kill_process(pid, Signal::TERM).expect("running");
    assert!(server.wait().expect("a child").success());
}

/// As many layers as an image of a thousand layers has.
// Promises: process-files
#[test]
fn mount_raises_descriptor_limit_to_maximum() {
    let place = Place::with_archive();
    let mut command = Command::new("sh");
    let script = r#"ulimit -Sn 64; exec "$0" mount "$1" "$2""#;
    command
        .args(["-c", script, env!("CARGO_BIN_EXE_tarfs")])
        .args([place.path("a.tar"), place.path("mnt")])
        .env("XDG_RUNTIME_DIR", place.root())
        .env("TARFS_CACHE_DIR", place.path("cache"));
    let output = command.output().expect("started");
    assert!(output.status.success(), "{}", stderr_text(&output));
    let (pid, _) = place.server();
    let limits = fs::read_to_string(format!("/proc/{}/limits", pid.as_raw_nonzero()));
    let limits = limits.expect("running");
    let files = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let numbers: Vec<_> = files.expect("a line").split_whitespace().skip(3).collect();
    assert_eq!(numbers[0], numbers[1], "{limits}");
}

/// Standard error is a full pipe, as with a stopped terminal or a waiting pager.
// Promises: block-terminal
#[test]
fn unread_terminal_does_not_block_mount() {
    let place = Place::with_archive();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let stderr = writer.try_clone().expect("a descriptor");
    assert_serves_with_full_pipe(&place, &writer, |command| {
        Some(command.arg("--foreground").stderr(stderr).spawn())
    });
    drop(reader);
}

// Promises: block-terminal
#[test]
fn unread_log_pipe_does_not_block_mount() {
    for is_in_front in [true, false] {
        let place = Place::with_archive();
        let log = place.path("log");
        mknodat(CWD, &log, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("made");
        let both = fs::OpenOptions::new().read(true).write(true).open(&log);
        // Without a reader, writes would fail at once.
        let both = both.expect("a pipe");
        assert_serves_with_full_pipe(&place, &both, |command| {
            command.arg("--log-file").arg(&log).stderr(Stdio::null());
            if is_in_front {
                return Some(command.arg("--foreground").spawn());
            }
            assert!(command.status().expect("started").success());
            None
        });
    }
}

/// Mounts with a full pipe as standard error, and causes many messages.
///
/// `start` returns the foreground process, if there is one.
fn assert_serves_with_full_pipe(
    place: &Place,
    pipe: impl AsFd,
    start: impl FnOnce(&mut Command) -> Option<std::io::Result<Child>>,
) {
    let files = (0..100).fold(Archive::new(), |archive, number| {
        archive.file(&format!("{number}"), vec![b'a'; 400_000])
    });
    let packed = Packing::Gzip.pack(&files.end().into());
    fs::write(place.path("a.tar"), packed).expect("written");
    let mut command = place.mount_command();
    command.args(["--wait-index", "--no-disk-cache", "--memory=32MiB"]);
    let server = start(&mut command);
    wait::wait_until("it answers", || place.is_answering());
    fill(pipe);
    // Each of these is reported.
    let damaged = fs::OpenOptions::new().write(true).open(place.path("a.tar"));
    damaged.expect("there").set_len(10).expect("cut");
    let files: Vec<_> = (0..100)
        .map(|number| place.path(format!("mnt/{number}")))
        .collect();
    let failed =
        wait::finish_in_time(move || files.iter().filter(|file| fs::read(file).is_err()).count());
    assert!(failed > 2, "{failed}");
    assert!(place.is_answering());
    let (pid, process) = place.server();
    kill_process(pid, Signal::TERM).expect("running");
    if let Some(server) = server {
        let mut server = server.expect("started");
        wait::wait_until("it ends", || server.try_wait().expect("a child").is_some());
    }
    assert!(process_exits(&process));
    assert!(!place.is_mounted());
}

/// Fills a pipe that has no reader.
fn fill(pipe: impl AsFd) {
    let flags = fcntl_getfl(&pipe).expect("open");
    fcntl_setfl(&pipe, flags | OFlags::NONBLOCK).expect("set");
    while rustix::io::write(&pipe, &[b'.'; 64]).is_ok() {}
    fcntl_setfl(&pipe, flags).expect("set");
}

#[test]
fn silent_control_connection_does_not_block_unmount() {
    let place = Place::with_archive();
    place.mount();
    let (pid, process) = place.server();
    let namespace = fs::metadata("/proc/self/ns/pid").expect("there").ino();
    let socket = place.path(format!("tarfs/{}-{namespace}.sock", pid.as_raw_nonzero()));
    let mut silent = UnixStream::connect(socket).expect("listening");
    silent.write_all(b"{\"verb\":").expect("taken");
    kill_process(pid, Signal::TERM).expect("running");
    wait::wait_until("it is unmounted", || !place.is_mounted());
    drop(silent);
    assert!(process_exits(&process));
}

#[test]
fn foreground_process_ends_with_the_mount() {
    let place = Place::with_archive();
    let mut server: Child = place
        .mount_command()
        .arg("--foreground")
        .stderr(Stdio::null())
        .spawn()
        .expect("started");
    wait::wait_until("it answers", || place.is_answering());
    assert!(place.path("mnt/file").exists());
    let output = place.umount_with(&[]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(server.wait().expect("a child").success());
}

// Promises: log-place
#[test]
fn background_messages_go_to_log_file() {
    let place = Place::with_archive();
    let log = place.path("log");
    let mut command = place.mount_command();
    command.arg("--log-file").arg(&log);
    assert!(command.status().expect("started").success());
    assert!(place.umount_with(&[]).status.success());
    let text = fs::read_to_string(&log).expect("written");
    assert!(
        text.contains("mounted") && text.contains("unmounted"),
        "{text}"
    );
}

// Promises: unmount-next
#[test]
fn process_ending_late_leaves_next_mount_alone() {
    let place = Place::with_archive();
    let number = || fs::metadata(place.path("mnt")).expect("mounted").dev();
    // The next mount gets its device number, unless another test's mount is faster.
    for _ in 0..50 {
        place.mount();
        let first = number();
        let (pid, process) = place.server();
        stop(pid);
        // As umount(8) does, which would ask the mount for its attributes.
        rustix::mount::unmount(place.path("mnt"), rustix::mount::UnmountFlags::empty())
            .expect("unmounted");
        let output = place.mount_command().output().expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
        let second = number();
        kill_process(pid, Signal::CONT).expect("stopped");
        assert!(process_exits(&process));
        assert!(place.path("mnt/file").exists());
        assert!(place.umount_with(&[]).status.success());
        if first == second {
            return;
        }
    }
    panic!("each mount had a number of its own");
}

// Promises: status-private
#[test]
fn stopped_mount_delays_no_command_for_another() {
    let place = Place::with_archive();
    place.mount();
    let (pid, process) = place.server();
    stop(pid);
    fs::create_dir(place.path("other")).expect("made");
    let other = |verb: &str| {
        let mut command = place.verb(verb);
        if verb == "mount" {
            command.arg(place.path("a.tar"));
        }
        command.arg(place.path("other")).output().expect("started")
    };
    for verb in ["mount", "status", "umount"] {
        let done = other(verb);
        assert!(done.status.success(), "{verb}: {}", stderr_text(&done));
        assert_eq!(stderr_text(&done), "", "{verb} waits for no other process");
    }
    let again = place.mount_command().output().expect("started");
    let error = stderr_text(&again);
    assert!(
        !again.status.success() && error.contains("does not answer"),
        "{error}"
    );
    kill_process(pid, Signal::CONT).expect("stopped");
    assert!(place.umount_with(&[]).status.success());
    assert!(process_exits(&process));
}

// Promises: service-notify
#[test]
fn service_manager_is_notified_of_ready_status_and_stop() {
    let place = Place::with_archive();
    let manager = UnixDatagram::bind(place.path("notify")).expect("bound");
    let mut server: Child = place
        .mount_command()
        .arg("--foreground")
        .env("NOTIFY_SOCKET", place.path("notify"))
        .stderr(Stdio::null())
        .spawn()
        .expect("started");
    let hear = || {
        let mut bytes = [0; 512];
        let timeout = Some(wait::WAIT_TIMEOUT);
        manager.set_read_timeout(timeout).expect("set");
        let mut told = manager.recv(&mut bytes);
        // The machine itself may have been stopped meanwhile.
        while matches!(&told, Err(error) if error.kind() == ErrorKind::Interrupted) {
            told = manager.recv(&mut bytes);
        }
        let len = told.expect("told");
        String::from_utf8_lossy(bytes.get(..len).expect("read")).into_owned()
    };
    while hear() != "READY=1" {}
    assert!(place.is_answering() && place.path("mnt/file").exists());
    let location = place.path("a.tar");
    let complete = format!("STATUS={}: complete", location.display());
    while hear() != complete {}
    assert!(place.umount_with(&[]).status.success());
    assert_eq!(hear(), "STOPPING=1");
    assert!(server.wait().expect("a child").success());
}

// Promises: log-place
#[test]
fn foreground_messages_go_to_journal_or_log_file() {
    let place = Place::with_archive();
    let stderr = fs::File::create(place.path("stderr")).expect("made");
    let found = stderr.metadata().expect("open");
    let stream = format!("{}:{}", found.dev(), found.ino());
    let serve = |log: &[&str]| {
        let mut command = place.mount_command();
        command.arg("--foreground").args(log);
        command
            .env("JOURNAL_STREAM", &stream)
            .stderr(stderr.try_clone().expect("cloned"));
        let mut server = command.spawn().expect("started");
        wait::wait_until("it answers", || place.is_answering());
        assert!(place.umount_with(&[]).status.success());
        assert!(server.wait().expect("a child").success());
    };
    serve(&[]);
    let text = fs::read_to_string(place.path("stderr")).expect("written");
    assert!(!text.is_empty());
    for line in text.lines() {
        assert!(line.starts_with("<6> INFO"), "{text}");
    }
    let log = place.path("log");
    serve(&["--log-file", log.to_str().expect("UTF-8")]);
    let logged = fs::read_to_string(&log).expect("written");
    assert!(logged.contains("INFO mounted"), "{logged}");
    let now = fs::read_to_string(place.path("stderr")).expect("written");
    assert_eq!(now, text);
    let mut failing = place.verb("ls");
    failing.arg("/nowhere.tar").env("JOURNAL_STREAM", &stream);
    let status = failing.stderr(stderr.try_clone().expect("cloned")).status();
    assert!(!status.expect("started").success());
    let now = fs::read_to_string(place.path("stderr")).expect("written");
    assert!(now.contains("\n<3>tarfs: cannot read"), "{now}");
    // Another stream is not the journal.
    failing.stderr(Stdio::piped());
    let output = failing.output().expect("started");
    assert!(
        stderr_text(&output).starts_with("tarfs: "),
        "{}",
        stderr_text(&output)
    );
}

// Promises: unmount-next
#[test]
fn unmounts_by_fusermount3_are_never_busy() {
    let place = TestMount::new(&[]);
    let archive = (0..20).fold(Archive::new(), |archive, number| {
        archive.file(&format!("d/f{number}"), vec![7; 3000])
    });
    place.put("a.tar", archive.end());
    for round in 0..40 {
        // Every second mount scans the archive.
        let scan = ["--cache-dir", "other"];
        let flags = if round % 2 == 0 { &scan[..] } else { &[] };
        place.succeeds(&[&["mount"], flags, &["a.tar", "mnt"]].concat());
        assert_eq!(fs::read(place.mounted("d/f3")).expect("there").len(), 3000);
        let unmounted = place.command_of("fusermount3").args(["-u", "mnt"]).output();
        let unmounted = unmounted.expect("started");
        assert!(
            unmounted.status.success(),
            "{round}: {}",
            stderr_text(&unmounted)
        );
        assert!(!place.is_mounted(), "{round}");
        fs::remove_dir_all(place.path("other")).unwrap_or_default();
    }
}
