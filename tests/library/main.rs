//! Tests of the library and the program that need neither root nor FUSE.
//!
//! They use plain files, servers on 127.0.0.1, the usual tools that pack archives, `python3`,
//! `openssl`, GNU find and script(1).

mod accepted_answers;
mod adversarial;
mod archive;
mod atomic;
mod cat;
mod change;
mod cli;
mod clouds;
mod copy_tree;
mod credential_outages;
mod credentials;
mod damaged_members;
mod destination;
mod diff;
mod docs;
mod drawing;
mod estargz;
mod find;
mod gnu_tar;
mod help;
mod hints;
mod image;
mod layered_archive;
mod layers;
mod listing;
mod materialize;
mod memory_budget;
mod mirrors;
mod nested_sources;
mod offline;
mod promises;
mod push;
mod registry;
mod remote;
mod replaced_entries;
mod resume;
mod semantics;
mod serve;
mod shards;
mod simulation;
mod soci;
mod source_names;
mod stragglers;
#[allow(dead_code, reason = "each test binary uses its own part")]
#[path = "../support/mod.rs"]
mod support;
mod sync_deletions;
mod terminal;
mod time_limits;
mod tree_origin;
mod truncated;
mod update;
mod upload;
mod verify;
mod via;
