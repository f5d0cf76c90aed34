//! Limits against hostile archives.

use super::*;

// Promises: hostile-memory, limit-name, limit-pax, limit-global, limit-error
#[test]
fn limits_stop_an_archive() {
    let limited = |limits: Limits, pieces: &[Vec<u8>]| {
        let options = Options {
            limits,
            ..Options::default()
        };
        read_in_pieces(&pieces.concat(), &[], options).remarks[0].clone()
    };
    let few = Limits {
        pax_bytes: 40,
        global_bytes: 8,
        name_bytes: 10,
        ..Limits::default()
    };
    let name = long(b'L', "eleven-long");
    assert!(limited(few.clone(), &[name]).contains("NameBytes"));
    let path = extension(b'x', &[("path", "eleven-long")]);
    assert!(limited(few.clone(), &[path]).contains("NameBytes"));
    let pax = extension(b'x', &[("GNU.sparse.map", &"1,".repeat(20))]);
    assert!(limited(few.clone(), &[pax]).contains("PaxBytes"));
    let global = extension(b'g', &[("path", "nine-long")]);
    assert!(limited(few, &[global]).contains("GlobalBytes"));
}

fn read_limited(limits: Limits, pieces: &[Vec<u8>]) -> Found {
    let options = Options {
        limits,
        ..Options::default()
    };
    read_in_pieces(&pieces.concat(), &[], options)
}

#[test]
fn first_member_beyond_a_total_limit_is_not_emitted() {
    let archive = [
        Block::new("d", b'5', 0).done(),
        file("a", b"12345"),
        Block::new("pax", b'2', 0).done(),
        file("b", b"678"),
        zeros(),
    ];
    let sized = |size| {
        let limits = Limits {
            size,
            ..Limits::default()
        };
        read_limited(limits, &archive)
    };
    assert_eq!(sized(8).names(), ["d", "a", "pax", "b"]);
    let short = sized(7);
    assert_eq!(short.names(), ["d", "a", "pax"]);
    assert!(short.remarks[0].starts_with("TooLarge"), "{short:?}");
    let counted = |entries| {
        let limits = Limits {
            entries,
            ..Limits::default()
        };
        read_limited(limits, &archive)
    };
    assert_eq!(counted(4).names(), ["d", "a", "pax", "b"]);
    let few = counted(3);
    assert_eq!(few.names(), ["d", "a", "pax"]);
    assert!(few.remarks[0].starts_with("TooManyEntries"), "{few:?}");
}

#[test]
fn holes_count_as_what_they_read_as() {
    let limits = Limits {
        size: 32_767,
        ..Limits::default()
    };
    let found = read_limited(limits, &[sparse_pax("1\n0\n5\n", b"hello"), zeros()]);
    assert_eq!(found.names(), Vec::<&str>::new());
    assert!(found.remarks[0].contains("total: 32768"), "{found:?}");
}

#[test]
fn sizes_that_overflow_when_added_exceed_every_limit() {
    let hole = |size: &str| {
        let keywords = [("GNU.sparse.map", "0,0"), ("GNU.sparse.size", size)];
        [extension(b'x', &keywords), file("hole", b"")].concat()
    };
    let limits = Limits {
        size: 1 << 63,
        ..Limits::default()
    };
    let most = i64::MAX.to_string();
    let found = read_limited(limits, &[hole(&most), hole(&most), hole(&most), zeros()]);
    assert_eq!(found.names(), ["hole"]);
}

// Promises: limit-components
#[test]
fn a_path_that_is_too_deep_loses_its_member_alone() {
    let limits = Limits {
        path_depth: 3,
        ..Limits::default()
    };
    let pieces = [
        file("/a//b/c/", b""),
        extension(b'x', &[("path", "a/b/c/d")]),
        file("x", b"payload"),
        extension(b'x', &[("linkpath", "a/b/c/d")]),
        Block::new("hard", b'1', 512).done(),
        extension(b'x', &[("linkpath", "a/b/c/d")]),
        Block::new("soft", b'2', 0).done(),
        file("last", b"1"),
        zeros(),
    ];
    let found = read_limited(limits, &pieces);
    assert_eq!(found.names(), ["/a//b/c/", "soft", "last"]);
    let told = found.remarks.iter().filter(|remark| {
        remark.starts_with("damaged") && remark.contains("more components in a name")
    });
    assert_eq!((told.count(), found.remarks.len()), (2, 3), "{found:?}");
}

#[test]
fn payload_of_too_deep_member_is_not_parsed_as_headers() {
    let limits = Limits {
        path_depth: 3,
        ..Limits::default()
    };
    let mut sparse = sparse_gnu();
    let last = sparse.len() - RECORD_LEN;
    sparse.truncate(last);
    sparse.extend(file("smuggled", b""));
    let deep = extension(b'x', &[("path", "a/b/c/d")]);
    let found = read_limited(limits, &[deep, sparse, file("last", b"1"), zeros()]);
    assert_eq!(found.names(), ["last"], "{found:?}");
}

// Promises: limit-metadata
#[test]
fn metadata_bytes_of_all_members_are_limited() {
    let limits = Limits {
        metadata_bytes: 10,
        ..Limits::default()
    };
    let large = "v".repeat(4097);
    let member = |value: &str| {
        let key = ("SCHILY.xattr.user.k", value);
        [extension(b'x', &[key]), file("f", b"")].concat()
    };
    let fits = read_limited(limits.clone(), &[member("v"), member(&large), zeros()]);
    assert_eq!(fits.names(), ["f", "f"]);
    let found = read_limited(limits, &[member(&large), member(&large), zeros()]);
    assert_eq!(found.names(), ["f"]);
    assert!(found.remarks[0].contains("MetadataBytes"), "{found:?}");
}
