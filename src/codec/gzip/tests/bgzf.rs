//! BGZF.

use super::*;

#[test]
fn bgzf_becomes_jobs_with_seek_points_between() {
    let plain = text(5 << 20, 1);
    let packed = bgzf(&plain);
    let mut decoder = Decoder::start(context(true));
    decoder.push(Bytes::copy_from_slice(&packed));
    let mut jobs = 0;
    loop {
        match decoder.pull().expect("a good stream") {
            Pull::Job(_) => jobs += 1,
            Pull::NeedInput => break,
            Pull::Plain(_) => panic!("all members are whole"),
            _ => {}
        }
    }
    assert_eq!(jobs, 5);
    for step in [usize::MAX, 500_000, 100_000, 5000] {
        let first = whole(&packed, step);
        assert_eq!(first.end, None);
        assert!(first.plain == plain);
        let count = first.seek_points.len();
        assert!((3..=5).contains(&count), "{count}");
        resumes_everywhere(&packed, &first, step);
    }
}

#[test]
fn bgzf_members_shorter_than_their_header_says_fail() {
    let mut packed = bgzf_member(b"hello");
    packed.splice(packed.len() - 8..packed.len() - 8, [0]);
    packed[16] += 1;
    let error = whole(&packed, usize::MAX).end;
    assert!(matches!(
        error.map(|error| error.cause),
        Some(Cause::Malformed(_))
    ));
}

#[test]
fn long_run_of_empty_bgzf_members_decodes_to_nothing() {
    let packed = bgzf_member(b"").repeat(30_000);
    let run = whole(&packed, usize::MAX);
    assert_eq!((run.plain.len(), run.end), (0, None));
}

#[test]
fn bgzf_job_is_limited_to_a_number_of_members() {
    let member = bgzf_member(b"1");
    let input = member.repeat(2 * MAX_PARTS_PER_JOB);
    let group = Group::parse(&input, 1 << 20).expect("members");
    assert_eq!(group.plain_len, MAX_PARTS_PER_JOB);
    assert_eq!(group.packed_len, MAX_PARTS_PER_JOB * member.len());
}

#[test]
fn bgzf_mixed_with_other_members_decodes() {
    let plain = text(400_000, 1);
    let packed = [
        member(&plain[..1000], 6),
        bgzf(&plain[1000..200_000]),
        member(&plain[200_000..300_000], 6),
        bgzf(&plain[300_000..]),
        vec![0; 700],
    ]
    .concat();
    for step in [usize::MAX, 77_777, 1000] {
        let run = whole(&packed, step);
        assert_eq!(run.end, None);
        assert!(run.plain == plain);
    }
}

#[test]
fn bit_flip_in_bgzf_fails_its_job_or_its_framing() {
    let plain = text(300, 1);
    let packed = bgzf(&plain);
    for bit in 0..packed.len() * 8 {
        let mut packed = packed.clone();
        packed[bit / 8] ^= 1 << (bit % 8);
        let run = whole(&packed, usize::MAX);
        assert!(
            run.end.is_some() || run.plain == plain || !run.warnings.is_empty(),
            "{bit}"
        );
    }
}

#[test]
fn bgzf_truncated_anywhere_gives_the_bytes_before() {
    let plain = text(3000, 1);
    let first = bgzf_member(&plain[..1000]);
    let packed = [first.clone(), bgzf_member(&plain[1000..])].concat();
    for len in first.len() + 2..packed.len() {
        let run = whole(&packed[..len], usize::MAX);
        assert!(plain.starts_with(&run.plain) && run.plain.len() >= 1000);
        assert_eq!(run.end.map(|error| error.cause), Some(Cause::Truncated));
    }
}
