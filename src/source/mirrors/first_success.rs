//! The first success of several attempts, of which each starts a little later.

use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;

/// Runs `attempts` until one succeeds, and returns its number, too. Each starts when the one before it has run for
/// `head_start`, or when one fails. If all fail, it returns their errors in the order of the attempts.
pub(in crate::source) async fn first_success<T, E, F: Future<Output = Result<T, E>>>(
    attempts: impl IntoIterator<Item = F>,
    head_start: Duration,
) -> Result<(usize, T), Vec<E>> {
    let mut waiting = attempts.into_iter().enumerate().peekable();
    let (mut running, mut errors) = (FuturesUnordered::new(), Vec::new());
    let mut next_start = Instant::now();
    loop {
        let has_waiting = waiting.peek().is_some();
        tokio::select! {
            biased;
            Some((number, result)) = running.next() => match result {
                Ok(success) => return Ok((number, success)),
                Err(error) => {
                    errors.push((number, error));
                    next_start = Instant::now();
                }
            },
            () = tokio::time::sleep_until(next_start), if has_waiting => {
                let next = waiting.next();
                running.extend(next.map(|(number, attempt)| async move { (number, attempt.await) }));
                next_start = Instant::now() + head_start;
            }
            else => break,
        }
    }
    errors.sort_by_key(|&(number, _)| number);
    Err(errors.into_iter().map(|(_, error)| error).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs attempts that take this many milliseconds and succeed or fail. Returns the result and the time.
    fn run(attempts: &[(u64, bool)]) -> (Result<(usize, u64), Vec<u64>>, u64) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build();
        runtime.expect("a runtime").block_on(async {
            let started = Instant::now();
            let attempts = attempts.iter().map(|&(millis, succeeds)| async move {
                tokio::time::sleep(Duration::from_millis(millis)).await;
                if succeeds { Ok(millis) } else { Err(millis) }
            });
            let result = first_success(attempts, Duration::from_millis(100)).await;
            (
                result,
                started.elapsed().as_millis().try_into().unwrap_or(u64::MAX),
            )
        })
    }

    // Promises: hosts-order, mirror-source
    #[test]
    fn silent_server_delays_the_next_one_by_a_head_start() {
        assert_eq!(run(&[(50, true), (1, true)]), (Ok((0, 50)), 50));
        assert_eq!(run(&[(9000, true), (10, true)]), (Ok((1, 10)), 110));
        assert_eq!(run(&[(150, true), (90, true)]), (Ok((0, 150)), 150));
        assert_eq!(
            run(&[(9000, false), (9000, false), (10, true)]),
            (Ok((2, 10)), 210)
        );
    }

    // Promises: hosts-order
    #[test]
    fn failed_server_does_not_delay_the_next_one() {
        assert_eq!(run(&[(10, false), (20, true)]), (Ok((1, 20)), 30));
        assert_eq!(run(&[(30, false), (20, false)]), (Err(vec![30, 20]), 50));
        assert_eq!(run(&[]), (Err(Vec::new()), 0));
    }
}
