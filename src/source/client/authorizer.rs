//! Interface between the HTTP client and credentials.
//!
//! An [`Authorizer`] belongs to one URL. The HTTP client calls it before each request to that URL's origin, and
//! shows it each error response, so that it can renew credentials.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, StatusCode};
use url::Url;

use super::server_error::ServerError;
use crate::base::sha256::Sha256;
use crate::source::error::SKEWED;
use crate::source::{Cause, Denial};

/// Error codes about credentials, some of which come with status 400 or 409.
const CREDENTIAL_CODES: [&str; 7] = [
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "PublicAccessNotPermitted",
    "RequestExpired",
    "TokenRefreshRequired",
];

/// Headers with the request ID of object stores.
const REQUEST_IDS: [&str; 3] = [
    "x-amz-request-id",
    "x-ms-request-id",
    "x-guploader-uploadid",
];

/// A request without its body.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its method: GET, or one of an upload.
    pub method: Method,
    /// Its URL.
    pub url: Url,
    /// Its headers.
    pub headers: HeaderMap,
    /// Digest of its body, for an upload to an object store.
    pub content_sha256: Option<Sha256>,
    /// Generation of the credentials that it carries; 0 without any.
    pub generation: u64,
}

/// A response without success.
#[derive(Clone, Debug)]
pub struct ErrorResponse {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// The error in its body.
    pub(crate) error: ServerError,
}

impl ErrorResponse {
    /// Describes it for the user. `credentials` names their origin.
    pub(crate) fn into_denial(self, credentials: String, advice: Option<String>) -> Denial {
        let ids = REQUEST_IDS.into_iter();
        let mut ids = ids.filter_map(|name| self.headers.get(name)?.to_str().ok());
        let is_id = |id: &&str| id.len() <= 128 && id.bytes().all(|byte| byte.is_ascii_graphic());
        Denial {
            status: self.status.as_u16(),
            request_id: ids.find(is_id).map(str::to_owned),
            code: self.error.code,
            message: self.error.message,
            credentials,
            advice,
        }
    }

    /// Whether other credentials may be accepted.
    pub(crate) fn allows_other_credentials(&self) -> bool {
        self.error.code.as_deref() != Some(SKEWED) && self.is_denial()
    }

    /// Whether the server requires credentials or rejects them.
    pub(crate) fn is_denial(&self) -> bool {
        let code = self.error.code.as_deref();
        let is_refused = matches!(
            self.status,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN
        );
        // No credentials may read an archived object.
        is_refused && code != Some("InvalidObjectState")
            || code.is_some_and(|code| CREDENTIAL_CODES.contains(&code))
    }
}

/// Adds credentials to the requests of one source.
pub trait Authorizer: Send + Sync + fmt::Debug {
    /// Adds credentials to `request`, and the headers that the server needs for its method. It may also change the
    /// URL's host, but not its meaning.
    ///
    /// # Errors
    /// [`Cause::Credentials`] if a configured source of credentials fails for good, and else its outage.
    fn authorize<'a>(&'a self, request: &'a mut Request) -> BoxFuture<'a, Result<(), Cause>>;

    /// Whether `request`, which the server refused so, should be authorized and sent again.
    ///
    /// It renews refused credentials.
    ///
    /// # Errors
    /// An outage of their source, because the response says nothing of the credentials that it would give.
    fn should_resend(
        &self,
        request: &Request,
        response: &ErrorResponse,
    ) -> BoxFuture<'_, Result<bool, Cause>>;

    /// The authorizer of requests to another server, to which this one redirected and which refused so.
    fn for_redirect(
        &self,
        _request: &Request,
        _response: &ErrorResponse,
    ) -> Option<Arc<dyn Authorizer>> {
        None
    }

    /// Name of the source of the current credentials, such as a file, for errors.
    fn credentials_origin(&self) -> String;

    /// Advice for the user when the server refuses the current credentials.
    fn advice(&self) -> Option<String> {
        None
    }

    /// As [`advice`](Self::advice), when the server refuses an upload. It names the permission.
    fn upload_advice(&self) -> Option<String> {
        self.advice()
    }
}

/// Loads headers, each as a name and a value.
#[derive(Clone)]
pub struct HeaderLoader(Arc<LoadHeaders>);

type LoadHeaders = dyn Fn() -> Result<Vec<(String, String)>, String> + Send + Sync;

impl HeaderLoader {
    /// Loads headers by `load`, which may read files. Its error is a text without secrets.
    pub fn new(
        load: impl Fn() -> Result<Vec<(String, String)>, String> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(load))
    }

    /// Loads the headers. The error is the text of the loader.
    pub(crate) fn load(&self) -> Result<Vec<(String, String)>, String> {
        (self.0)()
    }
}

impl fmt::Debug for HeaderLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeaderLoader").finish_non_exhaustive()
    }
}

/// Parses headers, each a name and a value, as sensitive ones. The error leaves out the value.
pub(crate) fn parse_headers(headers: &[(String, String)]) -> Result<HeaderMap, Cause> {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let name = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| Cause::Malformed(format!("{name:?} is not a valid header name")))?;
        // The error does not repeat the value, which may be a secret.
        let mut value = HeaderValue::from_str(value).map_err(|_| {
            Cause::Malformed(format!("the value of the header {name} is malformed"))
        })?;
        value.set_sensitive(true);
        map.append(name, value);
    }
    Ok(map)
}
