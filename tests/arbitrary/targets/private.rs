//! Parsers that are private in their layers. Their files are compiled once more here.

use std::sync::LazyLock;

use tarfs::index::{Builder, Index, Options, Origin};
use tarfs::serve::{Link, access_profile};
use tarfs::tar::{Member, MemberKind};
use tarfs::{Extent, Plain};

#[path = "../../../src/source/client/response.rs"]
#[allow(
    dead_code,
    clippy::pedantic,
    reason = "the program's, and looked at there"
)]
mod response_head;

/// Names in the archive of the profiles.
pub(crate) const NAMES: [&[u8]; 4] = [b"a", b"dir/b c", b"gr\xfcn\n", b"dir/\\"];

/// A profile of arbitrary bytes: its ranges are in files of the archive, and survive being written and
/// parsed. Merged with itself and cut, it is a profile of at most that size.
pub(super) fn profile(bytes: &[u8]) {
    static INDEX: LazyLock<Index> = LazyLock::new(index);
    let text = String::from_utf8_lossy(bytes);
    let Ok(found) = access_profile::resolve_profile(&text, &INDEX) else {
        return;
    };
    assert!(found.ranges.len() + found.missing_ranges <= bytes.len());
    for range in &found.ranges {
        let size = INDEX.entry(range.ino).expect("of the archive").size();
        assert!(range.len <= size.saturating_sub(range.offset));
    }
    let parsed = access_profile::parse_profile(&text).expect("resolved before");
    let parsed: Vec<_> = parsed.collect::<Result<_, _>>().expect("resolved before");
    let merged =
        access_profile::merge_profiles(vec![parsed.clone(), parsed], 1000).expect("few ranges");
    let merged = access_profile::parse_profile(&merged).expect("just written");
    let lens = merged.map(|range| range.expect("just written").len);
    assert!(lens.sum::<u64>() <= 1000);
    let again = access_profile::format_profile(&INDEX, &found.ranges);
    let again = access_profile::resolve_profile(&again, &INDEX).expect("just written");
    assert_eq!((again.missing_ranges, again.ranges), (0, found.ranges));
}

fn index() -> Index {
    let mut builder = Builder::new(Options::default());
    for (number, name) in NAMES.iter().enumerate() {
        let at = 1024 * number as u64;
        let member = Member {
            header: Plain(at),
            payload: Extent::with_len(Plain(at + 512), 100),
            size: 100,
            ..Member::new(*name, MemberKind::File)
        };
        builder.add_member(&member).expect("well-formed");
    }
    builder.finish(Origin::default())
}

/// A server's response of arbitrary status and header lines: its range is consistent.
pub(super) fn answer(bytes: &[u8]) {
    use reqwest::StatusCode;
    use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

    let mut lines = bytes.split(|&byte| byte == b'\n');
    let status = lines.next().unwrap_or_default();
    let Ok(status) = StatusCode::from_bytes(status) else {
        return;
    };
    let headers: HeaderMap = lines
        .filter_map(|line| {
            let (name, value) = line.split_at(line.iter().position(|&byte| byte == b':')?);
            let value = value.get(1..)?.trim_ascii_start();
            Some((
                HeaderName::from_bytes(name).ok()?,
                HeaderValue::from_bytes(value).ok()?,
            ))
        })
        .collect();
    let answer = response_head::ResponseHead::new(status, &headers, 1_000_000_000);
    let len = answer.fingerprint().len;
    if let Ok((start, end)) = answer.content_range() {
        assert!(start < end);
        assert!(len.is_none_or(|len| end <= len), "a part of nothing");
    }
    let fingerprint = answer.fingerprint();
    // Even without a version, a fingerprint matches itself.
    assert!(fingerprint.matches(&fingerprint));
    drop(answer.stored_encoding().map(|_| ()));
    drop((
        answer.check_encoding(None),
        answer.failure_cause().to_string(),
    ));
    assert!(status.is_redirection() || answer.redirect.is_none());
}

/// A packet between the monitor of a mount and its server: it is valid, or an error.
pub(super) fn packet(bytes: &[u8]) {
    let (here, there) = Link::pair().expect("sockets");
    let sent = rustix::io::write(&here, bytes.get(..bytes.len().min(150_000)).expect("less"));
    if sent.is_err() {
        return;
    }
    drop(here);
    let Ok(Some((packet, descriptors))) = there.receive() else {
        return;
    };
    assert!(descriptors.is_empty(), "none was sent");
    let (here, there) = Link::pair().expect("sockets");
    here.send(&packet, &[], rustix::net::SendFlags::empty())
        .expect("it is no longer than it was");
    let again = there.receive().expect("just sent").expect("sent");
    assert_eq!(again.0, packet);
}
