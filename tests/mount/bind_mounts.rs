//! Bind mounts of a mount: of the whole or a part, in this mount namespace or another.
//!
//! Each test runs in its own mount namespace.

use crate::support::namespace;

/// `wait_for_exit` waits for the end of a process, and `mounts` counts the mounts below this
/// directory.
const PRELUDE: &str = r#"
chmod 755 .
mkdir -p t/dir bin mnt part whole cache run tmp
echo one >t/file; echo two >t/dir/file; tar -C t -cf a.tar .
cp "$program" bin/tarfs
export PATH="$PWD/bin:$PATH" XDG_RUNTIME_DIR="$PWD/run" TARFS_CACHE_DIR="$PWD/cache" TMPDIR="$PWD/tmp"
pid() { tarfs status --json "$1" | sed 's/.*"monitor":\([0-9]*\).*/\1/'; }
wait_for_exit() { for _ in $(seq 200); do kill -0 $1 2>/dev/null || return 0; sleep 0.02; done; echo "$1 runs"; }
mounts() { grep -c " $PWD/" /proc/self/mountinfo || true; }
"#;

#[track_caller]
fn stdout_of(script: &str) -> String {
    namespace::stdout_text(&namespace::run_program(PRELUDE, script))
}

// Promises: unmount-copies
#[test]
fn umount_of_bind_mount_leaves_original_mount() {
    let said = stdout_of(
        r"
        for flags in '' --writable; do
            for how in '' --lazy; do
                tarfs mount $flags a.tar mnt; pid=$(pid mnt)
                mount --bind mnt/dir part; mount --bind mnt whole
                exec 5<mnt/file
                tarfs umount $how part 2>&1; tarfs umount $how whole 2>&1; mounts
                cat - mnt/dir/file <&5; exec 5<&-
                tarfs umount $how mnt 2>&1; mounts; wait_for_exit $pid
            done
        done
        ",
    );
    assert_eq!(said, "1\none\ntwo\n0\n".repeat(4));
}

// Promises: rm-mounts
#[test]
fn rm_crosses_no_mount_point_unless_told() {
    let said = stdout_of(
        r"
        mkdir -p r/a/m r/b; touch r/a/f r/b/f t/dir/keep
        mount --bind t/dir r/a/m
        tarfs rm -rf r 2>&1 || echo failed $?
        tarfs rm -rf r/a/m 2>&1 || echo failed $?
        find r t/dir | sort
        tarfs rm -rf --no-one-file-system r 2>&1 || echo failed $?
        find r t/dir | sort
        ",
    );
    let skipped = "tarfs: skipping 'r/a/m', since it's on a different device\nfailed 1\n";
    let busy = "tarfs: cannot remove 'r/a/m': Device or resource busy\nfailed 1\n";
    let left = "r\nr/a\nr/a/m\n";
    let expected = format!(
        "{skipped}{skipped}{left}r/a/m/file\nr/a/m/keep\nt/dir\nt/dir/file\nt/dir/keep\n\
         {busy}{left}t/dir\n"
    );
    assert_eq!(said, expected);
}

// Promises: sync-mounts
#[test]
fn update_deletes_nothing_that_is_mounted() {
    let said = stdout_of(
        r"
        mkdir -p out/extra/{m,gone/below,deep/{m,gone}} out/top home
        touch home/keep out/extra/{f,gone/f,deep/f} out/other
        mount --bind home out/extra/m; mount --bind home out/top
        mount --bind t/file out/other; mount --bind t/file out/extra/deep/f
        touch -r t out
        for flags in --dry-run ''; do
            tarfs sync -q --delete $flags a.tar out 2>&1 || echo failed $?
        done
        find out home | sort
        ",
    );
    let steps = "write dir\nwrite dir/file\ndelete extra/deep/gone\ndelete extra/deep/m\n\
                 delete extra/f\ndelete extra/gone\nwrite file\n";
    let left = "home\nhome/keep\nout\nout/dir\nout/dir/file\nout/extra\nout/extra/deep\nout/extra/deep/f\n\
                out/extra/m\nout/extra/m/keep\nout/file\nout/other\nout/top\nout/top/keep\n";
    let warning =
        |path| format!("tarfs: warning: {path}: something is mounted there, left alone\n");
    let warnings = ["extra/deep/f", "extra/m", "other", "top"]
        .map(warning)
        .concat();
    assert_eq!(said, format!("{warnings}{steps}{warnings}{left}"));
}

// Promises: sync-mounts
#[test]
fn update_changes_nothing_below_a_mount_point_of_a_common_name() {
    let said = stdout_of(
        r"
        mkdir -p u/dir/sub u/top out/dir/sub out/mode home/sub
        for name in dir/a dir/sub/b top/c other; do echo new >u/$name; done
        mkdir -m 700 u/mode; tar -C u -cf u.tar .
        for name in a sub/b extra; do echo keep >home/$name; done; echo keep >keep; touch out/other
        mount --bind home out/dir; mount --bind keep out/other; mount -t tmpfs -o mode=755 none out/mode
        # DIR may be a mount point itself.
        mkdir bound; mount --rbind out bound
        state() { find home keep out/mode -exec stat -c '%n %a %s %y' {} +; cat home/* home/sub/*; }
        state >before 2>/dev/null || true
        for source in u.tar u; do
            for flags in 'out --delete --dry-run' 'bound --delete' 'out'; do
                rm -rf out/top; touch out/gone; touch -d @1 out
                tarfs sync -q $source $flags 2>&1 | sort
                echo ${PIPESTATUS[0]} $(ls out)
                state 2>/dev/null | diff before - || true
            done
        done
        ",
    );
    let skipped =
        |path| format!("tarfs: warning: {path}: something is mounted there, left alone\n");
    let left = ["dir", "mode", "other"].map(skipped).concat();
    // Only the entries beside the mount points are deleted.
    let expected = format!(
        "change ./\ndelete gone\n{left}write top\nwrite top/c\n2 dir gone mode other\n\
         {left}2 dir mode other top\n{left}2 dir gone mode other top\n"
    );
    assert_eq!(said, expected.repeat(2));
}

// Promises: change-closed
#[test]
fn modes_are_changed_without_proc() {
    let said = stdout_of(
        r"
        mkdir -m 711 t/closed; mkfifo -m 604 t/fifo; tar -C t -cf b.tar .
        mkdir out copy
        mount -t tmpfs none /proc
        tarfs chmod -R u+w,o-r t || echo failed $?
        tarfs materialize -q b.tar -C out || echo failed $?
        tarfs copy -q t copy || echo failed $?
        stat -c '%a %n' t/* out/* copy/*
        umount /proc
        ",
    );
    let lines = |top: &str, modes: [&str; 4]| {
        let names = ["closed", "dir", "fifo", "file"];
        let lines = modes.iter().zip(names);
        let lines = lines.map(|(mode, name)| format!("{mode} {top}/{name}\n"));
        lines.collect::<Vec<_>>().concat()
    };
    let changed = ["711", "751", "600", "640"];
    let expected = [
        lines("t", changed),
        lines("out", ["711", "755", "604", "644"]),
        lines("copy", changed),
    ];
    assert_eq!(said, expected.concat());
}

// Promises: unmount-several
#[test]
fn several_mounts_or_all_are_unmounted() {
    let said = stdout_of(
        r"
        # The other mounts of this user are those of other tests.
        mount -t tmpfs none /run
        mkdir one two three
        for name in one two three; do tarfs mount a.tar $name; done
        tarfs umount one none two 2>&1 || echo ended with $?
        mounts
        tarfs mount a.tar mnt
        tarfs mount a.tar mnt/dir 2>/dev/null
        tarfs mount a.tar three 2>/dev/null
        tarfs umount --all
        mounts
        tarfs umount --all
        tarfs umount 2>/dev/null || echo ended with $?
        tarfs umount --all mnt 2>/dev/null || echo ended with $?
        ",
    );
    let missing = "tarfs: cannot unmount none: No such file or directory";
    let (first, rest) = said.split_once('\n').expect("lines");
    assert!(first.starts_with(missing), "{said}");
    assert_eq!(rest, "ended with 2\n1\n0\nended with 64\nended with 64\n");
}

// Promises: unmount-copies
#[test]
fn umount_of_mount_leaves_its_bind_mounts() {
    let said = stdout_of(
        r"
        for flags in '' --writable; do
            for how in '' --lazy; do
                tarfs mount $flags a.tar mnt; pid=$(pid mnt)
                mount --bind mnt/dir part; mount --bind mnt whole
                tarfs umount $how mnt 2>&1 | grep -c 'in use elsewhere'; mounts
                cat part/file; tarfs umount $how whole 2>/dev/null; cat part/file
                exec 5<part/file; tarfs umount part 2>/dev/null || echo busy; exec 5<&-
                tarfs umount $how part 2>&1; mounts; wait_for_exit $pid
            done
        done
        ",
    );
    assert_eq!(said, "1\n2\ntwo\ntwo\nbusy\n0\n".repeat(4));
}

// Promises: unmount-copies
#[test]
fn umount_in_another_namespace_leaves_the_mount_here() {
    let said = stdout_of(
        r"
        for how in '' --lazy; do
            tarfs mount a.tar mnt; pid=$(pid mnt)
            unshare --mount --propagation private sh -euc 'tarfs umount ${1-} mnt; ls mnt' sh $how 2>&1 |
                grep -c 'in use elsewhere'
            cat mnt/file; tarfs umount mnt 2>&1; mounts; wait_for_exit $pid
        done
        ",
    );
    assert_eq!(said, "1\none\n0\n".repeat(2));
}

// Promises: status-detached, status-json
#[test]
fn status_distinguishes_detached_from_mounted() {
    let said = stdout_of(
        r#"
        heads() { tarfs status | sed -n "s,^$PWD/,,p"; }
        tarfs mount a.tar mnt; old=$(pid mnt); exec 5<mnt/file; umount -l mnt; heads
        tarfs mount a.tar mnt; heads | sort
        test $(pid mnt) != $old; tarfs umount mnt
        tarfs status --json | grep "$PWD" | grep -c '"detached":true'
        exec 5<&-; wait_for_exit $old; heads
        # One directory of sockets with two names.
        ln -s "$PWD/run" run2; mount -t tmpfs none /run; mkdir -m 700 /run/tarfs
        ln -s /run also; export XDG_RUNTIME_DIR="$PWD/also"; tarfs mount a.tar mnt; heads
        mount --bind mnt/dir part; umount mnt; heads; umount part
        "#,
    );
    let detached = "mnt (detached, still in use)\n";
    assert_eq!(said, format!("{detached}mnt\n{detached}1\nmnt\npart\n"));
}

// Promises: unmount-several
#[test]
fn umount_by_another_user_names_the_owner() {
    let said = stdout_of(
        r#"
        mknod fuse c 10 229; chmod 0666 fuse; mount --bind fuse /dev/fuse
        as_user() { setpriv --reuid=$1 --regid=$1 --clear-groups env XDG_RUNTIME_DIR="$PWD/run$1" "${@:2}"; }
        chown 65534 mnt; mkdir -m 700 run65534 cache65534; chown 65534 run65534 cache65534
        as_user 65534 env TARFS_CACHE_DIR="$PWD/cache65534" tarfs mount a.tar mnt
        as_user 4343 tarfs umount mnt 2>&1 | sed "s,$PWD/,,"
        as_user 65534 tarfs umount mnt
        for flags in '' --writable; do
            tarfs mount -o allow_other $flags a.tar mnt; as_user 4343 tarfs umount mnt 2>&1 | sed "s,$PWD/,,"
            tarfs umount mnt
        done
        "#,
    );
    let refused = |owner: &str| {
        format!(
            "tarfs: cannot unmount mnt: it was mounted by {owner} (unmount as that user or as root)\n"
        )
    };
    let root = refused("root (0)");
    assert_eq!(said, format!("{}{root}{root}", refused("nobody (65534)")));
}
