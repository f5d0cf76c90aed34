//! Extended attributes: ACLs, and the selection by name.

pub mod filter;
pub mod posix_acl;
