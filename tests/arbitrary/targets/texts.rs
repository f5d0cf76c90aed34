//! Small texts from archives, machines and users: names, ACLs, accounts, URLs, magic bytes.

use tarfs::ArchivePath;
use tarfs::codec::{Detected, detect};
use tarfs::internal::escape::escape;
use tarfs::internal::passwd::Accounts;
use tarfs::internal::posix_acl::{Kind, find};
use tarfs::internal::redact::redact_urls;
use tarfs::source::{self, Validator};

/// Prefix of the passwords in URLs of the seeds.
const SECRET: &str = "s3cret";

/// Parses `bytes` as each of these.
pub(super) fn run(bytes: &[u8]) {
    path(bytes);
    listing(bytes);
    acl(bytes);
    if let Detected::Unsupported(format) = detect(bytes) {
        assert!(!format.is_empty(), "the error must name the format");
    }
    let half = bytes.len() / 2;
    let (passwd, group) = bytes.split_at(half);
    drop(Accounts::parse(passwd, group));
    let escaped = escape(bytes);
    assert!(!escaped.chars().any(char::is_control), "{escaped:?}");
    let text = String::from_utf8_lossy(bytes);
    let (tag, date) = text.split_once('\n').unwrap_or((&text, &text));
    drop(Validator::from_http(Some(tag), Some(date)));
    for shown in [source::redact(&text), redact_urls(&text)] {
        if text.starts_with("https://user:s3cret@example.org/") {
            let (_, rest) = text.split_once('@').expect("there");
            assert!(
                rest.contains(SECRET) || !shown.contains(SECRET),
                "{shown} tells a secret"
            );
        }
    }
}

/// Names in a listing of a bucket are those that a directory can have.
fn listing(bytes: &[u8]) {
    let paths = source::paths_of_page(bytes).unwrap_or_default();
    assert!(paths.len() <= bytes.len());
    for path in &paths {
        let is_name =
            |part: &str| !matches!(part, "" | "." | "..") && !part.contains(char::is_control);
        assert!(path.split('/').all(is_name), "{path:?}");
        let below = format!("{path}/");
        assert!(
            !paths.iter().any(|other| other.starts_with(&below)),
            "{path:?}"
        );
    }
}

fn path(bytes: &[u8]) {
    let path = ArchivePath::sanitize(bytes).path;
    for component in path.components() {
        let is_plain = !matches!(component, b"" | b"." | b"..") && !component.contains(&b'/');
        assert!(is_plain, "{path} leads elsewhere");
    }
    assert!(path.as_bytes().len() <= bytes.len());
    assert_eq!(ArchivePath::sanitize(path.as_bytes()).path, path);
    for count in [0, 1, usize::MAX] {
        drop(path.strip_components(count));
    }
}

fn acl(bytes: &[u8]) {
    let text = [(Kind::Access.keyword(), bytes)].into_iter();
    if let Ok(Some(acl)) = find(text, Kind::Access, &Accounts::default()) {
        // A header of 4 bytes and entries of 8.
        assert_eq!(acl.bytes.len() % 8, 4);
        assert!(acl.bytes.len() <= 4 + 8 * bytes.len());
    }
    // As an attribute the ACL has the same entries, sorted, and is valid again.
    let attribute = |bytes| [(Kind::Access.attribute().as_bytes(), bytes)].into_iter();
    if let Ok(Some(acl)) = find(attribute(bytes), Kind::Access, &Accounts::default()) {
        assert_eq!(acl.bytes.len() + 8 * acl.unmapped, bytes.len());
        let again = find(attribute(&acl.bytes), Kind::Access, &Accounts::default());
        assert_eq!(
            again.map(|again| again.map(|acl| acl.unmapped)),
            Ok(Some(0))
        );
    }
}
