//! Extraction of owners, devices and privileged attributes, and onto mounts.
//!
//! Trees are compared with those of GNU tar. `tests/library` has the tests that need no root.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use bytes::Bytes;
use tarfs::archive::scan::{PayloadEnd, Sink};
use tarfs::materialize::{Error, Materializer, Options, Summary};
use tarfs::tar::{Device, Event, Member, MemberKind, Parser};

use crate::support::atomic::{Place, shell};
use crate::support::fixture::PROGRAM;
use crate::support::materialize::{
    assert_same_trees, content, directory, file, hard_link, link, materialize_without_problems,
    member, options, problems, run, status, temporary, try_materialize, with,
};
use crate::support::raw::{Archive, Header};

// Promises: owner-names
#[test]
fn owners_are_chosen_as_by_gnu_tar() {
    let place = Place::open();
    let named = |name: &str, owner: &str| {
        let header = Header::new(name, b'0').owner(5, 6);
        header.put(265, owner).put(297, owner)
    };
    let names = [("uname", "daemon"), ("gname", "daemon")];
    let numbers = [("uid", "4000000000"), ("gid", "4000000001")];
    let archive = Archive::new()
        .pax(&numbers)
        .add(named("numbers over name", "daemon"), "")
        .pax(&names)
        .add(named("names alone", ""), "")
        .pax(&names)
        .add(named("names beside name", "bin"), "")
        .pax(&names)
        .add(named("names beside unknown name", "nosuch"), "")
        .pax(&[numbers, names].concat())
        .add(named("numbers over names", "bin"), "")
        .pax(&numbers[..1])
        .add(named("number over name", "bin"), "")
        .add(named("name", "bin"), "")
        .end();
    place.put("a.tar", archive);
    shell(
        &place,
        &format!(
            "mkdir gnu out; tar -xf a.tar -C gnu; {PROGRAM} materialize -q a.tar -C out
         list() {{ find $1 -type f -printf '%f %U:%G\\n' | sort; }}
         list gnu >expected; list out | diff expected - >&2"
        ),
    );
    // Listings show the owner that counts, even if its name is unknown here.
    let mut find = Command::new(PROGRAM);
    find.args(["find", "a.tar", "-type", "f", "-printf", "%f %u:%g\n"]);
    let found = place.run(&mut find).stdout;
    let mut found: Vec<_> = str::from_utf8(&found).expect("UTF-8").lines().collect();
    found.sort_unstable();
    assert_eq!(
        found,
        [
            "name bin:bin",
            "names alone 5:6",
            "names beside name bin:bin",
            "names beside unknown name nosuch:nosuch",
            "number over name 4000000000:bin",
            "numbers over name 4000000000:4000000001",
            "numbers over names 4000000000:4000000001",
        ]
    );
}

// Promises: types-flags
#[test]
fn every_type_is_written_with_its_attributes() {
    let root = temporary();
    let device = |major, minor| Device { major, minor };
    let owned = |entry| {
        with(entry, |member: &mut Member| {
            member.mode = 0o6751;
            member.uid = 4242;
            member.gid = 77;
        })
    };
    materialize_without_problems(
        root.path(),
        vec![
            owned(directory("d/")),
            owned(file("d/f", "content")),
            owned(link("d/l", "/nowhere/../at all")),
            owned(member("d/c", MemberKind::CharDevice(device(1, 3)))),
            owned(member("d/b", MemberKind::BlockDevice(device(300, 70_000)))),
            owned(member("d/p", MemberKind::Fifo)),
            hard_link("d/h", "d/f"),
            file(b"caf\xe9", ""),
        ],
    );
    for name in ["d", "d/f", "d/l", "d/c", "d/b", "d/p"] {
        let status = status(root.path().join(name));
        assert_eq!((status.uid(), status.gid()), (4242, 77), "{name}");
        assert_eq!(
            (status.mtime(), status.mtime_nsec()),
            (1_000_000_000, 123_456_789),
            "{name}"
        );
        if !status.is_symlink() {
            assert_eq!(status.mode() & 0o7777, 0o6751, "{name}");
        }
    }
    assert_eq!(content(root.path().join("d/f")), "content");
    let target = fs::read_link(root.path().join("d/l")).expect("a link");
    assert_eq!(target.as_os_str(), "/nowhere/../at all");
    let char_device = status(root.path().join("d/c"));
    assert!(char_device.file_type().is_char_device());
    assert_eq!(char_device.rdev(), 1 << 8 | 3);
    assert!(
        status(root.path().join("d/b"))
            .file_type()
            .is_block_device()
    );
    assert!(status(root.path().join("d/p")).file_type().is_fifo());
    assert_eq!(
        status(root.path().join("d/h")).ino(),
        status(root.path().join("d/f")).ino()
    );
    assert!(root.path().join(OsStr::from_bytes(b"caf\xe9")).exists());
}

// Promises: xattr-default, gnu-xattrs
#[test]
fn attributes_and_acls_replace_inherited_ones() {
    let root = temporary();
    fs::create_dir(root.path().join("acl_parent")).expect("a directory");
    run(Command::new("setfacl")
        .args(["-d", "-m", "user:7:rwx"])
        .arg(root.path().join("acl_parent")));
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let entries = vec![
        with(file("f", "x"), |member| {
            member.mode = 0o555;
            member.uid = 4242;
            member.xattrs = vec![
                (b"user.comment".to_vec(), b"\0binary\xff".to_vec()),
                (b"trusted.t".to_vec(), b"t".to_vec()),
                (b"security.capability".to_vec(), capability.to_vec()),
            ];
        }),
        with(directory("d"), |member| {
            let acl = b"user::rwx,user:daemon:r-x,group::r-x,mask::r-x,other::---";
            member.mode = 0o750;
            member.xattrs = vec![
                (b"SCHILY.acl.access".to_vec(), acl.to_vec()),
                (b"SCHILY.acl.default".to_vec(), acl.to_vec()),
            ];
        }),
        with(link("l", "f"), |member| {
            member.xattrs = vec![(b"trusted.on-link".to_vec(), b"l".to_vec())];
        }),
        file("acl_parent/f", "x"),
        directory("acl_parent/d"),
        member("acl_parent/p", MemberKind::Fifo),
    ];
    materialize_without_problems(root.path(), entries);
    let attributes = |name: &str| {
        let path = root.path().join(name);
        run(Command::new("getfattr")
            .args(["-h", "-d", "-m-", "-ehex", "--absolute-names"])
            .arg(path))
    };
    let f = attributes("f");
    assert!(f.contains("user.comment=0x0062696e617279ff"), "{f}");
    assert!(
        f.contains("trusted.t=0x74") && f.contains("security.capability=0x01"),
        "{f}"
    );
    assert!(attributes("l").contains("trusted.on-link=0x6c"));
    let acl = run(Command::new("getfacl")
        .args(["-cpn"])
        .arg(root.path().join("d")));
    assert!(
        acl.contains("\nuser:1:r-x\n") && acl.contains("default:user:1:r-x"),
        "{acl}"
    );
    for name in ["acl_parent/f", "acl_parent/d", "acl_parent/p"] {
        assert!(!attributes(name).contains("posix_acl"), "{name}");
    }
    assert_eq!(
        status(root.path().join("acl_parent/f")).mode() & 0o7777,
        0o644
    );
}

#[test]
fn owners_are_set_if_new_files_have_another_owner() {
    let root = temporary();
    let setgid_parent = root.path().join("setgid_parent");
    fs::create_dir(&setgid_parent).expect("a directory");
    run(Command::new("chown").arg("0:77").arg(&setgid_parent));
    fs::set_permissions(&setgid_parent, fs::Permissions::from_mode(0o2755)).expect("a mode");
    materialize_without_problems(
        root.path(),
        vec![
            file("setgid_parent/one", "x"),
            file("setgid_parent/two", "x"),
            link("setgid_parent/l", "x"),
        ],
    );
    for name in ["one", "two", "l"] {
        assert_eq!(status(setgid_parent.join(name)).gid(), 0, "{name}");
    }
}

// Promises: write-full-disk
#[test]
fn full_destination_stops_run_and_reports_missing_bytes() {
    let root = temporary();
    run(Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "none"])
        .arg(root.path()));
    let entries = (0..1000)
        .map(|number| file(format!("d{number}/f"), vec![1; 300_000]))
        .collect();
    let result = try_materialize(root.path(), options(), entries);
    run(Command::new("umount").arg(root.path()));
    let error = result.expect_err("3 of 1000 fit");
    assert!(
        matches!(
            error,
            Error::NoSpace {
                missing_bytes: 1..=300_000,
                ..
            }
        ),
        "{error:?}"
    );
    let text = error.to_string();
    assert!(
        text.contains("no space left") && text.contains(" more"),
        "{text}"
    );
}

// Promises: write-full-disk
#[test]
fn read_only_destination_stops_run() {
    let root = temporary();
    run(Command::new("mount")
        .args(["-t", "tmpfs", "-o", "ro", "none"])
        .arg(root.path()));
    let result = try_materialize(root.path(), options(), vec![file("f", "x")]);
    run(Command::new("umount").arg(root.path()));
    let error = result.expect_err("nothing can be written");
    assert_eq!(
        error.to_string(),
        "f: the destination fails, cannot create the file"
    );
}

/// Extracts an archive made by GNU tar with tarfs.
fn materialize_archive(archive: &Path, destination: &Path) -> Summary {
    let options = Options {
        numeric_owner: true,
        ..options()
    };
    let mut sink = Materializer::new(destination, options, Arc::default()).expect("a sink");
    let mut parser = Parser::new(tarfs::tar::Options::default());
    let archive = Bytes::from(fs::read(archive).expect("an archive"));
    let mut pieces = archive.chunks(70_000).map(Bytes::copy_from_slice);
    loop {
        match parser.pull().expect("a good archive") {
            Event::NeedInput => match pieces.next() {
                Some(piece) => parser.push(piece),
                None => parser.finish(),
            },
            Event::Member(member) => sink.member(*member).expect("a member"),
            Event::Payload(bytes) => sink.payload(bytes).expect("a payload"),
            Event::MemberEnd => sink.member_end(PayloadEnd::Complete).expect("an end"),
            Event::Warning(warning) | Event::Damaged(warning) => sink.warning(&warning.text),
            Event::End => break,
        }
    }
    sink.finish().expect("a summary")
}

/// A small tree with every entry type.
fn create_every_type(root: &Path) {
    let script = r"
        set -e
        mkdir -p a/b/c empty sticky locked
        echo one > a/one; echo two > a/b/two; : > a/b/c/nothing
        head -c 3000000 /dev/urandom > a/big
        ln a/one a/b/also-one; ln a/one zero-one
        ln -s a/b link; ln -s /etc absolute; ln -s nowhere dangling
        mknod null c 1 3; mknod disk b 8 0; mkfifo pipe; ln null also-null; ln -s x sl; ln sl also-sl
        truncate -s 5M sparse; printf data | dd of=sparse bs=1 seek=1000000 conv=notrunc status=none
        truncate -s 1M all-hole; head -c 100000 /dev/zero > zeros
        echo x > setuid; chown 12:34 setuid; chmod 6755 setuid
        echo x > secret; chown 4242:4243 secret; chmod 0600 secret
        echo x > odd; chmod 0027 odd
        chmod 1777 sticky; chmod 2775 a/b; chown -h 5:6 link
        cp /bin/true capable; setcap cap_net_raw+ep capable
        setfattr -n user.comment -v hello a/one; setfattr -n trusted.secret -v t a/b
        setfattr -h -n trusted.link -v l link
        setfacl -m u:daemon:rw,g:77:r a/b/two; setfacl -d -m u:7:rwx a
        printf x > 'new
line'; printf x > $(printf 'caf\351')
        touch -d '1901-12-13 20:45:53.123456789' a/one
        touch -d '2400-01-01 00:00:00.5' a/b/two
        touch -h -d '2001-02-03 04:05:06.789' dangling
        echo x > locked/x; touch -d '1999-09-09 09:09:09.09' locked; chmod 0555 locked
        touch -d '2010-10-10 10:10:10.101010101' a/b a .
    ";
    run(Command::new("bash").args(["-c", script]).current_dir(root));
}

#[test]
fn trees_equal_those_of_gnu_tar() {
    let (source, work) = (temporary(), temporary());
    create_every_type(source.path());
    for format in ["posix", "gnu"] {
        let archive = work.path().join(format).with_extension("tar");
        let theirs = work.path().join(format!("{format}-theirs"));
        let ours = work.path().join(format!("{format}-ours"));
        fs::create_dir(&theirs).expect("a directory");
        fs::create_dir(&ours).expect("a directory");
        let extended = ["--xattrs", "--xattrs-include=*", "--acls"];
        let extended = if format == "posix" {
            &extended[..]
        } else {
            &[]
        };
        run(Command::new("tar")
            .args(["--sparse", &format!("--format={format}"), "-C"])
            .arg(source.path())
            .args(extended)
            .arg("-cf")
            .args([archive.as_os_str(), OsStr::new(".")]));
        run(Command::new("tar")
            .args(["--numeric-owner", "--delay-directory-restore", "-C"])
            .arg(&theirs)
            .args(extended)
            .arg("-xpf")
            .arg(&archive));
        let summary = materialize_archive(&archive, &ours);
        assert_eq!(problems(&summary), Vec::<String>::new());
        assert_same_trees(&theirs, &ours);
        // Extract again over the existing tree.
        let summary = materialize_archive(&archive, &ours);
        assert_eq!(problems(&summary), Vec::<String>::new());
        assert_same_trees(&theirs, &ours);
    }
}
