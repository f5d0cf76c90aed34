//! Errors as the numbers the kernel hands to programs; exhaustive, so that a new error must be
//! given a number before it compiles.

use fuser::Errno;

use crate::archive::ReadError;

/// The number for a read that failed.
pub(super) fn of_read(error: &ReadError) -> Errno {
    match error {
        ReadError::NotAFile => Errno::EINVAL,
        // The handle is good, what it stood for is gone: NFS' word for the same thing.
        ReadError::Changed(_) => Errno::ESTALE,
        ReadError::Unreachable(_)
        | ReadError::Damaged { .. }
        | ReadError::Unscanned
        | ReadError::Index => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_cannot_be_read() {
        assert_eq!(of_read(&ReadError::NotAFile), Errno::EINVAL);
    }
}
