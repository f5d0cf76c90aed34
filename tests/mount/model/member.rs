//! Random members, and the bytes of an archive of them.

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

use super::tree::{Content, Tree};
use crate::support::raw::{Archive, GNU, Header, USTAR};
use crate::support::rng::Rng;

/// A member as its archive's creator intended it.
#[derive(Clone)]
pub(super) struct Member {
    /// Components of its path, without special ones. The root has none.
    pub(super) path: Vec<Vec<u8>>,
    pub(super) what: MemberKind,
    pub(super) attributes: Attributes,
}

/// Kind of a member.
#[derive(Clone)]
pub(super) enum MemberKind {
    File(Rc<Content>),
    Directory,
    Symlink(Vec<u8>),
    /// A hard link to this path.
    HardLink(Vec<Vec<u8>>),
    Fifo,
}

/// Attributes of an entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Attributes {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: Time,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Seconds since 1970, and nanoseconds after that second.
pub(super) type Time = (i64, u32);

/// How a program writes values that do not fit into a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Dialect {
    Ustar,
    Gnu,
    Pax,
}

/// Format of a sparse file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sparse {
    OldGnu,
    Pax00,
    Pax01,
    Pax10,
}

/// Components of paths, few so that paths collide.
const NAMES: [&[u8]; 9] = [
    b"a",
    b"b",
    b"dir",
    b"two words",
    b"gr\xfcn",
    "é漢字".as_bytes(),
    b"new\nline\\",
    b"\x01\xff\xfe",
    b".hidden",
];

const MODES: [u32; 9] = [
    0o644, 0o644, 0o755, 0o600, 0o4755, 0o2711, 0o1777, 0, 0o7777,
];

/// Number of sparse map entries in the old GNU header, and in each record after it.
const MAP_IN_HEADER: usize = 4;
const MAP_IN_RECORD: usize = 21;

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = joined(&self.path);
        write!(f, "{:?} '{}'", self.what, path.escape_ascii())?;
        let Attributes {
            mode,
            uid,
            gid,
            mtime,
            xattrs,
        } = &self.attributes;
        write!(f, " {mode:o} {uid}:{gid} {mtime:?}")?;
        xattrs
            .keys()
            .try_for_each(|name| write!(f, " {}", name.escape_ascii()))
    }
}

impl fmt::Debug for MemberKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(content) => write!(f, "file of {} bytes", content.size),
            Self::Directory => write!(f, "directory"),
            Self::Symlink(target) => write!(f, "symlink to '{}'", target.escape_ascii()),
            Self::HardLink(target) => write!(f, "link to '{}'", joined(target).escape_ascii()),
            Self::Fifo => write!(f, "fifo"),
        }
    }
}

/// A path as bytes.
pub(super) fn joined(path: &[Vec<u8>]) -> Vec<u8> {
    path.join(&b'/')
}

fn index(rng: &mut Rng, end: usize) -> usize {
    usize::try_from(rng.below(end as u64)).expect("small")
}

/// One of `choices`.
pub(super) fn pick<T: Clone>(rng: &mut Rng, choices: &[T]) -> T {
    let number = index(rng, choices.len());
    choices.get(number).expect("some").clone()
}

/// Whether an event happens that has the probability 1/`times`.
pub(super) fn one_in(rng: &mut Rng, times: u64) -> bool {
    rng.below(times) == 0
}

/// A random archive: its members, and its bytes.
pub(super) fn archive(rng: &mut Rng) -> (Vec<Member>, Vec<u8>) {
    let mut tree = Tree::default();
    let (mut members, mut archive) = (Vec::new(), Archive::new());
    if one_in(rng, 2) {
        let root = Member {
            path: Vec::new(),
            what: MemberKind::Directory,
            attributes: attributes(rng, Dialect::Pax, true),
        };
        archive = written(archive, &root, Dialect::Pax, rng);
        tree.apply(&root);
        members.push(root);
    }
    for _ in 0..=rng.below(50) {
        let dialect = pick(rng, &[Dialect::Ustar, Dialect::Gnu, Dialect::Pax]);
        let member = member(rng, dialect, &tree);
        archive = written(archive, &member, dialect, rng);
        tree.apply(&member);
        members.push(member);
    }
    (members, archive.end())
}

/// A member that can follow the members of `tree`.
fn member(rng: &mut Rng, dialect: Dialect, tree: &Tree) -> Member {
    let what = match rng.below(16) {
        0..7 => MemberKind::File(Rc::new(content(rng))),
        7..11 => MemberKind::Directory,
        11..13 => MemberKind::Symlink(target(rng)),
        13 => MemberKind::HardLink(pick(rng, &tree.paths())),
        // The target may be a later member.
        14 => MemberKind::HardLink(vec![name(rng)]),
        _ => MemberKind::Fifo,
    };
    let has_xattrs = matches!(what, MemberKind::File(_) | MemberKind::Directory);
    let mut path = path(rng, tree);
    if path.is_empty() && !matches!(what, MemberKind::Directory) {
        path.push(name(rng));
    }
    Member {
        path,
        what,
        attributes: attributes(rng, dialect, has_xattrs),
    }
}

/// A path below a directory, an existing path, or a random one.
fn path(rng: &mut Rng, tree: &Tree) -> Vec<Vec<u8>> {
    match rng.below(6) {
        0 => pick(rng, &tree.paths()),
        1 => (0..=rng.below(4)).map(|_| name(rng)).collect(),
        _ => {
            let mut path = pick(rng, &tree.directories());
            path.push(name(rng));
            path
        }
    }
}

fn name(rng: &mut Rng) -> Vec<u8> {
    let mut name = pick(rng, &NAMES).to_vec();
    if one_in(rng, 12) {
        let len = 90 + index(rng, 160);
        name.resize(len, b'l');
    }
    name
}

/// Target of a symbolic link, mostly an existing path.
fn target(rng: &mut Rng) -> Vec<u8> {
    let names: Vec<_> = (0..=rng.below(3)).map(|_| name(rng)).collect();
    let path = joined(&names);
    match rng.below(8) {
        0 => [b"/", &path[..]].concat(),
        1 => [b"../", &path[..]].concat(),
        2 => b"..".to_vec(),
        3 => [&path[..], b"/./"].concat(),
        _ => path,
    }
}

fn attributes(rng: &mut Rng, dialect: Dialect, has_xattrs: bool) -> Attributes {
    let owners = [0, 0, 1000, 65534, 3_000_000_000];
    let owner = |rng: &mut Rng| match dialect {
        Dialect::Ustar => pick(rng, owners.get(..4).expect("five")),
        Dialect::Gnu | Dialect::Pax => pick(rng, &owners),
    };
    let recent = i64::try_from(rng.below(4_000_000_000)).expect("small");
    let nanos = u32::try_from(rng.below(1_000_000_000)).expect("small");
    let mtime = match dialect {
        Dialect::Ustar => (recent, 0),
        Dialect::Gnu => (recent - 2_000_000_000, 0),
        Dialect::Pax if one_in(rng, 8) => (-1, nanos),
        Dialect::Pax => (recent - 2_000_000_000, nanos),
    };
    let mut xattrs = BTreeMap::new();
    if dialect == Dialect::Pax && has_xattrs && one_in(rng, 3) {
        for _ in 0..=rng.below(3) {
            let name = pick(rng, &["user.a", "user.b.c", "user.\u{e9}", "trusted.t"]);
            let len = index(rng, 200);
            xattrs.insert(name.as_bytes().to_vec(), rng.bytes(len));
        }
    }
    Attributes {
        mode: pick(rng, &MODES),
        uid: owner(rng),
        gid: owner(rng),
        mtime,
        xattrs,
    }
}

fn content(rng: &mut Rng) -> Content {
    let len = match rng.below(24) {
        0..4 => 0,
        4..16 => index(rng, 3000),
        16..19 => 512 * index(rng, 40),
        19..23 => index(rng, 120_000),
        _ => index(rng, 2_000_000),
    };
    if len > 0 && one_in(rng, 4) {
        return sparse_content(rng, len);
    }
    let bytes = if one_in(rng, 2) {
        rng.bytes(len)
    } else {
        rng.text(len)
    };
    Content {
        size: len as u64,
        pieces: vec![(0, bytes)],
        is_sparse: false,
    }
}

/// Pieces of whole records, except the last one.
fn sparse_content(rng: &mut Rng, most: usize) -> Content {
    let mut pieces = Vec::new();
    let mut end = 0;
    let most_pieces = if one_in(rng, 3) { 40 } else { 5 };
    let count = 1 + rng.below(most_pieces);
    for number in 0..count {
        let offset = end + 512 * rng.below(100);
        let records = 1 + index(rng, most / 512 + 1).min(20);
        let cut = if number + 1 == count {
            index(rng, 512)
        } else {
            0
        };
        let bytes = rng.bytes(512 * records - cut);
        end = offset + bytes.len() as u64;
        pieces.push((offset, bytes));
    }
    Content {
        size: end + rng.below(3) * 10_000,
        pieces,
        is_sparse: true,
    }
}

/// Appends `member` to `archive`.
fn written(archive: Archive, member: &Member, dialect: Dialect, rng: &mut Rng) -> Archive {
    let mut name = joined(&member.path);
    let is_directory = matches!(member.what, MemberKind::Directory);
    if name.is_empty() || one_in(rng, 10) {
        name = [b"./", &name[..]].concat();
    }
    if is_directory && !name.ends_with(b"/") && !one_in(rng, 4) {
        name.push(b'/');
    }
    let link = match &member.what {
        MemberKind::Symlink(target) => target.clone(),
        MemberKind::HardLink(target) => joined(target),
        MemberKind::File(_) | MemberKind::Directory | MemberKind::Fifo => Vec::new(),
    };
    let kind = match &member.what {
        MemberKind::File(_) => b'0',
        MemberKind::HardLink(_) => b'1',
        MemberKind::Symlink(_) => b'2',
        MemberKind::Directory => b'5',
        MemberKind::Fifo => b'6',
    };
    let writing = MemberWriter {
        archive,
        header: Header::new("", kind),
        records: Vec::new(),
    };
    let sparse = match &member.what {
        MemberKind::File(content) if content.is_sparse => Some(Rc::clone(content)),
        _ => None,
    };
    // Only these two can represent it.
    let dialect = match (dialect, &sparse) {
        (Dialect::Ustar, Some(_)) => Dialect::Pax,
        (dialect, _) => dialect,
    };
    let writing = writing.names(dialect, &name, &link, rng);
    let writing = writing.attributes(dialect, &member.attributes);
    match (&member.what, sparse) {
        (_, Some(content)) => {
            let format = match dialect {
                Dialect::Gnu => Sparse::OldGnu,
                _ => pick(rng, &[Sparse::Pax00, Sparse::Pax01, Sparse::Pax10]),
            };
            writing.sparse(format, &content, &name)
        }
        (MemberKind::File(content), None) => writing.end(&content.stored()),
        _ => writing.end(&[]),
    }
}

/// A member under construction.
struct MemberWriter {
    archive: Archive,
    header: Header,
    /// Records of a pax header before it.
    records: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Length of a header's name field.
const NAME_LEN: usize = 100;

impl MemberWriter {
    fn record(&mut self, key: &str, value: impl AsRef<[u8]>) {
        let record = (key.as_bytes().to_vec(), value.as_ref().to_vec());
        self.records.push(record);
    }

    fn names(mut self, dialect: Dialect, name: &[u8], link: &[u8], rng: &mut Rng) -> Self {
        let split = split(name);
        let magic = if dialect == Dialect::Gnu { GNU } else { USTAR };
        self.header = self.header.magic(magic);
        match dialect {
            Dialect::Gnu => {
                for (kind, text) in [(b'K', link), (b'L', name)] {
                    if text.len() > NAME_LEN || one_in(rng, 10) && !text.is_empty() {
                        self.archive = self.archive.long(kind, text);
                    }
                }
            }
            Dialect::Ustar | Dialect::Pax => {
                if let Some((prefix, rest)) = split.filter(|_| dialect == Dialect::Ustar) {
                    self.header = self.header.put(345, prefix).put(0, rest);
                } else if name.len() > NAME_LEN || one_in(rng, 10) {
                    self.record("path", name);
                }
                if link.len() > NAME_LEN {
                    self.record("linkpath", link);
                }
            }
        }
        if split.is_none() || dialect != Dialect::Ustar {
            let cut = name.get(..NAME_LEN).unwrap_or(name);
            self.header = self.header.put(0, cut);
        }
        let cut = link.get(..NAME_LEN).unwrap_or(link);
        self.header = self.header.link(cut);
        self
    }

    fn attributes(mut self, dialect: Dialect, attributes: &Attributes) -> Self {
        let Attributes {
            mode,
            uid,
            gid,
            mtime: (seconds, nanos),
            xattrs,
        } = attributes;
        let header = self.header.clone().mode(u64::from(*mode));
        self.header = match dialect {
            Dialect::Gnu => {
                let header = header.binary(136, 12, *seconds);
                let header = header.binary(108, 8, i64::from(*uid));
                header.binary(116, 8, i64::from(*gid))
            }
            Dialect::Ustar => header
                .owner(u64::from(*uid), u64::from(*gid))
                .mtime(u64::try_from(*seconds).expect("since 1970")),
            Dialect::Pax => {
                self.record("mtime", decimal(*seconds, *nanos));
                self.record("uid", uid.to_string());
                self.record("gid", gid.to_string());
                for (name, value) in xattrs {
                    let key = [b"SCHILY.xattr.", &name[..]].concat();
                    self.records.push((key, value.clone()));
                }
                header
            }
        };
        self
    }

    /// The member with `payload`.
    fn end(self, payload: &[u8]) -> Archive {
        let archive = if self.records.is_empty() {
            self.archive
        } else {
            self.archive.pax(&self.records)
        };
        archive.add(self.header, payload)
    }

    fn sparse(mut self, format: Sparse, content: &Content, name: &[u8]) -> Archive {
        let mut map: Vec<(u64, u64)> = content
            .pieces
            .iter()
            .map(|(offset, bytes)| (*offset, bytes.len() as u64))
            .collect();
        let last_end = map.last().map_or(0, |(offset, len)| offset + len);
        if last_end < content.size {
            map.push((content.size, 0));
        }
        let stored = content.stored();
        match format {
            Sparse::OldGnu => {
                let (front, records) = old_map(&map);
                let header = self.header.put(156, "S").put(386, front);
                let header = header.octal(483, 12, content.size);
                self.header = header.size(stored.len() as u64);
                return self.end(&[records, stored].concat());
            }
            Sparse::Pax00 => {
                self.record("GNU.sparse.size", content.size.to_string());
                self.record("GNU.sparse.numblocks", map.len().to_string());
                for (offset, len) in map {
                    self.record("GNU.sparse.offset", offset.to_string());
                    self.record("GNU.sparse.numbytes", len.to_string());
                }
            }
            Sparse::Pax01 => {
                self.record("GNU.sparse.size", content.size.to_string());
                self.record("GNU.sparse.numblocks", map.len().to_string());
                let numbers = map.iter().map(|(offset, len)| format!("{offset},{len}"));
                self.record("GNU.sparse.map", numbers.collect::<Vec<_>>().join(","));
            }
            Sparse::Pax10 => {
                self.record("GNU.sparse.major", "1");
                self.record("GNU.sparse.minor", "0");
                self.record("GNU.sparse.name", name);
                self.record("GNU.sparse.realsize", content.size.to_string());
                let lines = map.iter().map(|(offset, len)| format!("{offset}\n{len}\n"));
                let mut front = format!("{}\n{}", map.len(), lines.collect::<String>());
                let padded = front.len().next_multiple_of(512);
                front.extend(std::iter::repeat_n('\0', padded - front.len()));
                return self.end(&[front.as_bytes(), &stored].concat());
            }
        }
        self.end(&stored)
    }
}

/// A map in the old GNU format: the part in the header, and the part in records after it.
fn old_map(map: &[(u64, u64)]) -> (Vec<u8>, Vec<u8>) {
    let entries = |map: &[(u64, u64)], room: usize| -> Vec<u8> {
        let entries = map
            .iter()
            .map(|(offset, len)| format!("{offset:011o}\0{len:011o}\0"));
        let mut bytes = entries.collect::<String>().into_bytes();
        bytes.resize(24 * room, 0);
        bytes
    };
    let (first, rest) = map.split_at(map.len().min(MAP_IN_HEADER));
    let mut front = entries(first, MAP_IN_HEADER);
    front.push(u8::from(!rest.is_empty()));
    let mut records = Vec::new();
    for (number, part) in rest.chunks(MAP_IN_RECORD).enumerate() {
        records.extend(entries(part, MAP_IN_RECORD));
        let is_last = (number + 1) * MAP_IN_RECORD >= rest.len();
        records.push(u8::from(!is_last));
        records.resize(records.len().next_multiple_of(512), 0);
    }
    (front, records)
}

/// A name split for ustar's two fields, if it needs and fits both.
fn split(name: &[u8]) -> Option<(&[u8], &[u8])> {
    if name.len() <= NAME_LEN {
        return None;
    }
    let slashes = name.iter().enumerate().filter(|&(_, &byte)| byte == b'/');
    let mut places = slashes.map(|(place, _)| place);
    let place = places.find(|&place| {
        (1..=155).contains(&place) && (1..=NAME_LEN).contains(&(name.len() - place - 1))
    })?;
    let (prefix, rest) = name.split_at(place);
    Some((prefix, rest.get(1..)?))
}

/// A time in pax format.
fn decimal(seconds: i64, nanos: u32) -> String {
    match (seconds, nanos) {
        (_, 0) => seconds.to_string(),
        (0.., _) => format!("{seconds}.{nanos:09}"),
        _ => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos),
    }
}
