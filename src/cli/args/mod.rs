//! Flags shared by several verbs: parsed values without side effects.

mod cache;
mod given;
pub(crate) mod headers;
pub(crate) mod heading;
mod layers;
mod mount;
mod output;
mod prefetch;
mod server;
mod shard;
mod size;
mod source;
mod walk;
mod xattrs;

pub(crate) use cache::{CacheArgs, CacheDirArgs, SavedIndexArgs};
pub(crate) use given::{GivenArgs, PART_ARGS};
pub(crate) use layers::LayerArgs;
pub(crate) use mount::MountArgs;
pub(crate) use output::{HumanReadableArg, JsonArg, LongHelpArg, QuietArg, StatsArg};
pub(crate) use prefetch::{Mode, PrefetchArgs};
pub(crate) use shard::ShardArg;
pub(crate) use size::{count_parser, seconds_parser};
pub(crate) use source::SourceArgs;
pub(crate) use tarfs::internal::size::Size;
pub(crate) use walk::{JobsArg, LinkFlags, TreeArgs};
pub(crate) use xattrs::{XattrArgs, glob_parser};
