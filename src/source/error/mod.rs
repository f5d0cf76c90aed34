//! Errors of sources.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::base::descriptor_limit::{HINT_RAISE_DESCRIPTOR_LIMIT, is_descriptor_limit};
use crate::base::regular_file::ForeignWriter;

/// A failed read or upload. `Display` omits the cause, which is the error's `source()`.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "cannot {} {location}{}",
    if *.is_upload { "upload to" } else { "read" },
    describe_attempts(*.attempts, *.elapsed)
)]
pub struct Error {
    /// The source or destination, without secrets.
    pub location: String,
    /// Whether it is an upload instead of a read.
    pub is_upload: bool,
    /// Number of attempts, at least one.
    pub attempts: u32,
    /// Time from the first attempt to the end of the last.
    pub elapsed: Duration,
    /// Cause of the last failure.
    #[source]
    pub cause: Cause,
}

impl Error {
    /// An error of the first attempt.
    pub fn new(location: impl Into<String>, cause: Cause) -> Self {
        Self {
            location: location.into(),
            is_upload: false,
            attempts: 1,
            elapsed: Duration::ZERO,
            cause,
        }
    }

    /// The same failure of an upload.
    #[must_use]
    pub(crate) fn of_upload(self) -> Self {
        Self {
            is_upload: true,
            ..self
        }
    }
}

fn describe_attempts(attempts: u32, elapsed: Duration) -> String {
    match attempts {
        0..=1 => String::new(),
        _ => format!(" ({attempts} attempts in {:.1} s)", elapsed.as_secs_f64()),
    }
}

/// Error code of a request whose time differs too much from the server's.
pub(crate) const SKEWED: &str = "RequestTimeTooSkewed";

/// A refused request, and the credentials that it carried.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Denial {
    /// Status of the response.
    pub status: u16,
    /// The server's error code, such as `AccessDenied`.
    pub code: Option<String>,
    /// The server's error message, if it is short.
    pub message: Option<String>,
    /// The server's request ID.
    pub request_id: Option<String>,
    /// Where the credentials were found, or looked for.
    pub credentials: String,
    /// Advice for the user; `None` for that of all servers.
    pub advice: Option<String>,
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server refuses access (status {}", self.status)?;
        self.code.iter().try_for_each(|code| write!(f, " {code}"))?;
        let message = self.message.iter();
        message
            .into_iter()
            .try_for_each(|message| write!(f, ": {message}"))?;
        let id = self.request_id.iter();
        id.into_iter()
            .try_for_each(|id| write!(f, ", request {id}"))?;
        write!(f, ") with these credentials: {}", self.credentials)
    }
}

/// A response with an error that the server describes.
#[derive(Clone, Debug)]
pub struct Rejection {
    /// Status of the response.
    pub status: u16,
    /// The server's error code, such as `KMS.DisabledException`.
    pub code: Option<String>,
    /// The server's error message, if it is short.
    pub message: Option<String>,
    /// The cause without the description.
    plain: Cause,
}

/// Codes of servers that get too many requests, whatever the status.
const THROTTLING_CODES: [&str; 11] = [
    "BandwidthLimitExceeded",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "ServerBusy",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TOOMANYREQUESTS",
    "TooManyRequests",
    "TooManyRequestsException",
];

/// Other codes of servers that are unable to serve, whatever the status.
const OUTAGE_CODES: [&str; 3] = ["InternalError", "ServiceUnavailable", "UNAVAILABLE"];

/// Other codes of object stores whose error may soon end.
const TRANSIENT_CODES: [&str; 4] = [
    "OperationAborted",
    "OperationTimedOut",
    "RequestTimeout",
    "RequestTimeoutException",
];

/// Codes of archived objects, which no credentials may read.
const ARCHIVED_CODES: [&str; 4] = [
    "BlobArchived",
    "BlobBeingRehydrated",
    "InvalidBlobTier",
    "InvalidObjectState",
];

/// Codes of buckets and containers that are missing, although the status is that of a missing object.
const MISSING_BUCKET_CODES: [&str; 2] = ["ContainerNotFound", "NoSuchBucket"];

impl Rejection {
    fn has_code(&self, codes: &[&str]) -> bool {
        self.code
            .as_deref()
            .is_some_and(|code| codes.contains(&code))
    }

    fn is_throttling(&self) -> bool {
        self.has_code(&THROTTLING_CODES) || self.plain.is_throttling()
    }

    fn is_outage(&self) -> bool {
        self.is_throttling() || self.has_code(&OUTAGE_CODES) || self.plain.is_outage()
    }

    fn is_transient(&self) -> bool {
        self.has_code(&TRANSIENT_CODES) || self.is_outage() || self.plain.is_transient()
    }

    fn class(&self) -> Class {
        match self.plain.class() {
            _ if self.is_outage() => Class::Outage,
            _ if self.is_transient() => Class::Unreachable,
            _ if self.has_code(&ARCHIVED_CODES) => Class::AccessDenied,
            class => class,
        }
    }

    fn hint(&self) -> Option<&'static str> {
        let code = self.code.as_deref().unwrap_or_default();
        let message = self.message.as_deref().unwrap_or_default();
        let has_key_of_client =
            message.contains("Server Side Encryption") || code.starts_with("BlobUsesCustomer");
        Some(match code {
            _ if self.is_transient() => "try again later",
            _ if self.has_code(&ARCHIVED_CODES) => {
                "it is archived: restore it first, and read it then"
            }
            _ if self.has_code(&MISSING_BUCKET_CODES) => {
                "check how the bucket or container is spelled, and the endpoint"
            }
            _ if code.starts_with("KMS.") => {
                "the key that encrypts it cannot be used: check that key, and who may use it"
            }
            _ if has_key_of_client => {
                "its client has the key that encrypts it: send that key and its digest by --header"
            }
            SKEWED => "check the clock of this machine",
            _ if matches!(self.plain, Cause::Http(_)) => "correct what the server names",
            _ => return self.plain.static_hint(),
        })
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_refusal = matches!(self.plain, Cause::Unauthorized(_)) && !self.is_transient();
        let (before, after) = if is_refusal {
            ("refuses access (status", ")")
        } else {
            ("answers with status", "")
        };
        write!(f, "the server {before} {}", self.status)?;
        self.code.iter().try_for_each(|code| write!(f, " {code}"))?;
        let mut message = self.message.iter();
        message.try_for_each(|message| write!(f, ": {message}"))?;
        f.write_str(after)
    }
}

/// Kinds of failures of a source, by what a caller does about them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// Nothing has that name.
    NotFound,
    /// The caller may not read it.
    AccessDenied,
    /// It has another version.
    Changed,
    /// Its bytes are wrong or incomplete.
    Damaged,
    /// It cannot be reached, or its server cannot serve it, which may end within a minute.
    Outage,
    /// Its server does not serve it, or must not be asked.
    Unreachable,
    /// It would take longer than the caller waits.
    TimedOut,
    /// The caller's name or option for it is invalid.
    Invalid,
    /// Another failure.
    Other,
}

/// Status of a proxy that wants a user and password.
const PROXY_LOGIN: u16 = 407;

/// Status by which some servers limit the rate. In [`Cause::Http`] it had a `Retry-After`.
const RATE_LIMITED: u16 = 403;

/// Whether a server that answers with `status` may soon answer the same request otherwise.
fn is_transient_status(status: u16) -> bool {
    is_outage_status(status) || matches!(status, 408 | 421 | 425 | 500..)
}

/// Whether `status` says that a server, or a server behind it, cannot serve at present. Gateways use 509 and those
/// from 520 on.
fn is_outage_status(status: u16) -> bool {
    matches!(status, RATE_LIMITED | 429 | 500 | 502..=504 | 509 | 520..=530 | 598 | 599)
}

/// Causes, grouped by what the caller can do.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Cause {
    /// Nothing has that name.
    #[error("not found")]
    NotFound,
    /// The server requires credentials or rejects them (401, 403).
    #[error("the server refuses access (status {0})")]
    Unauthorized(u16),
    /// The server rejects the credentials that were found, or requires some.
    #[error("{0}")]
    Denied(Box<Denial>),
    /// A configured source of credentials fails for good: its name and its failure, without secrets.
    #[error("no credentials from {0}")]
    Credentials(String),
    /// A source of credentials fails, and may soon work.
    #[error("no credentials from {detail}{}", describe_pause(*.retry_after))]
    CredentialsUnavailable {
        /// Its name and its failure, without secrets.
        detail: Box<str>,
        /// Whether it is an outage, as the same failure of a server of data would be.
        is_outage: bool,
        /// The pause that its server asks for.
        retry_after: Option<Duration>,
    },
    /// The user forbids requests.
    #[error("--offline forbids the request for it")]
    Offline,
    /// The bytes belong to another version than the one opened.
    #[error("it has changed since it was opened")]
    Changed,
    /// The source ends before its length.
    #[error("it ends before its length")]
    Truncated,
    /// The server cannot be reached.
    #[error("{}", describe_obstacle(*.obstacle, .detail))]
    Unreachable {
        /// The obstacle.
        obstacle: Obstacle,
        /// The system's error text, without secrets.
        detail: String,
    },
    /// The server answers with an unusable status.
    #[error(
        "{}",
        match *.0 {
            PROXY_LOGIN => "the proxy refuses access (status 407)".to_owned(),
            status => format!("the server answers with status {status}"),
        }
    )]
    Http(u16),
    /// The server answers with an unusable status, and describes its error.
    #[error("{0}")]
    Rejected(Box<Rejection>),
    /// The server does not permit the method of an upload.
    #[error("the server permits no uploads there (status {0})")]
    NoUploads(u16),
    /// The server is busy and asks for a pause beyond the timeout.
    #[error("the server is busy and asks for a pause of {} s", .0.as_secs())]
    Busy(Duration),
    /// The server violates HTTP or uses an unsupported feature.
    #[error("{0}")]
    Protocol(String),
    /// The operating system returned an error.
    #[error("{0}")]
    Io(Arc<io::Error>),
    /// This process can open no more files and sockets, so no server is at fault.
    #[error("{0}")]
    DescriptorLimit(String),
    /// No file has that name, which is probably a URL without its scheme.
    #[error("not found")]
    MissingScheme {
        /// The URL with a scheme, without secrets.
        url: String,
    },
    /// No source supports URLs of this scheme.
    #[error("{0}:// is not a known scheme")]
    UnknownScheme(String),
    /// No source supports the kind of file at the path.
    #[error("{0} is not supported as a source")]
    Unsupported(String),
    /// A file that vouches for an archive can be written by a user who is not trusted.
    #[error("{0}, so it says nothing about the archive")]
    ForeignWriter(ForeignWriter),
    /// A redirect leads from HTTPS to HTTP.
    #[error(
        "the server redirects from https:// to http://, which others on the network can change"
    )]
    InsecureRedirect,
    /// The manifest of an image leads to this host, which is this machine or in its own network.
    #[error(
        "the manifest leads to {0}, which is this machine or in its network, and only the user may name such a server"
    )]
    OwnNetwork(String),
    /// The user's URL or header is malformed.
    #[error("{0}")]
    Malformed(String),
    /// The source is corrupt or contradicts itself.
    #[error("{0}")]
    Damaged(String),
    /// A second read of a source that can be read once.
    #[error("it can be read only once, from the front")]
    AlreadyRead,
    /// The read was cancelled by this process.
    #[error("the read was cancelled")]
    Cancelled,
}

impl Cause {
    /// The cause of a response with `status`, which is none of success, and its `Retry-After`.
    pub fn from_status(status: u16, retry_after: Option<Duration>) -> Self {
        match status {
            RATE_LIMITED if retry_after.is_some() => Self::Http(RATE_LIMITED),
            401 | 403 => Self::Unauthorized(status),
            404 | 410 => Self::NotFound,
            412 => Self::Changed,
            _ => Self::Http(status),
        }
    }

    /// The same with the error that the server describes, if that says more.
    #[must_use]
    pub fn with_error(self, status: u16, code: Option<String>, message: Option<String>) -> Self {
        let is_described = code.is_some() || message.is_some();
        let rejection = Rejection {
            status,
            code,
            message,
            plain: self,
        };
        let says_more = match rejection.plain {
            Self::Http(_) | Self::Unauthorized(_) => is_described,
            Self::NotFound => {
                rejection.is_transient()
                    || [&ARCHIVED_CODES[..], &MISSING_BUCKET_CODES]
                        .iter()
                        .any(|codes| rejection.has_code(codes))
            }
            _ => false,
        };
        if says_more {
            Self::Rejected(Box::new(rejection))
        } else {
            rejection.plain
        }
    }

    /// The reaction that a caller has to it.
    pub fn class(&self) -> Class {
        match self {
            Self::NotFound | Self::MissingScheme { .. } => Class::NotFound,
            Self::Unauthorized(_) | Self::Denied(_) | Self::Credentials(_) => Class::AccessDenied,
            Self::Changed => Class::Changed,
            Self::Truncated | Self::Damaged(_) => Class::Damaged,
            Self::Busy(_) => Class::TimedOut,
            Self::Rejected(rejection) => rejection.class(),
            cause if cause.is_outage() => Class::Outage,
            Self::Offline
            | Self::Unreachable { .. }
            | Self::CredentialsUnavailable { .. }
            | Self::Http(_) => Class::Unreachable,
            Self::UnknownScheme(_)
            | Self::Malformed(_)
            | Self::Unsupported(_)
            | Self::OwnNetwork(_) => Class::Invalid,
            Self::Io(error) => match error.kind() {
                io::ErrorKind::NotFound => Class::NotFound,
                io::ErrorKind::PermissionDenied => Class::AccessDenied,
                io::ErrorKind::TimedOut => Class::TimedOut,
                _ => Class::Other,
            },
            _ => Class::Other,
        }
    }

    /// Whether it is the limit of open files of this process, so that no server is at fault.
    pub(crate) fn is_descriptor_limit(&self) -> bool {
        matches!(self, Self::DescriptorLimit(_))
    }

    /// Whether the server gets too many requests, perhaps of this process.
    pub(crate) fn is_throttling(&self) -> bool {
        match self {
            Self::Http(status) => matches!(*status, RATE_LIMITED | 429 | 503),
            Self::Rejected(rejection) => rejection.is_throttling(),
            _ => false,
        }
    }

    /// The pause that a server asks for.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::CredentialsUnavailable { retry_after, .. } => *retry_after,
            Self::Busy(retry_after) => Some(*retry_after),
            _ => None,
        }
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        match self {
            Self::MissingScheme { url } => Some(Cow::from(format!("did you mean {url}?"))),
            Self::Denied(denial) if denial.advice.is_some() => denial.advice.clone().map(Cow::from),
            cause => cause.static_hint().map(Cow::from),
        }
    }

    fn static_hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::NotFound | Self::Malformed(_) => "check how it is spelled",
            Self::Unauthorized(401) => {
                "send credentials: --header 'Authorization: …', or an entry in ~/.netrc"
            }
            Self::Unauthorized(_) => "check the credentials; a signed URL may have expired",
            Self::Denied(denial) if denial.code.as_deref() == Some(SKEWED) => {
                "check the clock of this machine"
            }
            Self::Denied(_) => "check that they are valid and may read the object",
            Self::Credentials(_) => "correct this source of credentials, or remove it",
            Self::CredentialsUnavailable { .. } => {
                "try again later, or correct this source of credentials"
            }
            Self::Offline => "read it once without --offline, so that it is cached",
            Self::Changed => "start again to read the new version",
            Self::Damaged(_) => "it is damaged: get another copy",
            Self::Truncated => "it is incomplete: get a whole copy",
            Self::Unreachable { obstacle, .. } => obstacle.hint(),
            Self::NoUploads(_) => {
                "upload to a server that permits it, or copy the file there by other means"
            }
            Self::Rejected(rejection) => return rejection.hint(),
            Self::Http(PROXY_LOGIN) => {
                "put user and password into the URL of the proxy, in http_proxy or https_proxy"
            }
            Self::Http(status) if is_transient_status(*status) => "try again later",
            Self::Busy(_) => "try again later, or wait for it with --timeout",
            Self::Http(_) => "check the URL",
            Self::Protocol(_) => "download the file by other means and give its path",
            Self::DescriptorLimit(_) => HINT_RAISE_DESCRIPTOR_LIMIT,
            Self::Io(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                "check its permissions"
            }
            Self::Unsupported(_) => "name an archive, or an image as oci:DIR",
            Self::ForeignWriter(_) => {
                "it must belong to root, to you or to the owner of the archive, and be writable only for \
                 its owner"
            }
            Self::UnknownScheme(_) => {
                "known are http://, https://, s3://, gs://, az://, abfss://, oci:// and file://, and \
                 Hadoop's other names for them"
            }
            Self::InsecureRedirect => {
                "name the http:// URL itself, or allow it with --allow-insecure-redirects"
            }
            Self::OwnNetwork(_) => {
                "copy the image with all its layers, for instance with skopeo copy, if you trust its author"
            }
            Self::AlreadyRead => "store it in a file first",
            Self::MissingScheme { .. } | Self::Io(_) | Self::Cancelled => return None,
        })
    }

    /// Whether the same request may soon succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { obstacle, .. } => !obstacle.is_tls_error(),
            Self::Http(status) => is_transient_status(*status),
            Self::Rejected(rejection) => rejection.is_transient(),
            Self::Truncated | Self::Busy(_) | Self::CredentialsUnavailable { .. } => true,
            _ => false,
        }
    }

    /// Converts a failure of TLS. If it worked before, it may end like that of a connection.
    #[must_use]
    pub(crate) fn after_open(self) -> Self {
        match self {
            Self::Unreachable {
                obstacle: Obstacle::Tls,
                detail,
            } => Self::Unreachable {
                obstacle: Obstacle::Connection,
                detail,
            },
            cause => cause,
        }
    }

    /// Whether the server was unreachable or unable to serve, which may end within a minute.
    pub fn is_outage(&self) -> bool {
        match self {
            Self::Unreachable { obstacle, .. } => !obstacle.is_tls_error(),
            Self::Http(status) => is_outage_status(*status),
            Self::Rejected(rejection) => rejection.is_outage(),
            Self::CredentialsUnavailable { is_outage, .. } => *is_outage,
            Self::Busy(_) => true,
            _ => false,
        }
    }
}

impl From<io::Error> for Cause {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound,
            _ if is_descriptor_limit(&error) => Self::DescriptorLimit(error.to_string()),
            _ => Self::Io(Arc::new(error)),
        }
    }
}

/// Obstacles between this process and a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Obstacle {
    /// The host name does not resolve.
    #[error("the host's name cannot be resolved")]
    Dns,
    /// The host refuses the connection.
    #[error("the host refuses the connection")]
    Refused,
    /// The TLS handshake fails.
    #[error("no secure connection")]
    Tls,
    /// The server's certificate is not trusted.
    #[error("no secure connection")]
    Certificate,
    /// The server's certificate has expired, or is not valid yet.
    #[error("no secure connection")]
    CertificateDates,
    /// The server's certificate is for other names, or not for servers.
    #[error("no secure connection")]
    CertificateUse,
    /// The server does not answer.
    #[error("the server does not answer")]
    Timeout,
    /// Bytes arrive too slowly.
    #[error("data arrives too slowly")]
    TooSlow,
    /// A proxy does not connect to the server.
    #[error("no connection through the proxy")]
    Proxy,
    /// The connection broke or could not be established.
    #[error("the connection broke")]
    Connection,
}

impl Obstacle {
    /// Whether TLS causes it, so that the same request fails again.
    fn is_tls_error(self) -> bool {
        matches!(
            self,
            Self::Tls | Self::Certificate | Self::CertificateDates | Self::CertificateUse
        )
    }

    fn hint(self) -> &'static str {
        match self {
            Self::Dns => "check the host's name, and whether this machine has a name server",
            Self::Refused => "check host and port, and whether the server runs",
            Self::Tls => "check that this port speaks TLS",
            Self::Certificate => {
                "if you trust it, name a PEM file with this certificate or its authority's by --cacert"
            }
            Self::CertificateDates => {
                "check the clock of this machine; the server may need a new certificate"
            }
            Self::CertificateUse => {
                "use a host name of the certificate; the server may need another certificate"
            }
            Self::Timeout | Self::Connection => "check the network, or try again later",
            Self::Proxy => "check the proxy of http_proxy or https_proxy, and whether it runs",
            Self::TooSlow => "check the network, or wait longer with --timeout",
        }
    }
}

fn describe_pause(asked: Option<Duration>) -> String {
    let asked = asked.unwrap_or_default();
    match asked.as_secs() + u64::from(asked.subsec_nanos() > 0) {
        0 => String::new(),
        seconds => format!(", and asks for a pause of {seconds} s"),
    }
}

fn describe_obstacle(obstacle: Obstacle, detail: &str) -> String {
    match obstacle {
        Obstacle::Refused | Obstacle::Timeout | Obstacle::TooSlow => obstacle.to_string(),
        Obstacle::Dns => {
            let prefix = "failed to lookup address information: ";
            let detail = detail.strip_prefix(prefix).unwrap_or(detail);
            format!("{obstacle}: {detail}")
        }
        Obstacle::Proxy => format!("{obstacle} {detail}"),
        _ => format!("{obstacle}: {detail}"),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    // Promises: error-line
    #[test]
    fn error_text_has_location_and_attempts_but_no_cause() {
        let mut error = Error::new("http://host/a", Cause::Http(500));
        assert_eq!(error.to_string(), "cannot read http://host/a");
        error.attempts = 3;
        error.elapsed = Duration::from_millis(2_140);
        assert_eq!(
            error.to_string(),
            "cannot read http://host/a (3 attempts in 2.1 s)"
        );
        let upload = error.clone().of_upload().to_string();
        assert!(upload.starts_with("cannot upload to http://host/a ("));
        let cause = error.source().map(ToString::to_string);
        assert_eq!(cause.as_deref(), Some("the server answers with status 500"));
    }

    // Promises: retry-which
    #[test]
    fn errors_of_tls_are_final_only_at_open() {
        let met = |obstacle| Cause::Unreachable {
            obstacle,
            detail: String::new(),
        };
        for obstacle in [
            Obstacle::Tls,
            Obstacle::Certificate,
            Obstacle::CertificateDates,
            Obstacle::CertificateUse,
        ] {
            assert!(!met(obstacle).is_transient() && !met(obstacle).is_outage());
        }
        assert!(met(Obstacle::Tls).after_open().is_transient());
        assert!(met(Obstacle::Tls).after_open().is_outage());
        assert!(!met(Obstacle::Certificate).after_open().is_transient());
        let refused = Cause::Credentials("the profile".to_owned());
        assert!(!refused.is_transient() && !refused.is_outage());
        let outage = |is_outage| Cause::CredentialsUnavailable {
            detail: Box::default(),
            is_outage,
            retry_after: None,
        };
        assert!(outage(true).is_transient() && outage(true).is_outage());
        assert!(outage(false).is_transient() && !outage(false).is_outage());
        assert!(!Cause::NotFound.after_open().is_transient());
    }

    // Promises: retry-how-long
    #[test]
    fn statuses_of_gateways_and_rate_limits_are_outages() {
        for status in [
            429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 525, 526, 527, 529, 530,
        ] {
            let cause = Cause::from_status(status, None);
            assert!(cause.is_transient() && cause.is_outage(), "{status}");
        }
        let pause = Some(Duration::ZERO);
        assert!(Cause::from_status(403, pause).is_outage());
        assert!(matches!(
            Cause::from_status(403, None),
            Cause::Unauthorized(403)
        ));
        assert!(matches!(
            Cause::from_status(401, pause),
            Cause::Unauthorized(401)
        ));
        for status in [400, 404, 409, 418] {
            let cause = Cause::from_status(status, pause);
            assert!(!cause.is_transient() && !cause.is_outage(), "{status}");
        }
    }

    // Promises: store-errors
    #[test]
    fn described_errors_keep_class_and_code() {
        let described = |status, retry_after, code: &str| {
            let code = (!code.is_empty()).then(|| code.to_owned());
            Cause::from_status(status, retry_after).with_error(status, code, None)
        };
        let pause = Some(Duration::from_secs(1));
        for (status, code, class) in [
            (404, "NoSuchBucket", Class::NotFound),
            (404, "ContainerNotFound", Class::NotFound),
            (404, "NoSuchKey", Class::NotFound),
            (403, "InvalidObjectState", Class::AccessDenied),
            (409, "BlobArchived", Class::AccessDenied),
            (403, "AccessDenied", Class::AccessDenied),
            (400, "KMS.DisabledException", Class::Unreachable),
            (412, "PreconditionFailed", Class::Changed),
        ] {
            let cause = described(status, None, code);
            assert_eq!(cause.class(), class, "{code}");
            assert!(!cause.is_transient() && !cause.is_outage(), "{code}");
            let is_told = code == "NoSuchKey" || code == "PreconditionFailed";
            assert!(is_told || cause.to_string().contains(code), "{cause}");
        }
        for status in [400, 401, 403, 404, 409, 503] {
            for (code, is_outage) in [("SlowDown", true), ("RequestTimeout", status == 503)] {
                let cause = described(status, None, code);
                let class = if is_outage {
                    Class::Outage
                } else {
                    Class::Unreachable
                };
                assert!(cause.is_transient(), "{status} {code}");
                assert_eq!(cause.is_outage(), is_outage, "{status} {code}");
                assert_eq!(cause.class(), class, "{status} {code}");
            }
        }
        assert!(described(403, pause, "RateLimited").is_outage());
    }

    // Promises: request-rejected
    #[test]
    fn throttling_is_known_by_status_or_code() {
        let described = |status, code: &str| {
            Cause::from_status(status, None).with_error(status, Some(code.to_owned()), None)
        };
        for (status, code) in [
            (400, "SlowDown"),
            (403, "TooManyRequests"),
            (409, "ServerBusy"),
            (500, "Throttling"),
            (429, "Other"),
            (503, "InternalError"),
        ] {
            assert!(described(status, code).is_throttling(), "{status} {code}");
        }
        assert!(Cause::from_status(403, Some(Duration::ZERO)).is_throttling());
        for (status, code) in [
            (500, "InternalError"),
            (403, "AccessDenied"),
            (403, "RequestTimeout"),
        ] {
            assert!(!described(status, code).is_throttling(), "{status} {code}");
        }
    }

    #[test]
    fn every_outage_but_a_long_pause_has_one_class() {
        let unreachable = Cause::Unreachable {
            obstacle: Obstacle::Refused,
            detail: String::new(),
        };
        for cause in [unreachable, Cause::Http(503), Cause::Http(429)] {
            assert_eq!(cause.class(), Class::Outage, "{cause}");
        }
        assert_eq!(Cause::Busy(Duration::ZERO).class(), Class::TimedOut);
        assert_eq!(Cause::Http(501).class(), Class::Unreachable);
        let limit = Cause::from(io::Error::from_raw_os_error(24));
        assert!(limit.is_descriptor_limit() && !limit.is_transient());
        assert_eq!(limit.hint().as_deref(), Some(HINT_RAISE_DESCRIPTOR_LIMIT));
    }

    // Promises: retry-which
    #[test]
    fn transient_and_permanent_causes_are_distinguished() {
        for status in [408, 421, 425, 501, 505] {
            let cause = Cause::from_status(status, None);
            assert!(cause.is_transient() && !cause.is_outage(), "{status}");
        }
        for cause in [
            Cause::Http(400),
            Cause::NotFound,
            Cause::Changed,
            Cause::Unauthorized(403),
        ] {
            assert!(!cause.is_transient(), "{cause}");
        }
    }
}
