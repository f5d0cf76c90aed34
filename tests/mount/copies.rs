//! Copies and updates of directories for other users, and in environments that only root can make.

use std::process::Command;

use crate::support::atomic::{Place, assert_success};
use crate::support::failing_syscall::{FCHMODAT2, SETXATTRAT};
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, Header, random_bytes};

/// Runs `script` with the program as `$T`, and `as_user` before commands of another user in group 77. Returns its output.
fn shell(place: &Place, script: &str) -> String {
    let program = place.public_program();
    let script = format!(
        "set -e; umask 022; T={program}
         as_user() {{ setpriv --reuid=1234 --regid=1234 --groups=77 \"$@\"; }}
         {script}"
    );
    let output = place.run(Command::new("bash").args(["-c", &script]));
    assert_eq!(output.status.code(), Some(0), "{}", stderr_text(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

// Promises: cp-owners, hostile-devices
#[test]
fn copies_keep_set_id_bits_only_with_their_owner() {
    let place = Place::open();
    let found = shell(
        &place,
        "for mode in 4755 2755 6755 1755; do
            for owner in 55:66 1234:66 55:1234 1234:1234 55:77 1234:77; do
                mkdir -p source/d$mode-$owner; touch source/f$mode-$owner
                chown $owner source/?$mode-$owner; chmod $mode source/?$mode-$owner
            done
         done
         setcap cap_net_raw+ep source/f1755-55:66
         for tree in expected copy update changed; do
            mkdir $tree; chown 1234:1234 $tree
         done
         list() { find $1 -mindepth 1 -printf '%P %m %U:%G\\n' | sort; }
         as_user cp -a source/. expected
         as_user $T copy source copy 2>&1
         as_user $T sync -q source update 2>&1
         cp -a expected/. changed
         chown -R 1234:1234 changed; chmod 4777 changed/*
         as_user $T sync -q source changed 2>&1
         for tree in copy update changed; do diff <(list expected) <(list $tree); done
         as_user $T sync --dry-run source update",
    );
    assert_eq!(found, "");
}

// Promises: owner-setid
#[test]
fn owner_that_cannot_be_set_leaves_no_set_id_bits() {
    let place = Place::open();
    let program = Header::new("f", b'0').mode(0o6755).owner(55, 66);
    place.put("a.tar", Archive::new().add(program, "x").end());
    let found = shell(
        &place,
        "mkdir out; unshare --user --map-root-user $T materialize -q a.tar -C out && exit 1
         stat -c %a out/f",
    );
    assert_eq!(found, "755\n");
}

// Promises: owner-setid
#[test]
fn copies_and_archives_are_written_without_proc() {
    let place = Place::open();
    let entries = Archive::new().file("d/f", "x");
    let fifo = Header::new("p", b'6').mode(0o604);
    place.put("a.tar", entries.symlink("l", "p").add(fifo, "").end());
    let found = shell(
        &place,
        "mkdir -p source/d out copy; mkfifo -m 604 source/p; ln -s p source/l
         setfattr -n user.k -v v source/d; setfacl -m u:9:rwx source/p
         unshare --mount sh -c 'mount -t tmpfs none /proc
            $0 materialize -q a.tar -C out && $0 copy -q source copy' $T 2>&1
         stat -c %a out/p
         getfattr -n user.k --only-values copy/d; getfacl -cn copy/p | grep user:9",
    );
    assert_eq!(found, "604\nvuser:9:rwx\n");
}

// Promises: owner-setid
#[test]
fn attributes_are_set_in_kernels_without_calls_by_name() {
    for call in [FCHMODAT2, SETXATTRAT] {
        let place = Place::open();
        let fifo = Header::new("p", b'6').mode(0o604);
        let acl = [(
            "SCHILY.acl.access",
            "user::rw-,user:9:rwx,group::---,mask::rwx,other::r--",
        )];
        place.put("a.tar", Archive::new().pax(&acl).add(fifo, "").end());
        shell(&place, "mkdir in/out");
        assert_success(&place.with_failing_syscall(call, &[]));
        let found = shell(
            &place,
            "stat -c %a in/out/p; getfacl -cn in/out/p | grep user:9",
        );
        assert_eq!(found, "674\nuser:9:rwx\n");
    }
}

// Promises: sync-differs
#[test]
fn update_settles_where_times_are_coarse_or_end_early() {
    let place = Place::open();
    let archive = Archive::new()
        .pax(&[("mtime", "1000000000.5")])
        .file("fraction", "1")
        .pax(&[("mtime", "99999999999.25")])
        .file("late", "2")
        .pax(&[("mtime", "-99999999999")])
        .file("early", "3")
        .pax(&[("mtime", "99999999999.25")])
        .symlink("link", "late");
    place.put("a.tar", archive.end());
    let found = shell(
        &place,
        "truncate -s 16M image; mkfs.ext4 -q -I 128 image >/dev/null; mkdir coarse; mount -o loop image coarse
         trap 'umount coarse' EXIT
         mkdir coarse/out coarse/copy fine
         $T materialize -q a.tar -C fine; $T materialize -q a.tar -C coarse/out
         $T copy -q fine coarse/copy
         $T sync --dry-run a.tar coarse/out
         $T sync --dry-run fine coarse/copy
         $T diff fine coarse/copy
         touch -d @1000000001 coarse/out/fraction
         $T sync --dry-run a.tar coarse/out",
    );
    assert_eq!(found, "write fraction\n");
}

// Promises: sync-replaces
#[test]
fn update_without_space_keeps_the_old_file() {
    let place = Place::open();
    place.put(
        "a.tar",
        Archive::new().file("f", random_bytes(3_000_000)).end(),
    );
    let found = shell(
        &place,
        "mkdir out; mount -t tmpfs -o size=4m none out; trap 'umount out' EXIT
         head -c 2000000 /dev/zero >out/f; cp out/f old
         $T sync -q a.tar out 2>&1 | grep -c 'no space left'
         cmp old out/f; ls -A out",
    );
    assert_eq!(found, "1\nf\n");
}
