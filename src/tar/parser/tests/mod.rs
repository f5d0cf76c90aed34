//! Tests of the parser.

mod limits;
mod sparse;

use proptest::prelude::*;

use super::*;
use crate::base::extent::Extent;
use crate::tar::{Device, MemberKind, Segment, Timestamp};

/// A header under construction, by default ustar.
#[derive(Clone)]
struct Block(Record);

impl Block {
    fn new(name: &str, flag: u8, size: usize) -> Self {
        Self([0; RECORD_LEN])
            .put(0, name.as_bytes())
            .put(100, b"0000644\0")
            .put(108, b"0001750\0")
            .put(116, b"0001751\0")
            .put(124, format!("{size:011o}\0").as_bytes())
            .put(136, b"00000000100\0")
            .put(156, &[flag])
            .put(257, b"ustar\x0000")
    }

    fn gnu(name: &str, flag: u8, size: usize) -> Self {
        Self::new(name, flag, size).put(257, b"ustar  \0")
    }

    fn put(mut self, at: usize, bytes: &[u8]) -> Self {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    fn done(self) -> Vec<u8> {
        let summed = self.put(148, b"        ");
        let sum: u32 = summed.0.iter().map(|&byte| u32::from(byte)).sum();
        summed
            .put(148, format!("{sum:06o}\0 ").as_bytes())
            .0
            .to_vec()
    }

    fn with(self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = self.done();
        bytes.extend_from_slice(payload);
        bytes.resize(bytes.len().next_multiple_of(RECORD_LEN), 0);
        bytes
    }
}

fn file(name: &str, payload: &[u8]) -> Vec<u8> {
    Block::new(name, b'0', payload.len()).with(payload)
}

fn extension(flag: u8, keywords: &[(&str, &str)]) -> Vec<u8> {
    let mut body = String::new();
    for (key, value) in keywords {
        let rest = format!(" {key}={value}\n");
        let mut len = rest.len() + 1;
        while format!("{len}{rest}").len() > len {
            len += 1;
        }
        body.extend([len.to_string(), rest]);
    }
    Block::new("pax", flag, body.len()).with(body.as_bytes())
}

fn long(flag: u8, name: &str) -> Vec<u8> {
    let body = format!("{name}\0");
    Block::gnu("././@LongLink", flag, body.len()).with(body.as_bytes())
}

fn zeros() -> Vec<u8> {
    vec![0; 2 * RECORD_LEN]
}

fn junk() -> Vec<u8> {
    vec![b'j'; RECORD_LEN]
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Found {
    members: Vec<(Member, Vec<u8>)>,
    remarks: Vec<String>,
}

impl Found {
    fn names(&self) -> Vec<&str> {
        let names = self.members.iter().map(|(member, _)| &member.name);
        names
            .map(|name| std::str::from_utf8(name).unwrap())
            .collect()
    }

    fn one(&self) -> &Member {
        assert_eq!(
            (self.members.len(), &self.remarks[..]),
            (1, &["end".to_owned()][..])
        );
        &self.members[0].0
    }
}

/// Parses an archive that arrives in pieces of these lengths, in turn.
fn read_in_pieces(archive: &[u8], lens: &[usize], options: Options) -> Found {
    let mut parser = Parser::new(options);
    let mut rest = Bytes::copy_from_slice(archive);
    let mut lens = lens.iter().cycle();
    let mut found = Found::default();
    loop {
        match parser.pull() {
            Ok(Event::NeedInput) if rest.is_empty() => parser.finish(),
            Ok(Event::NeedInput) => {
                let len = lens.next().map_or(rest.len(), |&len| len.min(rest.len()));
                parser.push(rest.split_to(len));
            }
            Ok(Event::Member(member)) => found.members.push((*member, Vec::new())),
            Ok(Event::Payload(bytes)) => {
                assert!(!bytes.is_empty());
                found
                    .members
                    .last_mut()
                    .unwrap()
                    .1
                    .extend_from_slice(&bytes);
            }
            Ok(Event::MemberEnd) => {
                let (member, payload) = found.members.last().unwrap();
                assert_eq!(member.payload.len(), payload.len() as u64);
                assert_eq!(member_bytes(archive, member), payload);
            }
            Ok(Event::Warning(warning)) => found.remarks.push(format!("warning {warning:?}")),
            Ok(Event::Damaged(warning)) => found.remarks.push(format!("damaged {warning:?}")),
            Ok(Event::End) => {
                found.remarks.push("end".to_owned());
                return found;
            }
            Err(error) => {
                assert_eq!(parser.pull().err(), Some(error.clone()));
                found.remarks.push(format!("{:?}", error.cause));
                return found;
            }
        }
    }
}

fn member_bytes<'a>(archive: &'a [u8], member: &Member) -> &'a [u8] {
    let at = |offset: Plain| usize::try_from(offset.0).unwrap();
    &archive[at(member.payload.start())..at(member.payload.end())]
}

fn read(pieces: &[Vec<u8>]) -> Found {
    read_in_pieces(&pieces.concat(), &[], Options::default())
}

#[test]
fn a_plain_member_has_all_its_fields() {
    let header = Block::new("name", b'0', 5)
        .put(265, b"me")
        .put(297, b"us")
        .put(345, b"dir");
    let found = read(&[header.with(b"hello"), zeros()]);
    let expected = Member {
        header: Plain(0),
        payload: Extent::with_len(Plain(512), 5),
        name: b"dir/name".to_vec(),
        kind: MemberKind::File,
        mode: 0o644,
        uid: 0o1750,
        gid: 0o1751,
        user: b"me".to_vec(),
        group: b"us".to_vec(),
        mtime: Timestamp {
            seconds: 64,
            nanoseconds: 0,
        },
        size: 5,
        sparse: None,
        xattrs: Vec::new(),
        has_global_keywords: false,
    };
    assert_eq!(found.one(), &expected);
    assert_eq!(found.members[0].1, b"hello");
}

#[test]
fn payloads_share_the_pushed_bytes() {
    let archive = Bytes::from([file("a", b"hello"), zeros()].concat());
    let mut parser = Parser::new(Options::default());
    parser.push(archive.clone());
    assert!(matches!(parser.pull(), Ok(Event::Member(_))));
    let Ok(Event::Payload(payload)) = parser.pull() else {
        panic!("a payload follows its member");
    };
    assert_eq!(payload.as_ptr(), archive[RECORD_LEN..].as_ptr());
    assert_eq!(parser.offset(), Plain(517));
}

// Promises: types-flags
#[test]
fn typeflags_map_to_kinds() {
    let device = Device { major: 1, minor: 3 };
    let kinds = [
        (b'0', MemberKind::File),
        (0, MemberKind::File),
        (b'7', MemberKind::File),
        (b'S', MemberKind::File),
        (b'1', MemberKind::HardLink(b"to".to_vec())),
        (b'2', MemberKind::Symlink(b"to".to_vec())),
        (b'3', MemberKind::CharDevice(device)),
        (b'4', MemberKind::BlockDevice(device)),
        (b'5', MemberKind::Directory),
        (b'D', MemberKind::Directory),
        (b'6', MemberKind::Fifo),
    ];
    for (flag, kind) in kinds {
        let header = Block::new("name", flag, 0).put(157, b"to");
        let header = header.put(329, b"0000001\0").put(337, b"0000003\0");
        assert_eq!(read(&[header.done(), zeros()]).one().kind, kind);
    }
}

// Promises: types-flags
#[test]
fn a_trailing_slash_makes_a_file_a_directory() {
    for flag in [0, b'0', b'7'] {
        let found = read(&[Block::new("name/", flag, 0).done(), zeros()]);
        assert_eq!(found.one().kind, MemberKind::Directory);
    }
    let unknown = Block::new("name/", b'Q', 5).with(b"hello");
    let sparse = Block::new("name/", b'S', 5).with(b"hello");
    for archive in [unknown, sparse] {
        let found = read(&[archive, zeros()]);
        assert_eq!(found.members[0].0.kind, MemberKind::File);
        assert_eq!(found.members[0].1, b"hello");
    }
}

// Promises: limit-pax
#[test]
fn large_values_without_effect_do_not_end_an_archive() {
    let dumpdir = extension(b'x', &[("GNU.dumpdir", &"Y".repeat(17 << 20))]);
    let fork = "f".repeat(5 << 20);
    let attribute = ("SCHILY.xattr.com.apple.ResourceFork", &*fork);
    let fork = extension(b'x', &[attribute, ("path", "renamed")]);
    let archive = [dumpdir, file("a", b"1"), fork, file("b", b"2"), zeros()];
    let found = read(&archive);
    assert_eq!(found.names(), ["a", "renamed"]);
    assert_eq!(found.remarks.len(), 2, "{:?}", found.remarks);
    assert!(found.remarks[0].contains("com.apple.ResourceFork"));
}

// Promises: hardlink-content
#[test]
fn only_files_have_payloads_whatever_their_headers_say() {
    for flag in *b"123456" {
        let found = read(&[Block::new("a", flag, 1024).done(), file("b", b""), zeros()]);
        assert_eq!(found.names(), ["a", "b"]);
        assert_eq!(found.members[0].0.size, 0);
    }
}

// Promises: types-flags
#[test]
fn unknown_types_are_files_with_a_warning() {
    let found = read(&[Block::new("a", b'Q', 5).with(b"hello"), zeros()]);
    assert_eq!(found.members[0].0.kind, MemberKind::File);
    assert_eq!(found.members[0].1, b"hello");
    assert!(found.remarks[0].starts_with("warning"), "{found:?}");
}

// Promises: types-flags
#[test]
fn a_dumpdir_is_a_directory_without_payload() {
    let dumpdir = Block::gnu("d/", b'D', 6).with(b"Ya\0Yb\0");
    let found = read(&[dumpdir, file("b", b""), zeros()]);
    assert_eq!(found.names(), ["d/", "b"]);
    assert_eq!(found.members[0].1, b"");
}

// Promises: types-volumes
#[test]
fn volume_labels_are_no_members_and_continued_files_are_lost() {
    let label = Block::gnu("label", b'V', 5).with(b"hello");
    let found = read(&[label, file("b", b""), zeros()]);
    assert_eq!((found.names(), found.remarks.len()), (vec!["b"], 1));
    let continued = Block::gnu("c", b'M', 5).with(b"hello");
    let found = read(&[continued, file("b", b""), zeros()]);
    assert_eq!(found.names(), ["b"]);
    assert!(found.remarks[0].starts_with("damaged"), "{found:?}");
}

#[test]
fn long_names_and_pax_names_come_before_the_header() {
    let archive = [
        long(b'K', "target"),
        long(b'L', "long"),
        Block::gnu("s", b'2', 0).done(),
    ];
    let found = read(&archive);
    assert_eq!(found.one().name, b"long");
    assert_eq!(found.one().kind, MemberKind::Symlink(b"target".to_vec()));
    assert_eq!(found.one().header, Plain(0));

    let pax = extension(b'x', &[("path", "pax")]);
    let found = read(&[pax, long(b'L', "long"), file("a", b""), file("b", b"")]);
    assert_eq!(found.names(), ["pax", "b"]);
    assert_eq!(found.members[1].0.header, Plain(2560));
}

// Promises: types-headers
#[test]
fn of_two_pax_headers_the_last_counts_alone() {
    let first = extension(b'x', &[("path", "first"), ("uid", "7")]);
    let second = extension(b'X', &[("gid", "8")]);
    let found = read(&[first, second, file("a", b"")]);
    let member = found.one();
    assert_eq!(
        (&member.name[..], member.uid, member.gid),
        (&b"a"[..], 0o1750, 8)
    );
}

// Promises: gnu-global
#[test]
fn global_headers_add_up_and_give_way_to_local_ones() {
    let found = read(&[
        extension(b'g', &[("uid", "7"), ("gid", "7")]),
        extension(b'g', &[("gid", "8")]),
        file("a", b""),
        extension(b'x', &[("uid", "9")]),
        file("b", b""),
        extension(b'x', &[("gid", "")]),
        file("c", b""),
    ]);
    let owner = |number: usize| {
        let member = &found.members[number].0;
        (member.uid, member.gid)
    };
    assert_eq!(
        [owner(0), owner(1), owner(2)],
        [(7, 8), (9, 8), (7, 0o1751)]
    );
    assert_eq!(found.members[0].0.header, Plain(2048));
}

// Promises: hostile-sizes
#[test]
fn the_pax_size_wins_but_not_for_extensions_in_between() {
    let archive = [
        extension(b'x', &[("size", "1024")]),
        long(b'L', "long"),
        Block::new("a", b'0', 5).done(),
        file("inside", b""),
        file("too", b""),
        file("b", b""),
    ];
    let found = read(&archive);
    assert_eq!(found.names(), ["long", "b"]);
    assert_eq!(found.members[0].0.size, 1024);
}

#[test]
fn numbers_beyond_octal_are_read() {
    let header = Block::new("a", b'0', 0)
        .put(108, b"\x80\0\0\0\xff\xff\xff\xfe")
        .put(136, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe");
    let found = read(&[header.done()]);
    assert_eq!(found.one().uid, 0xffff_fffe);
    assert_eq!(found.one().mtime.seconds, -2);
}

#[test]
fn invalid_fields_damage_a_member_but_keep_it() {
    let header = Block::new("a", b'0', 0).put(108, b"zzz").put(136, b"zzz");
    let found = read(&[header.done()]);
    let member = &found.members[0].0;
    assert_eq!((member.uid, member.mtime.seconds), (u32::MAX, -1));
    assert_eq!(found.remarks.len(), 3);
    assert!(found.remarks[0].starts_with("damaged"), "{found:?}");
}

// Promises: damaged-header
#[test]
fn bad_records_are_skipped_and_reported_once() {
    let pax = extension(b'x', &[("path", "lost")]);
    let found = read(&[file("a", b""), pax, junk(), junk(), file("b", b""), junk()]);
    assert_eq!(found.names(), ["a", "b"]);
    let damaged = found
        .remarks
        .iter()
        .filter(|remark| remark.starts_with("damaged"));
    assert_eq!(damaged.count(), 2);
    assert_eq!(found.remarks.last().unwrap(), "end");
}

#[test]
fn invalid_size_makes_a_header_bad() {
    let header = Block::new("a", b'0', 0).put(124, &[0xff; 12]);
    let found = read(&[header.done(), file("b", b""), zeros()]);
    assert_eq!(found.names(), ["b"]);
    assert!(found.remarks[0].starts_with("damaged"), "{found:?}");
}

#[test]
fn size_of_a_hard_link_is_ignored() {
    let link = Block::new("a", b'1', 0).put(124, &[0xff; 12]);
    assert_eq!(read(&[link.done(), zeros()]).one().size, 0);
}

// Promises: gnu-searched
#[test]
fn stream_without_leading_header_is_not_tar() {
    for bytes in [
        vec![],
        b"abc".to_vec(),
        junk(),
        [junk(), file("a", b"")].concat(),
    ] {
        assert_eq!(read(&[bytes]).remarks, ["NotTar"]);
    }
}

#[test]
fn an_archive_of_zeros_is_empty() {
    assert_eq!(read(&[zeros()]).remarks, ["end"]);
}

#[test]
fn zero_records_end_an_archive() {
    let found = read(&[file("a", b""), zeros(), file("b", b"")]);
    assert_eq!((found.names(), found.remarks.len()), (vec!["a"], 1));
    let lone = vec![0; RECORD_LEN];
    for behind in [vec![], file("b", b""), junk()] {
        let found = read(&[file("a", b""), lone.clone(), behind]);
        assert_eq!(found.names(), ["a"]);
        assert!(found.remarks[0].contains("lone zero record"), "{found:?}");
        assert!(found.remarks[0].contains("plain 512"), "{found:?}");
    }
    assert_eq!(read(&[file("a", b"")]).remarks, ["end"]);
}

#[test]
fn zero_records_can_be_ignored() {
    let options = Options {
        ignore_zeros: true,
        ..Options::default()
    };
    let archive = [file("a", b""), zeros(), file("b", b""), zeros()].concat();
    let found = read_in_pieces(&archive, &[], options);
    assert_eq!((found.names(), found.remarks.len()), (vec!["a", "b"], 1));
}

// Promises: gnu-cut-header
#[test]
fn truncated_archive_error_has_the_offset() {
    let archive = [extension(b'x', &[("path", "p")]), file("a", &[b'x'; 700])].concat();
    let cut = |len: usize| {
        let found = read(&[archive[..len].to_vec()]);
        (found.members.len(), found.remarks[0].clone())
    };
    assert_eq!(cut(100), (0, "NotTar".to_owned()));
    assert_eq!(cut(512), (0, "Truncated(Extension)".to_owned()));
    assert_eq!(cut(530), (0, "Truncated(Extension)".to_owned()));
    assert_eq!(cut(1024), (0, "Truncated(Extension)".to_owned()));
    assert_eq!(cut(1025), (0, "Truncated(Header)".to_owned()));
    assert_eq!(cut(1536), (1, "Truncated(Payload)".to_owned()));
    assert_eq!(cut(2235), (1, "Truncated(Payload)".to_owned()));
    assert_eq!(cut(2236), (1, "Truncated(Padding)".to_owned()));
    assert_eq!(cut(2560), (1, "end".to_owned()));
}

#[test]
fn a_payload_that_is_whole_ends_its_member_even_without_padding() {
    let mut parser = Parser::new(Options::default());
    parser.push(Bytes::from(Block::new("a", b'0', 1).done()));
    assert!(matches!(parser.pull(), Ok(Event::Member(_))));
    assert!(matches!(parser.pull(), Ok(Event::NeedInput)));
    parser.push(Bytes::from_static(b"x"));
    assert!(matches!(parser.pull(), Ok(Event::Payload(_))));
    assert!(matches!(parser.pull(), Ok(Event::NeedInput)));
    parser.finish();
    assert!(matches!(parser.pull(), Ok(Event::MemberEnd)));
    assert!(parser.pull().is_err());
}

fn archive() -> Vec<u8> {
    [
        extension(b'g', &[("comment", "hello"), ("uname", "someone")]),
        file("a", b"hello"),
        extension(b'x', &[("mtime", "-1.5"), ("SCHILY.xattr.user.k", "v")]),
        file("b", &[b'b'; 1500]),
        junk(),
        long(b'L', "long"),
        Block::gnu("s", b'2', 0).put(157, b"to").done(),
        sparse_gnu(),
        sparse_pax("2\n0\n3\n32768\n0\n", b"abc"),
        Block::new("d/", b'5', 0).done(),
        zeros(),
    ]
    .concat()
}

proptest! {
    #[test]
    fn events_do_not_depend_on_push_boundaries(
        lens in prop::collection::vec(1_usize..1500, 1..20),
        cut in 0..archive().len(),
    ) {
        let archive = &archive()[..cut];
        let whole = read_in_pieces(archive, &[], Options::default());
        let pieces = read_in_pieces(archive, &lens, Options::default());
        prop_assert_eq!(whole, pieces);
    }

    #[test]
    fn flipped_bytes_neither_panic_nor_loop(
        flips in prop::collection::vec((0..archive().len(), any::<u8>()), 1..20),
        healed: bool,
    ) {
        let mut archive = archive();
        for (at, byte) in flips {
            archive[at] = byte;
            if healed {
                heal(&mut archive, at);
            }
        }
        read_in_pieces(&archive, &[], Options::default());
    }
}

/// Corrects the checksum of the record around `at`, so that the parser reads it.
fn heal(archive: &mut [u8], at: usize) {
    let start = at - at % RECORD_LEN;
    if let Some(record) = archive[start..].first_chunk_mut::<RECORD_LEN>() {
        let healed = Block(*record).done();
        record.copy_from_slice(&healed);
    }
}

#[test]
fn parser_that_needs_input_holds_no_buffer() {
    let pool = crate::base::buffer_pool::BufferPool::new(RECORD);
    let mut record = pool.acquire(RECORD_LEN).expect("open");
    record.copy_from_slice(&Block::new("a", b'x', 1).done());
    let mut parser = Parser::new(Options::default());
    parser.push(record.freeze());
    while !matches!(parser.pull(), Ok(Event::NeedInput)) {}
    assert_eq!(pool.used_bytes(), 0);
}

fn sparse_gnu() -> Vec<u8> {
    let piece = |offset: u64| format!("{offset:011o}\0{:011o}\0", 512);
    let mut header = Block::gnu("sparse", b'S', 5 * 512);
    for number in 0..4_usize {
        header = header.put(386 + 24 * number, piece(number as u64 * 4096).as_bytes());
    }
    let header = header.put(482, b"\x01").put(483, b"00000100000\0");
    let behind = Block([0; RECORD_LEN]).put(0, piece(5 * 4096).as_bytes());
    [header.done(), behind.0.to_vec(), vec![b'q'; 5 * 512]].concat()
}

fn sparse_pax(map: &str, payload: &[u8]) -> Vec<u8> {
    let keywords = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", "sparse"),
        ("GNU.sparse.realsize", "32768"),
    ];
    let mut stored = map.as_bytes().to_vec();
    stored.resize(map.len().next_multiple_of(RECORD_LEN), 0);
    stored.extend_from_slice(payload);
    [
        extension(b'x', &keywords),
        file("GNUSparseFile.0/sparse", &stored),
    ]
    .concat()
}
