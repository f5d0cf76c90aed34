//! Hashes and checksums of archives, spans and headers.

pub(crate) mod sha256;
pub mod span_hash;
pub(crate) mod tar_checksum;
