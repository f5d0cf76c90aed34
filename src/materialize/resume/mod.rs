//! Resumable runs: journal their progress, and restore the state of an interrupted run.
//!
//! A member may be made twice, before and after the interruption, with the same result. This holds because
//! nothing that an earlier member depends on changes between two checkpoints. So the run writes a checkpoint
//! before each member that finds an existing entry, except a file over a file with one name, and a directory
//! over a directory. It also writes one after each member that was deferred or not made as archived.

pub(super) mod journal;
mod state;

pub(super) use self::state::{ResumeState, is_tree_unchanged};
