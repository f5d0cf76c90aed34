//! Read requests: from memory or the page cache at once, or on the archive's own threads.

use std::sync::{Arc, Weak};
use std::time::Instant;

use bytes::Bytes;
use fuser::{Errno, ReplyData};

use super::pending_replies::{FailReply, WaitError, WaitReason};
use super::state::FilesystemState;
use super::timed_out_reads::RequestedRange;
use crate::archive::{ReadError, Volume};
use crate::index::Index;

pub(super) struct ReadRequest {
    pub(super) reply: ReplyData,
    pub(super) range: RequestedRange,
    /// Whether a short reply is a short read of the caller, and not a new size of the file.
    pub(super) is_direct: bool,
    pub(super) volume: Weak<dyn Volume>,
    pub(super) state: Arc<FilesystemState>,
}

impl ReadRequest {
    pub(super) fn read(self) {
        let RequestedRange {
            caller,
            ino,
            offset,
            len,
        } = self.range;
        let Some(volume) = self.volume.upgrade() else {
            return self.fail(WaitError::Closed);
        };
        if let Some(result) = volume.try_read(ino, offset, len) {
            return self.finish(result);
        }
        let timed_out_reads = &self.state.timed_out_reads;
        if timed_out_reads.is_kernel_retry(self.range, Instant::now()) {
            // The first failure was recorded already.
            self.state.stats.failed_reads.increment();
            return self.reply.error(Errno::ETIMEDOUT);
        }
        let pending_replies = Arc::clone(&self.state.pending_replies);
        let reason = if volume.is_scan_over() {
            WaitReason::Bytes
        } else {
            WaitReason::Scan
        };
        let pending = pending_replies.register(self, caller, reason);
        let wanted = pending.pending_check();
        let done = move |result| {
            // The reply may have failed already.
            if let Some(request) = pending.take() {
                request.finish(result);
            }
        };
        volume.read(ino, offset, len, wanted, Box::new(done));
    }

    pub(super) fn finish(self, result: Result<Bytes, ReadError>) {
        match result {
            Ok(bytes) => {
                self.state.stats.served_bytes.add(bytes.len() as u64);
                self.reply.data(&bytes);
            }
            Err(ReadError::Truncated) if let Some(range) = self.available() => {
                Self { range, ..self }.read();
            }
            Err(error) => self.record_failure(&error, errno_of(&error)),
        }
    }

    /// The part of the range before the end of a truncated archive, if it is another one that may be sent.
    fn available(&self) -> Option<RequestedRange> {
        let volume = self.volume.upgrade().filter(|_| self.is_direct)?;
        let before = volume
            .cut_offset(self.range.ino)
            .ok()??
            .checked_sub(self.range.offset)?;
        let len = u32::try_from(before).ok()?;
        (0 < len && len < self.range.len).then_some(RequestedRange { len, ..self.range })
    }

    fn record_failure(self, error: &(dyn std::error::Error + 'static), errno: Errno) {
        // Before the reply, so that a caller that sees the error finds it in the status.
        self.state.stats.failed_reads.increment();
        let volume = self.volume.upgrade();
        let path_of = |index: &Index| index.path(self.range.ino);
        let path = volume.and_then(|volume| volume.index().read(path_of).ok()?);
        let archive = self.state.archive_path.as_deref().unwrap_or_default();
        let path = format!("{archive}{}", path.unwrap_or_default());
        self.state.recent_errors.record(&path, error);
        if errno == Errno::ETIMEDOUT {
            let timed_out_reads = &self.state.timed_out_reads;
            timed_out_reads.record(self.range, Instant::now());
        }
        self.reply.error(errno);
    }
}

impl FailReply for ReadRequest {
    fn fail_with(self, errno: Errno) {
        self.reply.error(errno);
    }

    fn fail(self, why: WaitError) {
        match why {
            WaitError::CallerKilled | WaitError::Closed => self.reply.error(why.errno()),
            WaitError::TimedOut | WaitError::IndexUnavailable => {
                self.record_failure(&why, why.errno());
            }
        }
    }
}

/// The errno for a read that failed. Exhaustive, so that a new error needs an errno.
pub(super) fn errno_of(error: &ReadError) -> Errno {
    match error {
        ReadError::NotAFile => Errno::EINVAL,
        // NFS uses ESTALE for the same case: the handle is good, but its file has disappeared.
        ReadError::Changed(_) | ReadError::NotFound(_) => Errno::ESTALE,
        // Network file systems that do not wait for ever return this (nfs(5), softerr).
        ReadError::TimedOut(_) => Errno::ETIMEDOUT,
        ReadError::AccessDenied(_) => Errno::EACCES,
        ReadError::Memory(_) => Errno::ENOMEM,
        ReadError::Unreachable(_)
        | ReadError::Damaged { .. }
        | ReadError::Unscanned
        | ReadError::Truncated
        | ReadError::Index
        | ReadError::IndexUnavailable
        | ReadError::IndexMismatch => Errno::EIO,
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

    // Promises: error-estale, error-etimedout, error-eacces, error-eio
    #[test]
    fn read_errors_map_to_errnos() {
        for (error, number) in [
            (ReadError::NotAFile, Errno::EINVAL),
            (ReadError::Changed(failure()), Errno::ESTALE),
            (ReadError::NotFound(failure()), Errno::ESTALE),
            (ReadError::TimedOut(failure()), Errno::ETIMEDOUT),
            (ReadError::AccessDenied(failure()), Errno::EACCES),
            (ReadError::Unreachable(failure()), Errno::EIO),
            (ReadError::Memory(failure()), Errno::ENOMEM),
            (ReadError::Unscanned, Errno::EIO),
        ] {
            assert_eq!(errno_of(&error), number, "{error}");
        }
    }
}
