//! The program and the library from outside: real mounts, real files, real servers and processes.

mod budget;
mod daemon;
mod materialize;
mod mount;
mod remote;
mod support;
