//! Readers of one span, as `archive::read` has them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, PoisonError};

use bytes::Bytes;
use shuttle::sync::{Mutex, MutexGuard};
use shuttle::thread;

use crate::flights::Flights;
use crate::noise::Noise;

const SPANS: usize = 2;
const READERS: u64 = 4;

/// What readers share.
#[derive(Default)]
struct Reader {
    flights: Flights,
    spans: [Span; SPANS],
}

#[derive(Default)]
struct Span {
    memory: Mutex<Option<Bytes>>,
    making: Mutex<Making>,
}

#[derive(Clone, Copy, Default)]
struct Making {
    /// How many make it at this moment.
    now: u64,
    /// How often it was made.
    done: u64,
    /// How often that will fail first.
    failures: u64,
}

/// A panic of one thread poisons what others hold at the time: to the system they are one.
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

    /// The bytes of a span; `None` when it was this one's turn to make it, and that failed.
    fn read(&self, number: u64, panics: bool) -> Option<Bytes> {
        let memory = &self.span(number).memory;
        let make = || {
            let bytes = self.make(number, panics).ok_or("made to fail")?;
            *lock(memory) = Some(bytes.clone());
            Ok::<_, &str>(bytes)
        };
        let span = u32::try_from(number).expect("small");
        let read = self.flights.get(span, || lock(memory).clone(), make);
        read.ok().map(|(bytes, _)| bytes)
    }

    fn make(&self, number: u64, panics: bool) -> Option<Bytes> {
        let change = |change: fn(&mut Making)| {
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
            // Without the noise of a panic that nobody expects.
            resume_unwind(Box::new("made to fail"));
        }
        None
    }
}

/// Lets readers read, of whom so many fail for each span; all others get their bytes.
fn read_all(mut noise: Noise, failures: [u64; SPANS]) {
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
                let read = catch_unwind(AssertUnwindSafe(|| reader.read(number, panics)));
                let read = read.unwrap_or_default();
                assert!(read.as_ref().is_none_or(|read| *read == bytes(number)));
                u64::from(read.is_none())
            })
        })
        .collect();
    let failed = readers
        .into_iter()
        .map(|reader| reader.join().expect("it catches its panics"));
    assert_eq!(failed.sum::<u64>(), failures.iter().sum::<u64>());
    for (number, span) in (0..).zip(&reader.spans) {
        assert_eq!(lock(&span.making).done, 1, "made once");
        assert!(reader.flights.claim(number).is_ok(), "nobody has it");
    }
}

pub(crate) fn one_for_all(noise: Noise) {
    read_all(noise, [0; SPANS]);
}

pub(crate) fn after_failures(mut noise: Noise) {
    let failures = [(); SPANS].map(|()| noise.below(READERS));
    read_all(noise, failures);
}
