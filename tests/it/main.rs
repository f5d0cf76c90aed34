//! Whole parts of the program, against real servers and real files.

mod remote;
mod support;
