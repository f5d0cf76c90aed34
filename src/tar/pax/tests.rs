//! Tests of the keywords.

use super::body::MAX_PREFIX_BYTES;
use super::*;

fn read(body: &[u8]) -> (Keywords, Vec<Note>) {
    let (mut keywords, mut notes) = (Keywords::default(), Vec::new());
    let read = keywords.read(body, &Limits::default(), &mut notes);
    assert_eq!(read, Ok(()));
    (keywords, notes)
}

// Promises: gnu-pax-unknown, gnu-pax-known
#[test]
fn unknown_keywords_are_ignored_in_silence_and_star_s_are_known() {
    let body = b"17 comment=a b c\n21 SCHILY.devmajor=8\n21 SCHILY.devminor=1\n";
    let (keywords, notes) = read(body);
    assert_eq!((keywords.major, keywords.minor), (Some(8), Some(1)));
    assert!(notes.is_empty(), "{notes:?}");
}

#[test]
fn values_may_hold_equal_signs_newlines_and_nuls() {
    let (keywords, notes) = read(b"30 SCHILY.xattr.user.k=a=b\nc\0\n9 path=x\n");
    assert_eq!(
        keywords.xattrs,
        [(b"user.k".to_vec(), b"a=b\nc\0".to_vec())]
    );
    assert_eq!(keywords.path, Some(b"x".to_vec()));
    assert_eq!(notes, []);
}

#[test]
fn malformed_framing_keeps_what_came_before() {
    let malformed: [&[u8]; 8] = [
        b"9 path=x\nzz",
        b"9 path=x\n6 abc\n",
        b"9 path=x\n99 path=y\n",
        b"9 path=x\n8 path=y",
        b"9 path=x\n12 path\0=xyz\n",
        b"9 path=x\n0 path=y\n",
        b"9 path=x\n99999999999999999999999 path=y\n",
        b"9 path=x\n5path\n",
    ];
    for body in malformed {
        let (keywords, notes) = read(body);
        assert_eq!(keywords.path, Some(b"x".to_vec()), "{body:?}");
        assert!(
            matches!(notes[..], [Note::Damaged(_)]),
            "{body:?} {notes:?}"
        );
    }
}

#[test]
fn a_nul_ends_the_body() {
    let (keywords, notes) = read(b"9 path=x\n\0\0garbage");
    assert_eq!(keywords.path, Some(b"x".to_vec()));
    assert_eq!(notes, []);
}

// Promises: gnu-pax-empty
#[test]
fn an_empty_value_deletes_what_was_set() {
    let (keywords, notes) = read(b"9 path=x\n8 path=\n8 uid=7\n7 uid=\n");
    assert_eq!((keywords.path, keywords.uid), (None, None));
    assert_eq!(notes, []);
}

#[test]
fn an_empty_extended_attribute_is_one() {
    let (keywords, _) = read(b"24 SCHILY.xattr.user.k=\n");
    assert_eq!(keywords.xattrs, [(b"user.k".to_vec(), Vec::new())]);
}

#[test]
fn numbers_out_of_range_leave_the_field_alone() {
    let (keywords, notes) = read(b"18 uid=5000000000\n9 gid=-1\n28 size=9223372036854775808\n");
    assert_eq!(
        (keywords.uid, keywords.gid, keywords.size),
        (None, None, None)
    );
    assert_eq!(notes.len(), 3);
}

#[test]
fn names_end_at_a_nul() {
    let (keywords, _) = read(b"16 path=foo\0bar\n");
    assert_eq!(keywords.path, Some(b"foo".to_vec()));
}

#[test]
fn times_are_rounded_down_to_a_nanosecond() {
    let at = |seconds, nanoseconds| {
        Some(Timestamp {
            seconds,
            nanoseconds,
        })
    };
    assert_eq!(time(b"1"), at(1, 0));
    assert_eq!(time(b"1."), at(1, 0));
    assert_eq!(time(b"1.5"), at(1, 500_000_000));
    assert_eq!(time(b"1.1234567899"), at(1, 123_456_789));
    assert_eq!(time(b"-1.5"), at(-2, 500_000_000));
    assert_eq!(time(b"-0.25"), at(-1, 750_000_000));
    assert_eq!(time(b"-1.1234567891"), at(-2, 876_543_210));
    assert_eq!(time(b"-0.9999999999"), at(-1, 0));
    assert_eq!(time(b"1e3"), at(1, 0));
    assert_eq!(time(b"-9223372036854775808"), at(i64::MIN, 0));
    for none in [&b""[..], b".5", b"+1", b" 1", b"-", b"9223372036854775808"] {
        assert_eq!(time(none), None, "{none:?}");
    }
}

// Promises: gnu-pax-known
#[test]
fn both_xattr_keywords_set_the_same_attribute() {
    let body = b"29 SCHILY.xattr.user.a%3Db=1\n34 LIBARCHIVE.xattr.user.a%3Db=Mg\n";
    let (keywords, notes) = read(body);
    assert_eq!(notes, []);
    assert_eq!(keywords.xattrs, [(b"user.a=b".to_vec(), b"2".to_vec())]);
}

#[test]
fn base64_is_read_with_and_without_padding() {
    let decoded = |text: &[u8]| BASE64.decode(text).ok();
    assert_eq!(decoded(b"aGVsbG8="), Some(b"hello".to_vec()));
    assert_eq!(decoded(b"aGVsbG8"), Some(b"hello".to_vec()));
    assert_eq!(decoded(b"aGVsbG9"), Some(b"hello".to_vec()));
    assert_eq!(decoded(b"+/9A"), Some(vec![0xfb, 0xff, 0x40]));
    assert_eq!(decoded(b""), Some(Vec::new()));
    for none in [&b"a"[..], b"a===", b"a b=", b"=aaa"] {
        assert_eq!(decoded(none), None, "{none:?}");
    }
}

#[test]
fn an_selinux_context_ends_in_a_nul() {
    let (keywords, _) = read(b"28 RHT.security.selinux=ctx\n");
    let context = (b"security.selinux".to_vec(), b"ctx\0".to_vec());
    assert_eq!(keywords.xattrs, [context]);
}

#[test]
fn acls_stay_text_under_their_keyword() {
    let (keywords, _) = read(b"31 SCHILY.acl.access=user::rwx\n");
    let acl = (b"SCHILY.acl.access".to_vec(), b"user::rwx".to_vec());
    assert_eq!(keywords.xattrs, [acl]);
}

// Promises: limit-xattrs
#[test]
fn extended_attributes_beyond_a_limit_are_left_out() {
    let body = b"25 SCHILY.xattr.user.a=1\n25 SCHILY.xattr.user.b=1\n9 path=x\n";
    let names = |limits: Limits| {
        let (mut keywords, mut notes) = (Keywords::default(), Vec::new());
        assert_eq!(keywords.read(body, &limits, &mut notes), Ok(()));
        assert_eq!(keywords.path, Some(b"x".to_vec()));
        let names = keywords.xattrs.into_iter().map(|(name, _)| name);
        (names.collect::<Vec<_>>().concat(), notes)
    };
    let left_out =
        Note::Warning("leaving out the extended attribute user.b, which is too large".to_owned());
    let attributes = |xattrs| Limits {
        xattrs,
        ..Limits::default()
    };
    assert_eq!(
        names(attributes(1)),
        (b"user.a".to_vec(), vec![left_out.clone()])
    );
    assert_eq!(names(attributes(2)), (b"user.auser.b".to_vec(), vec![]));
    // Names count as well as values.
    let bytes = |xattr_bytes| Limits {
        xattr_bytes,
        ..Limits::default()
    };
    assert_eq!(names(bytes(13)), (b"user.a".to_vec(), vec![left_out]));
    assert_eq!(names(bytes(14)), (b"user.auser.b".to_vec(), vec![]));
}

// Promises: xattr-impossible
#[test]
fn value_too_long_for_linux_is_left_out() {
    let attribute = |len: usize| {
        let rest = [&b" SCHILY.xattr.user.a="[..], &vec![b'x'; len], b"\n"].concat();
        let body = [(rest.len() + 5).to_string().into_bytes(), rest].concat();
        let (keywords, notes) = read(&body);
        (keywords.xattrs.len(), notes.len())
    };
    assert_eq!(attribute(XATTR_SIZE_MAX), (1, 0));
    assert_eq!(attribute(XATTR_SIZE_MAX + 1), (0, 1));
}

fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = [b" ", key.as_bytes(), b"=", value, b"\n"].concat();
    let mut len = rest.len();
    while len.to_string().len() + rest.len() != len {
        len += 1;
    }
    [len.to_string().into_bytes(), rest].concat()
}

/// The collected bytes of a filtered body, and how many notes there are.
fn collect(body: &[u8], piece: usize) -> (Vec<u8>, usize) {
    let limits = Limits {
        pax_bytes: 8 << 10,
        xattr_bytes: 100,
        ..Limits::default()
    };
    let mut collected = Body::new(body.len() as u64, true, &limits);
    for piece in body.chunks(piece) {
        assert_eq!(collected.push(piece, &limits), Ok(()));
    }
    let (bytes, notes) = collected.finish();
    (bytes, notes.len())
}

#[test]
fn long_values_without_effect_are_not_collected() {
    let first = record("path", b"x");
    let last = record("SCHILY.xattr.user.a", b"1");
    let body = [
        first.clone(),
        record("GNU.dumpdir", &[b'Y'; 5000]),
        record("SCHILY.xattr.com.apple.ResourceFork", &[b'f'; 5000]),
        last.clone(),
    ]
    .concat();
    for piece in [1, 7, 512, body.len()] {
        assert_eq!(collect(&body, piece), ([&*first, &last].concat(), 1));
    }
}

#[test]
fn notes_about_one_header_are_limited() {
    let attribute = record("SCHILY.xattr.user.a", &[b'x'; 300]);
    let body = [attribute.clone(), b"10 uid=no\n".repeat(1000)].concat();
    let (_, notes) = read(&body);
    assert_eq!(notes.len(), MAX_NOTES + 1);
    assert!(matches!(notes.last(), Some(Note::Damaged(_))));
    let (collected, notes) = collect(&attribute.repeat(10_000), 4096);
    assert_eq!(collected, b"");
    assert_eq!(notes, MAX_NOTES + 1);
}

#[test]
fn nothing_is_collected_after_malformed_framing() {
    let junk = vec![b'j'; 9000];
    for malformed in [
        &b"9 path=x\n5=====\n"[..],
        b"9 path=x\njunk",
        b"9 path=x\n\0",
    ] {
        let body = [malformed, &junk].concat();
        for piece in [1, 700, body.len()] {
            let (collected, notes) = collect(&body, piece);
            assert!(collected.len() <= malformed.len() + MAX_PREFIX_BYTES);
            assert_eq!(notes, 0);
            let (keywords, notes) = read(&collected);
            assert_eq!(keywords.path, Some(b"x".to_vec()));
            assert_eq!(notes.is_empty(), malformed.ends_with(b"\0"), "{notes:?}");
        }
    }
}
