//! Resumable runs: journal their progress, and restore the state of an interrupted run.
//!
//! A member may be made twice, before and after the interruption, and the result must be the same. This
//! holds because nothing that an earlier member depends on changes between two checkpoints. So the run
//! writes a checkpoint before each member that finds an existing entry. Exceptions are a file over a file
//! with one name, and a directory over a directory. It also writes a checkpoint after each member that
//! could not be made as archived, or was deferred.

pub(super) mod encoding;
pub(super) mod journal;
pub(super) mod sidecar;
mod state;

pub(super) use self::state::{ResumeState, is_tree_unchanged};
