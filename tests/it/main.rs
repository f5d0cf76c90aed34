//! The program and the library from outside: real mounts, real files, real servers and processes.

mod daemon;
mod docs;
mod materialize;
mod mount;
mod remote;
mod semantics;
mod support;
