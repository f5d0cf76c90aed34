//! Encodes headers of members as pax (POSIX.1-2001), as GNU tar writes them with `--format=posix`.

use std::borrow::Cow;

use super::header::{RECORD_LEN, Record};
use super::{Member, MemberKind, Timestamp};

/// Largest octal numbers of eight and of twelve bytes.
const MAX_SMALL: u64 = 0o7_777_777;
const MAX_LARGE: u64 = 0o77_777_777_777;

/// Bytes of a member's header, with its extensions before it. Its content has `member.size` bytes, holes included.
pub(crate) fn encode_header(member: &Member) -> Vec<u8> {
    let (typeflag, link, device) = match &member.kind {
        MemberKind::File => (b'0', &[][..], None),
        MemberKind::HardLink(target) => (b'1', target.as_slice(), None),
        MemberKind::Symlink(target) => (b'2', target.as_slice(), None),
        MemberKind::CharDevice(device) => (b'3', &[][..], Some(device)),
        MemberKind::BlockDevice(device) => (b'4', &[][..], Some(device)),
        MemberKind::Directory => (b'5', &[][..], None),
        MemberKind::Fifo => (b'6', &[][..], None),
    };
    let mut fields = Fields::new();
    fields.text(0, 100, "path", &member.name);
    fields.text(157, 100, "linkpath", link);
    fields.owner(265, "uname", &member.user);
    fields.owner(297, "gname", &member.group);
    fields.octal(100, 8, u64::from(member.mode & 0o7777));
    fields.small_number(108, member.uid);
    fields.small_number(116, member.gid);
    fields.size(if typeflag == b'0' { member.size } else { 0 });
    fields.time(member.mtime);
    if let Some(device) = device {
        fields.small_number(329, device.major);
        fields.small_number(337, device.minor);
    }
    // Attributes of a hard link are those of its target.
    if typeflag != b'1' {
        for (name, value) in &member.xattrs {
            fields.extension(&xattr_keyword(name), &without_ids(name, value));
        }
    }
    let mut header = extension_header(&fields.extensions);
    header.extend_from_slice(fields.finish(typeflag));
    header
}

/// Two zero records, which end an archive.
pub(crate) const END: [u8; 2 * RECORD_LEN] = [0; 2 * RECORD_LEN];

/// Bytes from the end of a content of `size` bytes to the next record.
pub(crate) fn padding(size: u64) -> usize {
    let used = usize::try_from(size % super::RECORD).unwrap_or_default();
    (RECORD_LEN - used) % RECORD_LEN
}

fn xattr_keyword(name: &[u8]) -> Vec<u8> {
    if name.starts_with(b"SCHILY.acl.") {
        return name.to_vec();
    }
    let mut keyword = b"SCHILY.xattr.".to_vec();
    for &byte in name {
        match byte {
            b'=' => keyword.extend_from_slice(b"%3D"),
            b'%' => keyword.extend_from_slice(b"%25"),
            _ => keyword.push(byte),
        }
    }
    keyword
}

/// The value of an attribute. Entries of an ACL lose the number that star appends, which GNU tar cannot read.
fn without_ids<'a>(name: &[u8], value: &'a [u8]) -> Cow<'a, [u8]> {
    if !name.starts_with(b"SCHILY.acl.") {
        return value.into();
    }
    let entries = value.split_inclusive(|byte| matches!(byte, b',' | b'\n'));
    let entries = entries.flat_map(|entry| {
        let end = entry.iter().position(|byte| matches!(byte, b',' | b'\n'));
        let (text, separator) = entry.split_at(end.unwrap_or(entry.len()));
        let fields = text.split(|&byte| byte == b':').count();
        let last = text.iter().rposition(|&byte| byte == b':');
        let id = last
            .and_then(|last| text.get(last + 1..))
            .unwrap_or_default();
        let has_id = fields == 4 && !id.is_empty() && id.iter().all(u8::is_ascii_digit);
        let kept = last.filter(|_| has_id).unwrap_or(text.len());
        text.iter().take(kept).chain(separator)
    });
    Cow::Owned(entries.copied().collect())
}

/// A header's record, and the pax records of what does not fit.
struct Fields {
    record: Record,
    extensions: Vec<u8>,
}

impl Fields {
    fn new() -> Self {
        Self {
            record: [0; RECORD_LEN],
            extensions: Vec::new(),
        }
    }

    /// The record with its type, magic and checksum.
    fn finish(&mut self, typeflag: u8) -> &Record {
        self.put(148, b"        ");
        self.put(156, &[typeflag]);
        self.put(257, b"ustar\x0000");
        let sum: u64 = self.record.iter().map(|&byte| u64::from(byte)).sum();
        self.put(148, format!("{sum:06o}\0 ").as_bytes());
        &self.record
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        if let Some(field) = self.record.get_mut(offset..offset + bytes.len()) {
            field.copy_from_slice(bytes);
        }
    }

    fn text(&mut self, offset: usize, len: usize, keyword: &str, text: &[u8]) {
        if text.len() > len {
            self.extension(keyword.as_bytes(), text);
        }
        self.put(offset, text.get(..len).unwrap_or(text));
    }

    /// The name of an owner. One that does not fit is left out of the record, because its front may be another name.
    fn owner(&mut self, offset: usize, keyword: &str, name: &[u8]) {
        let fits = name.len() <= 31;
        self.text(offset, if fits { 31 } else { 0 }, keyword, name);
    }

    fn octal(&mut self, offset: usize, len: usize, value: u64) {
        self.put(
            offset,
            format!("{value:0width$o}\0", width = len - 1).as_bytes(),
        );
    }

    /// A number of eight bytes, in base 256 if it is large. GNU tar ignores the names of owners beside numbers in
    /// extensions, and has no extension for numbers of devices.
    fn small_number(&mut self, offset: usize, value: u32) {
        if u64::from(value) <= MAX_SMALL {
            return self.octal(offset, 8, value.into());
        }
        let [a, b, c, d] = value.to_be_bytes();
        self.put(offset, &[0x80, 0, 0, 0, a, b, c, d]);
    }

    fn size(&mut self, value: u64) {
        if value > MAX_LARGE {
            self.extension(b"size", value.to_string().as_bytes());
        }
        self.octal(124, 12, value.min(MAX_LARGE));
    }

    fn time(&mut self, mtime: Timestamp) {
        let seconds = u64::try_from(mtime.seconds).ok();
        let seconds = seconds.filter(|&seconds| seconds <= MAX_LARGE);
        if seconds.is_none() || mtime.nanoseconds > 0 {
            self.extension(b"mtime", decimal_time(mtime).as_bytes());
        }
        self.octal(136, 12, seconds.unwrap_or_default());
    }

    /// Adds the record `LEN KEYWORD=VALUE`, whose length counts itself.
    fn extension(&mut self, keyword: &[u8], value: &[u8]) {
        let rest = keyword.len() + value.len() + 3;
        let mut len = rest;
        while len != rest + len.to_string().len() {
            len = rest + len.to_string().len();
        }
        self.extensions
            .extend_from_slice(format!("{len} ").as_bytes());
        self.extensions.extend_from_slice(keyword);
        self.extensions.push(b'=');
        self.extensions.extend_from_slice(value);
        self.extensions.push(b'\n');
    }
}

/// Seconds with a fraction, which counts away from zero.
fn decimal_time(time: Timestamp) -> String {
    let nanoseconds = i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds);
    let sign = if nanoseconds < 0 { "-" } else { "" };
    let all = nanoseconds.unsigned_abs();
    format!("{sign}{}.{:09}", all / 1_000_000_000, all % 1_000_000_000)
}

fn extension_header(extensions: &[u8]) -> Vec<u8> {
    if extensions.is_empty() {
        return Vec::new();
    }
    let mut fields = Fields::new();
    fields.put(0, b"././@PaxHeader");
    fields.octal(100, 8, 0o644);
    fields.octal(108, 8, 0);
    fields.octal(116, 8, 0);
    // Extensions are in memory, so their length fits.
    fields.octal(124, 12, extensions.len() as u64);
    fields.octal(136, 12, 0);
    let mut header = fields.finish(b'x').to_vec();
    header.extend_from_slice(extensions);
    header.resize(header.len() + padding(extensions.len() as u64), 0);
    header
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::base::extent::{Extent, Plain};
    use crate::tar::{Device, Event, Options, Parser};

    /// The members that the parser finds in the headers of `members`, without offsets.
    fn parsed(members: &[Member]) -> Vec<Member> {
        let mut plain = Vec::new();
        for member in members {
            plain.extend(encode_header(member));
            plain.resize(plain.len() + usize::try_from(member.size).unwrap(), 7);
            plain.resize(plain.len() + padding(member.size), 0);
        }
        plain.extend(END);
        let mut parser = Parser::new(Options::default());
        let (mut found, mut rest) = (Vec::new(), Bytes::from(plain));
        loop {
            match parser.pull().expect("a valid archive") {
                Event::NeedInput => parser.push(rest.split_to(rest.len())),
                Event::Member(member) => found.push(Member {
                    header: Plain(0),
                    payload: Extent::default(),
                    ..*member
                }),
                Event::Payload(_) | Event::MemberEnd => {}
                Event::End => return found,
                event => panic!("{event:?}"),
            }
        }
    }

    fn every_kind() -> Vec<Member> {
        let device = Device { major: 8, minor: 1 };
        vec![
            Member::new("dir/", MemberKind::Directory),
            Member {
                size: 1000,
                mode: 0o4755,
                ..Member::new("file", MemberKind::File)
            },
            Member::new("hard", MemberKind::HardLink(b"file".to_vec())),
            Member::new("link", MemberKind::Symlink(b"/else where".to_vec())),
            Member::new("char", MemberKind::CharDevice(device)),
            Member::new("block", MemberKind::BlockDevice(device)),
            Member::new("fifo", MemberKind::Fifo),
        ]
    }

    // Promises: shard-tar
    #[test]
    fn parser_reads_encoded_members_of_every_kind() {
        assert_eq!(parsed(&every_kind()), every_kind());
    }

    // Promises: shard-tar
    #[test]
    fn parser_reads_values_that_do_not_fit_a_record() {
        for len in [31, 99, 100, 101, 4000] {
            let time = |seconds, nanoseconds| Timestamp {
                seconds,
                nanoseconds,
            };
            let device = Device {
                major: 5_000_000,
                minor: u32::MAX,
            };
            let name = vec![0xff; len];
            let kinds = [
                MemberKind::Symlink(name.clone()),
                MemberKind::HardLink(name.clone()),
                MemberKind::CharDevice(device),
            ];
            let times = [time(-1, 500_000_000), time(1 << 40, 0), time(7, 1)];
            let members = kinds.into_iter().zip(times).map(|(kind, mtime)| Member {
                mtime,
                uid: 3_000_000,
                gid: u32::MAX - 1,
                user: vec![b'u'; len],
                group: vec![b'g'; len],
                ..Member::new(name.clone(), kind)
            });
            let members: Vec<_> = members.collect();
            // The name of an owner counts only in the record.
            let owner = |name: Vec<u8>| if len <= 31 { name } else { Vec::new() };
            let expected = members.clone().into_iter().map(|member| Member {
                user: owner(member.user),
                group: owner(member.group),
                ..member
            });
            assert_eq!(parsed(&members), expected.collect::<Vec<_>>());
        }
    }

    // Promises: shard-tar
    #[test]
    fn parser_reads_encoded_attributes() {
        let attribute = |name: &str, value: &[u8]| (name.as_bytes().to_vec(), value.to_vec());
        let member = Member {
            xattrs: vec![
                attribute("user.a=%3D", b"\0\n="),
                attribute("user.empty", b""),
                attribute("SCHILY.acl.access", b"user::rw-"),
            ],
            ..Member::new("a", MemberKind::File)
        };
        assert_eq!(parsed(std::slice::from_ref(&member)), [member]);
    }

    // Promises: shard-tar
    #[test]
    fn numbers_of_acl_entries_are_left_out() {
        for (name, value, expected) in [
            (
                "SCHILY.acl.access",
                "user::rwx,user:lisa:r-x:502,group::r-x,group:42:r--:42,mask::r-x",
                "user::rwx,user:lisa:r-x,group::r-x,group:42:r--,mask::r-x",
            ),
            (
                "SCHILY.acl.default",
                "user:a:rwx\t#effective:r--\nuser:b:r--:7\n",
                "user:a:rwx\t#effective:r--\nuser:b:r--\n",
            ),
            ("user.a", "user:lisa:r-x:502", "user:lisa:r-x:502"),
        ] {
            let found = without_ids(name.as_bytes(), value.as_bytes());
            assert_eq!(found, expected.as_bytes(), "{name}");
        }
    }

    #[test]
    fn length_of_an_extension_counts_its_own_digits() {
        for len in 0..200 {
            let mut fields = Fields::new();
            fields.extension(b"k", &vec![b'v'; len]);
            let text = String::from_utf8(fields.extensions).unwrap();
            let (count, _) = text.split_once(' ').unwrap();
            assert_eq!(count.parse(), Ok(text.len()));
        }
    }
}
