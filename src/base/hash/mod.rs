//! Hashes and checksums of archives, spans and headers.

mod overlapped_read;
pub(crate) mod sha256;
pub mod span_hash;
pub(crate) mod tar_checksum;

pub(crate) use overlapped_read::read_overlapped;
