//! One request at a time, with its headers and redirects.

pub(super) mod authorizer;
mod identity;
pub(super) mod response;
mod sender;
mod server_error;
mod target;
mod upload_content;
mod user_headers;
mod via;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use reqwest::header::{self, HeaderMap, HeaderValue};
use reqwest::{Method, StatusCode};
use tokio::time::Instant;
use url::{Origin, Url};

use self::authorizer::parse_headers;
use self::response::ResponseHead;
use self::via::VIA_TIMEOUT;
use crate::base::sha256::Sha256;
use crate::base::sync::Mutex;
use crate::source::location::{is_in_own_network, may_identify};
use crate::source::network::{Content, RawResponse, Transport};
use crate::source::retry::Failure;
use crate::source::{Cause, Denial, Fingerprint, Options, Revalidation, Validator, redact};

pub use self::authorizer::{Authorizer, ErrorResponse, HeaderLoader, Request};
pub use self::identity::Identity;
pub(super) use self::sender::{Answer, MAX_ANSWER_BYTES, Sender};
pub(super) use self::server_error::ServerError;
pub use self::target::Target;
pub use self::upload_content::UploadContent;
pub use self::user_headers::{HeaderArg, UserHeaders};
pub use self::via::Via;

/// Maximum number of redirects of a request. Browsers follow twenty, and curl fifty.
const MAX_REDIRECTS: usize = 10;

/// Maximum number of times that a request is sent again with other credentials, or to another region.
const MAX_RESENDS: u32 = 2;

/// Maximum length of the part of an error response in which the error code is searched.
const MAX_ERROR_BODY_BYTES: usize = 4 << 10;

/// Timeout for the body of an error response, which has the error code.
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(2);

/// Sends the requests for one target.
#[derive(Debug)]
pub(crate) struct Client {
    transport: Box<dyn Transport>,
    /// The user's URL, with user and password.
    pub(crate) original: Url,
    /// Adds credentials for the original's origin.
    authorizer: Option<Arc<dyn Authorizer>>,
    /// Adds credentials for another origin, to which the original redirected.
    redirect_authorizer: Mutex<Option<(Origin, Arc<dyn Authorizer>)>>,
    /// The user's headers, for the original's origin only.
    headers: HeaderMap,
    via: Option<Via>,
    bypasses_caches: bool,
    /// Whether the server refuses the condition of the version that it serves.
    omits_if_match: AtomicBool,
    options: Box<Options>,
}

/// A request apart from the user's headers and credentials.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    pub(crate) method: Method,
    pub(crate) url: Url,
    /// They replace the user's of the same name.
    pub(crate) headers: HeaderMap,
    /// Its body.
    pub(crate) content: Option<&'a UploadContent>,
    /// Digest of the body, if the server compares it.
    pub(crate) sha256: Option<Sha256>,
}

impl Message<'_> {
    /// A message without a body.
    pub(crate) fn new(method: Method, url: Url) -> Self {
        Self {
            method,
            url,
            headers: HeaderMap::new(),
            content: None,
            sha256: None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) head: ResponseHead,
    pub(crate) content: Content,
    /// Target of the redirects.
    pub(crate) url: Url,
}

impl From<&ResponseHead> for Failure {
    fn from(head: &ResponseHead) -> Self {
        Self {
            cause: head.failure_cause(),
            retry_after: head.retry_after,
            is_for_concurrency: false,
        }
    }
}

impl Client {
    pub(crate) fn new(
        target: &Target,
        options: &Options,
        transport: Box<dyn Transport>,
    ) -> Result<Self, Cause> {
        Ok(Self {
            transport,
            headers: match &target.headers {
                Some(headers) => headers.clone(),
                None => parse_headers(&options.identity.headers)?,
            },
            via: options.via.clone(),
            bypasses_caches: false,
            omits_if_match: AtomicBool::default(),
            options: Box::new(options.clone()),
            original: target.url.clone(),
            authorizer: target.authorizer.clone(),
            redirect_authorizer: Mutex::default(),
        })
    }

    /// Creates a client without state of earlier requests, which bypasses caches (RFC 9111, 5.2.1.4).
    pub(crate) fn without_cache(&self, options: &Options) -> Result<Self, Cause> {
        let transport = self.transport.reconnect(&self.original, options)?;
        Ok(Self {
            transport,
            original: self.original.clone(),
            authorizer: self.authorizer.clone(),
            redirect_authorizer: Mutex::default(),
            headers: self.headers.clone(),
            via: None,
            bypasses_caches: true,
            omits_if_match: AtomicBool::new(self.omits_if_match.load(Ordering::Relaxed)),
            options: Box::new(options.clone()),
        })
    }

    /// Whether the user forbids requests.
    fn is_offline(&self) -> bool {
        self.options.revalidation == Revalidation::Never
    }

    /// Time to establish a connection; zero before the first one.
    pub(crate) fn connect_time(&self) -> Duration {
        self.transport.connect_time()
    }

    /// Requests bytes `start..end`, or all, of `version` at `from`, and follows redirects. It returns any other
    /// status as a response.
    ///
    /// If the target of a redirect refuses, it asks the original URL once more, because the target may have expired.
    pub(crate) async fn get(
        &self,
        from: &Url,
        range: Option<(u64, u64)>,
        version: Option<&Fingerprint>,
    ) -> Result<Response, Cause> {
        let has_condition = !self.omits_if_match.load(Ordering::Relaxed);
        let wanted = (range, version, has_condition);
        let mut response = self.get_once(from, wanted).await?;
        if response.head.may_be_expired_url() && response.url != self.original {
            response = self.get_once(&self.original, wanted).await?;
        }
        // Some servers answer every condition with 412. The tag of each response is compared anyway.
        if let Some(version) = version
            && response.head.status == 412
            && response.head.permits(version)
            && has_condition
        {
            let wanted = (range, Some(version), false);
            response = self.get_once(&response.url, wanted).await?;
            if version.matches(&response.head.fingerprint()) {
                self.omits_if_match.store(true, Ordering::Relaxed);
            }
        }
        Ok(response)
    }

    /// Sends the request of [`get`](Self::get) once, for a range of a version, and with a condition on that. The
    /// caching proxy is asked first for a range of a known version.
    async fn get_once(
        &self,
        from: &Url,
        (range, version, has_condition): (Option<(u64, u64)>, Option<&Fingerprint>, bool),
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
        if let Some(Validator::StrongEtag(etag)) = version.map(|version| &version.validator)
            && has_condition
        {
            conditions.insert(header::IF_MATCH, header_value(etag)?);
        }
        let mut message = Message::new(Method::GET, from.clone());
        message.headers = conditions;
        // Without a validator, bytes of another version would pass for those of this one.
        let is_known = |version: &&Fingerprint| version.validator != Validator::None;
        let version = version.filter(|_| range.is_some() && !self.is_offline());
        if let Some(version) = version.filter(is_known)
            && let Some(response) = self.get_via(&message, version).await
        {
            return Ok(response);
        }
        let (head, raw, url) = self.exchange(&message).await?;
        Ok(Response {
            head,
            content: raw.content,
            url,
        })
    }

    /// Sends `message` and follows redirects: all of a read, and those of an upload that permit it (307 and 308)
    /// within the host. It returns any other status as a response, and the URL that it is from.
    pub(crate) async fn exchange(
        &self,
        message: &Message<'_>,
    ) -> Result<(ResponseHead, RawResponse, Url), Cause> {
        if self.is_offline() {
            return Err(Cause::Offline);
        }
        let is_read = message.method == Method::GET;
        let mut url = message.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            if self.options.is_public_only && is_in_own_network(&url) {
                let host = url.host_str().unwrap_or_default();
                return Err(Cause::OwnNetwork(host.to_owned()));
            }
            let (head, raw) = self.send(message, &url).await?;
            let is_followed =
                is_read || message.content.is_some() && matches!(head.status, 307 | 308);
            let Some(target) = head.redirect.as_ref().filter(|_| is_followed) else {
                return Ok((head, raw, url));
            };
            let next = resolve_redirect(&url, target, self.options.allow_insecure_redirects)?;
            if !is_read && next.origin() != url.origin() {
                let refused = "the server redirects the upload to another host";
                return Err(Cause::Protocol(refused.to_owned()));
            }
            url = next;
        }
        Err(Cause::Protocol(format!(
            "more than {MAX_REDIRECTS} redirects"
        )))
    }

    /// Requests a range of `version` from the caching proxy; `None` if the origin must be asked.
    async fn get_via(&self, message: &Message<'_>, version: &Fingerprint) -> Option<Response> {
        let via = self.via.as_ref().filter(|via| via.is_usable())?;
        let url = &message.url;
        // The query of a redirect's target is usually a signature, whatever its parameters are called.
        if !via.sends_credentials && *url != self.original && url.query().is_some() {
            return None;
        }
        let mut request = self.request(message, url);
        if !via.sends_credentials || !may_identify(url, &self.original) {
            request.headers.clone_from(&message.headers);
        } else if let Some(authorizer) = &self.authorizer {
            authorizer.authorize(&mut request).await.ok()?;
        }
        // A signature may be part of the query.
        let proxied = via.url(&request.url)?;
        self.options.stats.source_requests.increment();
        let started = Instant::now();
        let getting = self
            .transport
            .send(Method::GET, proxied, request.headers, None);
        let reason = match tokio::time::timeout(VIA_TIMEOUT, getting).await {
            Ok(Ok(raw)) => {
                let head = ResponseHead::new(raw.status, &raw.headers, unix_time());
                if head.status == 206 && version.matches(&head.fingerprint()) {
                    via.block.lock().record_success(started);
                    return Some(Response {
                        head,
                        content: raw.content,
                        url: url.clone(),
                    });
                }
                format!("status {}, or another version", head.status)
            }
            Ok(Err(cause)) => cause.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        self.report_via_failure(&reason);
        None
    }

    /// Sends requests to the origin for a while, because the caching proxy failed for `reason`.
    pub(crate) fn report_via_failure(&self, reason: &str) {
        if let Some(via) = self.via.as_ref().filter(|via| via.is_usable()) {
            self.options.stats.source_via_failures.increment();
            let now = Instant::now();
            if via.block.lock().record_failure(now, Duration::ZERO) {
                let name = redact(via.prefix.as_str());
                tracing::warn!("{name}: {reason}; asking the origin");
            }
        }
    }

    /// Sends one request, and again if its credentials are refused and others are found.
    async fn send(
        &self,
        message: &Message<'_>,
        url: &Url,
    ) -> Result<(ResponseHead, RawResponse), Cause> {
        let mut resends = 0;
        loop {
            let authorizer = self.authorizer_of(url);
            let authorizer = authorizer.as_ref();
            let mut request = self.request(message, url);
            if let Some(authorizer) = authorizer {
                authorizer.authorize(&mut request).await?;
            }
            self.options.stats.source_requests.increment();
            let (method, headers) = (request.method.clone(), request.headers.clone());
            let body = message.content.map(UploadContent::body);
            let sent = self
                .transport
                .send(method, request.url.clone(), headers, body);
            let mut raw = sent.await?;
            let mut head = ResponseHead::new(raw.status, &raw.headers, unix_time());
            let is_plain_read = message.method == Method::GET && authorizer.is_none();
            if is_plain_read && resends < MAX_RESENDS && self.note_challenge(&request, &raw) {
                resends += 1;
                continue;
            }
            if raw.status.is_success() || is_plain_read && !describes_error(&raw.headers) {
                return Ok((head, raw));
            }
            let response = ErrorResponse {
                status: raw.status,
                headers: raw.headers.clone(),
                error: server_error(&mut raw).await,
            };
            head.error = (response.error.code.clone(), response.error.message.clone());
            // A server that is busy says nothing about the credentials.
            if is_plain_read || head.failure_cause().is_transient() {
                return Ok((head, raw));
            }
            if let Some(authorizer) = authorizer
                && resends < MAX_RESENDS
                && authorizer.should_resend(&request, &response).await?
            {
                resends += 1;
                self.options.stats.source_renewed_credentials.increment();
                continue;
            }
            if response.is_denial() {
                let is_read = message.method == Method::GET;
                head.denial = Some(describe(response, authorizer, is_read));
            }
            return Ok((head, raw));
        }
    }

    fn authorizer_of(&self, url: &Url) -> Option<Arc<dyn Authorizer>> {
        if may_identify(url, &self.original) {
            return self.authorizer.clone();
        }
        let redirected = self.redirect_authorizer.lock().clone();
        let redirected = redirected.filter(|(origin, _)| *origin == url.origin());
        redirected.map(|(_, authorizer)| authorizer)
    }

    /// Whether the target of a redirect asks, by `raw`, for credentials that can be got. Remembers how.
    fn note_challenge(&self, request: &Request, raw: &RawResponse) -> bool {
        let is_asked =
            raw.status == StatusCode::UNAUTHORIZED && !may_identify(&request.url, &self.original);
        let Some(authorizer) = self.authorizer.as_ref().filter(|_| is_asked) else {
            return false;
        };
        let response = ErrorResponse {
            status: raw.status,
            headers: raw.headers.clone(),
            error: ServerError::default(),
        };
        let found = authorizer.for_redirect(request, &response);
        let found = found.map(|authorizer| (request.url.origin(), authorizer));
        let is_found = found.is_some();
        *self.redirect_authorizer.lock() = found;
        is_found
    }

    /// Makes a request with the user's headers for `message` at `url`.
    fn request(&self, message: &Message<'_>, url: &Url) -> Request {
        let mut url = url.clone();
        let mut headers = HeaderMap::new();
        if may_identify(&url, &self.original) {
            // reqwest converts them to an Authorization header. Fails only for URLs without a host.
            url.set_username(self.original.username()).ok();
            url.set_password(self.original.password()).ok();
            headers.clone_from(&self.headers);
        }
        if self.bypasses_caches {
            let no_cache = HeaderValue::from_static("no-cache");
            headers.insert(header::CACHE_CONTROL, no_cache);
        }
        headers.extend(message.headers.clone());
        if let Some(content) = message.content {
            // Signatures may need it.
            headers.insert(header::CONTENT_LENGTH, content.size().into());
        }
        Request {
            method: message.method.clone(),
            url,
            headers,
            content_sha256: message.sha256,
            generation: 0,
        }
    }
}

/// Describes an error response for the user. Without an authorizer it is one of an upload.
fn describe(
    response: ErrorResponse,
    authorizer: Option<&Arc<dyn Authorizer>>,
    is_read: bool,
) -> Denial {
    let origin = authorizer.map(|authorizer| authorizer.credentials_origin());
    let origin = origin.unwrap_or_else(|| "those in the URL and in --header, if any".to_owned());
    let advice = if is_read {
        authorizer.and_then(|authorizer| authorizer.advice())
    } else {
        let advice = authorizer.and_then(|authorizer| authorizer.upload_advice());
        advice.or_else(|| {
            let advice = "check that they are valid and permit uploads there, by PUT; a signed URL may have expired";
            Some(advice.to_owned())
        })
    };
    response.into_denial(origin, advice)
}

/// Whether a response without success has a body for programs.
fn describes_error(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE);
    let text = content_type.and_then(|value| value.to_str().ok());
    text.is_some_and(|text| text.contains("xml") || text.contains("json"))
}

/// Returns the error in the body of an error response, which can still be read.
async fn server_error(raw: &mut RawResponse) -> ServerError {
    if raw.headers.contains_key(header::LOCATION) {
        return ServerError::default();
    }
    let (mut body, mut is_whole) = (BytesMut::new(), false);
    let receiving = async {
        while body.len() < MAX_ERROR_BODY_BYTES && !is_whole {
            match raw.content.next().await {
                Ok(Some(piece)) => body.extend_from_slice(&piece),
                Ok(None) | Err(_) => is_whole = true,
            }
        }
    };
    tokio::time::timeout(ERROR_BODY_TIMEOUT, receiving)
        .await
        .ok();
    let body = body.freeze();
    raw.content.put_back(body.clone(), is_whole);
    ServerError::parse(&body)
}

pub(crate) fn unix_time() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

fn header_value(text: &str) -> Result<HeaderValue, Cause> {
    HeaderValue::from_str(text)
        .map_err(|_| Cause::Protocol("a header's value cannot be sent".to_owned()))
}

/// Resolves the address `target`, to which the answer for `from` refers. It must be HTTP, and lead from HTTPS to HTTP
/// only if that is allowed.
pub(crate) fn resolve_redirect(
    from: &Url,
    target: &str,
    allows_insecure: bool,
) -> Result<Url, Cause> {
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

    // Promises: redirect-http
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
    fn malformed_header_error_hides_its_value() {
        let refusal = |name: &str, value: &str| {
            parse_headers(&[(name.to_owned(), value.to_owned())])
                .err()
                .map(|cause| cause.to_string())
        };
        assert_eq!(refusal("X-Key", "fine"), None);
        assert!(refusal("X Key", "fine").is_some_and(|text| text.contains("X Key")));
        assert!(refusal("X-Key", "hid\nden").is_some_and(|text| !text.contains("hid")));
    }
}
