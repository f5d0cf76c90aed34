//! Threads that wait for each other, in the orders that chance comes upon.
//!
//! The library's own files are compiled once more here, with the locks of a scheduler that runs one
//! thread at a time and decides by a seed who goes on whenever one could wait (`base::sync`). So an
//! order is tried again by its seed, and threads that wait for ever are a failure at once. Half of the
//! orders are any, half are such that few changes of turn matter.
//!
//! Without the usual harness: the unit tests in those files would run outside of the scheduler.

#[path = "../it/support/rng.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod rng;
#[path = "../it/support/rounds.rs"]
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

/// Orders of each kind, when nobody asks for more.
const DEFAULT_ROUNDS: u64 = 1500;

/// Changes of turn that matter, in half of the orders.
const PREEMPTION_POINTS: usize = 3;

/// Threads, and what must hold whatever their order.
type Scenario = fn(Rng);

/// Runs `scenario` in many orders; what else is chance in there, it takes from the noise.
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

/// What is explored, by name.
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

/// As the usual harness does it, for those tests whose names hold the words that are asked for.
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
