//! One JSON object an entry, for programs.
//!
//! | field | value |
//! |---|---|
//! | `path` | from the archive's root, without a leading slash; `.` for the root |
//! | `path_bytes` | the same as numbers 0–255, only when it is not UTF-8; `path` has U+FFFD then |
//! | `type` | `file`, `directory`, `symlink`, `char`, `block`, `fifo` |
//! | `mode` | the twelve permission bits, octal, four digits, as a string |
//! | `uid`, `gid` | numbers |
//! | `user`, `group` | as the archive names them, only when it does |
//! | `size` | bytes as a reader sees them |
//! | `mtime` | RFC 3339 in UTC with nine digits of a second; years outside 0–9999 have a sign |
//! | `nlink` | number of names |
//! | `target`, `target_bytes` | of a symbolic link; as for `path` |
//! | `major`, `minor` | of a device |
//! | `inode` | the number that a mount shows |

use std::fmt::Write;

use crate::base::archive_path::ArchivePath;
use crate::base::time::Civil;
use crate::index::{Entry, Kind};

/// The object for `entry`, called `path`: one line, without a line feed.
pub fn object(path: &ArchivePath, entry: &Entry<'_>) -> String {
    let mut object = Object::default();
    let path = if path.is_root() {
        b"."
    } else {
        path.as_bytes()
    };
    object.bytes("path", path);
    object.text("type", type_name(&entry.kind()));
    object.text("mode", &format!("{:04o}", entry.mode()));
    object.number("uid", entry.uid().into());
    object.number("gid", entry.gid().into());
    for (field, name) in [("user", entry.user()), ("group", entry.group())] {
        if !name.is_empty() {
            object.text(field, &String::from_utf8_lossy(name));
        }
    }
    object.number("size", entry.size());
    let mtime = entry.mtime();
    let mtime = Civil::new(mtime.seconds, mtime.nanoseconds);
    object.text("mtime", &mtime.to_rfc3339().to_string());
    object.number("nlink", entry.link_count().into());
    match entry.kind() {
        Kind::Symlink(target) => object.bytes("target", target),
        Kind::CharDevice(device) | Kind::BlockDevice(device) => {
            object.number("major", device.major.into());
            object.number("minor", device.minor.into());
        }
        Kind::File | Kind::Directory | Kind::Fifo => {}
    }
    object.number("inode", entry.ino().0.into());
    object.finish()
}

fn type_name(kind: &Kind<'_>) -> &'static str {
    match kind {
        Kind::File => "file",
        Kind::Directory => "directory",
        Kind::Symlink(_) => "symlink",
        Kind::CharDevice(_) => "char",
        Kind::BlockDevice(_) => "block",
        Kind::Fifo => "fifo",
    }
}

/// An object under construction.
#[derive(Default)]
struct Object(String);

impl Object {
    fn field(&mut self, name: &str) {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        quote(&mut self.0, name);
        self.0.push(':');
    }

    fn text(&mut self, name: &str, text: &str) {
        self.field(name);
        quote(&mut self.0, text);
    }

    fn number(&mut self, name: &str, number: u64) {
        self.field(name);
        self.0.push_str(&number.to_string());
    }

    /// Adds bytes as text, and also as an array of numbers if they are not UTF-8.
    fn bytes(&mut self, name: &str, bytes: &[u8]) {
        self.text(name, &String::from_utf8_lossy(bytes));
        if str::from_utf8(bytes).is_err() {
            self.field(&format!("{name}_bytes"));
            let numbers: Vec<String> = bytes.iter().map(u8::to_string).collect();
            self.0.push('[');
            self.0.push_str(&numbers.join(","));
            self.0.push(']');
        }
    }

    fn finish(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

/// Appends a string literal. Escapes DEL and C1 too, which is valid and safe for a terminal.
fn quote(out: &mut String, text: &str) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            _ if character.is_control() => {
                write!(out, "\\u{:04x}", u32::from(character)).expect("a String takes everything");
            }
            _ => out.push(character),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Ino;
    use crate::index::test_support::{file, index, member, symlink};
    use crate::tar::{Device, Kind as MemberKind, Member, Timestamp};

    fn objects(members: &[Member]) -> Vec<serde_json::Value> {
        let index = index(members);
        let objects = super::super::walk(&index, Ino::ROOT, true);
        objects
            .map(|(path, entry)| serde_json::from_str(&object(&path, &entry)).unwrap())
            .collect()
    }

    #[test]
    fn json_object_of_file_has_all_fields() {
        let member = Member {
            mode: 0o4755,
            uid: 7,
            gid: 8,
            user: b"root".to_vec(),
            mtime: Timestamp {
                seconds: 1,
                nanoseconds: 2,
            },
            ..file("a", 0..5)
        };
        let expected = serde_json::json!({
            "path": "a", "type": "file", "mode": "4755", "uid": 7, "gid": 8, "user": "root", "size": 5,
            "mtime": "1970-01-01T00:00:01.000000002Z", "nlink": 1, "inode": 2
        });
        assert_eq!(objects(&[member]), [expected]);
    }

    #[test]
    fn json_objects_of_links_and_devices_have_extra_fields() {
        let device = Device { major: 1, minor: 3 };
        let objects = objects(&[
            symlink("l", "x\"\n"),
            member("n", MemberKind::CharDevice(device)),
        ]);
        assert_eq!(objects[0]["target"], "x\"\n");
        assert_eq!(objects[0]["size"], 3);
        assert_eq!(
            (&objects[1]["major"], &objects[1]["minor"]),
            (&1.into(), &3.into())
        );
    }

    #[test]
    fn names_that_are_not_utf8_come_as_bytes_too() {
        let member = Member {
            name: b"a\xff\x1b".to_vec(),
            ..file("", 0..0)
        };
        let objects = objects(&[member]);
        assert_eq!(objects[0]["path"], "a\u{fffd}\u{1b}");
        assert_eq!(objects[0]["path_bytes"], serde_json::json!([97, 255, 27]));
    }

    #[test]
    fn the_root_is_a_dot() {
        let index = index(&[]);
        let root = index.entry(Ino::ROOT).unwrap();
        let object: serde_json::Value =
            serde_json::from_str(&object(&ArchivePath::root(), &root)).unwrap();
        assert_eq!(
            (&object["path"], &object["type"]),
            (&".".into(), &"directory".into())
        );
    }
}
