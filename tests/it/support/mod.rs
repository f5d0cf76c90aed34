//! What several tests need.

pub(crate) mod http;
pub(crate) mod noise;
pub(crate) mod packing;
pub(crate) mod tree;
pub(crate) mod raw;
