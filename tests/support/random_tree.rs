//! Random trees on disk, of names that make trouble in paths, patterns or columns.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{CWD, FileType, Mode, XattrFlags, mknodat, setxattr};

use super::rng::Rng;

const NAMES: [&[u8]; 14] = [
    b"a",
    b"b.txt",
    b".hidden",
    b"with blank",
    b"line\nfeed",
    b"\xff\xfe",
    b"-dash",
    b"*star",
    b"back\\slash",
    "\u{e4}\u{f6}".as_bytes(),
    b"README",
    b"x.o",
    b"x.tar.gz",
    b"~tilde",
];

/// Makes a tree with files of all types that need no root. Files have one of `lens`, the largest one last.
pub(crate) fn make_tree(root: &Path, random: &mut Rng, lens: &[usize]) {
    make_level(root, random, lens, 0);
}

fn make_level(root: &Path, random: &mut Rng, lens: &[usize], depth: usize) {
    fs::create_dir(root).expect("a new directory");
    let mut first_file = None;
    for name in NAMES {
        let path = root.join(OsStr::from_bytes(name));
        match random.below(10) {
            0 | 1 if depth < 3 => make_level(&path, random, lens, depth + 1),
            0..=4 => {
                let len = pick(lens, random);
                fs::write(&path, random.bytes(len)).expect("space");
                change(&path, random);
                first_file.get_or_insert(path);
            }
            5 => make_sparse(&path, random, lens),
            6 => symlink("a/target", &path).expect("ours"),
            7 => mknodat(CWD, &path, FileType::Fifo, Mode::from(0o640), 0).expect("ours"),
            8 => {
                if let Some(first) = &first_file {
                    fs::hard_link(first, &path).expect("ours");
                }
            }
            _ => {}
        }
    }
    set_time(root, random);
}

fn pick<T: Copy>(values: &[T], random: &mut Rng) -> T {
    let number = usize::try_from(random.below(values.len() as u64)).expect("small");
    *values.get(number).expect("one of them")
}

/// Gives a file a mode, a time and perhaps an extended attribute.
fn change(path: &Path, random: &mut Rng) {
    if random.below(3) == 0 {
        setxattr(path, "user.tarfs", b"value", XattrFlags::empty()).expect("supported");
    }
    let mode = pick(
        &[0o644, 0o600, 0o755, 0o4711, 0o1640, 0o444, 0o2775],
        random,
    );
    set_time(path, random);
    fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("ours");
}

pub(crate) fn set_time(path: &Path, random: &mut Rng) {
    let nanoseconds = u32::try_from(random.below(1_000_000_000)).expect("small");
    let time = UNIX_EPOCH + Duration::new(random.below(2_000_000_000), nanoseconds);
    let file = fs::File::open(path).expect("ours");
    file.set_modified(time).expect("ours");
}

/// Makes a file of data and holes.
fn make_sparse(path: &Path, random: &mut Rng, lens: &[usize]) {
    let max_len = 4 * lens.last().copied().unwrap_or_default() as u64;
    let file = fs::File::create(path).expect("a new file");
    file.set_len(random.below(max_len)).expect("supported");
    for _ in 0..random.below(3) {
        let place = random.below(max_len);
        file.write_all_at(&random.bytes(5000), place)
            .expect("space");
    }
    drop(file);
    change(path, random);
}
