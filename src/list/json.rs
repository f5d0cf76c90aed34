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

use std::borrow::Cow;
use std::fmt::Write;

use serde::Serialize;

use crate::base::archive_path::ArchivePath;
use crate::base::time::Civil;
use crate::index::{Entry, EntryKind};

/// An object. The fields have the order of the table above.
#[derive(Serialize)]
struct Row<'a> {
    path: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_bytes: Option<&'a [u8]>,
    r#type: &'static str,
    mode: String,
    uid: u32,
    gid: u32,
    #[serde(skip_serializing_if = "str::is_empty")]
    user: Cow<'a, str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    group: Cow<'a, str>,
    size: u64,
    mtime: String,
    nlink: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_bytes: Option<&'a [u8]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    major: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    minor: Option<u32>,
    inode: u32,
}

/// The object for `entry`, called `path`: one line, without a line feed.
pub fn object(path: &ArchivePath, entry: &Entry<'_>) -> String {
    let path = if path.is_root() {
        b"."
    } else {
        path.as_bytes()
    };
    let (r#type, target, device) = match entry.kind() {
        EntryKind::File => ("file", None, None),
        EntryKind::Directory => ("directory", None, None),
        EntryKind::Symlink(target) => ("symlink", Some(target), None),
        EntryKind::CharDevice(device) => ("char", None, Some(device)),
        EntryKind::BlockDevice(device) => ("block", None, Some(device)),
        EntryKind::Fifo => ("fifo", None, None),
    };
    let mtime = entry.mtime();
    let unless_utf8 = |bytes| str::from_utf8(bytes).is_err().then_some(bytes);
    let row = Row {
        path: String::from_utf8_lossy(path),
        path_bytes: unless_utf8(path),
        r#type,
        mode: format!("{:04o}", entry.mode()),
        uid: entry.uid(),
        gid: entry.gid(),
        user: String::from_utf8_lossy(entry.user()),
        group: String::from_utf8_lossy(entry.group()),
        size: entry.size(),
        mtime: Civil::new(mtime.seconds, mtime.nanoseconds)
            .to_rfc3339()
            .to_string(),
        nlink: entry.link_count(),
        target: target.map(String::from_utf8_lossy),
        target_bytes: target.and_then(unless_utf8),
        major: device.map(|device| device.major),
        minor: device.map(|device| device.minor),
        inode: entry.ino().0,
    };
    // Fails only for keys that are no text.
    let json = serde_json::to_string(&row).unwrap_or_default();
    // serde_json leaves DEL and C1, which are not safe for a terminal.
    let mut object = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_control() {
            write!(object, "\\u{:04x}", u32::from(character)).expect("a String takes everything");
        } else {
            object.push(character);
        }
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Ino;
    use crate::index::test_support::{file, index, member, symlink};
    use crate::tar::{Device, Member, MemberKind, Timestamp};

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
    fn control_characters_are_escaped_in_the_text() {
        let index = index(&[file("a\u{9b}\x7f\x1b", 0..0)]);
        let (path, entry) = super::super::walk(&index, Ino::ROOT, true).next().unwrap();
        assert!(object(&path, &entry).starts_with("{\"path\":\"a\\u009b\\u007f\\u001b\","));
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
