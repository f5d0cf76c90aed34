//! ACLs and extended attributes of a mount, read with the usual tools.
//!
//! Each test runs in its own mount namespace.

use crate::support::namespace;

/// An archive with ACLs as extended attributes, as GNU tar stores them without `--acls`. The user and
/// the group of `as_user` are in no account file.
const PRELUDE: &str = r#"
chmod 755 .
mkdir -p t/dir bin mnt out cache run tmp
echo one >t/file; echo two >t/dir/file; echo three >t/plain; chmod 660 t/file; chown 0:4242 t/file
setfacl -m user:4343:rw,group::r t/file; setfacl -d -m user:4343:rwx t/dir; setfattr -n user.x -v y t/dir/file
setfattr -n trusted.note -v secret t/dir/file
tar --create --xattrs --xattrs-include='*' -C t -f a.tar .
tar --create --xattrs --xattrs-include='*' --acls -C t -f both.tar .
cp "$program" bin/tarfs
export PATH="$PWD/bin:$PATH" XDG_RUNTIME_DIR="$PWD/run" TARFS_CACHE_DIR="$PWD/cache" TMPDIR="$PWD/tmp"
as_user() { setpriv --reuid="$1" --regid="$2" --clear-groups sh -c "$3" 2>/dev/null || echo refused; }
"#;

#[track_caller]
fn stdout_of(script: &str) -> String {
    namespace::stdout_text(&namespace::run_program(PRELUDE, script))
}

// Promises: acl-forms
#[test]
fn acl_in_extended_attribute_is_shown_and_enforced() {
    let said = stdout_of(
        r"
        for archive in a.tar both.tar; do
            for flags in '' --writable; do
                tarfs mount $flags -o allow_other $archive mnt
                getfacl -nps mnt/file mnt/dir | grep -c 'user:4343:rw'
                getfattr -d -m - mnt/file | grep -c posix_acl_access
                as_user 4343 4343 'cat mnt/file'
                as_user 4444 4242 'cat mnt/file'
                as_user 4444 4242 'echo x >>mnt/file'
                tarfs umount mnt
            done
            tarfs materialize -q $archive -C out; getfacl -nps out/file out/dir | grep -c 'user:4343:rw'
            rm -r out; mkdir out
        done
        ",
    );
    let mounted = "2\n1\none\none\nrefused\n";
    let archive = format!("{mounted}{mounted}2\n");
    assert_eq!(said, format!("{archive}{archive}"));
}

// Promises: acl-mode
#[test]
fn acl_stricter_than_header_mode_is_enforced() {
    let said = stdout_of(
        r"
        tar --create --acls --mode=666 -C t -f open.tar ./file
        tarfs mount -o allow_other open.tar mnt; stat -c %a mnt/file
        as_user 4343 4343 'cat mnt/file'
        as_user 4444 4444 'cat mnt/file'
        tarfs umount mnt
        tarfs materialize -q open.tar -C out; stat -c %a out/file
        mkdir gnu; tar --extract --acls -p -f open.tar -C gnu; stat -c %a gnu/file
        ",
    );
    assert_eq!(said, "660\none\nrefused\n660\n660\n");
}

// Promises: acl-mode
#[test]
fn listing_of_a_mount_has_its_modes() {
    let said = stdout_of(
        r"
        tar --create --acls --mode=666 -C t -f open.tar ./file
        for flags in '' --no-acls; do
            tarfs mount $flags open.tar mnt
            stat -c %a mnt/file; tarfs find mnt -name file -printf '%m\n'
            tarfs ls -l mnt | grep ' file$' | cut -c 1-11
            tarfs umount mnt
        done
        ",
    );
    assert_eq!(said, "660\n660\n-rw-rw----+\n666\n666\n-rw-rw-rw- \n");
}

// Promises: xattr-trusted
#[test]
fn trusted_names_are_listed_with_cap_sys_admin_only() {
    let said = stdout_of(
        r"
        list='getfattr -h -m - mnt/dir/file | grep -v ^#'
        for flags in '' --writable; do
            tarfs mount $flags -o allow_other --xattrs-include '*' a.tar mnt
            bash -c $list
            as_user 4343 4343 $list
            setpriv --bounding-set=-sys_admin bash -c $list
            as_user 4343 4343 'unshare --user --map-root-user getfattr -h -m - mnt/dir/file' | grep trusted || true
            tarfs umount mnt
        done
        # Overlayfs copies the attributes of a file with its own rights, whoever writes.
        chmod 666 t/dir/file; tar --create --xattrs --xattrs-include='*' -C t -f a.tar .
        tarfs mount --writable -o allow_other --xattrs-include '*' a.tar mnt
        as_user 4343 4343 'echo more >>mnt/dir/file'
        getfattr -h --only-values -n trusted.note mnt/dir/file; echo; tarfs umount mnt
        "
        .replace("c $list", "c \"$list\"")
        .replace("4343 $list", "4343 \"$list\"")
        .as_str(),
    );
    let all = "trusted.note\nuser.x\n\n";
    let harmless = "user.x\n\n";
    let mounted = format!("{all}{harmless}{harmless}");
    assert_eq!(said, format!("{mounted}{mounted}secret\n"));
}

// Promises: xattr-errno
#[test]
fn archive_without_attributes_lists_none() {
    let said = stdout_of(
        r"
        tar --create -C t -f bare.tar ./plain ./dir
        tarfs mount bare.tar mnt
        tar --create --xattrs --acls -f copy.tar -C mnt .
        getfattr -R -d -m - mnt; getfattr -n user.x mnt/plain 2>&1 | sed 's/.*: //'
        tarfs umount mnt
        ",
    );
    assert_eq!(said, "Operation not supported\n");
}

// Promises: acl-impossible
#[test]
fn acl_entries_of_unmapped_ids_are_skipped() {
    let said = stdout_of(
        r#"
        chgrp 0 t/file; tar --create --xattrs --xattrs-include='*' -C t -f a.tar .
        tar --create --acls -C t -f text.tar .
        for archive in a.tar text.tar; do
            unshare --user --map-root-user --mount --propagation private bash -euc '
                tarfs mount --writable $1 mnt
                echo x >>mnt/file; chmod 640 mnt/file; echo y >mnt/dir/new; mkdir mnt/dir/sub
                getfacl -cp mnt/file | tr "\n" " "; getfacl -cdp mnt/dir | tr "\n" " "; echo
                tarfs status mnt | grep "entries of ACLs" | sed "s/ *note *//"
                tarfs umount mnt; mkdir -p out
                tarfs materialize -q $1 -C out 2>&1 | sed "s/.*: \([0-9]\)/\1/" | grep -v trusted | sort -u
                getfacl -cp out/file | tr "\n" " "; echo; rm -r out
            ' bash $archive
        done
        "#,
    );
    let shown = "user::rw- group::r-- mask::r-- other::--- ";
    let left_out = "name users or groups that this user namespace does not map";
    let archive = format!(
        "{shown} user::rwx group::r-x mask::rwx other::r-x  \n\
         2 entries of ACLs are left out, because they {left_out}\n\
         1 entries of the ACL system.posix_acl_access {left_out}, left out\n\
         1 entries of the ACL system.posix_acl_default {left_out}, left out\n\
         user::rw- group::r-- mask::rw- other::---  \n"
    );
    assert_eq!(said, format!("{archive}{archive}"));
}

// Promises: holes-kept
#[test]
fn files_have_no_flags_but_chattr_works_on_writable_mount() {
    let said = stdout_of(
        r#"
        mkdir copy
        for flags in '' '--copy-to copy' --writable; do
            tarfs mount --wait-index $flags a.tar mnt
            lsattr -d mnt/dir mnt/file | sed 's/ .*//' | tr -d -- - | tr -d '\n'
            lsattr -p -d mnt/file | sed 's/ *\([0-9]*\).*/\1/'
            test "$flags" = --writable || tarfs umount mnt
        done
        chattr +a mnt/file; lsattr mnt/file | grep -o a-; echo more >>mnt/file
        echo over 2>/dev/null >mnt/file || echo append only
        cat mnt/file; chattr -a mnt/file; tarfs umount mnt
        "#,
    );
    assert_eq!(said, "0\n0\n0\na-\nappend only\none\nmore\n");
}

// Promises: times-mount
#[test]
fn statx_returns_no_birth_time() {
    let said = stdout_of(
        r"
        stat -c %w t/file | grep -c :
        tarfs mount --wait-index a.tar mnt
        stat -c %w mnt mnt/dir mnt/file
        tarfs umount mnt
        ",
    );
    assert_eq!(said, "1\n-\n-\n-\n");
}

// Promises: xattr-impossible
#[test]
fn attributes_that_linux_cannot_hold_are_left_out_and_counted() {
    let said = stdout_of(
        r#"
        cat >make.py <<'END'
import struct, tarfile
revision_1 = struct.pack("<III", 0x01000001, 0x400, 0)
attributes = {
    "revision-1": {"security.capability": revision_1}, "short": {"security.capability": b"\0\0"},
    "no-name": {"user.": b"1"}, "long-list": {f"user.k{n:04}{'q' * 235}": b"v" for n in range(400)},
    "odd-and-good": {"user." + "n" * 251: b"1", "user.good": b"yes"},
}
with tarfile.open("odd.tar", "w", format=tarfile.PAX_FORMAT) as archive:
    for name, xattrs in attributes.items():
        member = tarfile.TarInfo(name)
        member.pax_headers = {"SCHILY.xattr." + key: value.decode("utf-8", "surrogateescape") for key, value in xattrs.items()}
        archive.addfile(member)
END
        python3 make.py
        tarfs mount --wait-index --writable odd.tar mnt
        tarfs status mnt | grep -o '[0-9]* extended attributes are left out'
        getfattr -d mnt/odd-and-good | grep user
        getfattr -m - mnt/long-list | grep -c user || true
        for name in revision-1 short no-name long-list odd-and-good; do
            chmod 700 mnt/$name; mv mnt/$name mnt/$name.new
        done
        tarfs umount mnt
        "#,
    );
    assert_eq!(
        said,
        "403 extended attributes are left out\nuser.good=\"yes\"\n0\n"
    );
}
