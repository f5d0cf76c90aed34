//! One request at a time, with its headers and redirects.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use reqwest::header::{self, HeaderMap, HeaderName, HeaderValue};
use url::Url;

use super::transport::{Content, RawResponse, Transport};
use crate::base::stats::Stats;
use crate::source::response::ResponseHead;
use crate::source::{Cause, Options};

/// Maximum number of redirects of a request. Browsers follow twenty, and curl fifty.
const MAX_REDIRECTS: usize = 10;

#[derive(Debug)]
pub(super) struct Client {
    transport: Box<dyn Transport>,
    /// The user's URL, with user and password.
    pub(super) original: Url,
    /// The user's headers, for the original's origin only.
    headers: HeaderMap,
    bypasses_caches: bool,
    allows_insecure_redirects: bool,
    stats: Arc<Stats>,
}

#[derive(Debug)]
pub(super) struct Response {
    pub(super) head: ResponseHead,
    pub(super) content: Content,
    /// Target of the redirects.
    pub(super) url: Url,
}

impl Client {
    pub(super) fn new(
        url: Url,
        options: &Options,
        transport: Box<dyn Transport>,
    ) -> Result<Self, Cause> {
        Ok(Self {
            transport,
            headers: user_headers(&options.headers)?,
            bypasses_caches: false,
            allows_insecure_redirects: options.allow_insecure_redirects,
            stats: Arc::clone(&options.stats),
            original: url,
        })
    }

    /// Creates a client without state of earlier requests, which bypasses caches (RFC 9111, 5.2.1.4).
    pub(super) fn without_cache(&self, options: &Options) -> Result<Self, Cause> {
        let transport = self.transport.reconnect(&self.original, options)?;
        Ok(Self {
            bypasses_caches: true,
            ..Self::new(self.original.clone(), options, transport)?
        })
    }

    /// Time to establish a connection; zero before the first one.
    pub(super) fn connect_time(&self) -> Duration {
        self.transport.connect_time()
    }

    /// Requests bytes `start..end`, or all, of the version `etag` at `from`, and follows redirects. It
    /// returns any other status as a response.
    pub(super) async fn get(
        &self,
        from: &Url,
        range: Option<(u64, u64)>,
        etag: Option<&str>,
    ) -> Result<Response, Cause> {
        let mut conditions = HeaderMap::new();
        if let Some((start, end)) = range {
            let last = end.saturating_sub(1);
            conditions.insert(
                header::RANGE,
                header_value(&format!("bytes={start}-{last}"))?,
            );
        }
        conditions.insert(
            header::ACCEPT_ENCODING,
            HeaderValue::from_static("identity"),
        );
        if let Some(etag) = etag {
            conditions.insert(header::IF_MATCH, header_value(etag)?);
        }
        let mut url = from.clone();
        for _ in 0..=MAX_REDIRECTS {
            let raw = self.send(&url, &conditions).await?;
            let head = ResponseHead::new(raw.status, &raw.headers, unix_time());
            let Some(target) = &head.redirect else {
                return Ok(Response {
                    head,
                    content: raw.content,
                    url,
                });
            };
            url = resolve_redirect(&url, target, self.allows_insecure_redirects)?;
        }
        Err(Cause::Protocol(format!(
            "more than {MAX_REDIRECTS} redirects"
        )))
    }

    async fn send(&self, url: &Url, conditions: &HeaderMap) -> Result<RawResponse, Cause> {
        self.stats.source_requests.increment();
        let mut url = url.clone();
        let mut headers = HeaderMap::new();
        if may_send_credentials(&url, &self.original) {
            // reqwest converts them to an Authorization header. Fails only for URLs without a host.
            url.set_username(self.original.username()).ok();
            url.set_password(self.original.password()).ok();
            headers.clone_from(&self.headers);
        }
        if self.bypasses_caches {
            let no_cache = HeaderValue::from_static("no-cache");
            headers.insert(header::CACHE_CONTROL, no_cache);
        }
        headers.extend(conditions.clone());
        self.transport.get(url, headers).await
    }
}

/// Whether `url` may receive the user's credentials for `original`.
fn may_send_credentials(url: &Url, original: &Url) -> bool {
    url.origin() == original.origin()
}

fn unix_time() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

fn user_headers(headers: &[(String, String)]) -> Result<HeaderMap, Cause> {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let name = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| Cause::Malformed(format!("{name:?} is not a valid header name")))?;
        // The error does not repeat the value, which may be a secret.
        let mut value = header_value(value).map_err(|_| {
            Cause::Malformed(format!("the value of the header {name} is malformed"))
        })?;
        value.set_sensitive(true);
        map.append(name, value);
    }
    Ok(map)
}

fn header_value(text: &str) -> Result<HeaderValue, Cause> {
    HeaderValue::from_str(text)
        .map_err(|_| Cause::Protocol("a header's value cannot be sent".to_owned()))
}

fn resolve_redirect(from: &Url, target: &str, allows_insecure: bool) -> Result<Url, Cause> {
    let invalid_target =
        || Cause::Protocol("the server redirects to an address that is not HTTP".to_owned());
    let url = from.join(target).map_err(|_| invalid_target())?;
    match url.scheme() {
        "http" if from.scheme() == "https" && !allows_insecure => Err(Cause::InsecureRedirect),
        "http" | "https" if url.has_host() => Ok(url),
        _ => Err(invalid_target()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirect_to_another_scheme_is_rejected() {
        let from = Url::parse("http://host/a/b.tar").expect("well-formed");
        let to = |target| {
            let url = resolve_redirect(&from, target, false);
            url.map(String::from).ok()
        };
        assert_eq!(to("../c"), Some("http://host/c".to_owned()));
        assert_eq!(to("https://other/d"), Some("https://other/d".to_owned()));
        assert_eq!(to("file:///etc/passwd"), None);
        assert_eq!(to("http://"), None);
    }

    #[test]
    fn redirect_from_https_to_http_is_rejected_unless_allowed() {
        let from = Url::parse("https://host/a").expect("well-formed");
        let to = |target, allows| resolve_redirect(&from, target, allows).map(String::from);
        let refused = to("http://host/b", false).expect_err("insecure");
        assert!(matches!(refused, Cause::InsecureRedirect));
        assert!(
            refused
                .hint()
                .is_some_and(|hint| hint.contains("--allow-insecure-redirects"))
        );
        assert_eq!(
            to("http://host/b", true).ok().as_deref(),
            Some("http://host/b")
        );
        assert_eq!(to("/b", false).ok().as_deref(), Some("https://host/b"));
    }

    #[test]
    fn credentials_go_to_the_same_origin_only() {
        let original = Url::parse("https://me:secret@host/a").expect("well-formed");
        for (url, expected) in [
            ("https://host/elsewhere?x", true),
            ("https://HOST:443/", true),
            ("http://host/a", false),
            ("http://host:443/a", false),
            ("https://host:8443/a", false),
            ("https://host.example.com/a", false),
            ("https://host@other/a", false),
        ] {
            let url = Url::parse(url).expect("well-formed");
            assert_eq!(may_send_credentials(&url, &original), expected, "{url}");
        }
    }

    #[test]
    fn malformed_header_error_hides_its_value() {
        let refusal = |name: &str, value: &str| {
            user_headers(&[(name.to_owned(), value.to_owned())])
                .err()
                .map(|cause| cause.to_string())
        };
        assert_eq!(refusal("X-Key", "fine"), None);
        assert!(refusal("X Key", "fine").is_some_and(|text| text.contains("X Key")));
        assert!(refusal("X-Key", "hid\nden").is_some_and(|text| !text.contains("hid")));
    }
}
