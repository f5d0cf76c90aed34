//! The receiver of a scan's results.

use bytes::Bytes;

use super::scan::resume_point::ResumePoint;
use crate::base::extent::Plain;
use crate::codec::Compression;
use crate::index::{NewDigests, Span};
use crate::tar::Member;

/// The way in which the payload of a member ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PayloadEnd {
    /// All bytes were passed.
    Complete,
    /// The archive ends in the middle of it.
    Cut,
    /// The next bytes are damaged or unavailable, which [`Sink::damage`] or the error of the run reports.
    Damaged,
}

/// Receives the results of a scan, in archive order, on the scan thread.
///
/// For each member: [`member`](Self::member), [`payload`](Self::payload) for each piece,
/// [`member_end`](Self::member_end). With [`Options::spans`](super::scan::Options::spans), also the whole
/// plain stream, in spans.
pub trait Sink {
    /// Reason to stop the whole scan. The sink itself must remember a problem of a single member.
    type Error: std::fmt::Debug;

    /// Whether the sink needs all payloads. Otherwise the options may let the scan skip some.
    fn needs_payloads(&self) -> bool {
        true
    }

    /// Reports the packed format of the source.
    fn begin(&mut self, _compression: Compression) {}

    /// Begins the next member.
    ///
    /// # Errors
    /// When the scan must stop.
    fn member(&mut self, member: Member) -> Result<(), Self::Error>;

    /// Passes the next piece of the payload, which is never empty. All pieces together are as long as the
    /// member's payload extent. `bytes` count against the scan's memory budget until dropped.
    ///
    /// # Errors
    /// When the scan must stop.
    fn payload(&mut self, _bytes: Bytes) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Ends the payload.
    ///
    /// # Errors
    /// When the scan must stop.
    fn member_end(&mut self, _end: PayloadEnd) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Reports an oddity. `text` says what is odd, and where.
    fn warning(&mut self, text: &str);

    /// Reports a damaged or lost member. `offset` is that of its header; `text` says what is wrong.
    fn damage(&mut self, offset: Plain, text: &str);

    /// Checks whether the sink has memory for more.
    ///
    /// # Errors
    /// When the sink has no memory left, which ends the scan.
    fn check_memory(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Passes the next bytes of the current span, whether or not they belong to a member.
    fn span_piece(&mut self, _bytes: &Bytes) {}

    /// Passes digests of packed bytes. This precedes all plain bytes decoded from them.
    fn digests(&mut self, _digests: &NewDigests) {}

    /// Ends the current span, with the `checksums` of its blocks, which are empty if the span has no hash.
    fn span_end(&mut self, _span: Span, _checksums: &[u64]) {}

    /// Reports a point in front of the next member where a later scan can resume, unless that is impossible.
    fn resume_point(&mut self, _point: ResumePoint) {}
}
