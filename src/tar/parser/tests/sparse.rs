//! Sparse files.

use super::*;

fn pieces(numbers: &[(u64, u64)]) -> Vec<Segment> {
    let piece = |&(offset, len)| Segment { offset, len };
    numbers.iter().map(piece).collect()
}

#[test]
fn header_sparse_map_continues_in_next_records() {
    let found = read(&[sparse_gnu(), file("b", b"")]);
    let member = &found.members[0].0;
    let map = [
        (0, 512),
        (4096, 512),
        (8192, 512),
        (12288, 512),
        (20480, 512),
    ];
    assert_eq!(member.sparse, Some(pieces(&map)));
    assert_eq!((member.size, member.payload.start()), (32768, Plain(1024)));
    assert_eq!(found.names(), ["sparse", "b"]);
}

#[test]
fn payload_sparse_map_is_not_content() {
    let found = read(&[sparse_pax("2\n0\n3\n32768\n0\n", b"abc"), file("b", b"")]);
    let member = &found.members[0].0;
    assert_eq!(
        (member.sparse.clone(), member.size),
        (Some(pieces(&[(0, 3)])), 32768)
    );
    assert_eq!(found.members[0].1, b"abc");
    assert_eq!(found.names(), ["sparse", "b"]);
}

// Promises: gnu-sparse-padding
#[test]
fn pieces_follow_each_other_without_padding() {
    let keywords = [
        ("GNU.sparse.size", "4096"),
        ("GNU.sparse.numblocks", "2"),
        ("GNU.sparse.map", "0,3,512,2"),
    ];
    let found = read(&[extension(b'x', &keywords), file("f", b"abcde")]);
    let pieces = [(0, 3), (512, 2)].map(|(offset, len)| Segment { offset, len });
    assert_eq!(found.one().sparse.as_deref(), Some(&pieces[..]));
    assert_eq!(found.one().payload.len(), 5);
}

#[test]
fn a_map_in_keywords_may_be_empty() {
    let keywords = [("GNU.sparse.size", "4096"), ("GNU.sparse.map", "4096,0")];
    let found = read(&[extension(b'x', &keywords), file("hole", b"")]);
    assert_eq!(
        (found.one().size, &found.one().sparse),
        (4096, &Some(Vec::new()))
    );
}

#[test]
fn bytes_behind_the_last_piece_are_skipped() {
    let found = read(&[sparse_pax("1\n0\n3\n", &[b'x'; 2000]), file("b", b"")]);
    assert_eq!(found.members[0].1, b"xxx");
    assert_eq!(found.names(), ["sparse", "b"]);
    assert_eq!(found.remarks, ["end"]);
}

// Promises: gnu-sparse-unsound
#[test]
fn invalid_sparse_file_is_skipped_and_next_member_read() {
    let unsound = [
        "2\n0\n3\n2\n3\n",
        "1\n32767\n2\n",
        "1\n0\n9\n",
        "9\n0\n",
        "x\n",
    ];
    for map in unsound {
        let found = read(&[sparse_pax(map, b"abcdef"), file("b", b"")]);
        assert_eq!(found.names(), ["b"], "{map:?}");
        assert!(found.remarks[0].starts_with("damaged"), "{found:?}");
        assert_eq!(found.remarks[1..], ["end"], "{map:?}");
    }
}

#[test]
fn a_map_does_not_reach_beyond_its_member() {
    let map = format!("300\n{}", "1\n".repeat(254));
    let found = read(&[sparse_pax(&map, b""), file("b", b"")]);
    assert_eq!(found.names(), ["b"]);
    assert_eq!(found.remarks.len(), 2);
}
