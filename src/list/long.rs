//! `ls -l` lines.

use std::borrow::Cow;
use std::io::{self, Write};

use super::escape::{escape, owner_text};
use super::human_size::human_size;
use super::item::Item;
use super::tree::{FileKind, Tree};
use crate::base::time::Civil;

/// Widths of the columns. Measure every file first, then format the lines.
///
/// `-rwsr-xr-x 1 root root 68208 2026-05-20 16:27:29 passwd`
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Columns {
    style: Style,
    /// Of number, links, user, group and size.
    widths: [usize; 5],
}

/// The parts of a line.
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Style {
    /// All columns, and not only the name.
    pub long: bool,
    /// Owners by number even if they have names.
    pub numeric: bool,
    /// Names as [`escape`] shows them. Otherwise they are unchanged, as `ls` writes them into a pipe.
    pub escaped: bool,
    /// The file's number in front.
    pub inode: bool,
    /// Sizes with units.
    pub human: bool,
}

impl Columns {
    /// Columns of width zero.
    pub fn new(style: Style) -> Self {
        Self {
            style,
            ..Self::default()
        }
    }

    /// Whether there are columns besides the name.
    pub fn have_widths(&self) -> bool {
        self.style.long || self.style.inode
    }

    /// Widens the columns for `file`.
    ///
    /// # Errors
    /// Its attributes cannot be read.
    pub fn measure(&mut self, file: &Item<'_, impl Tree>) -> io::Result<()> {
        for (width, text) in self.widths.iter_mut().zip(self.style.texts(file)?) {
            *width = text.chars().count().max(*width);
        }
        Ok(())
    }

    /// Appends the line for `file`, called `name`, with a line feed. Times are in UTC.
    ///
    /// # Errors
    /// Its attributes or its target cannot be read; then nothing is appended.
    pub fn write(
        &self,
        output: &mut Vec<u8>,
        name: &[u8],
        file: &Item<'_, impl Tree>,
    ) -> io::Result<()> {
        let is_link = self.style.long && file.kind() == FileKind::Symlink;
        let target = is_link.then(|| file.target()).transpose()?;
        if self.have_widths() {
            let metadata = file.metadata()?;
            let [inode, links, user, group, size] = self.style.texts(file)?;
            let [inodes, all_links, users, groups, sizes] = self.widths;
            if self.style.inode {
                write!(output, "{inode:>inodes$} ")?;
            }
            if self.style.long {
                let mode = mode_string(metadata.kind, metadata.mode);
                let time = Civil::new(metadata.mtime.seconds, 0).to_date_and_time();
                write!(output, "{mode} {links:>all_links$} {user:<users$} ")?;
                write!(output, "{group:<groups$} {size:>sizes$} {time} ")?;
            }
        }
        self.push_name(output, name);
        if let Some(target) = target {
            output.extend_from_slice(b" -> ");
            self.push_name(output, &target);
        }
        output.push(b'\n');
        Ok(())
    }

    fn push_name(&self, output: &mut Vec<u8>, name: &[u8]) {
        if self.style.escaped {
            output.extend_from_slice(escape(name).as_bytes());
        } else {
            output.extend_from_slice(name);
        }
    }
}

impl Style {
    /// Number, links, user, group, and size or the number of a device.
    fn texts(self, file: &Item<'_, impl Tree>) -> io::Result<[String; 5]> {
        let metadata = file.metadata()?;
        let named =
            |name: Option<Cow<'_, [u8]>>, id| owner_text(name.filter(|_| !self.numeric), id);
        let size = match metadata.device {
            (major, minor) if metadata.is_device() => format!("{major}, {minor}"),
            _ if self.human => human_size(metadata.size),
            _ => metadata.size.to_string(),
        };
        Ok([
            metadata.inode.to_string(),
            metadata.links.to_string(),
            named(file.user()?, metadata.uid),
            named(file.group()?, metadata.gid),
            size,
        ])
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
    use super::super::{Batch, IndexTree, metadata};
    use super::*;
    use crate::index::test_support::{directory, file, index, member, symlink};
    use crate::index::{Index, Ino};
    use crate::tar::{Device, Member, MemberKind, Timestamp};

    const LONG_ESCAPED: Style = Style {
        long: true,
        numeric: false,
        escaped: true,
        inode: false,
        human: false,
    };

    fn items(index: &Index, mut each: impl FnMut(&Item<'_, IndexTree<&Index>>)) {
        let (tree, mut batch) = (IndexTree::new(index, true), Batch::default());
        tree.read(&Ino::ROOT, &mut 0, &mut batch).expect("read");
        for name in batch.iter() {
            each(&Item::at_start(&tree, &Ino::ROOT, name));
        }
    }

    fn lines(index: &Index, style: Style) -> Vec<String> {
        let (mut columns, mut lines) = (Columns::new(style), Vec::new());
        items(index, |item| columns.measure(item).expect("measured"));
        items(index, |item| {
            let mut line = Vec::new();
            columns
                .write(&mut line, item.name(), item)
                .expect("written");
            lines.push(
                String::from_utf8(line)
                    .expect("UTF-8")
                    .trim_end_matches('\n')
                    .to_owned(),
            );
        });
        lines
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
            lines(&index, LONG_ESCAPED),
            [
                "-rw-r--r-- 1 root shadow 12345 1970-01-01 23:59:59 a\\ b",
                "drwxrwxrwt 2 0    0          0 1970-01-01 00:00:00 d",
                "lrwxrwxrwx 1 0    0          3 1970-01-01 00:00:00 l -> x\\ny",
                "crw-r--r-- 1 0    0       5, 1 1970-01-01 00:00:00 n",
            ]
        );
        let numeric = Style {
            long: true,
            numeric: true,
            ..Style::default()
        };
        assert_eq!(
            lines(&index, numeric)[0],
            "-rw-r--r-- 1 0 0 12345 1970-01-01 23:59:59 a b"
        );
        assert!(lines(&index, numeric)[2].ends_with("l -> x\ny"));
    }

    #[test]
    fn special_bits_show_with_and_without_execute() {
        let index = index(&[
            directory("a", 0o7777),
            directory("b", 0o7000),
            directory("c", 0o640),
            directory("d", 0o111),
        ]);
        let modes: Vec<String> = index
            .children_by_name(Ino::ROOT, 0)
            .map(|child| index.entry(child.ino).expect("there"))
            .map(|entry| mode_string(metadata(&entry).kind, entry.mode()))
            .collect();
        assert_eq!(
            modes,
            ["drwsrwsrwt", "d--S--S--T", "drw-r-----", "d--x--x--x"]
        );
    }
}
