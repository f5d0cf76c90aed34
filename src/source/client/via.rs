//! A caching proxy whose URLs contain those of the origin.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use url::Url;

use crate::base::redact::is_secret;
use crate::base::sync::Mutex;
use crate::source::retry::FailureBlock;

/// Timeout for an answer of the proxy, which may have to ask the origin.
pub(super) const VIA_TIMEOUT: Duration = Duration::from_secs(5);

/// Names of parameters, in small letters, that choose an object or its version, and are no secrets.
const HARMLESS_NAMES: [&str; 5] = ["alt", "generation", "ns", "snapshot", "versionid"];

/// Whether the parameter `pair` of a query says nothing about the user.
fn is_harmless(pair: &str) -> bool {
    let name = pair.split('=').next().unwrap_or_default();
    HARMLESS_NAMES
        .iter()
        .any(|harmless| name.eq_ignore_ascii_case(harmless))
}

/// A caching proxy, and its failures. It serves `https://HOST/PATH` as `PREFIX/https/HOST/PATH`.
#[derive(Clone, Debug)]
pub struct Via {
    /// URL of the proxy without query and fragment.
    pub(crate) prefix: Url,
    /// Whether it receives the credentials for the origin.
    pub(super) sends_credentials: bool,
    /// Time in which only the origin is asked. All sources share it.
    pub(super) block: Arc<Mutex<FailureBlock>>,
}

impl Via {
    /// The proxy at the URL `prefix`, which receives credentials for the origin if `sends_credentials`.
    ///
    /// # Errors
    /// The reason why this is no `http://` or `https://` URL, without its secrets.
    pub fn new(prefix: &str, sends_credentials: bool) -> Result<Self, String> {
        let prefix = Url::parse(prefix).map_err(|error| error.to_string())?;
        let is_http = matches!(prefix.scheme(), "http" | "https");
        if !is_http || prefix.query().is_some() || prefix.fragment().is_some() {
            return Err("it is not an http:// or https:// URL without a query".to_owned());
        }
        Ok(Self {
            prefix,
            sends_credentials,
            block: Arc::default(),
        })
    }

    pub(super) fn is_usable(&self) -> bool {
        self.block.lock().until(Instant::now()).is_none()
    }

    /// Returns the proxy's URL for `url`. Without permission for credentials, signatures are left out. `None` if the URL
    /// has another parameter, which may be a secret, or choose what is read.
    pub(super) fn url(&self, url: &Url) -> Option<Url> {
        let mut proxied = self.prefix.clone();
        let port = url.port().map(|port| format!(":{port}"));
        let (prefix, scheme) = (self.prefix.path().trim_end_matches('/'), url.scheme());
        let (host, port, path) = (url.host_str()?, port.unwrap_or_default(), url.path());
        proxied.set_path(&format!("{prefix}/{scheme}/{host}{port}{path}"));
        let pairs = url.query().unwrap_or_default().split('&');
        let mut query = Vec::new();
        for pair in pairs.filter(|pair| !pair.is_empty()) {
            if self.sends_credentials || is_harmless(pair) {
                query.push(pair);
            } else if !is_secret(pair) {
                return None;
            }
        }
        let query = query.join("&");
        proxied.set_query((!query.is_empty()).then_some(&query));
        let has_user = !url.username().is_empty() || url.password().is_some();
        if self.sends_credentials && has_user {
            // They fail only for URLs without a host.
            proxied.set_username(url.username()).ok()?;
            proxied.set_password(url.password()).ok()?;
        }
        Some(proxied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn via(prefix: &str, sends_credentials: bool) -> Via {
        Via::new(prefix, sends_credentials).expect("well-formed")
    }

    // Promises: via-prefix
    #[test]
    fn proxied_url_has_scheme_host_and_path_of_the_origin() {
        let signed = "https://me:pw@example.com:8443/a%20b/c.tar?versionId=7&X-Amz-Signature=abc#x";
        for (prefix, sends_credentials, url, expected) in [
            (
                "http://cache:8080",
                false,
                "https://example.com/a.tar",
                "http://cache:8080/https/example.com/a.tar",
            ),
            (
                "https://cache/at/",
                false,
                signed,
                "https://cache/at/https/example.com:8443/a%20b/c.tar?versionId=7",
            ),
            (
                "http://cache",
                false,
                "https://example.com/a.tar?GENERATION=7&Token=b&sig=c",
                "http://cache/https/example.com/a.tar?GENERATION=7",
            ),
            (
                "http://cache/",
                true,
                "https://example.com:pw@example.com/a.tar?id=1",
                "http://example.com:pw@cache/https/example.com/a.tar?id=1",
            ),
            (
                "http://cache/",
                true,
                signed,
                "http://me:pw@cache/https/example.com:8443/a%20b/c.tar?versionId=7&X-Amz-Signature=abc",
            ),
        ] {
            let url = Url::parse(url).expect("well-formed");
            let proxied = via(prefix, sends_credentials).url(&url);
            assert_eq!(proxied.as_ref().map(Url::as_str), Some(expected));
        }
    }

    // Promises: via-secrets
    #[test]
    fn proxy_is_not_asked_for_a_url_with_an_unknown_parameter() {
        for query in [
            "id=1",
            "apiKey=s",
            "Password=s",
            "Private_Token=s",
            "code=s",
            "versionId=7&key=s",
        ] {
            let url = Url::parse(&format!("https://example.com/a.tar?{query}")).expect("a URL");
            assert_eq!(via("http://cache", false).url(&url), None, "{query}");
            assert!(via("http://cache", true).url(&url).is_some(), "{query}");
        }
    }

    #[test]
    fn prefix_of_a_proxy_is_an_http_url_without_query() {
        for (prefix, is_valid) in [
            ("http://example.com", true),
            ("https://me:pw@example.com:1/a/", true),
            ("example.com:80", false),
            ("http://example.com/?a", false),
            ("file:///a", false),
        ] {
            assert_eq!(Via::new(prefix, false).is_ok(), is_valid, "{prefix}");
        }
    }

    // Promises: via-prefix
    #[test]
    fn failing_proxy_is_not_asked_for_a_while() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build();
        runtime.expect("a runtime").block_on(async {
            let state = via("http://cache", false);
            let fail = || {
                state
                    .block
                    .lock()
                    .record_failure(Instant::now(), Duration::ZERO)
            };
            for seconds in [5, 10, 20, 40, 60, 60] {
                assert!(state.is_usable());
                assert_eq!(fail(), seconds == 5);
                tokio::time::advance(Duration::from_millis(seconds * 1000 - 1)).await;
                assert!(!state.is_usable());
                tokio::time::advance(Duration::from_millis(1)).await;
            }
            state.block.lock().record_success(Instant::now());
            assert!(state.is_usable() && fail());
        });
    }
}
