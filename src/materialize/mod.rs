//! Parallel writer: writes the members of a scan to a tree on disk.
//!
//! A [`Materializer`] is a [`Sink`](crate::archive::scan::Sink). On the scan thread it makes directories,
//! links and special files. It sends regular files to writer threads, piece by piece as the scan delivers
//! them. Directories get their owner, mode and times at the very end. Every entry stays below the
//! destination, whatever the archive and the destination contain, because the kernel never follows a link for
//! us. With `--atomic`, the tree is first written into a [`Staging`].
//!
//! Two smaller sinks write no tree: [`ContentSink`] and [`DryRunSink`].

mod background_copy;
mod copy_plan;
mod copy_tree;
mod dry_run;
mod entry_reader;
mod error;
mod layers;
mod lock;
mod materializer;
mod options;
mod resume;
mod selection;
mod shard;
mod shard_records;
mod sidecar;
mod staging;
mod sync;
mod to_stdout;
mod tree_writer;
mod write;

#[cfg(test)]
mod test_support;

pub use self::background_copy::{BackgroundCopy, BackgroundCopyProgress, CopyState, RunningCopy};
pub use self::dry_run::DryRunSink;
pub use self::entry_reader::{EntryError, read_entries};
pub use self::error::{Cause, Error, Problem, Reporter, StepError};
pub use self::layers::UNPLACED_DIRECTORY;
pub use self::lock::DestinationLock;
pub use self::materializer::{Materializer, StopOnDrop};
pub use self::options::{Existing, Options, Summary};
pub use self::selection::{PathLinks, SelectedPath, Selection};
pub use self::staging::Staging;
pub use self::sync::{DeletionRefusal, SyncPlan, SyncPlanner};
pub use self::to_stdout::ContentSink;
#[cfg(feature = "python")]
pub(crate) use self::write::member_of;
pub use self::write::{check_empty_destination, is_empty_directory};
pub use crate::base::glob::Glob;
pub use crate::base::xattr::filter::XattrFilter;
