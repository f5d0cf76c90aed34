//! What several tests need.

pub(crate) mod http;
pub(crate) mod raw;
