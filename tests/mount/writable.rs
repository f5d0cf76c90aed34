//! `tarfs mount --writable`: one tree of an archive and written files, of which nothing is left.
//!
//! Each test runs in its own mount namespace.

use std::process::Output;

use crate::support::namespace;

/// An archive, and functions of the scripts. `left` prints remaining files and processes. `pid` prints
/// the process that serves the mount, and `monitor` the one that keeps it.
const PRELUDE: &str = r#"
chmod 755 .
mkdir -p t/dir/sub t/acl bin mnt cache run tmp
echo one >t/a; echo two >t/dir/b; echo three >t/dir/sub/c; ln t/a t/hard; cp /usr/bin/id t/suid
chmod 4755 t/suid; mknod t/null c 1 3; setfacl -m u:7:rwx t; setfattr -n user.x -v root t; chmod 1775 t
chown 0:9 t; chown -h 7:8 t/dir/b; touch -d @1000000000 t
tar --create --xattrs --xattrs-include='user.*' --acls -C t -f a.tar .
cp "$program" bin/tarfs
export PATH="$PWD/bin:$PATH" XDG_RUNTIME_DIR="$PWD/run" TARFS_CACHE_DIR="$PWD/cache" TMPDIR="$PWD/tmp"
pid() { tarfs status --json mnt | sed 's/.*"pid":\([0-9]*\).*/\1/'; }
monitor() { tarfs status --json mnt | sed 's/.*"monitor":\([0-9]*\).*/\1/'; }
left() {
    find tmp -mindepth 1
    grep -e "$PWD/mnt" -e "$PWD/tmp" /proc/self/mountinfo || true
}
gone() { for _ in $(seq 200); do test -n "$(left)" || return 0; sleep 0.02; done; left; return 1; }
# As an ordinary user, who may open the device.
as_user() {
    setpriv --reuid=65534 --regid=65534 --clear-groups env -i PATH="$PATH" \
        XDG_RUNTIME_DIR="$PWD/run" TARFS_CACHE_DIR="$PWD/cache" TMPDIR="$PWD/tmp" "$@"
}
for_users() {
    mknod fuse c 10 229; chmod 0666 fuse; mount --bind fuse /dev/fuse
    chown 65534:65534 mnt cache run tmp; chmod 700 run
}
"#;

fn run(script: &str) -> Output {
    namespace::run_program(PRELUDE, script)
}

#[track_caller]
fn stdout_of(script: &str) -> String {
    namespace::stdout_text(&run(script))
}

// Promises: unmount-number
#[test]
fn mount_is_found_after_parent_directory_is_renamed() {
    for flags in ["", "--writable"] {
        for signal in ["TERM", "KILL"] {
            let script = format!(
                r#"
                mkdir -p above/mnt
                tarfs mount --isolated {flags} a.tar above/mnt
                server=$(tarfs status --json above/mnt | sed 's/.*"pid":\([0-9]*\).*/\1/')
                mv above below
                cat below/mnt/a
                kill -{signal} $server
                is_there() {{ grep -q "$PWD/below/mnt" /proc/self/mountinfo; }}
                for _ in $(seq 600); do is_there || break; sleep 0.05; done
                grep -c "$PWD/below/mnt" /proc/self/mountinfo || true
                ls below/mnt; gone
                "#
            );
            assert_eq!(stdout_of(&script), "one\n0\n", "{flags} {signal}");
        }
    }
    let said = stdout_of(
        r#"
        mkdir -p above/mnt
        tarfs mount --restart a.tar above/mnt
        exec 5<above/mnt/a
        server=$(tarfs status --json above/mnt | sed 's/.*"pid":\([0-9]*\).*/\1/')
        mv above below
        kill -KILL $server
        cat <&5; cat below/mnt/dir/b
        exec 5<&-
        umount below/mnt
        "#,
    );
    assert_eq!(said, "one\ntwo\n");
}

// Promises: upper-temporary, upper-named, upper-shared, upper-whole, upper-quick, writable-exceptions
#[test]
fn written_data_is_temporary_unless_directory_is_named() {
    let said = stdout_of(
        r#"
        tarfs mount --writable a.tar mnt
        echo more >>mnt/a; rm mnt/dir/b; mv mnt/dir mnt/moved; mkdir mnt/new
        cat mnt/a; ls mnt mnt/moved
        tarfs status mnt | grep -o 'by overlayfs.*until it is unmounted' | sed "s,$PWD.*/upper,UPPER,"
        test $(grep -c "$PWD/tmp/.*/lower fuse" /proc/self/mountinfo) = 0
        tarfs umount mnt
        left

        tarfs mount --writable --upper changes a.tar mnt
        echo more >>mnt/a; rm mnt/dir/b; mv mnt/dir/sub mnt/sub 2>/dev/null
        umount mnt; gone; ls changes changes/upper
        tarfs mount --writable --upper changes a.tar mnt
        cat mnt/a mnt/sub/c; ls mnt/dir
        tarfs status mnt | grep -c "by overlayfs, to $PWD/changes/upper$"
        stat -c %a changes
        umount mnt; gone
        "#,
    );
    let temporary = "one\nmore\nmnt:\na\nacl\nhard\nmoved\nnew\nnull\nsuid\n\nmnt/moved:\nsub\n\
                     by overlayfs, to UPPER, until it is unmounted\n";
    let named = "changes:\nupper\nwork\n\nchanges/upper:\na\ndir\nsub\none\nmore\nthree\n1\n700\n";
    assert_eq!(said, format!("{temporary}{named}"));
}

// Promises: upper-root, writable-options
#[test]
fn writable_root_has_archive_attributes_and_mount_options() {
    let said = stdout_of(
        r#"
        tarfs mount --writable a.tar mnt
        stat -c '%a %u:%g %Y' mnt; getfattr --only-values -n user.x mnt; getfacl -cnp mnt | grep user:
        grep -o "mnt rw,nosuid,nodev,.* overlay " /proc/self/mountinfo | cut -d' ' -f1-2
        as_user mnt/suid -u; cat mnt/null 2>/dev/null || echo no device
        chown 3:4 mnt/dir/b; stat -c '%u:%g' mnt/dir/b
        as_user sh -c 'echo x >mnt/acl/x' 2>/dev/null || echo kept out
        stat -c %d mnt mnt/a mnt/dir mnt/dir/b | sort -u | wc -l
        tarfs umount mnt
        tarfs mount --writable -o suid,dev,uid=65534 a.tar mnt
        as_user mnt/suid -un; cat mnt/null; stat -c %u mnt mnt/dir/b
        tarfs umount mnt
        tarfs mount --writable -o ro,noexec --upper changes a.tar mnt
        touch mnt/x 2>/dev/null || echo read-only; mnt/suid 2>/dev/null || echo not run
        tarfs umount mnt
        left
        "#,
    );
    let root = "1775 0:9 1000000000\nrootuser::rwx\nuser:7:rwx\nmnt rw,nosuid,nodev,relatime\n";
    let harmless = "65534\nno device\n3:4\nkept out\n1\n";
    let told = "nobody\n65534\n65534\nread-only\nnot run\n";
    let (root, said) = (root.split_whitespace(), said.split_whitespace());
    let harmless = harmless.split_whitespace();
    assert!(said.eq(root.chain(harmless).chain(told.split_whitespace())));
}

// Promises: kill-unmounts, upper-temporary, writable-lazy
#[test]
fn writable_mount_leaves_nothing_after_unmount_or_kill() {
    let said = stdout_of(
        r"
        kill_it() { kill -$1 $(pid); gone; }
        for how in 'tarfs umount mnt' 'umount mnt' 'kill_it TERM' 'kill_it INT' 'kill_it KILL'; do
            tarfs mount --isolated --writable a.tar mnt
            echo x >>mnt/dir/b; mkdir -m 0 mnt/closed; test $(ls tmp | wc -l) = 1
            $how; gone
        done
        # A process with an open file can use the mount until it closes the file.
        tarfs mount --isolated --writable a.tar mnt
        exec 5<mnt/a; tarfs umount mnt 2>/dev/null || echo in use
        pid=$(pid); umount -l mnt; read line <&5; echo $line; kill -0 $pid; exec 5<&-; gone
        for _ in $(seq 100); do kill -0 $pid 2>/dev/null || break; sleep 0.02; done
        kill -0 $pid 2>/dev/null || echo ended
        # Killed while a process uses it.
        tarfs mount --isolated --writable --upper changes a.tar mnt
        exec 5<mnt/a; kill -KILL $(pid); gone; exec 5<&-; ls mnt
        # Killed together with the process that watches.
        tarfs mount --isolated --writable --upper changes a.tar mnt
        pid=$(pid); kill -KILL $(monitor) $pid
        ls mnt/nothing 2>/dev/null || true
        tarfs umount mnt; left
        # A foreground that is interrupted before it is over.
        for pause in 0 0.01 0.02 0.03 0.05 0.08; do
            tarfs mount -f --writable a.tar mnt & sleep $pause; kill -KILL $!; wait $! || true; gone
        done 2>/dev/null
        ",
    );
    assert_eq!(said, "in use\none\nended\n");
}

/// With empty listings, a process would believe that its files were removed.
// Promises: writable-lazy, upper-temporary
#[test]
fn process_in_killed_mount_sees_errors_not_empty_listings() {
    let said = stdout_of(
        r#"
        use_it() {
            tarfs mount --isolated --writable "${@:2}" a.tar mnt
            mkdir mnt/new; echo new >mnt/new/f; rm mnt/dir/b; echo x >mnt/dir/x
            exec 5<mnt/new 6<mnt/dir 7<mnt/dir/sub 8<mnt; pid=$(pid)
            $1
            for _ in $(seq 200); do grep -q "$PWD/mnt" /proc/self/mountinfo || break; sleep 0.02; done
            sleep 0.5
            for directory in 5 6 7 8; do
                listed=$(ls /proc/$$/fd/$directory/ 2>&1) && test -z "$listed" && echo "$directory is empty"
            done
            cat /proc/$$/fd/5/f; cat /proc/$$/fd/7/c 2>&1 | sed 's/.*: //'
            test $(ls tmp | wc -l) = 1; exec 5<&- 6<&- 7<&- 8<&-; gone
        }
        kill_it() { kill -KILL $pid; }
        unmount_it() { tarfs umount --lazy mnt; }
        use_it kill_it; use_it unmount_it
        # No process can go on with it.
        use_it 'eval mv a.tar b.tar; kill_it; sleep 3; mv b.tar a.tar' --restart --restart-timeout 1
        rm -r run cache; mkdir run cache; for_users; as_user bash -euc "$(declare -f); use_it kill_it"
        "#,
    );
    assert_eq!(said, "new\nTransport endpoint is not connected\n".repeat(4));
}

// Promises: writable-restart
#[test]
fn writable_mount_survives_worker_restart_if_supported() {
    let said = stdout_of(
        r#"
        tarfs mount --writable --restart a.tar mnt
        exec 5<mnt/dir/sub/c; echo x >>mnt/a; old=$(pid)
        kill -KILL $old; cat mnt/hard; cat <&5; echo y >>mnt/a; cat mnt/a
        until after=$(pid); test -n "$after" -a "$after" != $old; do sleep 0.02; done
        tarfs status mnt | grep -c 'by overlayfs, to .*/upper, until it is unmounted'
        exec 5<&-; tarfs umount mnt; gone
        mkdir copy
        tarfs mount --writable --restart --copy-to copy a.tar mnt 2>told || echo $?
        grep -c 'which is not possible with --writable' told; left
        "#,
    );
    assert_eq!(said, "one\nthree\none\nx\ny\n1\n64\n1\n");
}

#[test]
fn writable_layers_survive_worker_restart() {
    let said = stdout_of(
        r#"
        mkdir -p l/dir; echo four >l/dir/d; : >l/dir/.wh.b; tar -C l -cf l.tar .
        tarfs mount --writable --restart --layer l.tar a.tar mnt
        ls mnt/dir; echo more >>mnt/dir/d
        before=$(pid); kill -9 $before
        until after=$(pid); test -n "$after" -a "$after" != $before; do sleep 0.02; done
        cat mnt/dir/d mnt/dir/sub/c mnt/a
        tarfs umount mnt; left
        "#,
    );
    assert_eq!(said, "d\nsub\nfour\nmore\nthree\none\n");
}

#[test]
fn written_data_survives_failed_restart() {
    let said = stdout_of(
        r#"
        tarfs mount --writable --restart a.tar mnt
        echo x >>mnt/a; old=$(pid); : >empty; upper=$(tarfs status mnt | grep -o '/.*/upper')
        mount --bind empty a.tar; kill -KILL $old; sleep 1; umount a.tar
        until tarfs status mnt >/dev/null 2>&1; do sleep 0.05; done
        test "$(pid)" != $old; cat mnt/a "$upper/a"; tarfs umount mnt; gone
        "#,
    );
    assert_eq!(said, "one\nx\none\nx\n");
}

// Promises: writable-index
#[test]
fn dentries_are_primed_through_the_overlay() {
    let said = stdout_of(
        r#"
        mkdir many; for i in $(seq 400); do echo "$i" >many/file$i; done; tar -C many -cf many.tar .
        tarfs mount --writable many.tar mnt
        tar -tf many.tar | sed -n 's,^\./\(f.*\),mnt/\1,p' | xargs -n 1 cat | wc -l
        tarfs status --verbose mnt | awk '$1 == "served_lookups" { print $2 < 200 }'
        tarfs umount mnt
        "#,
    );
    assert_eq!(said, "400\n1\n");
}

// Promises: readonly-errno, upper-shared, upper-named, overlay-kind
#[test]
fn unsupported_writable_mounts_are_reported() {
    let said = stdout_of(
        r#"
        tarfs mount -o rw a.tar mnt 2>told || echo $?; grep -c 'read-only without --writable' told
        tarfs mount --writable --upper changes a.tar mnt; mkdir other
        tarfs mount --writable --upper changes a.tar other 2>told || echo $?
        grep -c 'another mount writes there' told; tarfs umount mnt
        tarfs mount --writable --upper mnt/changes a.tar mnt 2>told || echo $?
        grep -c 'would hide it' told; rmdir mnt/changes
        mkdir lower upper work stacked
        mount -t overlay o -o lowerdir=lower,upperdir=upper,workdir=work stacked
        tarfs mount --writable --upper stacked/changes a.tar mnt 2>told || echo $?
        grep -c 'takes changes on a local file system only' told; umount stacked
        long=$(printf '%0200d/' 1 2 3 4 5 6 7 8 9 10 11); mkdir -p "$long"
        tarfs mount --writable --upper "$long" a.tar mnt 2>told || echo $?
        grep -c 'a shorter path with --upper' told; ls mnt
        for_users; mount --bind /dev/null "$(command -v fuse-overlayfs)"
        as_user tarfs mount --writable a.tar mnt 2>told || echo $?
        grep -c 'apt install fuse-overlayfs' told; left
        "#,
    );
    assert_eq!(said, "64\n1\n2\n1\n2\n1\n2\n1\n2\n1\n2\n1\n");
}

// Promises: overlay-kind, overlay-fuse
#[test]
fn ordinary_user_writes_by_fuse_overlayfs() {
    let said = stdout_of(
        r#"
        for_users
        use_it() {
            as_user tarfs mount --isolated --writable a.tar mnt
            as_user sh -c 'echo more >>mnt/a; rm mnt/dir/b; echo new >mnt/new; cat mnt/a; ls mnt/dir'
        }
        use_it; as_user tarfs status mnt | grep -c 'by fuse-overlayfs'
        test $(grep -c "$PWD/tmp" /proc/self/mountinfo) = 0
        as_user tarfs umount mnt; gone
        use_it; as_user fusermount3 -u mnt; gone
        use_it; kill -KILL $(as_user tarfs status --json mnt | sed 's/.*"pid":\([0-9]*\).*/\1/'); gone
        use_it
        helper=$(pgrep -u 65534 -f "^/usr/bin/fuse-overlayfs.*$PWD/tmp"); kill -KILL $helper; gone
        "#,
    );
    let used = "one\nmore\nsub\n";
    assert_eq!(said, format!("{used}1\n{used}{used}{used}"));
}

/// dpkg makes directories with mode 0 and sets their mode later.
// Promises: overlay-fuse
#[test]
fn ordinary_user_creates_directories_of_any_mode() {
    let said = stdout_of(
        r#"
        for_users
        as_user tarfs mount --writable a.tar mnt 2>&1
        as_user sh -euc '
            for mode in 0 300 555 700; do mkdir -m $mode mnt/$mode; stat -c "%a %u" mnt/$mode; done
            chmod 755 mnt/0; mkdir -m 0 mnt/0/inner; mv mnt/0/inner mnt/0/moved; chmod 500 mnt/0/moved
            chmod 0 mnt/dir; chmod 700 mnt/dir; rm mnt/dir/b; rmdir mnt/300; echo x >mnt/700/x; chmod 0 mnt/700'
        as_user tarfs umount mnt; gone
        # With the modes that were set; the user removes what no mode lets in.
        as_user tarfs mount --writable --upper cache/changes a.tar mnt 2>&1
        as_user mkdir -m 0 mnt/closed; as_user tarfs umount mnt; stat -c %a cache/changes/upper/closed
        as_user tarfs mount --writable --upper cache/changes a.tar mnt 2>&1
        as_user stat -c %a mnt/closed; as_user rmdir mnt/closed; as_user tarfs umount mnt
        "#,
    );
    let uid = 65534;
    let made = format!("0 {uid}\n300 {uid}\n555 {uid}\n700 {uid}\n");
    assert_eq!(said, format!("{made}0\n0\n"));
}

// Promises: overlay-fuse
#[test]
fn user_without_user_namespaces_is_warned_of_modes() {
    let said = stdout_of(
        r"
        for_users
        mount --bind /bin/false /usr/bin/unshare
        as_user tarfs mount --writable a.tar mnt 2>&1 | grep -c 'cannot make directories without write permission'
        as_user mkdir -m 555 mnt/x 2>&1 | sed 's/.*: //'; as_user mkdir -m 755 mnt/y; as_user rmdir mnt/y
        as_user tarfs status mnt | grep -c 'by fuse-overlayfs'
        as_user tarfs umount mnt; gone
        ",
    );
    assert_eq!(said, "1\nPermission denied\n1\n");
}

// Promises: overlay-kind
#[test]
fn user_namespace_writes_by_kernel_overlayfs() {
    let said = stdout_of(
        r#"
        for_users
        as_user unshare --user --map-root-user --mount --propagation private sh -euc '
            tarfs mount --writable a.tar mnt
            grep -c "mnt rw.* overlay .*userxattr" /proc/self/mountinfo
            echo more >>mnt/a; rm mnt/dir/sub/c; mkdir mnt/new; cat mnt/a; ls mnt/dir
            mkdir -m 0 mnt/closed; rmdir mnt/closed
            tarfs umount mnt'
        gone
        "#,
    );
    assert_eq!(said, "1\none\nmore\nb\nsub\n");
}
