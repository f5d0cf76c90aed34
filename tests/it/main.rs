//! The program and the library from outside: real mounts, real files, real servers and processes.

mod adversarial;
mod archive;
mod atomic;
mod budget;
mod cache;
mod cli;
mod copy;
mod daemon;
mod differential;
mod docs;
mod faults;
mod kills;
mod lazy;
mod materialize;
mod mount;
mod network;
mod remote;
mod resume;
mod secrets;
mod semantics;
mod spool;
mod status;
mod successor;
mod support;
mod user;
mod verify;
