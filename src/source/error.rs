//! Why bytes cannot be had.

/// (stub)
#[derive(Clone, Debug, thiserror::Error)]
#[error("{location}")]
pub struct Error {
    /// Where, without secrets.
    pub location: String,
    /// Why.
    #[source]
    pub cause: Cause,
}

/// (stub)
#[derive(Clone, Debug, thiserror::Error)]
pub enum Cause {
    /// The bytes are those of another version.
    #[error("the source changed")]
    Changed,
    /// The source ends before its length.
    #[error("the source ends early")]
    Truncated,
}
