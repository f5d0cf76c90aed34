//! Location of a source: its canonical name, the key of saved state, and a name without secrets.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{self, Path, PathBuf};

use url::{Host, Url};

use crate::base::redact::{is_secret, redact};

/// Length of the query's hash in hexadecimal digits: 128 bits.
const HASH_DIGITS: usize = 32;

/// Schemes of Hadoop and of other clients of the clouds, and those of this crate for the same objects.
const ALIASES: [(&str, &str); 5] = [
    ("s3a", "s3"),
    ("s3n", "s3"),
    ("gcs", "gs"),
    ("wasb", "abfs"),
    ("wasbs", "abfss"),
];

/// Start of the name of a bucket or access point of S3 in the form of all resources of AWS.
const S3_ARN: &str = "arn:aws";

/// `name` without the blanks before it, which the parser of URLs ignores.
pub(crate) fn without_blanks(name: &str) -> &str {
    name.trim_start_matches(|first| first <= ' ')
}

/// Returns `name` in the one form that this crate reads. Hadoop, Spark and AWS also write others.
pub fn canonical_name(name: &str) -> Cow<'_, str> {
    let url = without_blanks(name);
    if is_url(url) {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let alias = ALIASES.iter().find(|(alias, _)| *alias == scheme);
        return alias.map_or(Cow::from(url), |(_, own)| format!("{own}://{rest}").into());
    }
    if url.starts_with("file:/") {
        // RFC 8089 permits a file URL without an authority.
        return url.replacen("file:", "file://", 1).into();
    }
    let is_arn = url.starts_with(S3_ARN) && url.split(':').nth(2) == Some("s3");
    if is_arn {
        format!("s3://{url}").into()
    } else {
        name.into()
    }
}

/// Whether `name` is a URL: it begins with a scheme and `://`. Each other name is a path.
pub fn is_url(name: impl AsRef<OsStr>) -> bool {
    let scheme = name
        .as_ref()
        .to_str()
        .and_then(|name| name.split_once("://"));
    scheme.is_some_and(|(scheme, _)| {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
        scheme.starts_with(|first: char| first.is_ascii_alphabetic())
            && scheme.bytes().all(is_valid)
    })
}

/// As [`canonical_name`], of a name that may not be UTF-8.
pub fn canonical_os_name(name: &OsStr) -> OsString {
    name.to_str().map_or_else(
        || name.to_owned(),
        |text| canonical_name(text).as_ref().into(),
    )
}

/// Returns `location`, or the URL of a file if it is a path that is not UTF-8.
pub fn location_text(location: &OsStr) -> String {
    let url = || {
        let path = path::absolute(location).ok()?;
        Url::from_file_path(path).ok().map(String::from)
    };
    let text = location.to_str().map(str::to_owned);
    text.or_else(url)
        .unwrap_or_else(|| location.to_string_lossy().into_owned())
}

/// Returns the text of `path` for messages, without secrets if it may be a URL that is spelled wrong.
pub(super) fn shown_path(path: &Path) -> String {
    redact(&location_text(path.as_os_str()))
}

/// Whether `url` is one of an HTTP server, without user, password and query.
pub(super) fn is_server_url(url: &Url) -> bool {
    matches!(url.scheme(), "http" | "https")
        && url.has_host()
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
}

/// Whether `url` leads to this machine, or to an address or name that only its own network has.
pub(super) fn is_in_own_network(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(ip)) => is_own_address(ip.into()),
        Some(Host::Ipv6(ip)) => is_own_address(ip.into()),
        Some(Host::Domain(name)) => {
            let (_, top) = name
                .trim_end_matches('.')
                .rsplit_once('.')
                .unwrap_or_default();
            matches!(top, "" | "internal" | "local" | "localhost")
        }
        None => true,
    }
}

/// A public address at which Azure answers its virtual machines.
const AZURE_HOST: [u8; 4] = [168, 63, 129, 16];

/// Whether `ip` is an address of this machine or of its own network. Public addresses of this machine are not known.
pub(super) fn is_own_address(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => {
            // RFC 6598 has addresses between a provider and its customers, as of metadata servers.
            let is_shared = matches!(ip.octets(), [100, 64..=127, ..]);
            is_shared
                || matches!(ip.octets(), [0 | 240..=255, ..] | [192, 0, 0, _])
                // RFC 2544 has addresses for tests of networks.
                || matches!(ip.octets(), [198, 18..=19, ..])
                || ip.octets() == AZURE_HOST
                || ip.is_loopback()
                || ip.is_private()
                || ip.is_link_local()
                || ip.is_multicast()
        }
        IpAddr::V6(ip) => {
            let own = ip.is_loopback() || ip.is_unspecified() || ip.is_multicast();
            let translated = translated_address(ip);
            own || ip.is_unique_local()
                || ip.is_unicast_link_local()
                // Site-local addresses of RFC 3879, and those of a gateway of the own network of RFC 8215.
                || matches!(ip.segments(), [0xfec0..=0xfeff, ..] | [0x64, 0xff9b, 1, ..])
                || translated.is_some_and(|ip| is_own_address(ip.into()))
        }
    }
}

/// The IPv4 address to which a gateway or this machine translates `ip`, by the prefixes of RFC 4291, 6052 and 3056.
fn translated_address(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let from_words = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        Some(Ipv4Addr::new(a, b, c, d))
    };
    match ip.segments() {
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            from_words(high, low)
        }
        [0x2002, high, low, ..] => from_words(high, low),
        _ => None,
    }
}

/// Locator and display name of a source.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Location {
    canonical: String,
    display: String,
    local_path: Option<PathBuf>,
}

impl Location {
    /// Location of `url`. The canonical one is the URL without user, password, fragment and signing parameters. Of
    /// the other parameters it has only a hash, because it is saved and secrets can have unknown names.
    pub fn from_url(url: &Url) -> Self {
        let url = without_user(url);
        Self {
            display: redact(url.as_str()),
            canonical: canonical(url),
            local_path: None,
        }
    }

    /// Location of the file `ino` on `dev` at `path`.
    pub fn from_file(path: &Path, dev: u64, ino: u64) -> Self {
        Self {
            canonical: format!("file:{dev}:{ino}"),
            display: location_text(path.as_os_str()),
            local_path: path::absolute(path).ok(),
        }
    }

    /// Location that has only a name, such as standard input.
    pub fn from_name(name: &str) -> Self {
        Self::with_canonical(name, format!("name:{name}"))
    }

    /// Location with the display name `name` and the canonical location `canonical`.
    pub fn with_canonical(name: &str, canonical: String) -> Self {
        Self {
            canonical,
            display: name.to_owned(),
            local_path: None,
        }
    }

    /// Location of a source with bytes of this one. It has the same local path.
    #[must_use]
    pub fn derive(&self, name: &str, canonical: String) -> Self {
        Self {
            local_path: self.local_path.clone(),
            ..Self::with_canonical(name, canonical)
        }
    }

    /// Key of saved state, the same for every user of the same place.
    pub fn canonical(&self) -> &str {
        &self.canonical
    }

    /// Absolute path of the file on this machine; `None` for servers.
    pub fn local_path(&self) -> Option<&Path> {
        self.local_path.as_deref()
    }

    /// Name that may be shown to anyone.
    pub fn as_str(&self) -> &str {
        &self.display
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.display)
    }
}

/// `url` without user, password and fragment.
fn without_user(url: &Url) -> Url {
    let mut url = url.clone();
    url.set_fragment(None);
    // Fails only for URLs that cannot have a user. In Azure's data lakes, that is the container.
    if !matches!(url.scheme(), "abfs" | "abfss") {
        url.set_username("").ok();
    }
    url.set_password(None).ok();
    url
}

/// The canonical location of `url`, which has no user.
fn canonical(mut url: Url) -> String {
    let query = url.query().unwrap_or_default();
    let is_kept = |pair: &&str| !pair.is_empty() && !is_secret(pair);
    let kept: Vec<&str> = query.split('&').filter(is_kept).collect();
    let mut hidden = kept.join("&");
    url.set_query(None);
    let shown = redact(url.as_str());
    if shown != url.as_str() {
        // The path has another URL with secrets.
        hidden = format!("{}#{hidden}", url.as_str());
    }
    if hidden.is_empty() {
        return shown;
    }
    let hash = blake3::hash(hidden.as_bytes()).to_hex();
    format!("{shown}?…{}", hash.get(..HASH_DIGITS).unwrap_or_default())
}

/// Whether `url` may receive the identity of the user for `original`.
pub(crate) fn may_identify(url: &Url, original: &Url) -> bool {
    url.origin() == original.origin()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: store-hadoop, store-arn
    #[test]
    fn names_of_other_programs_have_one_form() {
        for (name, canonical) in [
            ("s3a://b/k", "s3://b/k"),
            ("s3n://b/k?versionId=1", "s3://b/k?versionId=1"),
            ("gcs://b/k#1", "gs://b/k#1"),
            (
                "wasbs://c@a.blob.core.windows.net/k",
                "abfss://c@a.blob.core.windows.net/k",
            ),
            (
                "wasb://c@a.blob.core.windows.net/k",
                "abfs://c@a.blob.core.windows.net/k",
            ),
            ("file:/a%20b", "file:///a%20b"),
            (
                "arn:aws:s3:eu-west-1:123456789012:accesspoint/p/k",
                "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/p/k",
            ),
            (
                "arn:aws-cn:s3:cn-north-1:123456789012:accesspoint/p/k",
                "s3://arn:aws-cn:s3:cn-north-1:123456789012:accesspoint/p/k",
            ),
        ] {
            assert_eq!(canonical_name(name), canonical);
            assert_eq!(canonical_name(canonical), canonical);
        }
        for name in [
            "a/b",
            "s3a:b",
            "file:a",
            "http://h/s3a://b",
            "arn:aws:iam::1:role/x",
            "-",
        ] {
            assert_eq!(canonical_name(name), name);
        }
    }

    fn at(url: &str) -> Location {
        Location::from_url(&Url::parse(url).expect("well-formed"))
    }

    // Promises: index-found
    #[test]
    fn locator_of_a_signed_url_ignores_its_signature() {
        let today = at(
            "https://b.s3.amazonaws.com/a.tar?versionId=7&X-Amz-Date=20260101T0&X-Amz-Signature=abc",
        );
        let tomorrow = at(
            "https://b.s3.amazonaws.com/a.tar?versionId=7&X-Amz-Date=20260102T0&X-Amz-Signature=def",
        );
        assert_eq!(today.canonical(), tomorrow.canonical());
        let hidden = "https://b.s3.amazonaws.com/a.tar?…";
        assert!(
            today.canonical().starts_with(hidden),
            "{}",
            today.canonical()
        );
        assert_eq!(today.canonical().len(), hidden.len() + HASH_DIGITS);
        let azure =
            at("https://x.blob.core.windows.net/c/a.tar?sv=2020&se=2026&sr=b&sp=r&sig=abc%3D");
        assert_eq!(azure.canonical(), "https://x.blob.core.windows.net/c/a.tar");
    }

    // Promises: index-found
    #[test]
    fn locator_hashes_other_query_parameters_in_order() {
        let canonical = |query: &str| at(&format!("http://h/d?{query}")).canonical().to_owned();
        assert_eq!(canonical("id=2&b=1&sig=3"), canonical("id=2&sig=4&b=1"));
        for other in ["b=1&id=2", "id=2", "id=3&b=1", "id=2&b=1&c"] {
            assert_ne!(canonical("id=2&b=1"), canonical(other), "{other}");
        }
        assert!(!canonical("id=2&apikey=hidden").contains("hidden"));
    }

    #[test]
    fn locator_is_of_the_normalised_url() {
        assert_eq!(
            at("HTTP://me:secret@Host:80/a/../b#part").canonical(),
            "http://host/b"
        );
    }

    // Promises: secret-hidden
    #[test]
    fn location_has_no_secrets() {
        let shown = at("https://me:secret@host:8443/a.tar?token=hidden#x").to_string();
        assert_eq!(shown, "https://host:8443/a.tar?…");
        let nested = |secret: &str| at(&format!("https://p.com/https://me:{secret}@h/k"));
        let (one, other) = (nested("hidden"), nested("other"));
        assert_eq!(one.to_string(), "https://p.com/https://h/k");
        assert!(!one.canonical().contains("hidden"), "{}", one.canonical());
        assert_ne!(one.canonical(), other.canonical());
    }

    // Promises: auth-origin, profile-header
    #[test]
    fn credentials_go_to_the_same_origin_only() {
        let original = Url::parse("https://me:secret@host/a").expect("well-formed");
        for (url, expected) in [
            ("https://host/elsewhere?x", true),
            ("https://me:pass@HOST:443/", true),
            ("http://host/a", false),
            ("http://host:443/a", false),
            ("https://host:8443/a", false),
            ("https://host.example.com/a", false),
            ("https://host@other/a", false),
        ] {
            let url = Url::parse(url).expect("well-formed");
            assert_eq!(may_identify(&url, &original), expected, "{url}");
        }
        // The origins of file URLs are never equal.
        let file = Url::parse("file:///a").expect("well-formed");
        assert!(!may_identify(&file, &file));
    }
}
