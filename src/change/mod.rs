//! Changes to the files of a directory tree, as chmod(1), chown(1) and rm(1) make them.
//!
//! Every call names a file by its open directory and follows no link in it.

mod attributes;
mod log;
mod remove;

pub use attributes::{Attributes, ChangeOptions, Changer, LateChange, Owner};
pub use log::{ChangeLog, Verbosity, quote};
pub use remove::ask;
