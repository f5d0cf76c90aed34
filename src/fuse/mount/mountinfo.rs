//! The kernel's table of mounts (`/proc/self/mountinfo`).

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::base::mount_point::mount_id;

/// The top mount at a mountpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TopMount {
    /// Mount id, unique on the machine while the mount exists.
    pub id: u32,
    /// Major and minor number of its file system, which its bind mounts share.
    pub device: (u32, u32),
    /// Its file system type.
    pub fs_type: String,
    /// Superblock options, still escaped as in the table.
    pub(super) options: Vec<u8>,
}

impl TopMount {
    /// Whether its superblock options have `text`, without characters that are escaped.
    pub fn has_in_options(&self, text: &[u8]) -> bool {
        let mut parts = self.options.windows(text.len().max(1));
        parts.any(|part| part == text)
    }
}

/// The top mount of any type at `mountpoint` (see [`canonical_mountpoint`]). Sends it no request.
///
/// # Errors
/// When the kernel's table of mounts cannot be read.
pub fn top_mount(mountpoint: &Path) -> io::Result<Option<TopMount>> {
    let table = read_table()?;
    Ok(last_mount_at(&table, mountpoint).map(|found| TopMount {
        id: found.id,
        device: found.device,
        fs_type: String::from_utf8_lossy(found.fs_type).into_owned(),
        options: found.options.to_vec(),
    }))
}

pub(super) fn device_at(mountpoint: &Path, fs_type: &str) -> io::Result<Option<(u32, u32)>> {
    let top = top_mount(mountpoint)?.filter(|top| top.fs_type == fs_type);
    Ok(top.map(|top| top.device))
}

/// Mountpoints of the file systems of type `fs_type` with the superblock option `option`, the last first. With `device`, only
/// those of that file system.
pub(super) fn mountpoints_with(
    fs_type: &str,
    option: &str,
    device: Option<(u32, u32)>,
) -> io::Result<Vec<PathBuf>> {
    let table = read_table()?;
    let has_option = |found: &MountEntry<'_>| {
        let mut options = found.options.split(|&byte| byte == b',');
        options.any(|found| found == option.as_bytes())
    };
    let is_meant = |found: &MountEntry<'_>| {
        found.fs_type == fs_type.as_bytes() && device.is_none_or(|device| found.device == device)
    };
    let found = mounts(&table).filter(is_meant);
    let found = found.filter(has_option).map(|found| found.mountpoint);
    Ok(found.rev().collect())
}

/// Number of mounts of the file system `device`, including mounts of a part of it.
pub(super) fn count_mounts(device: (u32, u32)) -> io::Result<usize> {
    let table = read_table()?;
    let mounts = mounts(&table).filter(|found| found.device == device);
    Ok(mounts.count())
}

/// Whether the file system `device` is mounted more than once in this mount namespace.
pub fn has_several_mounts(device: (u32, u32)) -> bool {
    count_mounts(device).is_ok_and(|count| count > 1)
}

/// The mount of a file system at present.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CurrentMount {
    /// The mount's id.
    pub mount_id: u32,
    /// Its mountpoint.
    pub path: PathBuf,
}

pub(super) fn read_table() -> io::Result<Vec<u8>> {
    fs::read("/proc/self/mountinfo")
}

/// Finds a mount of the file system with this device number and type in `table`. Prefers a mount of the whole
/// file system, then one at `mountpoint`, even if covered, then the latest.
pub(super) fn find(
    table: &[u8],
    device: (u32, u32),
    fs_type: &str,
    mountpoint: &Path,
) -> Option<CurrentMount> {
    let is_wanted =
        |found: &MountEntry<'_>| found.device == device && found.fs_type == fs_type.as_bytes();
    let all = || mounts(table).rev().filter(is_wanted);
    let whole = || all().filter(|found| found.is_whole);
    let here = whole().find(|found| found.mountpoint == mountpoint);
    let found = here.or_else(|| whole().next()).or_else(|| all().next());
    found.map(|found| CurrentMount {
        mount_id: found.id,
        path: found.mountpoint,
    })
}

pub(super) fn find_by_root(
    root: impl AsFd,
    fs_type: &str,
) -> io::Result<Option<((u32, u32), PathBuf)>> {
    let Some(id) = mount_id(root)? else {
        return Ok(None);
    };
    let table = read_table()?;
    let found = find_by_id(&table, id).filter(|found| found.fs_type == fs_type.as_bytes());
    Ok(found.map(|found| (found.device, found.mountpoint)))
}

fn find_by_id(table: &[u8], id: u32) -> Option<MountEntry<'_>> {
    mounts(table).find(|found| found.id == id)
}

fn last_mount_at<'a>(table: &'a [u8], mountpoint: &Path) -> Option<MountEntry<'a>> {
    let mut latest_first = mounts(table).rev();
    latest_first.find(|found| found.mountpoint == mountpoint)
}

fn mounts(table: &[u8]) -> impl DoubleEndedIterator<Item = MountEntry<'_>> {
    table.split(|&byte| byte == b'\n').filter_map(parse_line)
}

struct MountEntry<'a> {
    id: u32,
    device: (u32, u32),
    /// Whether it shows the root of its file system.
    is_whole: bool,
    mountpoint: PathBuf,
    fs_type: &'a [u8],
    options: &'a [u8],
}

/// Parses a line: words 1, 3, 4 and 5, and words 1 and 3 after the lone hyphen.
fn parse_line(line: &[u8]) -> Option<MountEntry<'_>> {
    let mut words = line.split(|&byte| byte == b' ');
    let id = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let device = parse_device(words.nth(1)?)?;
    let is_whole = words.next()? == b"/";
    let mountpoint = unescape(words.next()?);
    let mut behind = words.skip_while(|&word| word != b"-").skip(1);
    let fs_type = behind.next()?;
    let options = behind.nth(1).unwrap_or_default();
    Some(MountEntry {
        id,
        device,
        is_whole,
        mountpoint: PathBuf::from(OsString::from_vec(mountpoint)),
        fs_type,
        options,
    })
}

fn parse_device(word: &[u8]) -> Option<(u32, u32)> {
    let (major, minor) = std::str::from_utf8(word).ok()?.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Decodes the table's octal escapes: of blanks, tabs, newlines, backslashes, and separators in options.
pub(super) fn unescape(word: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&byte, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|_| byte == b'\\');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let code = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        text.push(code.unwrap_or(byte));
        rest = match code {
            Some(_) => tail.get(3..).unwrap_or_default(),
            None => tail,
        };
    }
    text
}

/// `path` as the table writes it: absolute, without symbolic links. Does not resolve the last component if it
/// is a dead mount, so that it can be named.
///
/// # Errors
/// When `path` does not exist.
pub fn canonical_mountpoint(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => {
            let absolute = std::path::absolute(path)?;
            let parent = absolute.parent().unwrap_or(Path::new("/"));
            let name = absolute.file_name().unwrap_or_default();
            Ok(fs::canonicalize(parent)?.join(name))
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: unmount-number, unmount-copies
    #[test]
    fn find_prefers_expected_mountpoint_then_whole_mounts() {
        let table = b"\
30 21 0:40 / /a/mnt ro - fuse.tarfs x ro
31 21 0:40 /d /b ro - fuse.tarfs x ro
32 21 0:40 / /c ro - fuse.tarfs x ro
33 32 0:41 / /c ro - tmpfs y rw
34 21 0:42 /d /e ro - fuse.tarfs x ro
";
        let find_path = |device, mountpoint: &str| {
            let found = find(table, device, "fuse.tarfs", Path::new(mountpoint));
            found.map(|found| found.path.to_string_lossy().into_owned())
        };
        assert_eq!(find_path((0, 40), "/a/mnt").as_deref(), Some("/a/mnt"));
        assert_eq!(find_path((0, 40), "/c").as_deref(), Some("/c"));
        assert_eq!(find_path((0, 40), "/b").as_deref(), Some("/c"), "a part");
        assert_eq!(
            find_path((0, 40), "/gone").as_deref(),
            Some("/c"),
            "the last"
        );
        assert_eq!(find_path((0, 41), "/c"), None, "another type");
        assert_eq!(
            find_path((0, 42), "/c").as_deref(),
            Some("/e"),
            "only a part"
        );
    }

    const TABLE: &[u8] = b"\
21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 21 0:25 / /mnt/with\\040blank ro shared:1 master:2 - fuse.tarfs http://host/a.tar ro
31 21 0:26 / /mnt/twice ro - fuse.tarfs a ro
32 31 0:27 / /mnt/twice rw - tmpfs tmpfs rw
broken
";

    #[test]
    fn last_mount_at_mountpoint_wins() {
        let top = |path: &str| last_mount_at(TABLE, Path::new(path)).map(|found| found.fs_type);
        assert_eq!(top("/mnt/with blank"), Some(&b"fuse.tarfs"[..]));
        assert_eq!(top("/mnt/twice"), Some(&b"tmpfs"[..]));
        assert_eq!(top("/mnt"), None);
        let found = last_mount_at(TABLE, Path::new("/mnt/with blank"));
        assert_eq!(found.map(|found| found.device), Some((0, 25)));
        let below = find_by_id(TABLE, 31).map(|found| found.device);
        assert_eq!(below, Some((0, 26)));
        assert!(find_by_id(TABLE, 3).is_none());
        let found = last_mount_at(TABLE, Path::new("/mnt/twice"));
        assert_eq!(found.map(|found| found.options), Some(&b"rw"[..]));
    }

    #[test]
    fn backslash_without_octal_digits_is_literal() {
        assert_eq!(unescape(b"a\\134b\\9\\"), b"a\\b\\9\\");
    }
}
