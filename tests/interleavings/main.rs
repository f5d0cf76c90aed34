//! Threads that wait for each other, in random interleavings.
//!
//! The library's own files are compiled once more here, with the locks of a scheduler (`base::sync`).
//! It runs one thread at a time, and a seed decides which thread runs next. An interleaving is
//! repeated by its seed, and a deadlock is a failure at once. Half of the interleavings are uniformly
//! random, half have few preemptions that matter.
//!
//! There is no standard harness, because the unit tests in those files would run outside of the
//! scheduler.

#[path = "../support/rng.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod rng;
#[path = "../support/rounds.rs"]
mod rounds;

mod base;
mod memory_pool;
#[path = "../../src/archive/read/single_flight.rs"]
#[allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    clippy::pedantic,
    reason = "the library's, and looked at there"
)]
mod single_flight;
mod span_fill;

use std::panic::catch_unwind;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

use rng::Rng;

/// Default number of interleavings of each kind.
const DEFAULT_ROUNDS: u64 = 1500;

/// Number of preemptions in half of the interleavings.
const PREEMPTION_POINTS: usize = 3;

/// Threads, and what must hold in every interleaving.
type Scenario = fn(Rng);

/// Runs `scenario` in many interleavings. It takes its other random numbers from the argument.
fn explore(scenario: Scenario) {
    let orders = rounds::rounds(DEFAULT_ROUNDS);
    let iterations = usize::try_from(orders).expect("small");
    let number = AtomicU64::new(rounds::seed().wrapping_mul(1 << 32));
    let number = std::sync::Arc::new(number);
    let run = move || scenario(Rng::new(number.fetch_add(1, Ordering::SeqCst)));
    let any = RandomScheduler::new_from_seed(rounds::seed(), iterations);
    Runner::new(any, Config::new()).run(run.clone());
    let few_changes = PctScheduler::new_from_seed(rounds::seed(), PREEMPTION_POINTS, iterations);
    Runner::new(few_changes, Config::new()).run(run);
}

/// All scenarios by name.
const SCENARIOS: [(&str, Scenario); 10] = [
    (
        "one_reader_fills_span_for_all_others",
        span_fill::shared_fill,
    ),
    (
        "waiters_get_span_from_next_filler_after_failure_or_panic",
        span_fill::fill_after_failures,
    ),
    (
        "waiters_share_failure_of_the_filler",
        span_fill::shared_failure,
    ),
    (
        "buffers_stay_within_budget_and_every_waiter_gets_one",
        memory_pool::buffers,
    ),
    (
        "soft_limited_takers_get_memory_eventually",
        memory_pool::soft_limits,
    ),
    (
        "granted_memory_is_not_handed_out_until_returned",
        memory_pool::buffers_beside_grant,
    ),
    (
        "grants_stay_within_limit_and_every_waiter_gets_one",
        memory_pool::grants,
    ),
    (
        "preallocated_memory_never_waits_and_is_returned",
        memory_pool::preallocations,
    ),
    (
        "decoder_ahead_of_consumer_never_deadlocks",
        memory_pool::long_jobs,
    ),
    (
        "closing_pool_ends_all_waits_for_memory",
        memory_pool::close_during_waits,
    ),
];

/// Runs the scenarios whose names contain the given words, as the standard harness does.
#[expect(clippy::print_stdout, reason = "as the usual harness does")]
fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let is_wanted = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(*word));
    let start = Instant::now();
    let (mut passed, mut failed, mut left_out) = (0, 0, 0);
    for (name, scenario) in SCENARIOS {
        if !is_wanted(name) {
            left_out += 1;
        } else if catch_unwind(|| explore(scenario)).is_ok() {
            println!("test {name} ... ok");
            passed += 1;
        } else {
            println!("test {name} ... FAILED");
            failed += 1;
        }
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {passed} passed; {failed} failed; 0 ignored; 0 measured; \
         {left_out} filtered out; finished in {:.2}s\n",
        start.elapsed().as_secs_f64()
    );
    ExitCode::from(u8::from(failed > 0))
}
