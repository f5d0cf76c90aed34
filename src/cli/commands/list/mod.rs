//! The verbs that list and walk trees.

pub(crate) mod du;
pub(crate) mod find;
pub(crate) mod ls;
pub(super) mod open_place;
