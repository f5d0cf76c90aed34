//! Errors of sources.

mod cause;
mod denial;
mod obstacle;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use self::cause::{Cause, Class, Rejection};
pub use self::denial::Denial;
pub(super) use self::denial::SKEWED;
pub use self::obstacle::Obstacle;

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
