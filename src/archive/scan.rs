//! One pass over an archive: fetch → decode → parse, and every sink together.

use bytes::Bytes;

use crate::tar::Member;

/// Receives members in archive order: [`member`](Self::member), then its payload piece by piece,
/// then [`member_end`](Self::member_end).
pub trait MemberSink {
    /// Why the whole scan must stop. What concerns one member only is the sink's to remember.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The next member begins.
    ///
    /// # Errors
    /// When the scan must stop.
    fn member(&mut self, member: Member) -> Result<(), Self::Error>;

    /// The next piece of the payload, never empty; pieces add up to the member's payload extent.
    /// The bytes hold a share of the scan's memory budget until dropped.
    ///
    /// # Errors
    /// When the scan must stop.
    fn payload(&mut self, bytes: Bytes) -> Result<(), Self::Error>;

    /// The member's payload is complete; or, when `cut`, the archive ends in the middle of it.
    ///
    /// # Errors
    /// When the scan must stop.
    fn member_end(&mut self, cut: bool) -> Result<(), Self::Error>;

    /// Something is odd, at this byte of the plain stream, and `text` says what; nothing is lost
    /// that GNU tar would keep.
    fn warning(&mut self, text: &str);
}
