//! Brings an existing tree to the state of a source: writes only what differs, and removes what the source lacks.

mod apply;
mod extra;
mod plan;

pub use self::plan::{DeletionRefusal, SyncPlan, SyncPlanner};
