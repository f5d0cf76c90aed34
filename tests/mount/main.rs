//! Tests that need root, `/dev/fuse`, mount namespaces, or servers that scripts/test installs.
//!
//! Without root or `/dev/fuse` they fail. `cargo test` leaves them out, and `scripts/test` runs them
//! with `cargo test --test mount`.

mod adversarial;
mod atomic;
mod background_copy;
mod bind_mounts;
mod cache;
mod cli;
mod conformance;
mod copies;
mod daemon;
mod damaged_members;
mod destination;
mod differential;
mod directory;
mod disk_cache;
mod faults;
mod foreground;
mod image;
mod kills;
mod layers;
mod listing;
mod materialize;
mod model;
mod mount;
mod mount_helper;
mod mount_while_scanning;
mod nested_sources;
mod network;
mod offline;
mod overlay;
mod published_index;
mod push;
mod restart;
mod secrets;
mod semantics;
mod shared;
mod span_hash;
mod status;
mod stress;
#[allow(dead_code, reason = "each test binary uses its own part")]
#[path = "../support/mod.rs"]
mod support;
mod terminal;
mod truncated;
mod unprivileged;
mod weak_versions;
mod writable;
mod xattrs;
