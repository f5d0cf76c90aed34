//! An overlay over a mount behaves like an overlay over a local tree.
//!
//! After the same operations both overlays are equal, and so are their upper directories. Each test
//! runs in its own mount namespace, and its mounts end with that.

use std::process::Output;

use crate::support::namespace;

/// A tree with every kind of entry, its archive, and GNU tar's copy of it.
const TREE: &str = r#"
mkdir -p t/dir/sub t/empty t/full/sub t/gone/sub t/acls t/private t/sticky t/move/d/x t/move/d2 t/move/d3 t/move/d4
for f in a mode closed acl attr hard1 hard3 of-user dir/f1 dir/f2 dir/sub/f3 full/f gone/f1 gone/sub/f2 \
    private/f sticky/of-root move/f1 move/f2 move/f3 move/f4 move/d/x/f move/d3/f; do echo "this is $f" >t/$f; done
cp /usr/bin/id t/exe; cp /usr/bin/id t/suid; cp /bin/sleep t/sleep; cp /bin/true t/caps
cp -L "$(ls /lib/*/libm.so.6 /usr/lib/*/libm.so.6 2>/dev/null | head -1)" t/library.so
head -c 3000000 /dev/urandom >t/big
truncate -s 2M t/sparse; echo data | dd of=t/sparse bs=1 seek=1M conv=notrunc status=none
ln t/hard1 t/hard2; ln t/hard3 t/hard4; ln -s a t/link; ln -s nothing t/dangling; ln -s f1 t/move/l
mkfifo t/fifo; mknod t/null c 1 3; mknod t/disk b 8 77
chown 7:8 t/mode t/dir/f1; chown 1234:1234 t/of-user; chmod 0640 t/mode; chmod 0600 t/closed
chmod 0700 t/private; chmod 1777 t/sticky; chmod 4755 t/suid; chmod 2755 t/full
setfacl -m u:1234:rw,g:77:r t/acl; setfacl -m u:1234:rwx -d -m u:1234:rwx,o::- t/acls
setfattr -n user.x -v 1 t/attr; setfattr -n trusted.x -v 1 t/attr; setfattr -n user.d -v 2 t/dir
setcap cap_net_raw+ep t/caps
find t -exec touch -h -d @1000000000 {} +
tar --create --xattrs --xattrs-include='*' --acls --sparse -C t -f a.tar .
mkdir ref mnt; tar -x --xattrs --xattrs-include='*' --acls --numeric-owner -p -C ref -f a.tar
"#;

/// The start of every script.
const PRELUDE: &str = r#"
export XDG_RUNTIME_DIR="$PWD" TARFS_CACHE_DIR="$PWD/cache" no_proxy='*'
trap 'umount -l merged.* up.* idmapped mnt 2>/dev/null || true' EXIT
# Mounts an overlay with the options $2 over the tree $1. Writes the results of all operations to $1.said, the
# resulting tree to $1.seen, and the upper directory to $1.written.
overlay() {
    mkdir -p up.$1/upper up.$1/work merged.$1
    chmod 755 up.$1/upper
    mount -t overlay overlay -o "lowerdir=$1,upperdir=up.$1/upper,workdir=up.$1/work,$2" merged.$1
    (cd merged.$1 && python3 "$operations") >$1.said 2>&1
    (cd merged.$1 && python3 "$dump") >$1.seen
    umount merged.$1
    (cd up.$1/upper && python3 "$dump") >$1.written
}
# Prints the differences between the overlay over the mount and the overlay over local files.
compare() {
    # Upper directories on tmpfs, so that neither overlay can use features within a single file system.
    for tree in mnt ref; do mkdir -p up.$tree; mount -t tmpfs none up.$tree; done
    overlay ref "$1"
    overlay mnt "$1"
    same=0
    for what in said seen written; do diff -U0 ref.$what mnt.$what || same=1; done
    test $(wc -l <mnt.said) -gt 150
    return $same
}
"#;

fn run(script: &str) -> Output {
    let place = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let here = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mount/overlay");
    let names = format!(
        "tarfs={}\noperations={here}/operations.py\ndump={here}/dump.py\nidmap={here}/idmap.py\n",
        env!("CARGO_BIN_EXE_tarfs")
    );
    let script = format!("{names}{PRELUDE}{TREE}{script}");
    namespace::run("bash", &script, place.path())
}

#[track_caller]
fn stdout_of(script: &str) -> String {
    namespace::stdout_text(&run(script))
}

// Promises: writable-overlay, writable-exceptions
#[test]
fn overlay_over_mount_equals_overlay_over_local_files() {
    let script = r#"
        "$tarfs" mount --wait-index --xattrs-include="*" -o suid,dev,allow_other a.tar mnt
        compare xino=on
        grep -q '^rename a directory: EXDEV' mnt.said
        "$tarfs" umount mnt
    "#;
    assert_eq!(stdout_of(script), "");
}

// Promises: writable-overlay
#[test]
fn overlay_with_metacopy_and_redirects_equals_local_one() {
    let script = r#"
        "$tarfs" mount --wait-index --xattrs-include="*" -o suid,dev,allow_other a.tar mnt
        compare xino=on,metacopy=on,redirect_dir=on
        grep -q '^rename a directory: None' mnt.said
        "$tarfs" umount mnt
    "#;
    assert_eq!(stdout_of(script), "");
}

// Promises: writable-overlay
#[test]
fn overlay_with_passthrough_equals_local_one() {
    let script = r#"
        "$tarfs" mount --wait-index --xattrs-include="*" -o suid,dev,allow_other --copy-to copy a.tar mnt
        until "$tarfs" status mnt | grep -q 'copy  *complete'; do sleep 0.05; done
        compare xino=on
        "$tarfs" status --json mnt | grep -q '"passthrough_opens":[1-9]'
        "$tarfs" umount mnt
    "#;
    assert_eq!(stdout_of(script), "");
}

// Promises: inode-number
#[test]
fn inode_numbers_survive_forget_and_remount() {
    let script = r#"
        numbers() { (cd mnt && find . -printf '%p %i\n' | sort); }
        "$tarfs" mount --wait-index --xattrs-include="*" -o suid,dev,allow_other a.tar mnt
        numbers >first; stat -c %d mnt mnt/a >devices
        echo 3 >/proc/sys/vm/drop_caches
        numbers | diff first -
        stat -c %d mnt mnt/a | diff devices -
        test $(sort -u devices | wc -l) = 1
        "$tarfs" umount mnt; rm -r cache
        "$tarfs" mount -o suid,dev,allow_other a.tar mnt
        numbers | diff first -
        "$tarfs" umount mnt
    "#;
    assert_eq!(stdout_of(script), "");
}

// Promises: option-idmapped, writable-index
#[test]
fn idmapped_mount_shifts_owners_and_permissions() {
    let script = r#"
        "$tarfs" mount --wait-index --xattrs-include="*" -o allow_other a.tar mnt
        mkdir idmapped
        chmod 755 .
        python3 "$idmap" mnt idmapped sh -c 'stat -c "in it %u:%g" idmapped/mode && cat idmapped/mode'
        stat -c '%u:%g %n' idmapped/a idmapped/mode mnt/mode
        setpriv --reuid=100007 --regid=1 --clear-groups cat idmapped/mode
        setpriv --reuid=7 --regid=1 --clear-groups cat idmapped/mode 2>/dev/null || echo kept out
        mkdir -p up.i/upper up.i/work merged.i
        chmod 755 up.i/upper
        mount -t overlay overlay -o lowerdir=idmapped,upperdir=up.i/upper,workdir=up.i/work merged.i
        setpriv --reuid=100007 --regid=1 --clear-groups sh -c 'echo more >>merged.i/mode'
        setpriv --reuid=7 --regid=1 --clear-groups sh -c 'echo no >>merged.i/mode' 2>/dev/null || echo kept out
        cat merged.i/mode
        stat -c '%u:%g %n' merged.i/mode up.i/upper/mode mnt/mode
        umount merged.i idmapped
        "$tarfs" umount mnt
    "#;
    let shifted = "in it 7:8\nthis is mode\n\
                   100000:100000 idmapped/a\n100007:100008 idmapped/mode\n7:8 mnt/mode\n\
                   this is mode\nkept out\n\
                   kept out\nthis is mode\nmore\n\
                   100007:100008 merged.i/mode\n100007:100008 up.i/upper/mode\n7:8 mnt/mode\n";
    assert_eq!(stdout_of(script), shifted);
}

/// The guide on containers documents this. The reason is that overlayfs cannot be idmapped.
// Promises: writable-index
#[test]
fn writable_mount_cannot_be_idmapped() {
    let script = r#"
        mkdir idmapped
        "$tarfs" mount --writable a.tar mnt
        python3 "$idmap" mnt idmapped 2>&1 || echo refused
        "$tarfs" umount mnt
    "#;
    assert_eq!(
        stdout_of(script),
        "mount_setattr: Invalid argument\nrefused\n"
    );
}
