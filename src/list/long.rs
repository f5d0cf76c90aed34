//! `ls -l` lines.

use std::borrow::Cow;
use std::io::{self, Write};

use super::human_size::human_size;
use crate::base::escape::{escape, owner_text};
use crate::base::time::Civil;
use crate::tree::{FileKind, Item, Tree, mode_string, type_letter};

/// Widths of the columns. Measure every file first, then format the lines.
///
/// `-rwsr-xr-x 1 root root 68208 2026-05-20 16:27:29 passwd`
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Columns {
    style: Style,
    /// Of number, links, user, group, size, and major and minor number of a device.
    widths: [usize; 7],
    /// Whether one of the files has an ACL, which a sign behind the mode shows.
    has_acls: bool,
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
    /// Targets of links, also without [`Style::long`].
    pub targets: bool,
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
    pub fn measure(&mut self, file: &Item<'_, impl Tree>) {
        let texts = self.style.texts(file).unwrap_or_else(|_| unknown_texts());
        for (width, text) in self.widths.iter_mut().zip(texts) {
            *width = text.chars().count().max(*width);
        }
        let [.., size, major, minor] = &mut self.widths;
        if *minor > 0 {
            *size = (*major + ", ".len() + *minor).max(*size);
        }
        // The line reports an error.
        self.has_acls |= self.style.long && file.has_acl().unwrap_or(false);
    }

    /// Appends the line for `file`, called `name`, with a line feed. Times are in UTC. Unknown attributes are `?`.
    ///
    /// # Errors
    /// Its attributes or its target cannot be read.
    pub fn write(
        &self,
        output: &mut Vec<u8>,
        name: &[u8],
        file: &Item<'_, impl Tree>,
    ) -> io::Result<()> {
        let style = self.style;
        let is_link = (style.long || style.targets) && file.kind() == FileKind::Symlink;
        let target = is_link.then(|| file.target()).transpose();
        let written = self.write_columns(output, file);
        self.push_name(output, name);
        if let Ok(Some(target)) = &target {
            output.extend_from_slice(b" -> ");
            self.push_name(output, target);
        }
        output.push(b'\n');
        written.and(target.map(drop))
    }

    /// Appends the columns before the name. Returns whether they are known.
    fn write_columns(&self, output: &mut Vec<u8>, file: &Item<'_, impl Tree>) -> io::Result<()> {
        if !self.have_widths() {
            return Ok(());
        }
        let texts = self.style.texts(file);
        let (known, texts) = match texts {
            Ok(texts) => (Ok(file.metadata()?), texts),
            Err(error) => (Err(error), unknown_texts()),
        };
        let [inode, links, user, group, size, major, minor] = texts;
        let [inodes, all_links, users, groups, sizes, _, minors] = self.widths;
        if self.style.inode {
            write!(output, "{inode:>inodes$} ")?;
        }
        if !self.style.long {
            return known.map(drop);
        }
        let mode = match &known {
            Ok(metadata) => mode_string(metadata.kind, metadata.mode),
            Err(_) => format!("{}?????????", type_letter(file.kind())),
        };
        let has_acl = file.has_acl();
        let sign = match (self.has_acls, &has_acl) {
            (false, _) => "",
            (true, Ok(true)) => "+",
            (true, _) => " ",
        };
        let size = if minor.is_empty() {
            size
        } else {
            format!("{major}, {minor:>minors$}")
        };
        write!(output, "{mode}{sign} {links:>all_links$} {user:<users$} ")?;
        write!(output, "{group:<groups$} {size:>sizes$} ")?;
        match &known {
            Ok(metadata) => {
                let time = Civil::new(metadata.mtime.seconds, 0);
                write!(output, "{} ", time.to_date_and_time())?;
            }
            Err(_) => write!(output, "{:>19} ", "?")?,
        }
        known.and(has_acl).map(drop)
    }

    /// Appends `name` as it is shown.
    pub(super) fn push_name(&self, output: &mut Vec<u8>, name: &[u8]) {
        if self.style.escaped {
            output.extend_from_slice(escape(name).as_bytes());
        } else {
            output.extend_from_slice(name);
        }
    }
}

impl Style {
    /// Number, links, user, group, and size or the numbers of a device. Empty if they are not shown.
    fn texts(self, file: &Item<'_, impl Tree>) -> io::Result<[String; 7]> {
        let metadata = file.metadata()?;
        let named =
            |name: Option<Cow<'_, [u8]>>, id| owner_text(name.filter(|_| !self.numeric), id);
        let mut texts = <[String; 7]>::default();
        let [inode, links, user, group, size, major, minor] = &mut texts;
        if self.inode {
            *inode = metadata.inode.to_string();
        }
        if self.long {
            *links = metadata.links.to_string();
            *user = named(file.user()?, metadata.uid);
            *group = named(file.group()?, metadata.gid);
            match metadata.device {
                device if metadata.is_device() => {
                    (*major, *minor) = (device.0.to_string(), device.1.to_string());
                }
                _ if self.human => *size = human_size(metadata.size),
                _ => *size = metadata.size.to_string(),
            }
        }
        Ok(texts)
    }
}

/// The columns of a file that cannot be examined.
fn unknown_texts() -> [String; 7] {
    ["?", "?", "?", "?", "?", "", ""].map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::test_support::{directory, file, index, member, symlink};
    use crate::index::{Index, Ino, LazyIndex};
    use crate::tar::{Device, Member, MemberKind, Timestamp};
    use crate::tree::{Batch, IndexTree, metadata};

    const LONG_ESCAPED: Style = Style {
        long: true,
        numeric: false,
        escaped: true,
        inode: false,
        human: false,
        targets: false,
    };

    fn items(index: &Index, mut each: impl FnMut(&Item<'_, IndexTree<&Index>>)) {
        let (tree, mut batch) = (
            IndexTree::new(LazyIndex::new(index), true),
            Batch::default(),
        );
        tree.read(&Ino::ROOT, &mut 0, &mut batch).expect("read");
        for name in batch.iter() {
            each(&Item::at_start(&tree, &Ino::ROOT, name));
        }
    }

    fn lines(index: &Index, style: Style) -> Vec<String> {
        let (mut columns, mut lines) = (Columns::new(style), Vec::new());
        items(index, |item| columns.measure(item));
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
