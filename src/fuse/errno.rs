//! Maps errors to errnos.
//!
//! The match is exhaustive, so a new error needs an errno before the crate compiles.

use fuser::Errno;

use crate::archive::ReadError;

/// The errno for a read that failed.
pub(super) fn from_read_error(error: &ReadError) -> Errno {
    match error {
        ReadError::NotAFile => Errno::EINVAL,
        // NFS uses ESTALE for the same case: the handle is good, but its file has disappeared.
        ReadError::Changed(_) | ReadError::NotFound(_) => Errno::ESTALE,
        // Network file systems that do not wait for ever return this (nfs(5), softerr).
        ReadError::TimedOut(_) => Errno::ETIMEDOUT,
        ReadError::AccessDenied(_) => Errno::EACCES,
        ReadError::Unreachable(_)
        | ReadError::Damaged { .. }
        | ReadError::Unscanned
        | ReadError::Index => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::archive::Error;

    fn failure() -> Arc<Error> {
        Arc::new(Error::Empty)
    }

    #[test]
    fn read_errors_map_to_errnos() {
        for (error, number) in [
            (ReadError::NotAFile, Errno::EINVAL),
            (ReadError::Changed(failure()), Errno::ESTALE),
            (ReadError::NotFound(failure()), Errno::ESTALE),
            (ReadError::TimedOut(failure()), Errno::ETIMEDOUT),
            (ReadError::AccessDenied(failure()), Errno::EACCES),
            (ReadError::Unreachable(failure()), Errno::EIO),
            (ReadError::Unscanned, Errno::EIO),
        ] {
            assert_eq!(from_read_error(&error), number, "{error}");
        }
    }
}
