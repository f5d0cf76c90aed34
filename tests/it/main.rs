//! The program and the library from outside: real mounts, real files, real servers and processes.

mod cli;
mod daemon;
mod differential;
mod materialize;
mod mount;
mod remote;
mod support;
