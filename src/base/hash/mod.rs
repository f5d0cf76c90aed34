//! Hashes and checksums of archives, spans and headers.

pub mod sha256;
pub mod span_hash;
pub mod tar_checksum;
