//! Causes of failures, and what a caller does about them.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::denial::{Denial, SKEWED};
use super::obstacle::{Obstacle, describe_obstacle};
use crate::base::descriptor_limit::{HINT_RAISE_DESCRIPTOR_LIMIT, is_descriptor_limit};
use crate::base::regular_file::ForeignWriter;

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
        let is_denial = matches!(self.plain, Cause::DeniedStatus(_)) && !self.is_transient();
        let (before, after) = if is_denial {
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
    DeniedStatus(u16),
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
    /// A mirror, or the source with mirrors, is no URL of a server.
    #[error("mirrors and their SOURCE are URLs of servers or of objects")]
    NotMirrored,
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
    /// The cause if a server does not answer, or stops sending.
    pub(crate) fn silent_server() -> Self {
        Self::Unreachable {
            obstacle: Obstacle::Timeout,
            detail: String::new(),
        }
    }

    /// The cause of a response with `status`, which is none of success, and its `Retry-After`.
    pub fn from_status(status: u16, retry_after: Option<Duration>) -> Self {
        match status {
            RATE_LIMITED if retry_after.is_some() => Self::Http(RATE_LIMITED),
            401 | 403 => Self::DeniedStatus(status),
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
            Self::Http(_) | Self::DeniedStatus(_) => is_described,
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
            Self::DeniedStatus(_) | Self::Denied(_) | Self::Credentials(_) => Class::AccessDenied,
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
            | Self::NotMirrored
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
            Self::DeniedStatus(401) => {
                "send credentials: --header 'Authorization: …', or an entry in ~/.netrc"
            }
            Self::DeniedStatus(_) => "check the credentials; a signed URL may have expired",
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
            Self::NotMirrored | Self::MissingScheme { .. } | Self::Io(_) | Self::Cancelled => {
                return None;
            }
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

fn describe_pause(pause: Option<Duration>) -> String {
    let pause = pause.unwrap_or_default();
    match pause.as_secs() + u64::from(pause.subsec_nanos() > 0) {
        0 => String::new(),
        seconds => format!(", and asks for a pause of {seconds} s"),
    }
}
