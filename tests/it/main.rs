//! The program and the library from outside: real mounts, real files, real servers and processes.

mod daemon;
mod mount;
mod remote;
mod support;
