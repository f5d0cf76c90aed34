//! Shared fixtures of the tests.

pub(crate) mod archive_env;
pub(crate) mod atomic;
pub(crate) mod cli;
pub(crate) mod damaged;
pub(crate) mod destination;
pub(crate) mod failing_syscall;
pub(crate) mod fixture;
pub(crate) mod http;
pub(crate) mod image;
pub(crate) mod materialize;
pub(crate) mod measured_runner;
pub(crate) mod mounts;
pub(crate) mod namespace;
pub(crate) mod nested;
pub(crate) mod packing;
pub(crate) mod program;
pub(crate) mod raw;
pub(crate) mod rng;
pub(crate) mod rounds;
pub(crate) mod sample_images;
pub(crate) mod sha256;
pub(crate) mod simulated_network;
pub(crate) mod terminal;
pub(crate) mod tree;
pub(crate) mod wait;
