//! Malicious archives that are mounted, and those with devices.
//!
//! `tests/library` has the tests that need no root.

mod bombs;
mod confinement;
mod endless;
mod limits;
