//! Flags shared by several verbs: parsed values without side effects.

mod cache;
pub(crate) mod headers;
mod size;
mod source;
pub(crate) mod xattrs;

pub(crate) use cache::{CacheArgs, CacheDirArgs, SavedIndexArgs};
pub(crate) use size::{Size, count_parser, seconds_parser};
pub(crate) use source::SourceArgs;
#[cfg(test)]
pub(crate) use source::tests::parse_source;
