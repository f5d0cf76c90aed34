//! Mounts of an unprivileged user through fusermount3.
//!
//! Each test runs in its own mount namespace, where everyone may open /dev/fuse as on most machines,
//! with its own /etc/fuse.conf and /tmp.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Output;

use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Server};
use crate::support::namespace;
use crate::support::program::{self, stderr_text};
use crate::support::raw::{Archive, Header};

/// An unprivileged user with a name, because fusermount3 requires one.
const USER: u32 = 65534;

/// Start of every script. `user` runs the program as [`USER`] with a small environment.
const PRELUDE: &str = r#"
mknod fuse c 10 229
chmod 0666 fuse
mount --bind fuse /dev/fuse
mount --bind fuse.conf /etc/fuse.conf
mount -t tmpfs -o mode=1777 none /tmp
as_user() {
    setpriv --reuid=65534 --regid=65534 --clear-groups env -i PATH="$PATH" no_proxy='*' \
        TARFS_CACHE_DIR="$PWD/cache" XDG_RUNTIME_DIR="$PWD/run" "$@"
}
user() { as_user ./tarfs "$@"; }
pid() { user status --json | sed 's/.*"pid":\([0-9]*\).*/\1/'; }
"#;

/// A directory that the user can access, with the program, an archive and a mountpoint.
struct Place(TestDir);

impl Place {
    fn new() -> Self {
        let names = ["mnt", "cache", "run"];
        let place = TestDir::new_in("/var/tmp", &names);
        let open = Permissions::from_mode(0o755);
        fs::set_permissions(place.root(), open).expect("set");
        program::copy_to(&place.path("tarfs"));
        place.put("a.tar", archive());
        place.put("fuse.conf", "");
        for own in names {
            chown(place.path(own), Some(USER), Some(USER)).expect("root runs the tests");
        }
        fs::set_permissions(place.path("run"), Permissions::from_mode(0o700)).expect("set");
        Self(place)
    }

    /// Runs `script` as root.
    fn run(&self, script: &str) -> Output {
        let script = format!("{PRELUDE}{script}");
        namespace::run("sh", &script, self.0.root())
    }

    #[track_caller]
    fn stdout_of(&self, script: &str) -> String {
        namespace::stdout_text(&self.run(script))
    }
}

/// A file that everyone can read, and one that only its owner, root, can read.
fn archive() -> Vec<u8> {
    Archive::new()
        .file("open", "open\n")
        .add(Header::new("closed", b'0').mode(0o600), "closed\n")
        .end()
}

// Promises: secret-memory, secret-modes, user-mounts, privilege-same
#[test]
fn ordinary_user_mounts_reads_and_unmounts() {
    let place = Place::new();
    let said = place.stdout_of(
        "user mount --wait-index a.tar mnt
         as_user cat mnt/open mnt/closed
         cat mnt/open 2>/dev/null || echo not even root
         stat -c %u:%a cache/index/*.idx
         echo dumpable $(stat -c %u /proc/$(pid)/environ)
         grep -c \"$PWD/mnt fuse.tarfs ro,nosuid,nodev\" /proc/self/mounts
         user umount mnt
         ls mnt; ls run/tarfs | grep -vE '\\.(daemon|sock)$' || true",
    );
    let expected = "open\nclosed\nnot even root\n65534:600\ndumpable 0\n1\n";
    assert_eq!(said, expected);
}

// Promises: secret-memory
#[test]
fn process_with_secrets_has_no_core_dump_or_ptrace() {
    let place = Place::new();
    let server = Server::start();
    server.serve("/a.tar", Resource::new(archive()).etag("\"1\""));
    let url = server.url("/a.tar");
    // Files in /proc of a process that is not dumpable belong to root.
    let said = place.stdout_of(&format!(
        "user mount {url} mnt
         as_user cat mnt/open
         echo $(stat -c %u /proc/$(pid)/environ)
         as_user cat /proc/$(pid)/environ 2>/dev/null || echo refused
         user umount mnt; ls mnt"
    ));
    assert_eq!(said, "open\n0\nrefused\n");
}

// Promises: user-mounts
#[test]
fn allow_other_needs_fuse_conf_and_checks_permissions() {
    let place = Place::new();
    let output = place.run("user mount -o allow_other a.tar mnt");
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
    let complaint = stderr_text(&output);
    assert!(complaint.contains("user_allow_other"), "{complaint}");
    assert!(complaint.contains("/etc/fuse.conf"), "{complaint}");

    let place = Place::new();
    fs::write(place.0.path("fuse.conf"), "user_allow_other\n").expect("written");
    let said = place.stdout_of(
        "user mount -o allow_other a.tar mnt
         cat mnt/open
         setpriv --reuid=1 --regid=1 --clear-groups sh -c 'cat mnt/open; cat mnt/closed || echo kept out'
         as_user cat mnt/closed 2>/dev/null || echo kept out as well
         user umount mnt",
    );
    assert_eq!(said, "open\nopen\nkept out\nkept out as well\n");
}

// Promises: user-mounts
#[test]
fn missing_fusermount_error_says_how_to_install_it() {
    let place = Place::new();
    let said = place.stdout_of(
        "as_user env PATH=/nowhere ./tarfs mount a.tar mnt 2>&1 || echo $?
         ls mnt; ls run/tarfs | grep -vE '\\.(daemon|sock)$' || true",
    );
    let (told, code) = said.split_at(said.find('\n').expect("a line") + 1);
    assert_eq!(code, "2\n", "{said}");
    for words in [
        "not permitted, and fusermount3 is not installed",
        "apt install fuse3",
        "mount as root",
        "tarfs materialize",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
}

// Promises: secret-children
#[test]
fn fusermount_gets_no_variables_of_the_program() {
    let place = Place::new();
    let helper = "#!/bin/sh\n\
        echo \"called $1\" >>\"${0%/*}/../run/seen\"\n\
        env >>\"${0%/*}/../run/seen\"\n\
        exec /usr/bin/fusermount3 \"$@\"\n";
    fs::create_dir(place.0.path("bin")).expect("made");
    fs::write(place.0.path("bin/fusermount3"), helper).expect("written");
    let said = place.stdout_of(
        "chmod 755 bin bin/fusermount3
         PATH=$PWD/bin:$PATH
         with_secret() { as_user env TARFS_HEADERS='Authorization: secret' ./tarfs \"$@\"; }
         with_secret mount a.tar mnt
         as_user cat mnt/open
         with_secret umount mnt
         grep -c -m 1 '^called -o' run/seen
         grep -c -m 1 '^called -u' run/seen
         grep -e '^TARFS_' -e secret run/seen || echo no variables",
    );
    assert_eq!(said, "open\n1\n1\nno variables\n");
}

// Promises: user-mounts
#[test]
fn unwritable_mountpoint_error_says_what_to_do() {
    for (how, words) in [
        (
            "mkdir roots",
            &["no write access", "mount on a directory of your own"][..],
        ),
        (
            "mkdir -m 700 closed; mkdir closed/roots; ln -s closed/roots roots",
            &["Permission denied"],
        ),
        ("touch roots; chmod 666 roots", &["not a directory"]),
    ] {
        let place = Place::new();
        let said = place.stdout_of(&format!(
            "{how}
             user mount a.tar roots 2>&1 || echo $?
             grep -c \"$PWD/roots \" /proc/self/mounts || true"
        ));
        let (told, rest) = said.split_at(said.find('\n').expect("a line") + 1);
        assert_eq!(rest, "2\n0\n", "{how}: {said}");
        assert!(told.contains("cannot mount on"), "{how}: {told}");
        assert!(told.contains("roots"), "{how}: {told}");
        for words in words {
            assert!(told.contains(words), "{how}: {told}");
        }
    }
}

// Promises: privilege-same
#[test]
fn service_with_ambient_capability_leaves_no_dead_mount() {
    let place = Place::new();
    let said = place.stdout_of(
        "service() {
             setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all,+sys_admin,+kill \\
                 --ambient-caps=-all,+sys_admin,+kill env PATH=/nowhere TARFS_CACHE_DIR=$PWD/cache \\
                 XDG_RUNTIME_DIR=$PWD/run ./tarfs \"$@\"
         }
         service mount --isolated a.tar mnt
         as_user cat mnt/open
         server=$(pid)
         monitor=$(user status --json | sed 's/.*\"monitor\":\\([0-9]*\\).*/\\1/')
         grep -h CapAmb /proc/$server/status /proc/$monitor/status
         kill -9 $server
         while kill -0 $monitor 2>/dev/null; do sleep 0.05; done
         grep -c \"$PWD/mnt \" /proc/self/mounts || ls mnt",
    );
    let ambient = format!("CapAmb:\t{:016x}\n", 1 << 21);
    assert_eq!(said, format!("open\n{ambient}{ambient}0\n"));
}

#[test]
fn failed_link_does_not_affect_upper_layer() {
    let place = Place::new();
    // A user cannot make a device, so the link never has a target.
    let device = Header::new("d/c", b'3').device(5, 1);
    let lower = Archive::new()
        .directory("d/")
        .add(device, "")
        .hard_link("d/h", "d/c")
        .file("d/secret", "hidden");
    fs::write(place.0.path("lower.tar"), lower.end()).expect("written");
    let upper = Archive::new().file(".wh.d", "").file("d2", "");
    fs::write(place.0.path("upper.tar"), upper.end()).expect("written");
    let said = place.stdout_of(
        "chown 65534 run; mkdir run/out; chown 65534 run/out
         user materialize -q --layer upper.tar -C run/out lower.tar || echo $?
         ls -A run/out",
    );
    assert_eq!(said, "d2\n", "nothing of what is hidden is made");
}

// Promises: trust-socket
#[test]
fn runtime_directory_created_by_others_is_not_used() {
    for trap in [
        "ln -s /tmp/victim /tmp/tarfs-65534; chown -h 1 /tmp/tarfs-65534",
        "mkdir /tmp/tarfs-65534; chown 1 /tmp/tarfs-65534; chmod 777 /tmp/tarfs-65534",
    ] {
        let place = Place::new();
        let said = place.stdout_of(&format!(
            "mkdir /tmp/victim; chown 65534 /tmp/victim; chmod 700 /tmp/victim
             {trap}
             unset_run() {{ as_user env -u XDG_RUNTIME_DIR ./tarfs \"$@\"; }}
             unset_run mount a.tar mnt 2>told
             grep -c 'no control socket.*not a directory of this user alone' told
             as_user cat mnt/open
             unset_run status 2>told || grep -c 'not a directory of this user alone' told
             ls /tmp/victim; ls /tmp/tarfs-65534
             as_user fusermount3 -u mnt"
        ));
        assert_eq!(said, "1\nopen\n1\n", "{trap}");
    }
}
