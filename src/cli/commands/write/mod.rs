//! Verbs that write trees: a file each, and what they share.

pub(crate) mod args;
pub(crate) mod copy;
pub(crate) mod materialize;
pub(crate) mod output;
pub(crate) mod shard;
pub(crate) mod sync;
