//! mount(8), umount(8) and /etc/fstab with tarfs as their helper.
//!
//! Each test runs in its own mount namespace with its own /sbin, /etc/fstab, /run and /var/cache.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Server};
use crate::support::image::{self, Image};
use crate::support::namespace;
use crate::support::program::{self, stderr_text};
use crate::support::raw::{Archive, Header};

/// Start of every script. `helpers` installs the program in /sbin under the given names. `gone` waits
/// until no process serves a mount.
const PRELUDE: &str = r#"
mknod fuse c 10 229
chmod 0666 fuse
mount --bind fuse /dev/fuse
mount --bind fstab /etc/fstab
mount -t tmpfs none /run
mount -t tmpfs none /var/cache
mount -t tmpfs none over
mkdir over/upper over/work
mount -t overlay -o lowerdir=/usr/sbin,upperdir=over/upper,workdir=over/work overlay /usr/sbin
ln -sf "$PWD/tarfs" /usr/sbin/tarfs
rm -f /usr/sbin/mount.tarfs /usr/sbin/mount.fuse.tarfs
export PATH="/usr/sbin:/usr/bin:/sbin:/bin" no_proxy='*' XDG_RUNTIME_DIR="$PWD/session"
helpers() { for name; do ln -s "$PWD/tarfs" "/usr/sbin/$name"; done; }
code() { if "$@"; then echo 0; else echo $?; fi; }
gone() { while [ -n "$(tarfs status)" ]; do sleep 0.01; done; }
"#;

/// A directory with the program, an archive, mountpoints and an fstab.
struct Place(TestDir);

impl Place {
    fn new() -> Self {
        let place = TestDir::new_in("/var/tmp", &["mnt", "m n", "over", "session"]);
        let open = Permissions::from_mode(0o755);
        fs::set_permissions(place.root(), open).expect("set");
        program::copy_to(&place.path("tarfs"));
        place.put("a.tar", archive());
        place.put("fstab", "");
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

/// A file that everyone can read, and a set-user-id program.
fn archive() -> Vec<u8> {
    Archive::new()
        .file("open", "open\n")
        .add(Header::new("raised", b'0').mode(0o4755), "#!/bin/sh\n")
        .end()
}

// Promises: helper-types
#[test]
fn mount_command_finds_helper_by_each_type() {
    for (helpers, kind) in [
        ("mount.tarfs", "tarfs"),
        ("mount.fuse.tarfs", "fuse.tarfs"),
        // By mount.fuse3, which runs the program named by the type.
        ("", "fuse.tarfs"),
    ] {
        let place = Place::new();
        let said = place.stdout_of(&format!(
            "helpers {helpers}
             mount -t {kind} a.tar mnt -o ro,allow_other,memory=32MiB,wait_index
             cat mnt/open
             findmnt -n -o SOURCE,FSTYPE,OPTIONS mnt | tr -s ' '
             df --output=source mnt | tail -n 1
             tarfs status --verbose mnt | grep -c '32 MiB'
             umount mnt; gone; ls mnt; ls session"
        ));
        let archive = place.0.path("a.tar");
        let archive = archive.display();
        let expected = format!(
            "open\n{archive} fuse.tarfs ro,nosuid,nodev,relatime,user_id=0,group_id=0,\
             default_permissions,allow_other\n{archive}\n1\n"
        );
        assert_eq!(said, expected, "{helpers} {kind}");
    }
}

// Promises: helper-root
#[test]
fn system_mount_uses_system_directories() {
    let place = Place::new();
    let said = place.stdout_of(
        "helpers mount.tarfs
         mount -t tarfs -o ro a.tar mnt
         ls /run/tarfs | sed 's/[0-9]*-[0-9]*/PID-NS/; s/.*.daemon/ID.daemon/' | sort; ls /var/cache/tarfs session
         cd /; tarfs umount \"$OLDPWD/mnt\"; gone
         env -u HOME -u XDG_RUNTIME_DIR tarfs ls \"$OLDPWD/a.tar\"",
    );
    assert_eq!(
        said,
        "ID.daemon\nPID-NS.sock\n/var/cache/tarfs:\nindex\n\nsession:\nopen\nraised\n"
    );
}

// Promises: helper-table
#[test]
fn fstab_mounts_all_entries_or_named_one() {
    let place = Place::new();
    let server = Server::start();
    server.serve("/b.tar", Resource::new(archive()).etag("\"1\""));
    fs::write(place.0.path("a header"), "X-Who: me\n").expect("written");
    let directory = place.0.root().display();
    let url = server.url("/b.tar");
    let table = format!(
        "{url} {directory}/m\\040n tarfs ro,nofail,_netdev,x-systemd.automount,\
         header=@{directory}/a\\040header,comment=mine 0 0\n\
         {directory}/a.tar {directory}/mnt fuse.tarfs noauto,users,fsname=\"a,b\" 0 0\n"
    );
    fs::write(place.0.path("fstab"), table).expect("written");
    let said = place.stdout_of(
        "helpers mount.tarfs mount.fuse.tarfs
         mount -a; cat 'm n/open'; ls mnt
         mount -a -v 2>/dev/null | grep -c 'already mounted'
         mount \"$PWD/mnt\" 2>warned
         cat warned mnt/open
         findmnt -n -o SOURCE \"$PWD/mnt\"
         umount \"$PWD/mnt\"; umount 'm n'; gone",
    );
    let warned =
        format!("tarfs: {directory}/mnt: WARNING: source write-protected, mounted read-only.\n");
    assert_eq!(said, format!("open\n1\n{warned}open\na,b\n"));
    let seen = server.requests("/b.tar");
    assert!(!seen.is_empty());
    for seen in seen {
        assert_eq!(seen.request.header("x-who"), Some("me"));
    }
}

// Promises: helper-table
#[test]
fn fstab_mounts_any_source_only_once() {
    let place = Place::new();
    let server = Server::start();
    server.serve("/b.tar", Resource::new(archive()).etag("\"1\""));
    let image = Image::new("v1", vec![archive()]);
    fs::write(place.0.path("image"), image::oci(&[image]).tar()).expect("written");
    let outer = Archive::new().file("a.tar", archive()).end();
    fs::write(place.0.path("outer"), outer).expect("written");
    let url = server.other_url("/b.tar");
    let at = place.0.root().display();
    let lines = [
        (format!("oci-archive:{at}/image:v1"), String::new()),
        (format!("{at}/a.tar"), format!(",layer={at}/a.tar")),
        (format!("{at}/a.tar"), format!(",layer={at}/a.tar,writable")),
        (format!("tar:{at}/outer!/a.tar"), String::new()),
        (format!("slice:0:{at}/a.tar"), String::new()),
        (format!("file://{at}/a.tar"), String::new()),
        (url.replace("localhost", "LOCALHOST"), String::new()),
    ];
    let mut table = Vec::new();
    for (number, (source, options)) in lines.iter().enumerate() {
        fs::create_dir(place.0.path(number.to_string())).expect("made");
        table.push(format!("{source} {at}/{number} tarfs ro{options} 0 0\n"));
    }
    fs::write(place.0.path("fstab"), table.concat()).expect("written");
    let said = place.stdout_of(
        "helpers mount.tarfs
         mount -a
         for number in 0 1 2 3 4 5 6; do cat $number/open; findmnt -n -o SOURCE $PWD/$number; done
         mount -a -v 2>/dev/null | grep -c 'already mounted'
         for number in 0 1 2 3 4 5 6; do umount $number; ls $number; done; gone",
    );
    let expected = lines.map(|(source, _)| format!("open\n{source}\n"));
    assert_eq!(said, format!("{}7\n", expected.concat()));
}

// Promises: helper-user
#[test]
fn fstab_user_mounts_with_own_identity_and_unmounts() {
    let place = Place::new();
    let directory = place.0.root().display();
    let table =
        format!("{directory}/a.tar {directory}/mnt tarfs ro,noauto,user,no_disk_cache 0 0\n");
    fs::write(place.0.path("fstab"), table).expect("written");
    let said = place.stdout_of(
        "helpers mount.tarfs
         chown 65534 mnt session; chmod 700 session
         user() { setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=\"$PWD/session\" \"$@\"; }
         user mount \"$PWD/mnt\"
         user cat mnt/open
         findmnt -n -o OPTIONS mnt
         user umount \"$PWD/mnt\"
         user sh -c 'while [ -n \"$(tarfs status)\" ]; do sleep 0.01; done'; ls mnt",
    );
    let options = "ro,nosuid,nodev,noexec,relatime,user_id=65534,group_id=65534";
    assert_eq!(said, format!("open\n{options}\n"));
}

// Promises: helper-writable, helper-status
#[test]
fn mount_helper_returns_exit_codes_of_mount() {
    let place = Place::new();
    let output = place.run(
        "helpers mount.tarfs mount.fuse.tarfs
         code mount -t tarfs a.tar mnt -o sparkle
         code mount -t tarfs a.tar mnt -o memory=lots
         code mount.tarfs a.tar
         code mount -t tarfs nowhere.tar mnt
         code mount -t tarfs a.tar nowhere
         code mount -f -t tarfs a.tar mnt
         code mount.tarfs a.tar $PWD/mnt -N /proc/nowhere
         code mount.tarfs a.tar mnt -N /proc/self/ns/mnt
         code mount.tarfs a.tar mnt -o writable,restart,copy_to=copy
         code mount.tarfs -f s3://bucket/archives/ mnt -o restart
         ls mnt
         code mount -s -t tarfs a.tar mnt -o sparkle
         code mount -o remount,ro mnt
         umount mnt; gone",
    );
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        said,
        "1\n1\n1\n32\n32\n0\n32\n1\n1\n1\n0\n32\n",
        "{}",
        stderr_text(&output)
    );
    for complaint in [
        "unknown mount option `sparkle`",
        "'--memory <SIZE>'",
        "cannot read",
        "make the directory first",
        "the mountpoint must be an absolute path",
        "leave out one of the three",
        "--restart is for a single archive",
        "a mount cannot be changed",
    ] {
        assert!(
            stderr_text(&output).contains(complaint),
            "{}",
            stderr_text(&output)
        );
    }
}

// Promises: option-nosymfollow
#[test]
fn nosymfollow_reads_links_but_does_not_follow_them() {
    let place = Place::new();
    fs::write(
        place.0.path("b.tar"),
        Archive::new()
            .file("open", "open\n")
            .symlink("link", "open")
            .end(),
    )
    .expect("written");
    let said = place.stdout_of(
        "helpers mount.tarfs
         follow() { cat mnt/link || :; readlink mnt/link; umount mnt; gone; }
         mount -t tarfs b.tar mnt -o ro; follow
         mount -t tarfs b.tar mnt -o ro,nosymfollow,iversion; follow 2>/dev/null
         mount -t tarfs b.tar mnt -o nosymfollow,writable; follow 2>/dev/null",
    );
    assert_eq!(said, "open\nopen\nopen\nopen\n");
}

// Promises: helper-flags
#[test]
fn suid_and_dev_options_take_effect() {
    let place = Place::new();
    let said = place.stdout_of(
        "helpers mount.tarfs
         mount -t tarfs a.tar mnt -o ro,suid,dev; findmnt -n -o OPTIONS mnt; umount mnt; gone
         mount -t tarfs a.tar mnt -o ro,allow_suid,allow_dev; findmnt -n -o OPTIONS mnt; umount mnt",
    );
    let common = "relatime,user_id=0,group_id=0\n";
    assert_eq!(said, format!("ro,nosuid,nodev,{common}ro,{common}"));
}

// Promises: namespace-mount
#[test]
fn mount_is_made_in_the_named_namespace() {
    let place = Place::new();
    let said = place.stdout_of(
        "helpers mount.tarfs
         mkfifo started
         unshare --mount sh -c 'echo >started; exec sleep 100' & pid=$!
         read -r nothing <started
         mount -N $pid -t tarfs -o ro \"$PWD/a.tar\" \"$PWD/mnt\"
         ls mnt
         cat /proc/$pid/root/$PWD/mnt/open
         tarfs status | grep -c '^  source '
         umount -N $pid \"$PWD/mnt\"; gone
         kill $pid",
    );
    assert_eq!(said, "open\n1\n");
}

/// Script that starts a process `$pid` in its own mount namespace after `commands`.
fn another_namespace(commands: &str) -> String {
    format!(
        "mkfifo started
         unshare --mount sh -euc '{commands}
                                  echo >started; exec sleep 100' & pid=$!
         read -r nothing <started
         seen() {{ grep -c \" $PWD/mnt .* fuse.tarfs \" /proc/$pid/mountinfo || :; }}
         until_seen() {{ while [ \"$(seen)\" != $1 ]; do sleep 0.01; done; }}
         server() {{ tarfs status --json | grep -m 1 -o '\"pid\": *[0-9]*' | tr -dc 0-9; }}
        "
    )
}

// Promises: namespace-mount
#[test]
fn mount_in_namespace_executes_no_program_of_it() {
    let place = Place::new();
    let plant = "printf \"#!/bin/sh\\necho \\$0 >>$PWD/executed\\n\" >planted
                 chmod 755 planted
                 mount --bind planted tarfs
                 mount --bind planted /usr/bin/fusermount3";
    let other = another_namespace(plant);
    let said = place.stdout_of(&format!(
        "helpers mount.tarfs
         {other}
         code mount -N $pid -t tarfs -o ro \"$PWD/a.tar\" \"$PWD/mnt\"
         cat executed 2>/dev/null || cat /proc/$pid/root/$PWD/mnt/open
         for process in /proc/[0-9]*; do
             case $(tr '\\0' ' ' <$process/cmdline 2>/dev/null || :) in
                 *\"$PWD/a.tar\"*)
                     [ $(readlink $process/ns/mnt) = $(readlink /proc/self/ns/mnt) ] || echo inside;;
             esac
         done
         umount -N $pid \"$PWD/mnt\"; gone
         kill $pid"
    ));
    assert_eq!(said, "0\nopen\n");
}

// Promises: namespace-mount, namespace-end
#[test]
fn mount_in_namespace_is_unmounted_when_its_process_ends() {
    for signal in ["TERM", "KILL"] {
        let place = Place::new();
        let other = another_namespace(":");
        let said = place.stdout_of(&format!(
            "helpers mount.tarfs
             {other}
             mount -N $pid -t tarfs -o ro \"$PWD/a.tar\" \"$PWD/mnt\"
             seen
             tarfs status | grep -c 'in another mount namespace'
             kill -{signal} $(server); until_seen 0; gone
             kill $pid"
        ));
        assert_eq!(said, "1\n1\n", "{signal}");
    }
}

// Promises: namespace-end
#[test]
fn mount_in_namespace_rejects_unsupported_options() {
    let place = Place::new();
    let other = another_namespace(":");
    let output = place.run(&format!(
        "helpers mount.tarfs
         {other}
         for option in writable restart copy_to=copy; do
             code mount -N $pid -t tarfs -o ro,$option \"$PWD/a.tar\" \"$PWD/mnt\"
         done
         code mount -N $pid -t tarfs -o ro \"$PWD/a.tar\" \"$PWD/nowhere\"
         code mount.tarfs \"$PWD/a.tar\" \"$PWD/mnt\" -N /proc/$pid/ns/uts
         seen
         kill $pid"
    ));
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said, "1\n1\n1\n32\n32\n0\n", "{}", stderr_text(&output));
    for complaint in [
        "'--writable' cannot be used with '--namespace <PID|PATH>'",
        "'--restart' cannot be used with '--namespace <PID|PATH>'",
        "'--copy-to <DIR>' cannot be used with '--namespace <PID|PATH>'",
        "make the directory first",
        "cannot enter the mount namespace",
    ] {
        assert!(
            stderr_text(&output).contains(complaint),
            "{}",
            stderr_text(&output)
        );
    }
}

// Promises: secret-hidden
#[test]
fn mount_by_fstab_shows_no_secret_in_process_titles() {
    let place = Place::new();
    let server = Server::start();
    server.serve("/b.tar", Resource::new(archive()).etag("\"1\""));
    let directory = place.0.root().display();
    let url =
        server
            .url("/b.tar?token=hunter2-token")
            .replacen("http://", "http://me:hunter2-pass@", 1);
    let table = format!("{url} {directory}/mnt tarfs ro,noauto,header=\"X-Key:hunter2-key\" 0 0\n");
    fs::write(place.0.path("fstab"), table).expect("written");
    let said = place.stdout_of(
        "helpers mount.tarfs
         mount \"$PWD/mnt\"
         cat mnt/open
         for process in /proc/[0-9]*; do
             tr '\\0' ' ' <$process/cmdline 2>/dev/null || :; echo
         done >titles
         grep -c \"tarfs mount .*$PWD/mnt\" titles
         server=$(tarfs status --json \"$PWD/mnt\" | grep -m 1 -o '\"pid\": *[0-9]*' | tr -dc 0-9)
         tr '\\0' ' ' </proc/$server/cmdline | grep -c 'tarfs serve-mounts /run/tarfs/'
         grep tarfs titles | grep -c 'hunter[2]' || :
         umount \"$PWD/mnt\"; gone",
    );
    // The monitor and the process that serves the mount.
    assert_eq!(said, "open\n1\n1\n0\n");
    let seen = server.requests("/b.tar");
    assert!(!seen.is_empty());
    for seen in seen {
        assert_eq!(seen.request.header("x-key"), Some("hunter2-key"));
        assert!(seen.request.header("authorization").is_some());
    }
}

// Promises: unmount-proc
#[test]
fn mount_is_unmounted_without_readable_fdinfo() {
    let place = Place::new();
    let said = place.stdout_of(
        "helpers mount.tarfs
         mount -t tarfs -o ro a.tar mnt
         cat mnt/open
         server=$(tarfs status --json | grep -m 1 -o '\"pid\": *[0-9]*' | tr -dc 0-9)
         mount -t tmpfs none /proc/$server/fdinfo
         tarfs umount mnt; gone; ls mnt",
    );
    assert_eq!(said, "open\n");
}

// Promises: unmount-proc
#[test]
fn foreground_mount_ends_with_proc_of_other_pid_namespace() {
    let place = Place::new();
    let said = place.stdout_of(
        "timeout -s KILL 60 unshare --pid --fork --kill-child sh -euc '
             tarfs mount --restart --foreground a.tar mnt 2>/dev/null & pid=$!
             while [ ! -e mnt/open ]; do sleep 0.01; done
             umount mnt
             wait $pid; echo $?'",
    );
    assert_eq!(said, "0\n");
}
