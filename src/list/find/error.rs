//! Errors of expressions.

use std::io;

use thiserror::Error;

/// An expression that cannot be evaluated.
#[derive(Debug, Error)]
pub enum Error {
    /// A word that begins with `-` and is no primary.
    #[error("unknown predicate '{0}'")]
    UnknownPredicate(String),
    /// The words end after a primary that needs one more.
    #[error("missing argument to '{0}'")]
    MissingArgument(String),
    /// An argument that the primary before it does not take.
    #[error("invalid argument '{argument}' to '{primary}': {reason}")]
    InvalidArgument {
        /// The primary.
        primary: String,
        /// Its argument, escaped.
        argument: String,
        /// The part of it that is wrong, or the values that are allowed.
        reason: String,
    },
    /// A primary of GNU find that has no meaning here.
    #[error("'{primary}' is not supported: {reason}")]
    Unsupported {
        /// The primary.
        primary: String,
        /// Why.
        reason: &'static str,
    },
    /// Operators, operands and parentheses do not fit together.
    #[error("invalid expression: {0}")]
    Syntax(String),
    /// A word that is neither a primary nor an operator.
    #[error("paths must precede expression: '{0}'")]
    PathAfterExpression(String),
    /// The file of `-newer` or `-samefile` cannot be examined.
    #[error("cannot examine '{path}'")]
    ReferenceFile {
        /// Its path, escaped.
        path: String,
        /// The reason.
        source: io::Error,
    },
}
