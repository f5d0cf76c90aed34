//! What is mounted where, from the kernel's own table (`/proc/self/mountinfo`); pure but for one
//! read.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::pin::mount_id;

const TABLE: &str = "/proc/self/mountinfo";

/// The type of what lies on top at `mountpoint`, an absolute path without symbolic links.
///
/// # Errors
/// When the table cannot be read.
pub(super) fn file_system(mountpoint: &Path) -> io::Result<Option<String>> {
    let table = fs::read(TABLE)?;
    Ok(top(&table, mountpoint).map(|name| String::from_utf8_lossy(name).into_owned()))
}

/// Major and minor number of what lies on top at `mountpoint`, as for [`file_system`], if it is of the
/// type `file_system`. Asks nothing of the mount itself.
///
/// # Errors
/// When the table cannot be read.
pub(super) fn device(mountpoint: &Path, file_system: &str) -> io::Result<Option<(u32, u32)>> {
    let table = fs::read(TABLE)?;
    let found =
        last(&table, mountpoint).filter(|found| found.file_system == file_system.as_bytes());
    Ok(found.map(|found| found.device))
}

/// A mount in the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TopMount {
    /// Its id, which no other mount of the machine has meanwhile.
    pub id: u32,
    /// Major and minor number of its file system, which its bind mounts have, too.
    pub device: (u32, u32),
    /// Its type.
    pub file_system: String,
}

/// The mount on top at `mountpoint`, as for [`file_system`], whatever it is.
///
/// # Errors
/// When the table cannot be read.
pub(super) fn top_mount(mountpoint: &Path) -> io::Result<Option<TopMount>> {
    let table = fs::read(TABLE)?;
    Ok(last(&table, mountpoint).map(|found| TopMount {
        id: found.id,
        device: found.device,
        file_system: String::from_utf8_lossy(found.file_system).into_owned(),
    }))
}

/// How many mounts of the file system with this number there are, of the whole or of a part of it.
///
/// # Errors
/// When the table cannot be read.
pub(super) fn count(device: (u32, u32)) -> io::Result<usize> {
    let table = fs::read(TABLE)?;
    let mounts = table.split(|&byte| byte == b'\n').filter_map(mount);
    Ok(mounts.filter(|found| found.device == device).count())
}

/// Where a file system is mounted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attachment {
    /// The mount's id.
    pub mount_id: u32,
    /// Its mountpoint.
    pub path: PathBuf,
}

/// Where the file system of this type and number is mounted: at `mountpoint` if it is mounted there,
/// though perhaps below something else; otherwise where it was mounted last. A mount of the whole file
/// system counts before one of a part.
///
/// # Errors
/// When the table cannot be read.
pub(super) fn find(
    device: (u32, u32),
    file_system: &str,
    mountpoint: &Path,
) -> io::Result<Option<Attachment>> {
    let table = fs::read(TABLE)?;
    Ok(find_in(&table, device, file_system, mountpoint))
}

/// As [`find`], in `table`.
pub(super) fn find_in(
    table: &[u8],
    device: (u32, u32),
    file_system: &str,
    mountpoint: &Path,
) -> Option<Attachment> {
    let lines = || table.rsplit(|&byte| byte == b'\n').filter_map(mount);
    let all = || {
        lines()
            .filter(|found| found.device == device && found.file_system == file_system.as_bytes())
    };
    let whole = || all().filter(|found| found.is_whole);
    let here = whole().find(|found| found.place == mountpoint);
    let found = here.or_else(|| whole().next()).or_else(|| all().next());
    found.map(|found| Attachment {
        mount_id: found.id,
        path: found.place,
    })
}

/// Major and minor number of mount `id` if it is of the type `file_system`.
///
/// # Errors
/// When the table cannot be read.
pub(super) fn device_of(id: u32, file_system: &str) -> io::Result<Option<(u32, u32)>> {
    let table = fs::read(TABLE)?;
    Ok(with_id(&table, id)
        .filter(|found| found.file_system == file_system.as_bytes())
        .map(|found| found.device))
}

/// Device number and place of the mount that `root` is open on, as for [`device_of`].
///
/// # Errors
/// When the table cannot be read.
pub(super) fn mount_of(
    root: impl AsFd,
    file_system: &str,
) -> io::Result<Option<((u32, u32), PathBuf)>> {
    let Some(id) = mount_id(root)? else {
        return Ok(None);
    };
    let table = fs::read(TABLE)?;
    Ok(with_id(&table, id)
        .filter(|found| found.file_system == file_system.as_bytes())
        .map(|found| (found.device, found.place)))
}

fn with_id(table: &[u8], id: u32) -> Option<Mounted<'_>> {
    let mut lines = table.split(|&byte| byte == b'\n');
    lines.find_map(|line| mount(line).filter(|found| found.id == id))
}

/// What the file system says for itself that lies on top at `mountpoint`, as for [`file_system`], if it
/// is of the type `file_system`; still escaped as in the table.
///
/// # Errors
/// When the table cannot be read.
pub(super) fn options(mountpoint: &Path, file_system: &str) -> io::Result<Option<Vec<u8>>> {
    let table = fs::read(TABLE)?;
    let found =
        last(&table, mountpoint).filter(|found| found.file_system == file_system.as_bytes());
    Ok(found.map(|found| found.options.to_vec()))
}

/// The type of the last mount on `mountpoint`, which hides those before it.
fn top<'a>(table: &'a [u8], mountpoint: &Path) -> Option<&'a [u8]> {
    last(table, mountpoint).map(|found| found.file_system)
}

fn last<'a>(table: &'a [u8], mountpoint: &Path) -> Option<Mounted<'a>> {
    table
        .rsplit(|&byte| byte == b'\n')
        .filter_map(mount)
        .find(|found| found.place == mountpoint)
}

/// A line of the table.
struct Mounted<'a> {
    id: u32,
    device: (u32, u32),
    /// Whether it shows the file system's root.
    is_whole: bool,
    place: PathBuf,
    file_system: &'a [u8],
    options: &'a [u8],
}

/// The first, the third, the fourth and the fifth word, and the first and the third behind the lone hyphen.
fn mount(line: &[u8]) -> Option<Mounted<'_>> {
    let mut words = line.split(|&byte| byte == b' ');
    let id = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let device = numbers(words.nth(1)?)?;
    let is_whole = words.next()? == b"/";
    let place = unescaped(words.next()?);
    let mut behind = words.skip_while(|&word| word != b"-").skip(1);
    let file_system = behind.next()?;
    let options = behind.nth(1).unwrap_or_default();
    Some(Mounted {
        id,
        device,
        is_whole,
        place: PathBuf::from(OsString::from_vec(place)),
        file_system,
        options,
    })
}

/// `0:25`
fn numbers(word: &[u8]) -> Option<(u32, u32)> {
    let (major, minor) = std::str::from_utf8(word).ok()?.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Blanks, tabs, newlines and backslashes, and in options what separates them, stand there as a
/// backslash and three octal digits.
pub(super) fn unescaped(word: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&byte, tail)) = rest.split_first() {
        let code = tail.get(..3).and_then(octal).filter(|_| byte == b'\\');
        text.push(code.unwrap_or(byte));
        rest = match code {
            Some(_) => tail.get(3..).unwrap_or_default(),
            None => tail,
        };
    }
    text
}

fn octal(digits: &[u8]) -> Option<u8> {
    let digits = std::str::from_utf8(digits).ok()?;
    u8::from_str_radix(digits, 8).ok()
}

/// `path` as the table writes it: absolute, without symbolic links. The last component is not
/// asked, so that a dead mount can be named.
///
/// # Errors
/// When its parent does not exist.
pub(super) fn canonical(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Ok(canonical) => Ok(canonical),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => {
            let absolute = std::path::absolute(path)?;
            let parent = absolute.parent().unwrap_or(Path::new("/"));
            let name = absolute.file_name().unwrap_or_default();
            Ok(fs::canonicalize(parent)?.join(name))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_number_and_where_it_should_be_first() {
        let table = b"\
30 21 0:40 / /a/mnt ro - fuse.tarfs x ro
31 21 0:40 /d /b ro - fuse.tarfs x ro
32 21 0:40 / /c ro - fuse.tarfs x ro
33 32 0:41 / /c ro - tmpfs y rw
34 21 0:42 /d /e ro - fuse.tarfs x ro
";
        let place = |device, mountpoint: &str| {
            let found = find_in(table, device, "fuse.tarfs", Path::new(mountpoint));
            found.map(|found| found.path.to_string_lossy().into_owned())
        };
        assert_eq!(place((0, 40), "/a/mnt").as_deref(), Some("/a/mnt"));
        assert_eq!(place((0, 40), "/c").as_deref(), Some("/c"));
        assert_eq!(place((0, 40), "/b").as_deref(), Some("/c"), "a part");
        assert_eq!(place((0, 40), "/gone").as_deref(), Some("/c"), "the last");
        assert_eq!(place((0, 41), "/c"), None, "another type");
        assert_eq!(place((0, 42), "/c").as_deref(), Some("/e"), "only a part");
    }

    const TABLE: &[u8] = b"\
21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 21 0:25 / /mnt/with\\040blank ro shared:1 master:2 - fuse.tarfs http://host/a.tar ro
31 21 0:26 / /mnt/twice ro - fuse.tarfs a ro
32 31 0:27 / /mnt/twice rw - tmpfs tmpfs rw
broken
";

    #[test]
    fn the_last_mount_on_a_place_counts() {
        let top = |path: &str| top(TABLE, Path::new(path));
        assert_eq!(top("/mnt/with blank"), Some(&b"fuse.tarfs"[..]));
        assert_eq!(top("/mnt/twice"), Some(&b"tmpfs"[..]));
        assert_eq!(top("/mnt"), None);
        let found = last(TABLE, Path::new("/mnt/with blank"));
        assert_eq!(found.map(|found| found.device), Some((0, 25)));
        let below = with_id(TABLE, 31).map(|found| found.device);
        assert_eq!(below, Some((0, 26)));
        assert!(with_id(TABLE, 3).is_none());
        let found = last(TABLE, Path::new("/mnt/twice"));
        assert_eq!(found.map(|found| found.options), Some(&b"rw"[..]));
    }

    #[test]
    fn a_backslash_without_digits_is_itself() {
        assert_eq!(unescaped(b"a\\134b\\9\\"), b"a\\b\\9\\");
    }
}
