//! `ls -l` lines.

use std::io;

use super::escape::escape;
use super::human_size::human_size;
use super::tree::{Candidate, FileKind};
use crate::base::time::Civil;

/// Widths of the columns. Measure every file first, then format the lines.
///
/// `-rwsr-xr-x 1 root root 68208 2026-05-20 16:27:29 passwd`
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Columns {
    style: Style,
    inode: usize,
    links: usize,
    user: usize,
    group: usize,
    size: usize,
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

    /// Whether [`Self::measure`] has anything to do.
    pub fn have_widths(&self) -> bool {
        self.style.long || self.style.inode
    }

    /// Widens the columns for `file`.
    ///
    /// # Errors
    /// Its attributes cannot be read.
    pub fn measure(&mut self, file: &impl Candidate) -> io::Result<()> {
        let width = |text: String| text.chars().count();
        let metadata = file.metadata()?;
        self.inode = self.inode.max(width(metadata.inode.to_string()));
        self.links = self.links.max(width(metadata.links.to_string()));
        self.user = self.user.max(width(self.user(file)?));
        self.group = self.group.max(width(self.group(file)?));
        self.size = self.size.max(width(self.size(file)?));
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
        file: &impl Candidate,
    ) -> io::Result<()> {
        let start = output.len();
        let written = self.try_write(output, name, file);
        if written.is_err() {
            output.truncate(start);
        }
        written
    }

    fn try_write(
        &self,
        output: &mut Vec<u8>,
        name: &[u8],
        file: &impl Candidate,
    ) -> io::Result<()> {
        if self.style.inode {
            let inode = file.metadata()?.inode;
            output.extend_from_slice(format!("{inode:>0$} ", self.inode).as_bytes());
        }
        if self.style.long {
            let metadata = file.metadata()?;
            let facts = format!(
                "{} {:>links$} {:<users$} {:<groups$} {:>sizes$} {} ",
                mode_string(metadata.kind, metadata.mode),
                metadata.links,
                self.user(file)?,
                self.group(file)?,
                self.size(file)?,
                Civil::new(metadata.mtime.seconds, 0).to_date_and_time(),
                links = self.links,
                users = self.user,
                groups = self.group,
                sizes = self.size,
            );
            output.extend_from_slice(facts.as_bytes());
        }
        self.push_name(output, name);
        if self.style.long && file.kind() == FileKind::Symlink {
            output.extend_from_slice(b" -> ");
            self.push_name(output, &file.target()?);
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

    fn user(&self, file: &impl Candidate) -> io::Result<String> {
        let name = if self.style.numeric {
            None
        } else {
            file.user()?
        };
        let metadata = file.metadata()?;
        Ok(name.map_or_else(|| metadata.uid.to_string(), |name| escape(&name)))
    }

    fn group(&self, file: &impl Candidate) -> io::Result<String> {
        let name = if self.style.numeric {
            None
        } else {
            file.group()?
        };
        let metadata = file.metadata()?;
        Ok(name.map_or_else(|| metadata.gid.to_string(), |name| escape(&name)))
    }

    /// Device number of a device, as `ls` shows it; else the size.
    fn size(&self, file: &impl Candidate) -> io::Result<String> {
        let metadata = file.metadata()?;
        Ok(match (metadata.kind, metadata.device) {
            (FileKind::CharDevice | FileKind::BlockDevice, (major, minor)) => {
                format!("{major}, {minor}")
            }
            _ if self.style.human => human_size(metadata.size),
            _ => metadata.size.to_string(),
        })
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
    use super::super::{Batch, IndexTree, Item, Tree, metadata};
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
        let (tree, mut batch) = (IndexTree::by_name(index), Batch::default());
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
