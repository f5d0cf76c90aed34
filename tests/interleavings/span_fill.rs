//! Readers of one span, as `archive::read` has them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, PoisonError};

use bytes::Bytes;
use shuttle::sync::{Mutex, MutexGuard};
use shuttle::thread;

use crate::rng::Rng;
use crate::single_flight::{FlightError, SingleFlight};

const SPANS: usize = 2;
const READERS: u64 = 4;

/// State shared by the readers.
#[derive(Default)]
struct Reader {
    single_flight: SingleFlight<Failure>,
    spans: [Span; SPANS],
}

#[derive(Default)]
struct Span {
    memory: Mutex<Option<Bytes>>,
    making: Mutex<FillError>,
}

#[derive(Clone, Copy, Default)]
struct FillError {
    /// Number of threads that decode the span now.
    now: u64,
    /// Number of times the span was decoded.
    done: u64,
    /// Number of times that decoding fails first.
    failures: u64,
}

/// The error of a failed decode.
#[derive(Clone, Debug)]
struct Failure {
    /// Whether waiting readers fail with the one that decodes the span.
    is_shared: bool,
}

impl FlightError for Failure {
    fn is_shared(&self) -> bool {
        self.is_shared
    }
}

/// Locks a mutex and ignores poisoning. The scheduler treats all threads as one, so a panic of one
/// poisons the locks of others.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bytes(number: u64) -> Bytes {
    format!("span {number}").into()
}

impl Reader {
    fn span(&self, number: u64) -> &Span {
        let place = usize::try_from(number).expect("small");
        self.spans.get(place).expect("one of them")
    }

    /// Reads a span. Returns `None` if this reader decoded it and failed, or shares the failure of
    /// another reader.
    fn read(&self, number: u64, panics: bool, is_shared: bool) -> Option<Bytes> {
        let memory = &self.span(number).memory;
        let make = || {
            let bytes = self.make(number, panics);
            let bytes = bytes.ok_or(Failure { is_shared })?;
            *lock(memory) = Some(bytes.clone());
            Ok(bytes)
        };
        let span = u32::try_from(number).expect("small");
        let read = self
            .single_flight
            .get_or_fill(span, || lock(memory).clone(), make);
        read.ok().map(|(bytes, _)| bytes)
    }

    fn make(&self, number: u64, panics: bool) -> Option<Bytes> {
        let change = |change: fn(&mut FillError)| {
            let mut making = lock(&self.span(number).making);
            change(&mut making);
            *making
        };
        let began = change(|making| making.now += 1);
        assert_eq!(began.now, 1, "one at a time");
        thread::yield_now();
        let ended = change(|making| {
            making.now -= 1;
            match making.failures.checked_sub(1) {
                Some(left) => making.failures = left,
                None => making.done += 1,
            }
        });
        if ended.done > 0 {
            return Some(bytes(number));
        }
        if panics {
            // A panic without a message on standard error.
            resume_unwind(Box::new("made to fail"));
        }
        None
    }
}

/// Runs readers. The given number of readers fails for each span, plus those that share a failure.
fn read_all(mut noise: Rng, failures: [u64; SPANS], is_shared: bool) {
    let reader = Reader::default();
    for (span, failures) in reader.spans.iter().zip(failures) {
        lock(&span.making).failures = failures;
    }
    let reader = Arc::new(reader);
    let readers: Vec<_> = (0..SPANS as u64 * READERS)
        .map(|number| {
            let (reader, panics) = (Arc::clone(&reader), noise.below(2) == 0);
            thread::spawn(move || {
                let number = number % SPANS as u64;
                let read = || reader.read(number, panics, is_shared);
                let read = catch_unwind(AssertUnwindSafe(read)).unwrap_or_default();
                assert!(read.as_ref().is_none_or(|read| *read == bytes(number)));
                (number, read.is_none())
            })
        })
        .collect();
    let mut failed = [0; SPANS];
    for reader in readers {
        let (number, has_failed) = reader.join().expect("it catches its panics");
        let place = usize::try_from(number).expect("small");
        *failed.get_mut(place).expect("one of them") += u64::from(has_failed);
    }
    for (((number, span), failures), failed) in (0..).zip(&reader.spans).zip(failures).zip(failed) {
        let making = *lock(&span.making);
        assert!(reader.single_flight.claim(number).is_ok(), "not claimed");
        if is_shared {
            assert!(failed >= failures - making.failures, "one for each failure");
            assert_eq!(
                making.done,
                u64::from(failed < READERS),
                "made at most once"
            );
        } else {
            assert_eq!(failed, failures);
            assert_eq!(making.done, 1, "made once");
        }
    }
}

pub(crate) fn shared_fill(noise: Rng) {
    read_all(noise, [0; SPANS], false);
}

pub(crate) fn fill_after_failures(mut noise: Rng) {
    let failures = [(); SPANS].map(|()| noise.below(READERS));
    read_all(noise, failures, false);
}

pub(crate) fn shared_failure(mut noise: Rng) {
    let failures = [(); SPANS].map(|()| noise.below(READERS));
    read_all(noise, failures, true);
}
