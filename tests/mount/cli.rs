//! The command line: error messages of verbs that mount, and runs as root.
//!
//! `tests/library` has the tests that need no root.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use rustix::io::Errno;

use crate::support::cli::{Outcome, Place, sample};
use crate::support::http::{Resource, Response, Server};
use crate::support::mounts::mount_lines;
use crate::support::program;
use crate::support::raw::{Archive, Header, random_bytes};
use crate::support::wait;

// Promises: error-line
#[test]
fn no_message_contains_secrets() {
    let place = Place::new();
    let server = Server::start();
    server.serve("/good", Resource::new(sample()).etag("\"1\""));
    server.serve("/cut", Resource::new(sample()[..200_000].to_vec()));
    server.serve("/text", Resource::new("hello"));
    server.route("/500", |_| Response::new(500));
    server.route("/401", |_| Response::new(401));
    let with_user = |path: &str| {
        let url = server.url(path).replace("http://", "http://geheim:geheim@");
        format!("{url}?X-Amz-Signature=geheim&sig=geheim")
    };
    let mut texts = Vec::new();
    for path in ["/good", "/cut", "/text", "/500", "/401", "/none"] {
        let url = with_user(path);
        for arguments in [
            &["ls", "-l", "--header", "X-Key: geheim", &url][..],
            &["materialize", "-v", "--stats", &url, "-C", "out"],
            &["index", &url, "--output", "index"],
            &["mount", "--wait-index", &url, "mnt", "--log-file", "log"],
        ] {
            let outcome = Outcome::of(place.tarfs().args(arguments).env("RUST_LOG", "debug"));
            texts.push(outcome.complaints.clone());
            texts.push(outcome.text().to_owned());
        }
    }
    // The valid one is mounted.
    assert_eq!(place.mounts(), 1);
    texts.extend(mount_lines(&place.path("mnt")));
    texts.push(place.succeeds(&["status", "mnt"]).text().to_owned());
    place.succeeds(&["umount", "mnt"]);
    texts.push(fs::read_to_string(place.path("log")).expect("a log"));
    let index = fs::read(place.path("index")).expect("an index");
    texts.push(String::from_utf8_lossy(&index).into_owned());
    for text in texts {
        assert!(!text.contains("geheim"), "{text}");
    }
}

#[test]
fn unusable_destination_is_reported() {
    let place = Place::new();
    place.put("a.tar", sample());
    place.fails(
        &["materialize", "a.tar", "-C", "none"],
        &["none: cannot open", "No such file", "make the directory"],
    );
    place.fails(
        &["materialize", "a.tar", "-C", "a.tar"],
        &["a.tar: cannot open", "Not a directory"],
    );
    place.fails(
        &["index", "a.tar", "--output", "none/index"],
        &["none/index", "No such file"],
    );
    // Read-only for this process and its children only.
    let script = "mount -t tmpfs -o ro none out && exec \"$0\" materialize a.tar -C out";
    let outcome = Outcome::of(
        place
            .command("unshare")
            .args(["-m", "sh", "-c", script])
            .arg(env!("CARGO_BIN_EXE_tarfs")),
    );
    outcome.failure(&[
        "out: cannot write",
        "Read-only file system",
        "that you may write to",
    ]);
}

/// An archive with a file that has every kind of attribute.
fn with_attributes() -> Vec<u8> {
    let capability: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let acl: &[u8] = b"user::rw-,user:7:r--,group::r--,mask::r--,other::---";
    Archive::new()
        .pax(&[
            ("SCHILY.xattr.user.a", &b"1"[..]),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            (
                "SCHILY.xattr.security.selinux",
                b"system_u:object_r:etc_t:s0\0",
            ),
            ("SCHILY.xattr.security.ima", b"\x01"),
            ("SCHILY.xattr.security.evm", b"\x01"),
            ("SCHILY.xattr.security.capability", capability),
            ("SCHILY.acl.access", acl),
        ])
        .add(Header::new("file", b'0').mode(0o640), "content")
        .end()
}

/// The sorted names of a file's extended attributes.
fn attributes(path: &Path) -> Vec<String> {
    let mut buffer = [0; 4096];
    let len = match rustix::fs::listxattr(path, &mut buffer[..]) {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => 0,
        Err(errno) => panic!("{errno}"),
    };
    let names = buffer
        .get(..len)
        .expect("within it")
        .split(|&byte| byte == 0);
    let names = names.filter(|name| !name.is_empty());
    let mut names: Vec<_> = names
        .map(|name| String::from_utf8(name.to_vec()).expect("UTF-8"))
        .collect();
    names.sort_unstable();
    names
}

// Promises: xattr-default, xattr-flags, xattr-overlay, copy-owner, gnu-xattrs
#[test]
fn extended_attributes_are_selected_by_flags() {
    const ACL: &str = "system.posix_acl_access";
    const CAPABILITY: &str = "security.capability";
    const OPAQUE: &str = "trusted.overlay.opaque";
    let cases: [(&[&str], &[&str]); 7] = [
        (&[], &[CAPABILITY, ACL, "user.a"]),
        (&["--xattrs-include=trusted.*"], &[ACL, OPAQUE]),
        (
            &["--xattrs-include=*", "--xattrs-exclude=security.*"],
            &[ACL, OPAQUE, "user.a"],
        ),
        (
            &["--xattrs-exclude=user.*", "--xattrs-exclude=*.capability"],
            &[ACL],
        ),
        (&["--no-xattrs"], &[ACL]),
        (&["--no-acls"], &[CAPABILITY, "user.a"]),
        (&["--no-acls", "--no-xattrs"], &[]),
    ];
    for (flags, expected) in cases {
        let place = Place::new();
        place.put("a.tar", with_attributes());
        let run = |words: &[&str]| place.succeeds(&[words, flags].concat());
        run(&["materialize", "-q", "a.tar", "-C", "out"]);
        assert_eq!(attributes(&place.path("out/file")), expected, "{flags:?}");
        run(&["materialize", "-q", "a.tar", "--atomic", "-C", "whole"]);
        assert_eq!(attributes(&place.path("whole/file")), expected, "{flags:?}");
        // Errors of a copy that ends early go to the terminal.
        let copied = ["mount", "--wait-index", "--copy-to", "copy", "a.tar", "mnt"];
        let mounted = place.run(&[&copied[..], flags].concat());
        assert_eq!(mounted.code, 0, "{}", mounted.complaints);
        assert_eq!(attributes(&place.path("mnt/file")), expected, "{flags:?}");
        let mut buffer = [0; 64];
        for name in ["user.a", CAPABILITY, OPAQUE, "security.selinux", ACL] {
            let found = rustix::fs::getxattr(place.path("mnt/file"), name, &mut buffer[..]);
            assert_eq!(
                found.is_ok(),
                expected.contains(&name),
                "{flags:?} {name}: {found:?}"
            );
        }
        wait::wait_until("the copy is complete", || {
            let status = place.run(&["status", "--json", "mnt"]);
            status.text().contains(r#""state":"complete""#)
        });
        assert_eq!(attributes(&place.path("copy/file")), expected, "{flags:?}");
        place.succeeds(&["umount", "mnt"]);
        // A copy with other attributes is not resumed.
        let other = [&copied[..], &["--xattrs-include=user.b"]].concat();
        let refused = place.run(&other);
        assert_eq!(refused.code, 2, "{}", refused.complaints);
        let why = "is no copy that a mount of this archive keeps";
        assert!(refused.complaints.contains(why), "{}", refused.complaints);
    }
}

// Promises: xattr-errno
#[test]
fn hidden_security_labels_are_not_supported() {
    let place = Place::new();
    let labelled = Archive::new()
        .pax(&[(
            "SCHILY.xattr.security.selinux",
            "system_u:object_r:etc_t:s0",
        )])
        .file("file", "content");
    place.put("a.tar", labelled.end());
    let mut buffer = [0; 64];
    let mut label = || {
        let path = place.path("mnt/file");
        rustix::fs::getxattr(path, "security.selinux", &mut buffer[..])
    };
    place.succeeds(&["mount", "--wait-index", "a.tar", "mnt"]);
    assert_eq!(label(), Err(Errno::OPNOTSUPP));
    place.succeeds(&["umount", "mnt"]);
    let include = "--xattrs-include=security.selinux";
    place.succeeds(&["mount", "--wait-index", include, "a.tar", "mnt"]);
    assert_eq!(label(), Ok(26));
    place.succeeds(&["umount", "mnt"]);
}

#[test]
fn failed_mount_is_reported_and_leaves_nothing() {
    let place = Place::new();
    place.put("a.tar", sample());
    place.put("text", "hello");
    place.fails(
        &["mount", "a.tar", "none"],
        &["cannot mount on none", "No such file", "make the directory"],
    );
    place.fails(
        &["mount", "a.tar", "text"],
        &["cannot mount on text", "not a directory"],
    );
    place.fails(&["mount", "text", "mnt"], &["/text: ", "neither"]);
    place.fails(
        &["mount", "missing", "mnt"],
        &["/missing: ", "not found", "check"],
    );
    place.fails(&["mount", "-", "mnt"], &["standard input"]);
    place.fails(
        &["mount", "a.tar", "mnt", "--root", "nothing"],
        &["nothing"],
    );
    let devices = [
        (
            "/dev/null bound over it",
            "mount --bind /dev/null /dev/fuse",
        ),
        (
            "nothing there",
            "mkdir dev && mount -t tmpfs none dev && touch dev/null && \
             mount --bind /dev/null dev/null && mount --rbind dev /dev",
        ),
    ];
    for (name, hide) in devices {
        let script = format!("{hide} && exec \"$0\" mount -f a.tar mnt");
        let outcome = Outcome::of(
            place
                .command("unshare")
                .args(["-m", "sh", "-c", &script])
                .arg(env!("CARGO_BIN_EXE_tarfs")),
        );
        let text = outcome.failure(&["no FUSE device", "`tarfs materialize` works without it"]);
        assert!(text.contains("modprobe fuse"), "{name}: {text}");
    }
    assert_eq!(place.mounts(), 0);
    let left = fs::read_dir(place.path("run")).expect("a directory");
    let sockets = left
        .flatten()
        .filter(|entry| entry.path().extension() == Some(OsStr::new("sock")));
    assert_eq!(sockets.count(), 0);
}

#[test]
fn mount_answers_when_command_returns() {
    let place = Place::new();
    place.put("a.tar", sample());
    place.succeeds(&["mount", "a.tar", "mnt"]);
    let found = fs::metadata(place.path("mnt/top/b")).expect("mounted");
    assert_eq!((found.len(), found.uid(), found.gid()), (3, 7, 8));
    assert_eq!(
        fs::read(place.path("mnt/top/sub/noise")).expect("readable"),
        random_bytes(300_000)
    );
    place.succeeds(&["umount", "mnt"]);
    assert_eq!(place.mounts(), 0);
}

// Promises: walk-paths
#[test]
fn root_of_a_mount_resolves_as_a_path_of_ls() {
    let place = Place::new();
    let archive = Archive::new()
        .file("dir/f", "below")
        .file("dir/sub/g", "deeper")
        .symlink("lnk", "dir/sub")
        .symlink("loop", "loop")
        .add(Header::new(b"d\xff/h", b'0'), "")
        .end();
    place.put("a.tar", archive);
    let mount = |root: &[u8]| {
        let words = ["mount", "a.tar", "mnt", "--root"];
        Outcome::of(place.tarfs().args(words).arg(OsStr::from_bytes(root)))
    };
    for (root, expected) in [
        (&b"lnk/.."[..], "f\nsub\n"),
        (b"/lnk/", "g\n"),
        (b"d\xff", "h\n"),
    ] {
        assert_eq!(mount(root).code, 0);
        assert_eq!(place.succeeds(&["ls", "mnt"]).text(), expected);
        place.succeeds(&["umount", "mnt"]);
    }
    for (root, words) in [
        ("../dir", ["../dir: ", "its `..` leads above the root"]),
        ("dir/f/", ["dir/f/: ", "not a directory"]),
        ("dir/f", ["dir/f ", "is not a directory"]),
        ("loop/x", ["loop/x: ", "too many levels of symbolic links"]),
        ("lnk/../none", ["lnk/../none: ", "not in the archive"]),
    ] {
        mount(root.as_bytes()).failure(&words);
    }
    assert_eq!(place.mounts(), 0);
}

#[test]
fn owners_and_modes_are_restored_for_root_only() {
    let place = Place::new();
    place.put("a.tar", sample());
    fs::set_permissions(place.directory.root(), PermissionsExt::from_mode(0o755)).expect("ours");
    let owner = |name: &str| {
        let found = fs::symlink_metadata(place.path(name)).expect("written");
        (found.uid(), found.gid(), found.mode() & 0o7777)
    };
    place.succeeds(&["materialize", "a.tar", "-C", "out"]);
    assert_eq!(owner("out/top/b"), (7, 8, 0o4755));
    fs::create_dir(place.path("own")).expect("fresh");
    place.succeeds(&["materialize", "a.tar", "-C", "own", "--no-same-owner"]);
    assert_eq!(owner("own/top/b"), (0, 0, 0o4755));
    fs::create_dir(place.path("user")).expect("fresh");
    chown(place.path("user"), Some(65534), Some(65534)).expect("root");
    // Other users may not reach the directory of the original program.
    program::copy_to(&place.path("tarfs"));
    let script = "umask 027 && exec ./tarfs materialize a.tar -C user";
    let outcome = Outcome::of(
        place
            .command("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args(["sh", "-c", script]),
    );
    assert_eq!((outcome.code, outcome.complaints.as_str()), (0, ""));
    assert_eq!(owner("user/top/a"), (65534, 65534, 0o640));
    // Without the owner, the set-user-id bit would apply to another user.
    assert_eq!(owner("user/top/b"), (65534, 65534, 0o750));
    assert_eq!(owner("user/top"), (65534, 65534, 0o750));
}
