//! Tests of the adaptive concurrency.

mod simulation;

use self::simulation::{Server, Simulation};
use super::*;

const MIB: u64 = 1 << 20;

const BUDGET: u64 = 64 * MIB;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const LOOPBACK: Simulation = Simulation {
    round_trip: 0,
    connection_rate: 1_000_000,
    total_rate: 1_500_000,
    reader: 500_000,
    len: 400 * MIB,
    server: Server::Ready,
};

// Promises: request-rejected
#[test]
fn serial_server_gets_one_request_at_once() {
    let simulation = Simulation {
        server: Server::Serial(500),
        len: 240 * MIB,
        ..LOOPBACK
    };
    let transfer = simulation.transfer(None);
    assert!(transfer.concurrency.is_serial && transfer.concurrency.is_streaming());
    assert_eq!((transfer.max_requests, transfer.sent), (2, 2));
    assert!(transfer.concurrency.is_confirmed_serial());
    let short = Simulation {
        len: 2 * MIB,
        ..simulation
    };
    let transfer = short.transfer(None);
    assert!(transfer.concurrency.is_serial && !transfer.concurrency.is_confirmed_serial());
}

// Promises: request-limits
#[test]
fn server_with_parallel_latency_gets_many_requests() {
    let simulation = Simulation {
        server: Server::Parallel(500),
        connection_rate: 20_000,
        ..LOOPBACK
    };
    let transfer = simulation.transfer(None);
    assert!(!transfer.concurrency.is_serial);
    assert_eq!(transfer.requests_without_trial(), 16);
}

// Promises: request-limits
#[test]
fn server_that_decompresses_from_the_start_gets_one_request() {
    let simulation = Simulation {
        server: Server::Unpacking(240_000),
        len: 240 * MIB,
        ..LOOPBACK
    };
    let transfer = simulation.transfer(None);
    assert!(transfer.concurrency.is_streaming() && !transfer.concurrency.is_serial);

    assert!(transfer.sent < 20, "{} requests", transfer.sent);
    let stream = simulation.len / 240_000;
    assert!(transfer.now < stream * 5 / 4, "{} ms", transfer.now);
}

// Promises: request-rejected
#[test]
fn each_stream_request_is_four_times_as_long() {
    let simulation = Simulation {
        server: Server::Serial(500),
        len: 16_384 * MIB,
        reader: 100_000,
        ..LOOPBACK
    };
    let transfer = simulation.transfer(None);
    // Requests of 1 GiB, 4 GiB and the rest; a further one detected that the server is serial.
    assert_eq!(transfer.sent, 4);
}

#[test]
fn reader_that_never_waits_gets_no_more_requests() {
    let (transfer, longer) = LOOPBACK.run();
    assert_eq!(transfer.max_requests, INITIAL_REQUESTS);
    assert!(longer <= 5, "{longer} %");
}

#[test]
fn fast_start_does_not_add_requests() {
    // The reader takes bytes at once, until its consumer is busy.
    let simulation = Simulation {
        connection_rate: 200_000,
        total_rate: 800_000,
        reader: 5_000_000,
        len: 64 * MIB,
        ..LOOPBACK
    };
    let (transfer, _) = simulation.run();
    assert!(transfer.now < 100, "{} ms", transfer.now);
    assert_eq!(transfer.max_requests, INITIAL_REQUESTS);
}

#[test]
fn unneeded_requests_are_dropped_soon() {
    let mut concurrency = AdaptiveConcurrency::new(16, 8 * MIB, BUDGET, None);
    for now in [10, 20] {
        concurrency.update(Sample {
            now: ms(now),
            waited: ms(now),
            in_flight: 16,
            ..Sample::default()
        });
    }
    assert_eq!(concurrency.requests(), 16);
    // From now on the reader takes 100 bytes a millisecond, and each request transfers 50.
    for now in 3..=5 {
        let sample = Sample {
            now: ms(now * 100),
            waited: ms(20),
            received: now * 10_000,
            read: now * 10_000,
            in_flight: 2,
            is_cheap: false,
        };
        concurrency.on_completed(
            sample,
            CompletedChunk {
                start: 0,
                len: 500,
                duration: ms(10),
                latency: Some(ms(0)),
                cost: None,
            },
        );
        concurrency.update(sample);
    }
    assert_eq!(concurrency.requests(), INITIAL_REQUESTS);
}

#[test]
fn fetch_ahead_is_three_times_the_bytes_in_flight() {
    let mut concurrency = AdaptiveConcurrency::new(16, 2 * MIB, BUDGET, None);
    assert_eq!(concurrency.fetch_ahead_bytes(), 3 * MIB);
    for _ in 0..10 {
        concurrency.on_sent();
    }
    assert_eq!(concurrency.fetch_ahead_bytes(), 24 * MIB);
}

#[test]
fn slow_connections_lead_to_many_requests() {
    let simulation = Simulation {
        connection_rate: 60_000,
        ..LOOPBACK
    };
    let (transfer, longer) = simulation.run();
    assert_eq!(transfer.requests_without_trial(), 16);
    assert!(transfer.grown <= 30, "after {} ms", transfer.grown);
    assert!(longer <= 10, "{longer} %");
}

#[test]
fn long_round_trip_is_filled_within_one_round_trip() {
    // A connection can have a window of 4 MiB in flight.
    let simulation = Simulation {
        round_trip: 40,
        connection_rate: 4 * MIB / 40,
        ..LOOPBACK
    };
    let (transfer, longer) = simulation.run();
    assert_eq!(transfer.requests_without_trial(), 16);
    assert!(transfer.grown <= 40, "after {} ms", transfer.grown);
    assert!(longer <= 10, "{longer} %");
}

#[test]
fn requests_that_add_no_throughput_are_dropped() {
    let simulation = Simulation {
        round_trip: 5,
        connection_rate: 200_000,
        total_rate: 200_000,
        len: 4096 * MIB,
        ..LOOPBACK
    };
    let (transfer, longer) = simulation.run();
    assert_eq!(transfer.max_requests, 16);
    assert_eq!(transfer.requests_without_trial(), INITIAL_REQUESTS);
    assert!(longer <= 10, "{longer} %");
}

#[test]
fn wrongly_dropped_requests_are_restored_soon() {
    let simulation = Simulation {
        connection_rate: 60_000,
        reader: 2_000_000,
        len: 8192 * MIB,
        ..LOOPBACK
    };
    let (transfer, longer) = simulation.run();
    assert!(transfer.concurrency.has_tried);
    assert_eq!(transfer.requests_without_trial(), 16);
    assert!(longer <= 5, "{longer} %");
}

#[test]
fn slow_reader_gets_as_many_requests_as_it_needs() {
    let simulation = Simulation {
        connection_rate: 20_000,
        reader: 100_000,
        ..LOOPBACK
    };
    let (transfer, longer) = simulation.run();
    assert_eq!(transfer.requests_without_trial(), 8);
    assert!(longer <= 5, "{longer} %");
}

fn measured(latency: u64, took: u64, len: u64) -> u64 {
    let mut concurrency = AdaptiveConcurrency::new(16, 64 * MIB, 1 << 40, None);
    let chunk = CompletedChunk {
        start: 0,
        len,
        duration: ms(took),
        latency: Some(ms(latency)),
        cost: None,
    };
    concurrency.on_completed(Sample::default(), chunk);
    concurrency.chunk_len()
}

#[test]
fn chunk_takes_eight_round_trips_and_is_a_power_of_two() {
    assert_eq!(measured(40, 140, 5_000_000), 8 * MIB);
    assert_eq!(measured(40, 140, 6_000_000), 16 * MIB);
    assert_eq!(measured(40, 40, 5_000_000), 64 * MIB);
    assert_eq!(measured(0, 100, 5 * MIB), 2 * MIB, "50 ms");
    assert_eq!(measured(1, 101, MIB), MIB, "and is worth asking for");
}

#[test]
fn chunk_length_doubles_until_the_first_measurement() {
    let mut concurrency = AdaptiveConcurrency::new(2, 2 * MIB, 1 << 40, None);
    let mut lens = Vec::new();
    for _ in 0..5 {
        lens.push(concurrency.chunk_len());
        concurrency.on_sent();
    }
    assert_eq!(lens, [MIB / 4, MIB / 2, MIB, 2 * MIB, 2 * MIB]);
}

#[test]
fn the_budget_holds_two_chunks_more_than_are_in_flight() {
    for (connections, budget) in [(1, 16), (4, 16), (16, 64), (64, 16), (256, 64)] {
        let mut concurrency = AdaptiveConcurrency::new(connections, 8 * MIB, budget * MIB, None);
        for _ in 0..10 {
            concurrency.on_sent();
        }
        let held = (connections as u64 + 2) * concurrency.chunk_len();
        assert!(held <= budget * MIB, "{connections} with {budget} MiB");
    }
    assert!(AdaptiveConcurrency::new(1, 1, 0, None).chunk_len() > 0);
}

#[test]
fn no_limit_is_exceeded() {
    for most in [1, 2, 3, 5] {
        let mut concurrency = AdaptiveConcurrency::new(most, MIB, BUDGET, None);
        for now in 0..100 {
            concurrency.update(Sample {
                now: ms(now * 10),
                waited: ms(now * 10),
                in_flight: 100,
                ..Sample::default()
            });
        }
        assert_eq!(concurrency.requests(), most);
    }
}
