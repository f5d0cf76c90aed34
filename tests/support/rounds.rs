//! Length and seed of randomized tests.

use std::str::FromStr;

/// Number of rounds: `few`, or `TARFS_ROUNDS` of the environment (`scripts/soak`).
pub(crate) fn rounds(few: u64) -> u64 {
    number("TARFS_ROUNDS").unwrap_or(few)
}

/// Seed of a randomized test: `TARFS_SEED` of the environment, to repeat a failure.
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
