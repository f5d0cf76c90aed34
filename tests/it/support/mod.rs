//! What several tests need.

pub(crate) mod http;
pub(crate) mod image;
pub(crate) mod measured;
pub(crate) mod mounts;
pub(crate) mod namespace;
pub(crate) mod noise;
pub(crate) mod packing;
pub(crate) mod program;
pub(crate) mod raw;
pub(crate) mod refusal;
pub(crate) mod rounds;
pub(crate) mod simulated;
pub(crate) mod sums;
pub(crate) mod tree;
pub(crate) mod wait;
