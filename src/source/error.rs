//! Why bytes cannot be had.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A source's bytes could not be had: where, how hard it was tried, and why.
///
/// The cause is not part of the text; it is the error's `source()`.
#[derive(Clone, Debug)]
pub struct Error {
    /// Where, without secrets.
    pub location: String,
    /// How many times it was tried; at least one.
    pub attempts: u32,
    /// From the first attempt to the end of the last.
    pub elapsed: Duration,
    /// Why the last attempt failed.
    pub cause: Cause,
}

impl Error {
    /// `cause` met at the first attempt and at once.
    pub fn new(location: impl Into<String>, cause: Cause) -> Self {
        Self {
            location: location.into(),
            attempts: 1,
            elapsed: Duration::ZERO,
            cause,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot read {}", self.location)?;
        if self.attempts > 1 {
            let seconds = self.elapsed.as_secs_f64();
            write!(f, " ({} attempts in {seconds:.1} s)", self.attempts)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}

/// Why, by what the caller can do about it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Cause {
    /// There is nothing of that name: correct it.
    #[error("not found")]
    NotFound,
    /// The server wants to know who asks, or refuses that person (401, 403): bring credentials.
    #[error("the server refuses access (status {0})")]
    Unauthorized(u16),
    /// The bytes are those of another version than the one opened: open again.
    #[error("it has changed since it was opened")]
    Changed,
    /// The source ends before its length: wait, or fetch it anew.
    #[error("it ends before its length")]
    Truncated,
    /// Nobody answers: look at the network.
    #[error("{}", describe_obstacle(*.obstacle, .detail))]
    Unreachable {
        /// What is in the way.
        obstacle: Obstacle,
        /// In the words of the system, without secrets.
        detail: String,
    },
    /// The server answers with a status that helps nobody.
    #[error("the server answers with status {0}")]
    Http(u16),
    /// The server cannot serve now, and asks for a pause longer than anyone waits.
    #[error("the server is busy and asks to be left alone for {} s", .0.as_secs())]
    Busy(Duration),
    /// The server breaks the rules of HTTP, or uses one that cannot be supported.
    #[error("{0}")]
    Protocol(String),
    /// The system refuses.
    #[error("{0}")]
    Io(Arc<io::Error>),
    /// There is no file of that name, which is probably a URL without its scheme.
    #[error("not found")]
    MissingScheme {
        /// The URL with a scheme, without secrets.
        url: String,
    },
    /// No source reads URLs of this scheme.
    #[error("{0}:// is not a known scheme")]
    UnknownScheme(String),
    /// No source reads what is at a path.
    #[error("{0} is not supported as a source")]
    Unsupported(String),
    /// A redirect leads from HTTPS to HTTP.
    #[error("the server redirects from https:// to http://, which anyone on the way can change")]
    InsecureRedirect,
    /// What the user gave cannot be understood: a URL, a header.
    #[error("{0}")]
    Malformed(String),
    /// What holds the bytes is not what it was, or contradicts itself: fetch it anew.
    #[error("{0}")]
    Damaged(String),
    /// A source that gives its bytes once was asked for them again.
    #[error("it can be read only once, from the front")]
    AlreadyRead,
    /// The reading was given up from this side.
    #[error("the reading was cancelled")]
    Cancelled,
}

impl Cause {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        match self {
            Self::MissingScheme { url } => Some(Cow::from(format!("did you mean {url}?"))),
            cause => cause.static_hint().map(Cow::from),
        }
    }

    fn static_hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::NotFound | Self::Malformed(_) => "check how it is spelled",
            Self::Unauthorized(401) => "send credentials: --header 'Authorization: …'",
            Self::Unauthorized(_) => "check the credentials; a signed URL may have expired",
            Self::Changed => "start again to read the new version",
            Self::Damaged(_) => "it is damaged: get another copy",
            Self::Truncated => "it is incomplete: get a whole copy",
            Self::Unreachable { obstacle, .. } => obstacle.hint(),
            Self::Http(408 | 425 | 429 | 500..) => "try again later",
            Self::Busy(_) => "try again later, or wait for it with --timeout",
            Self::Http(_) => "check the URL",
            Self::Protocol(_) => "download the file by other means and give its path",
            Self::Io(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                "check its permissions"
            }
            Self::Unsupported(_) => "name an archive, or an image as oci:DIR",
            Self::UnknownScheme(scheme) => scheme_hint(scheme),
            Self::InsecureRedirect => {
                "name the http:// URL itself, or allow it with --allow-insecure-redirects"
            }
            Self::AlreadyRead => "store it in a file first",
            Self::MissingScheme { .. } | Self::Io(_) | Self::Cancelled => return None,
        })
    }

    /// Whether the same request may succeed in a moment.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { obstacle, .. } => !obstacle.is_tls_error(),
            Self::Http(status) => matches!(status, 408 | 425 | 429 | 500..),
            Self::Truncated | Self::Busy(_) => true,
            _ => false,
        }
    }

    /// The same met by a source that was opened before. Its server spoke TLS and was trusted then, so a
    /// damaged record or an alert is a fault of the connection.
    #[must_use]
    pub(super) fn after_open(self) -> Self {
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

    /// Whether the server was out of reach, or said that it cannot serve for now: something that
    /// may be over in a minute, whatever is asked for and however often.
    pub fn is_outage(&self) -> bool {
        match self {
            Self::Unreachable { obstacle, .. } => !obstacle.is_tls_error(),
            Self::Http(status) => matches!(status, 429 | 502..=504),
            Self::Busy(_) => true,
            _ => false,
        }
    }
}

/// What the user can do instead of naming a URL of `scheme`.
fn scheme_hint(scheme: &str) -> &'static str {
    match scheme {
        "oci" | "docker" => {
            "tarfs does not read registries: save the image with `skopeo copy docker://NAME \
             docker-archive:FILE` or `docker save -o FILE NAME`, and name docker-archive:FILE"
        }
        "s3" | "gs" => {
            "known are http://, https:// and file://; a signed https:// URL of the object can be read"
        }
        _ => "known are http://, https:// and file://",
    }
}

impl From<io::Error> for Cause {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound,
            _ => Self::Io(Arc::new(error)),
        }
    }
}

/// What stands between us and a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Obstacle {
    /// The name has no address.
    Dns,
    /// The host is there, nobody listens.
    Refused,
    /// The two sides do not agree on a secure connection.
    Tls,
    /// The server's certificate is not trusted.
    Certificate,
    /// The server's certificate has expired, or is not valid yet.
    CertificateDates,
    /// The server's certificate is for other names, or not for servers.
    CertificateUse,
    /// Silence.
    Timeout,
    /// Bytes come, and too few to wait for.
    TooSlow,
    /// The connection broke, or never came to be.
    Connection,
}

impl Obstacle {
    /// Whether it is no fault of the network, and the same request fails again.
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
            Self::TooSlow => "check the network, or wait longer with --timeout",
        }
    }
}

/// The obstacle, with the system's words for it where they add something.
fn describe_obstacle(obstacle: Obstacle, detail: &str) -> String {
    match obstacle {
        Obstacle::Refused | Obstacle::Timeout | Obstacle::TooSlow => obstacle.to_string(),
        Obstacle::Dns => {
            let prefix = "failed to lookup address information: ";
            let detail = detail.strip_prefix(prefix).unwrap_or(detail);
            format!("{obstacle}: {detail}")
        }
        Obstacle::Tls
        | Obstacle::Certificate
        | Obstacle::CertificateDates
        | Obstacle::CertificateUse
        | Obstacle::Connection => {
            format!("{obstacle}: {detail}")
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dns => "the host's name cannot be resolved",
            Self::Refused => "nobody listens there",
            Self::Tls | Self::Certificate | Self::CertificateDates | Self::CertificateUse => {
                "no secure connection"
            }
            Self::Timeout => "the server is silent",
            Self::TooSlow => "next to nothing comes",
            Self::Connection => "the connection broke",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

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
        let cause = error.source().map(ToString::to_string);
        assert_eq!(cause.as_deref(), Some("the server answers with status 500"));
    }

    #[test]
    fn tls_errors_are_final_only_at_open() {
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
        assert!(!Cause::NotFound.after_open().is_transient());
    }

    #[test]
    fn transient_causes_are_told_from_permanent_ones() {
        for status in [408, 429, 500, 503] {
            assert!(Cause::Http(status).is_transient(), "{status}");
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
