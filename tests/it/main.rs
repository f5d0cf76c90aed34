//! The program and the library from outside: real mounts, real files, real servers and processes.

mod archive;
mod atomic;
mod budget;
mod cli;
mod copy;
mod daemon;
mod differential;
mod docs;
mod lazy;
mod materialize;
mod mount;
mod network;
mod remote;
mod semantics;
mod spool;
mod status;
mod successor;
mod support;
mod verify;
