//! `ls`, `find` and `du` of mounts, which ask the process of the mount for its index.

use std::process::Command;

use crate::support::fixture::TestMount;
use crate::support::tree::Tree;

/// A mount of the mixed tree.
fn place(flags: &[&str]) -> TestMount {
    let place = TestMount::new(&[]);
    place.put("a.tar", &Tree::mixed().tar);
    place.succeeds(&[&["mount", "--wait-index"], flags, &["a.tar", "mnt"]].concat());
    place
}

/// Sorted lines of the output of a program of the system.
fn lines_of(place: &TestMount, program: &str, words: &[&str]) -> Vec<String> {
    let mut command = Command::new(program);
    let output = command.args(words).current_dir(place.root()).output();
    sorted(&output.expect("installed").stdout)
}

fn sorted(output: &[u8]) -> Vec<String> {
    let lines = output.split(|&byte| byte == b'\n');
    let mut lines: Vec<_> = lines.map(|line| line.escape_ascii().to_string()).collect();
    lines.sort();
    lines
}

/// Checks that `find` and `du` of tarfs say the same about `path` as those of the system.
#[track_caller]
fn assert_same(place: &TestMount, path: &str) {
    let format = "%p %y %m %s %n %i %U %G %T@ %l\\n";
    let find = place.tarfs(&["find", path, "-printf", format]);
    let expected = lines_of(place, "find", &[path, "-printf", format]);
    assert_eq!(sorted(&find.stdout), expected);
    let du = place.tarfs(&["du", "-a", "--apparent-size", path]);
    let expected = lines_of(place, "du", &["-a", "--apparent-size", path]);
    assert_eq!(sorted(&du.stdout), expected);
}

// Promises: walk-mount
#[test]
fn mount_is_walked_by_its_index() {
    let place = place(&[]);
    let directories = lines_of(&place, "find", &["mnt", "-mindepth", "1", "-type", "d"]);
    let below = directories.iter().rfind(|path| !path.is_empty());
    assert_same(&place, "mnt");
    assert_eq!(place.counter("sent_indexes"), 2);
    assert_same(&place, below.expect("the tree has directories"));
    assert_eq!(place.counter("sent_indexes"), 4);
}

// Promises: walk-mount
#[test]
fn file_systems_mounted_below_are_not_shown() {
    let place = place(&[]);
    let paths = sorted(&place.tarfs(&["find", "mnt"]).stdout);
    let mounted = lines_of(&place, "mount", &["-t", "tmpfs", "tmpfs", "mnt/first"]);
    assert_eq!(mounted, [""]);
    let below = sorted(&place.tarfs(&["find", "mnt"]).stdout);
    let seen = lines_of(&place, "find", &["mnt/first"]);
    lines_of(&place, "umount", &["mnt/first"]);
    assert_eq!(below, paths);
    assert_eq!(seen, ["", "mnt/first"], "it hides the files below");
}

// Promises: walk-mount
#[test]
fn mount_with_other_attributes_is_walked_by_fuse() {
    for flags in [["-o", "uid=7"], ["-o", "umask=077"], ["--root", "first"]] {
        let place = place(&flags);
        assert_same(&place, "mnt");
        assert_eq!(place.counter("sent_indexes"), 0, "{flags:?}");
    }
    let place = place(&[]);
    let words = ["mnt", "-xtype", "f,l", "-printf", "%p %Y\\n"];
    let find = place.tarfs(&[&["find"], &words[..]].concat());
    assert_eq!(sorted(&find.stdout), lines_of(&place, "find", &words));
}
