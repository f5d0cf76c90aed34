//! Arbitrary plain bytes.
//!
//! Every split of the input gives the same members. Each payload is at the offset that its member
//! names, and an index of the members survives being saved.

use bytes::Bytes;
use tarfs::index::{Builder, Locator, Options as IndexOptions, Origin, format};
use tarfs::tar::{Event, Limits, Member, Options, Parser};
use tarfs::{Extent, Plain};

use super::index::description;
use super::knobs::Knobs;

/// A parsed item, with the pieces of a payload joined.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Found {
    Member(Box<Member>),
    Payload(Vec<u8>),
    MemberEnd,
    Told(String),
    End,
    Failed(String),
}

/// Parses `bytes` at once and in pieces, and builds an index.
pub(super) fn run(bytes: &[u8]) {
    let (plain, knobs) = Knobs::split(bytes);
    let options = Options {
        ignore_zeros: knobs.flag(0),
        accepts_empty: false,
        limits: if knobs.flag(1) {
            low_limits()
        } else {
            high_limits()
        },
    };
    let found = parse(plain, plain.len().max(1), &options);
    check(&found, plain, &options.limits);
    assert!(
        found == parse(plain, knobs.push_len(), &options),
        "in pieces it is another archive"
    );
    make_index(&found, plain, knobs);
}

/// Limits that a small archive exceeds.
fn low_limits() -> Limits {
    Limits {
        entries: 20,
        size: 100 << 10,
        path_depth: 8,
        metadata_bytes: 4 << 10,
        pax_bytes: 2 << 10,
        global_bytes: 100,
        xattrs: 3,
        xattr_bytes: 300,
        name_bytes: 300,
        sparse_segments: 5,
    }
}

/// The program's limits, except those that an archive can exceed without having as many bytes.
fn high_limits() -> Limits {
    Limits {
        metadata_bytes: 16 << 20,
        ..Limits::default()
    }
}

fn parse(plain: &[u8], push_len: usize, options: &Options) -> Vec<Found> {
    let mut parser = Parser::new(options.clone());
    let mut pushes = plain.chunks(push_len);
    let mut found = Vec::new();
    loop {
        let offset = parser.offset();
        match parser.pull() {
            Ok(Event::NeedInput) => match pushes.next() {
                Some(bytes) => parser.push(Bytes::copy_from_slice(bytes)),
                None => parser.finish(),
            },
            Ok(Event::Payload(bytes)) => {
                assert!(!bytes.is_empty(), "an empty piece");
                match found.last_mut() {
                    Some(Found::Payload(payload)) => payload.extend_from_slice(&bytes),
                    _ => found.push(Found::Payload(bytes.to_vec())),
                }
            }
            Ok(Event::Member(member)) => found.push(Found::Member(member)),
            Ok(Event::MemberEnd) => found.push(Found::MemberEnd),
            Ok(Event::Warning(told)) => found.push(Found::Told(format!("{told:?}"))),
            Ok(Event::Damaged(told)) => found.push(Found::Told(format!("damaged: {told:?}"))),
            Ok(Event::End) => {
                found.push(Found::End);
                return found;
            }
            Err(error) => {
                let again = parser.pull().expect_err("errors are fused");
                assert_eq!(again, error, "errors are fused");
                found.push(Found::Failed(format!("{error:?}")));
                return found;
            }
        }
        assert!(parser.offset() >= offset, "it goes back");
        // A record gives at most a member and its end, and few diagnostics.
        assert!(found.len() <= 64 + plain.len() / 16, "out of nothing");
    }
}

/// Checks the invariants of all members.
fn check(found: &[Found], plain: &[u8], limits: &Limits) {
    let mut open: Option<&Member> = None;
    let mut end = 0;
    let mut members = 0;
    for (number, what) in found.iter().enumerate() {
        match what {
            Found::Member(member) => {
                assert!(open.is_none(), "one in another");
                assert!(
                    member.header.0 >= end,
                    "{member:?} begins in the one before"
                );
                assert!(member.payload.start() > member.header, "{member:?}");
                end = member.payload.start().0;
                members += 1;
                assert_within_limits(member, limits);
                open = Some(&**member);
            }
            Found::Payload(payload) => {
                let extent = open.expect("a member's").payload;
                let start = usize::try_from(extent.start().0).expect("read");
                assert!(
                    plain.get(start..start + payload.len()) == Some(payload),
                    "other bytes than the archive's"
                );
                assert!(payload.len() as u64 <= extent.len(), "too much");
            }
            Found::MemberEnd => {
                let member = open.take().expect("begun");
                let payload = match found.get(number - 1) {
                    Some(Found::Payload(payload)) => payload.len() as u64,
                    _ => 0,
                };
                assert_eq!(payload, member.payload.len(), "{member:?}");
                end = member.payload.end().0;
                assert!(
                    end <= plain.len() as u64,
                    "{member:?} ends behind the archive"
                );
            }
            Found::Told(_) | Found::End | Found::Failed(_) => {}
        }
    }
    assert!(members <= limits.entries);
    let sizes = found.iter().map(|what| match what {
        Found::Member(member) => member.size,
        _ => 0,
    });
    assert!(sizes.fold(0, u64::saturating_add) <= limits.size);
}

fn assert_within_limits(member: &Member, limits: &Limits) {
    assert!(member.mode <= 0o7777);
    assert!(member.mtime.nanoseconds < 1_000_000_000);
    assert!(member.name.len() as u64 <= limits.name_bytes);
    assert!(member.xattrs.len() as u64 <= limits.xattrs);
    let xattrs = member.xattrs.iter();
    let xattrs: usize = xattrs.map(|(name, value)| name.len() + value.len()).sum();
    assert!(xattrs as u64 <= limits.xattr_bytes);
    let Some(map) = &member.sparse else {
        return;
    };
    assert!(map.len() as u64 <= limits.sparse_segments);
    let mut end = 0;
    let mut stored = 0_u64;
    for segment in map {
        assert!(segment.offset >= end, "{member:?} is out of order");
        end = segment.offset.checked_add(segment.len).expect("inside");
        stored += segment.len;
    }
    assert!(end <= member.size, "{member:?} has pieces behind its end");
    assert_eq!(stored, member.payload.len(), "{member:?}");
}

/// Builds an index of the members, which must be equal after it is saved and loaded.
fn make_index(found: &[Found], plain: &[u8], knobs: Knobs) {
    let keeps_replaced = knobs.flag(3);
    let mut builder = Builder::new(IndexOptions {
        max_entries: if knobs.flag(2) { 30 } else { 1 << 16 },
        max_problems: 3,
        max_reported_problems: 0,
        keeps_replaced,
        whiteouts: None,
    });
    for what in found {
        if let Found::Member(member) = what {
            // The builder may reject a member.
            builder.add_member(member).ok();
        }
    }
    let len = plain.len() as u64;
    builder.add_span(Extent::with_len(Plain(0), len), Some(&[1]), None);
    let index = builder.finish(Origin {
        packed_bytes: len,
        plain_bytes: len,
        ..Origin::default()
    });
    let mut file = Vec::new();
    format::write(&index, &Locator::default(), b"", &mut file).expect("memory");
    let loaded = format::read(&*file, file.len() as u64).expect("just written");
    let described = description(&index);
    assert_eq!(described.unnamed, 0, "names that lead nowhere");
    if !keeps_replaced {
        assert!(described == description(&loaded), "loaded it is another");
    }
}
