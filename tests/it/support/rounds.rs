//! How long tests of chance go on.

use std::str::FromStr;

/// Rounds of a test of chance: `few`, so that all tests end soon, or as many as the environment's
/// `TARFS_ROUNDS` says (`scripts/soak`).
pub(crate) fn rounds(few: u64) -> u64 {
    number("TARFS_ROUNDS").unwrap_or(few)
}

/// Which chance: the environment's `TARFS_SEED`, so that what once failed can be tried again.
pub(crate) fn seed() -> u64 {
    number("TARFS_SEED").unwrap_or(1)
}

#[expect(
    clippy::disallowed_methods,
    reason = "tests are told by the script that runs them"
)]
fn number<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}
