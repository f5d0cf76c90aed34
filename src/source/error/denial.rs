//! Refused requests.

use std::fmt;

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
