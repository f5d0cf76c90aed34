//! The program and the library from outside: real mounts, real files, real processes.

mod daemon;
mod mount;
