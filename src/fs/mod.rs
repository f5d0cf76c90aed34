//! FUSE: unpack, call, reply; no decisions.
