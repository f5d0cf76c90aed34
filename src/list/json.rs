//! One JSON object a file, for programs.
//!
//! | field | value |
//! |---|---|
//! | `path` | from SOURCE on, without a leading slash; `.` for SOURCE itself |
//! | `path_bytes` | the same as numbers 0–255, only when it is not UTF-8; `path` has U+FFFD then |
//! | `type` | `file`, `directory`, `symlink`, `char`, `block`, `fifo`, `socket` |
//! | `mode` | the twelve permission bits, octal, four digits, as a string |
//! | `uid`, `gid` | numbers |
//! | `user`, `group` | names of the owners, only when they have some |
//! | `size` | bytes as a reader sees them |
//! | `atime`, `mtime`, `ctime` | seconds since 1970, with nine decimals if there is a fraction; in an archive all are `mtime` |
//! | `nlink` | number of names |
//! | `target`, `target_bytes` | of a symbolic link; as for `path` |
//! | `major`, `minor` | of a device |
//! | `fileid` | number of the file, as a mount shows it |
//! | `dirid` | number of the directory that holds the name; 0 for SOURCE itself |
//! | `offset` | of the first stored byte in the plain archive, only of files with content |

use std::io::{self, Write};

use crate::base::escape::{bytes_unless_utf8, escape_json};
use crate::tar::Timestamp;
use crate::tree::{FileKind, Item, Tree};

/// Appends the object for `item`, called `path`: one line, with a line feed.
///
/// # Errors
/// Its attributes or its target cannot be read; then nothing is appended.
pub fn write<T: Tree>(output: &mut Vec<u8>, path: &[u8], item: &Item<'_, T>) -> io::Result<()> {
    let metadata = item.metadata()?;
    let is_link = metadata.kind == FileKind::Symlink;
    let target = is_link.then(|| item.target()).transpose()?;
    let (user, group, offset) = (item.user()?, item.group()?, item.offset()?);
    output.extend_from_slice(b"{\"path\":");
    write_bytes(output, b"path_bytes", path);
    write!(
        output,
        ",\"type\":\"{}\",\"mode\":\"{:04o}\",\"uid\":{},\"gid\":{}",
        metadata.kind.name(),
        metadata.mode,
        metadata.uid,
        metadata.gid
    )?;
    for (field, name) in [("user", user), ("group", group)] {
        if let Some(name) = name {
            write!(output, ",\"{field}\":")?;
            write_text(output, &name);
        }
    }
    write!(output, ",\"size\":{}", metadata.size)?;
    let (atime, mtime, ctime) = (metadata.atime, metadata.mtime, metadata.ctime);
    for (field, time) in [("atime", atime), ("mtime", mtime), ("ctime", ctime)] {
        write!(output, ",\"{field}\":")?;
        write_time(output, time)?;
    }
    write!(output, ",\"nlink\":{}", metadata.links)?;
    if let Some(target) = target {
        output.extend_from_slice(b",\"target\":");
        write_bytes(output, b"target_bytes", &target);
    }
    if metadata.is_device() {
        let (major, minor) = metadata.device;
        write!(output, ",\"major\":{major},\"minor\":{minor}")?;
    }
    let (number, above) = (metadata.inode, item.parent());
    write!(output, ",\"fileid\":{number},\"dirid\":{above}")?;
    if let Some(offset) = offset {
        write!(output, ",\"offset\":{offset}")?;
    }
    output.extend_from_slice(b"}\n");
    Ok(())
}

/// A number without loss: negative times have their fraction below the whole seconds, too.
fn write_time(output: &mut Vec<u8>, time: Timestamp) -> io::Result<()> {
    let nanoseconds = i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds);
    if time.nanoseconds == 0 {
        return write!(output, "{}", time.seconds);
    }
    let sign = if nanoseconds < 0 { "-" } else { "" };
    let absolute = nanoseconds.unsigned_abs();
    let (whole, part) = (absolute / 1_000_000_000, absolute % 1_000_000_000);
    write!(output, "{sign}{whole}.{part:09}")
}

/// Writes `bytes` as text, and if they are not UTF-8 as numbers in another field, too.
pub(super) fn write_bytes(output: &mut Vec<u8>, field: &[u8], bytes: &[u8]) {
    write_text(output, bytes);
    if let Some(bytes) = bytes_unless_utf8(bytes) {
        output.extend_from_slice(b",\"");
        output.extend_from_slice(field);
        output.extend_from_slice(b"\":[");
        let numbers: Vec<String> = bytes.iter().map(u8::to_string).collect();
        output.extend_from_slice(numbers.join(",").as_bytes());
        output.push(b']');
    }
}

fn write_text(output: &mut Vec<u8>, bytes: &[u8]) {
    output.push(b'"');
    let is_plain = |&byte: &u8| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
    if bytes.iter().all(is_plain) {
        output.extend_from_slice(bytes);
    } else {
        let text = String::from_utf8_lossy(bytes);
        let text = text.replace('\\', "\\\\").replace('"', "\\\"");
        output.extend_from_slice(escape_json(&text).as_bytes());
    }
    output.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::test_support::{file, index, member, symlink};
    use crate::index::{Index, Ino, LazyIndex};
    use crate::tar::{Device, Member, MemberKind, Timestamp};
    use crate::tree::push_component;
    use crate::tree::{IndexTree, Name, metadata};

    /// The objects of the entries below the root, as text.
    fn texts(index: &Index) -> Vec<String> {
        let tree = IndexTree::new(LazyIndex::new(index), true);
        let (mut texts, mut left) = (Vec::new(), vec![(Ino::ROOT, Vec::new())]);
        while let Some((directory, above)) = left.pop() {
            for child in index.children_by_name(directory, 0) {
                let mut path: Vec<u8> = above.clone();
                push_component(&mut path, child.name);
                let name = Name {
                    name: &path,
                    kind: metadata(&index.entry(child.ino).expect("there")).kind,
                    inode: child.ino.0.into(),
                };
                let mut text = Vec::new();
                let item = Item::at_start(&tree, &Ino::ROOT, name);
                write(&mut text, &path, &item).expect("written");
                texts.push(String::from_utf8(text).expect("UTF-8"));
                left.push((child.ino, path));
            }
        }
        texts
    }

    fn objects(members: &[Member]) -> Vec<serde_json::Value> {
        let texts = texts(&index(members));
        let objects = texts.iter().map(|text| serde_json::from_str(text));
        objects.map(Result::unwrap).collect()
    }

    // Promises: json-path, json-type, json-mode, json-owner, json-size, json-inodes, json-offset
    #[test]
    fn json_object_of_file_has_all_fields() {
        let member = Member {
            mode: 0o4755,
            uid: 7,
            gid: 8,
            user: b"root".to_vec(),
            group: b"shadow".to_vec(),
            mtime: Timestamp {
                seconds: 1,
                nanoseconds: 2,
            },
            ..file("a", 0..5)
        };
        let expected = serde_json::json!({
            "path": "a", "type": "file", "mode": "4755", "uid": 7, "gid": 8, "user": "root", "group": "shadow",
            "size": 5,
            "atime": 1.000_000_002, "mtime": 1.000_000_002, "ctime": 1.000_000_002, "nlink": 1,
            "fileid": 2, "dirid": 0, "offset": 0
        });
        assert_eq!(objects(&[member]), [expected]);
    }

    // Promises: json-path, json-target, json-device
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

    // Promises: names-bytes, json-path, json-bytes
    #[test]
    fn names_that_are_not_utf8_come_as_bytes_too() {
        let member = Member {
            name: b"a\xff\x1b".to_vec(),
            ..file("", 0..0)
        };
        let kind = MemberKind::Symlink(b"\xfe".to_vec());
        let objects = objects(&[member, Member::new("l", kind)]);
        assert_eq!(objects[0]["path"], "a\u{fffd}\u{1b}");
        assert_eq!(objects[0]["path_bytes"], serde_json::json!([97, 255, 27]));
        assert_eq!(objects[1]["target_bytes"], serde_json::json!([254]));
    }

    // Promises: json-path
    #[test]
    fn control_characters_are_escaped_in_the_text() {
        let text = texts(&index(&[file("a\u{9b}\x7f\x1b", 0..0)])).remove(0);
        assert!(
            text.starts_with("{\"path\":\"a\\u009b\\u007f\\u001b\","),
            "{text}"
        );
    }

    // Promises: json-times
    #[test]
    fn times_keep_all_digits_before_and_after_1970() {
        for (seconds, nanoseconds, text) in [
            (0, 0, "0"),
            (12, 5, "12.000000005"),
            (-1, 0, "-1"),
            (-1, 999_999_998, "-0.000000002"),
            (-2, 500_000_000, "-1.500000000"),
        ] {
            let mut output = Vec::new();
            let time = Timestamp {
                seconds,
                nanoseconds,
            };
            write_time(&mut output, time).expect("written");
            assert_eq!(String::from_utf8(output).expect("ASCII"), text);
        }
    }
}
