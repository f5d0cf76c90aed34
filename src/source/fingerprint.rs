//! Identity of the bytes.

/// (stub)
#[derive(Clone, Debug)]
pub struct Fingerprint {}
