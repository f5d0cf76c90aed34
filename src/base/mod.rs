//! Words everyone shares. A file enters only when two neighbouring layers need it.

pub mod accounts;
pub mod acl;
pub mod bounds;
pub mod buffer;
pub mod change_time;
pub mod civil;
pub mod extent;
pub mod file_time;
pub mod free_list;
pub mod glob;
pub mod loan;
pub mod path;
pub mod private;
pub mod regular;
pub mod resolve;
pub mod sha256;
pub mod short_reads;
pub mod span_hash;
pub mod stats;
pub mod sync;
pub mod tar_checksum;
pub mod task;
pub mod ticket;
pub mod time_left;
pub mod workers;
pub mod xattrs;
