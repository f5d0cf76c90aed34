//! The verbs that list, walk and change trees.

mod change;
pub(crate) mod chmod;
pub(crate) mod chown;
pub(crate) mod diff;
pub(crate) mod du;
pub(crate) mod find;
pub(crate) mod ls;
pub(super) mod operands;
pub(crate) mod rm;
