//! Extended attributes: ACLs, and the selection by name.

pub(crate) mod filter;
pub mod posix_acl;
