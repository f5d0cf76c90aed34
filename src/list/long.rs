//! `ls -l` lines.

use super::escape::escape;
use super::tree::FileKind;
use crate::base::time::Civil;
use crate::index::{Entry, EntryKind};

/// Widths of the columns. Measure every entry first, then format the lines.
///
/// `-rwsr-xr-x 1 root root 68208 2026-05-20 16:27:29 passwd`
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Columns {
    numeric: bool,
    escaped: bool,
    links: usize,
    user: usize,
    group: usize,
    size: usize,
}

impl Columns {
    /// Columns of width zero. `numeric` shows owners by number even if the archive names them. `escaped`
    /// applies [`escape`]. Otherwise names are unchanged, as `ls` writes them into a pipe.
    pub fn new(numeric: bool, escaped: bool) -> Self {
        Self {
            numeric,
            escaped,
            ..Self::default()
        }
    }

    /// Widens the columns for `entry`.
    pub fn measure(&mut self, entry: &Entry<'_>) {
        let width = |text: String| text.chars().count();
        self.links = self.links.max(width(entry.link_count().to_string()));
        self.user = self.user.max(width(self.owner(entry.user(), entry.uid())));
        let group = self.owner(entry.group(), entry.gid());
        self.group = self.group.max(width(group));
        self.size = self.size.max(width(size(entry)));
    }

    /// The line for `entry`, called `name`, without a line feed. Times are in UTC.
    pub fn line(&self, name: &[u8], entry: &Entry<'_>) -> Vec<u8> {
        let facts = format!(
            "{} {:>links$} {:<users$} {:<groups$} {:>sizes$} {} ",
            mode_string(kind_of(entry), entry.mode()),
            entry.link_count(),
            self.owner(entry.user(), entry.uid()),
            self.owner(entry.group(), entry.gid()),
            size(entry),
            Civil::new(entry.mtime().seconds, 0).to_date_and_time(),
            links = self.links,
            users = self.user,
            groups = self.group,
            sizes = self.size,
        );
        let mut line = facts.into_bytes();
        line.extend(self.name(name));
        if let EntryKind::Symlink(target) = entry.kind() {
            line.extend_from_slice(b" -> ");
            line.extend(self.name(target));
        }
        line
    }

    fn name(&self, name: &[u8]) -> Vec<u8> {
        if self.escaped {
            escape(name).into_bytes()
        } else {
            name.to_vec()
        }
    }

    fn owner(&self, name: &[u8], number: u32) -> String {
        if self.numeric || name.is_empty() {
            number.to_string()
        } else {
            escape(name)
        }
    }
}

/// Device number of a device, as `ls` shows it; else the size.
fn size(entry: &Entry<'_>) -> String {
    match entry.kind() {
        EntryKind::CharDevice(device) | EntryKind::BlockDevice(device) => {
            format!("{}, {}", device.major, device.minor)
        }
        _ => entry.size().to_string(),
    }
}

fn kind_of(entry: &Entry<'_>) -> FileKind {
    match entry.kind() {
        EntryKind::File => FileKind::File,
        EntryKind::Directory => FileKind::Directory,
        EntryKind::Symlink(_) => FileKind::Symlink,
        EntryKind::CharDevice(_) => FileKind::CharDevice,
        EntryKind::BlockDevice(_) => FileKind::BlockDevice,
        EntryKind::Fifo => FileKind::Fifo,
    }
}

/// Type and permissions in ten letters, as `ls -l` writes them: `drwxrwxrwt`.
pub(crate) fn mode_string(kind: FileKind, mode: u32) -> String {
    let mut letters = String::with_capacity(10);
    letters.push(match kind {
        FileKind::File => '-',
        kind => kind.letter(),
    });
    for (shift, special, with_execute, without) in [
        (6, 0o4000, 's', 'S'),
        (3, 0o2000, 's', 'S'),
        (0, 0o1000, 't', 'T'),
    ] {
        let bits = mode >> shift;
        letters.push(if bits & 4 != 0 { 'r' } else { '-' });
        letters.push(if bits & 2 != 0 { 'w' } else { '-' });
        letters.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => with_execute,
            (true, false) => without,
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    letters
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::test_support::{directory, file, index, member, symlink};
    use crate::index::{Index, Ino};
    use crate::tar::{Device, Member, MemberKind, Timestamp};

    fn lines(index: &Index, numeric: bool, escaped: bool) -> Vec<String> {
        let mut columns = Columns::new(numeric, escaped);
        let entries = || super::super::walk(index, Ino::ROOT, false);
        entries().for_each(|(_, entry)| columns.measure(&entry));
        let line = |(path, entry): (crate::base::archive_path::ArchivePath, Entry<'_>)| {
            String::from_utf8(columns.line(path.as_bytes(), &entry)).unwrap()
        };
        entries().map(line).collect()
    }

    #[test]
    fn lines_align_like_those_of_ls() {
        let index = index(&[
            Member {
                user: b"root".to_vec(),
                group: b"shadow".to_vec(),
                mtime: Timestamp {
                    seconds: 86_399,
                    nanoseconds: 5,
                },
                ..file("a b", 0..12345)
            },
            directory("d", 0o1777),
            member("n", MemberKind::CharDevice(Device { major: 5, minor: 1 })),
            symlink("l", "x\ny"),
        ]);
        assert_eq!(
            lines(&index, false, true),
            [
                "-rw-r--r-- 1 root shadow 12345 1970-01-01 23:59:59 a\\ b",
                "drwxrwxrwt 2 0    0          0 1970-01-01 00:00:00 d",
                "lrwxrwxrwx 1 0    0          3 1970-01-01 00:00:00 l -> x\\ny",
                "crw-r--r-- 1 0    0       5, 1 1970-01-01 00:00:00 n",
            ]
        );
        assert_eq!(
            lines(&index, true, false)[0],
            "-rw-r--r-- 1 0 0 12345 1970-01-01 23:59:59 a b"
        );
        assert!(lines(&index, true, false)[2].ends_with("l -> x\ny"));
    }

    #[test]
    fn special_bits_show_with_and_without_execute() {
        let index = index(&[
            directory("a", 0o7777),
            directory("b", 0o7000),
            directory("c", 0o640),
            directory("d", 0o111),
        ]);
        let modes: Vec<String> = super::super::walk(&index, Ino::ROOT, false)
            .map(|(_, entry)| mode_string(kind_of(&entry), entry.mode()))
            .collect();
        assert_eq!(
            modes,
            ["drwsrwsrwt", "d--S--S--T", "drw-r-----", "d--x--x--x"]
        );
    }
}
