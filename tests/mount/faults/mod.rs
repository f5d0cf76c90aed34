//! Network faults, one by one, under reads of real mounts and under `materialize`.
//!
//! Each must give the right bytes or an error that names the cause, in time. A table in
//! docs/semantics.md has a row for each.

mod fixture;
mod unmounts;

use std::fs;
use std::io::ErrorKind;
use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use self::fixture::{
    AMPLE_TIMEOUT_SECONDS, FILE_LEN, FILES, Faults, PATH, Place, Read, SHORT_TIMEOUT_SECONDS,
    Written, archive, content, materialize_tree, read_cached, read_in_cold_mount,
    read_in_warm_mount, strong,
};
use crate::support::http::{Fault, Request, Resource};
use crate::support::packing::Packing;
use crate::support::program;
use crate::support::wait::finish_in_time;

/// Checks a read that needs requests, a read from the cache, and `materialize`.
#[track_caller]
fn check_warm_read_and_materialize(
    timeout: &str,
    faults: impl Faults + Clone,
    read: Read,
    written: Written,
) {
    let [of_mount, of_kept] = [(); 2].map(|()| faults.clone());
    std::thread::scope(|scope| {
        scope.spawn(|| read_in_warm_mount(&strong(), timeout, of_mount, read));
        scope.spawn(|| read_cached(&strong(), of_kept));
        materialize_tree(&strong(), timeout, faults, written);
    });
}

/// As [`check_warm_read_and_materialize`], and a mount without an index, with the result `cold`.
#[track_caller]
fn check_each_way(
    timeout: &str,
    faults: impl Faults + Clone,
    read: Read,
    cold: Read,
    written: Written,
) {
    let of_cold = faults.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| read_in_cold_mount(&strong(), timeout, of_cold, cold));
        check_warm_read_and_materialize(timeout, faults, read, written);
    });
}

/// The result of a scan for a read's result `read`. A scan waits after temporary errors, and fails at
/// others.
fn scan_outcome(read: Read) -> Read {
    read.map_err(|errno| match errno {
        Errno::TIMEDOUT => errno,
        _ => Errno::IO,
    })
}

/// As [`check_each_way`], where the result of the scan follows from `read`.
#[track_caller]
fn check_all_ways(timeout: &str, faults: impl Faults + Clone, read: Read, written: Written) {
    check_each_way(timeout, faults, read, scan_outcome(read), written);
}

/// The first `count` requests meet `fault`.
fn first_requests(count: usize, fault: Fault) -> impl Faults + Clone {
    move |number, _: &Request| (number <= count).then(|| fault.clone())
}

fn every_request(fault: Fault) -> impl Faults + Clone {
    first_requests(usize::MAX, fault)
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

// Promises: fault-harmless
#[test]
fn late_responses_are_awaited() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        every_request(Fault::Late(millis(100))),
        Ok(()),
        Ok(()),
    );
}

// Promises: fault-harmless
#[test]
fn slow_steady_connections_are_awaited() {
    let fault = Fault::Paced(32 << 10, millis(10));
    check_all_ways(AMPLE_TIMEOUT_SECONDS, every_request(fault), Ok(()), Ok(()));
}

// Promises: time-deadline, fault-silence
#[test]
fn trickling_server_times_out_at_the_deadline() {
    let fault = Fault::Paced(1, millis(100));
    check_all_ways(
        SHORT_TIMEOUT_SECONDS,
        every_request(fault),
        Err(Errno::TIMEDOUT),
        Err("data arrives too slowly"),
    );
}

// Promises: fault-in-scan, fault-invalid
#[test]
fn server_errors_are_retried() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        first_requests(3, Fault::Status(501)),
        Ok(()),
        Ok(()),
    );
    check_each_way(
        SHORT_TIMEOUT_SECONDS,
        every_request(Fault::Status(501)),
        Err(Errno::IO),
        Err(Errno::TIMEDOUT),
        Err("status 501"),
    );
}

// Promises: retry-how-long, fault-outage
#[test]
fn outage_is_retried_until_the_deadline() {
    let gateway = |number: usize, _: &Request| {
        let statuses = [500, 502, 509, 522, 530];
        let status = statuses.get(number.checked_sub(1)?);
        status.map(|&status| Fault::Status(status))
    };
    check_all_ways(AMPLE_TIMEOUT_SECONDS, gateway, Ok(()), Ok(()));
    check_all_ways(
        SHORT_TIMEOUT_SECONDS,
        every_request(Fault::Status(503)),
        Err(Errno::TIMEDOUT),
        Err("status 503"),
    );
}

// Promises: fault-retry-after
#[test]
fn retry_after_is_honoured_up_to_the_deadline() {
    let fault = Fault::Busy(503, "1".to_owned());
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        first_requests(2, fault),
        Ok(()),
        Ok(()),
    );
    // The pause is also longer than a mount lets a caller wait.
    let fault = Fault::Busy(429, "12".to_owned());
    check_all_ways(
        SHORT_TIMEOUT_SECONDS,
        every_request(fault),
        Err(Errno::TIMEDOUT),
        Err("asks for a pause of 12 s"),
    );
}

// Promises: fault-harmless
#[test]
fn connections_reset_anywhere_only_cost_time() {
    let cuts = |number: usize, _: &Request| Some(Fault::Reset(number * 7_919 % 200_000 + 70_000));
    check_all_ways(AMPLE_TIMEOUT_SECONDS, cuts, Ok(()), Ok(()));
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        first_requests(5, Fault::Reset(1)),
        Ok(()),
        Ok(()),
    );
}

// Promises: fault-scope, fault-in-scan, fault-outage
#[test]
fn unreachable_server_is_retried_until_the_deadline() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        first_requests(5, Fault::HangUp),
        Ok(()),
        Ok(()),
    );
    check_all_ways(
        SHORT_TIMEOUT_SECONDS,
        every_request(Fault::HangUp),
        Err(Errno::TIMEDOUT),
        Err("the connection broke"),
    );
}

// Promises: fault-invalid
#[test]
fn short_bodies_are_completed() {
    let cuts = |number: usize, _: &Request| Some(Fault::Short(number * 104_729 % 200_000 + 70_000));
    check_all_ways(AMPLE_TIMEOUT_SECONDS, cuts, Ok(()), Ok(()));
    check_each_way(
        SHORT_TIMEOUT_SECONDS,
        every_request(Fault::Short(0)),
        Err(Errno::IO),
        Err(Errno::TIMEDOUT),
        Err("it ends before its length"),
    );
}

// Promises: time-deadline, time-attempt, fault-silence
#[test]
fn silent_server_times_out_at_the_deadline() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        first_requests(1, Fault::Silence),
        Ok(()),
        Ok(()),
    );
    check_all_ways(
        SHORT_TIMEOUT_SECONDS,
        every_request(Fault::Silence),
        Err(Errno::TIMEDOUT),
        Err("the server does not answer"),
    );
}

/// After a failed read-ahead the kernel retries the single wanted page. The caller waits for one
/// timeout only.
// Promises: fault-read-ahead
#[test]
fn read_times_out_once() {
    let place = Place::serve(&strong());
    let url = place.server.url(PATH);
    place.run_ok(&["index", &url]);
    let timeout = Duration::from_secs(6);
    let words = [
        "mount",
        &url,
        "mnt",
        "--no-disk-cache",
        "--prefetch",
        "none",
    ];
    place.run_ok(&[&words[..], &["--timeout", "6"]].concat());
    place.serve_with_faults(strong(), every_request(Fault::Silence));
    // One thread does both reads, because a later read of the same thread must wait for its own
    // timeout.
    let path = place.mounted("second");
    let waits = finish_in_time(move || {
        [(); 2].map(|()| {
            let start = Instant::now();
            let error = fs::read(&path).expect_err("nothing comes");
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            start.elapsed()
        })
    });
    assert!(waits.iter().all(|&waited| waited >= timeout), "{waits:?}");
    // A busy machine may delay one of them.
    assert!(
        waits.iter().any(|&waited| waited < 2 * timeout),
        "{waits:?}"
    );
}

// Promises: time-deadline, time-attempt, fault-silence
#[test]
fn stalled_body_times_out_at_the_deadline() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        first_requests(1, Fault::Stall(50_000)),
        Ok(()),
        Ok(()),
    );
    check_all_ways(
        SHORT_TIMEOUT_SECONDS,
        every_request(Fault::Stall(0)),
        Err(Errno::TIMEDOUT),
        Err("the server does not answer"),
    );
}

// Promises: fault-invalid
#[test]
fn wrong_range_is_never_taken_for_the_requested_one() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        first_requests(2, Fault::OtherRange),
        Ok(()),
        Ok(()),
    );
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        every_request(Fault::OtherRange),
        Err(Errno::IO),
        Err("the server sends bytes"),
    );
}

// Promises: fault-invalid
#[test]
fn whole_body_is_never_taken_for_a_range() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        first_requests(2, Fault::Whole),
        Ok(()),
        Ok(()),
    );
    let told = "stopped answering with ranges";
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        every_request(Fault::Whole),
        Err(Errno::IO),
        Err(told),
    );
}

// Promises: fault-invalid
#[test]
fn rejected_range_is_requested_again() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        first_requests(2, Fault::Unsatisfiable),
        Ok(()),
        Ok(()),
    );
    let told = "refuses a range inside its length";
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        every_request(Fault::Unsatisfiable),
        Err(Errno::IO),
        Err(told),
    );
}

// Promises: fault-harmless
#[test]
fn server_without_head_works() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        |_: usize, _: &Request| None,
        Ok(()),
        Ok(()),
    );
}

// Promises: fault-harmless
#[test]
fn chunked_bodies_work() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        every_request(Fault::Chunked),
        Ok(()),
        Ok(()),
    );
}

// Promises: fault-invalid
#[test]
fn encoded_bodies_are_never_taken_for_bytes() {
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        first_requests(2, Fault::Gzip),
        Ok(()),
        Ok(()),
    );
    let told = "Content-Encoding: gzip";
    check_all_ways(
        AMPLE_TIMEOUT_SECONDS,
        every_request(Fault::Gzip),
        Err(Errno::IO),
        Err(told),
    );
}

// Promises: fault-in-scan, fault-denied, fault-changed
#[test]
fn access_denied_midway_is_reported() {
    for status in [401, 403] {
        let fault = every_request(Fault::Status(status));
        check_all_ways(
            AMPLE_TIMEOUT_SECONDS,
            fault,
            Err(Errno::ACCESS),
            Err("refuses access"),
        );
    }
    for status in [404, 410] {
        check_all_ways(
            AMPLE_TIMEOUT_SECONDS,
            every_request(Fault::Status(status)),
            Err(Errno::STALE),
            Err("not found"),
        );
    }
}

/// Checks all ways with a server that changes from `before` to `after`.
#[track_caller]
fn check_version_change(before: &Resource, after: Resource, read: Read, written: Written) {
    let after = Arc::new(after);
    let late = move |number: usize, _: &Request| {
        (number > 2).then(|| Fault::Other(Resource::clone(&after)))
    };
    let at_once = late.clone();
    let at_once = move |number: usize, request: &Request| at_once(number + 2, request);
    read_cached(before, at_once.clone());
    read_in_warm_mount(before, AMPLE_TIMEOUT_SECONDS, at_once.clone(), read);
    read_in_cold_mount(before, AMPLE_TIMEOUT_SECONDS, at_once, scan_outcome(read));
    materialize_tree(before, AMPLE_TIMEOUT_SECONDS, late, written);
}

// Promises: fault-scope, fault-in-scan, fault-changed, fault-harmless
#[test]
fn versions_are_never_mixed() {
    let other = || Resource::new(archive(2));
    let told = "changed since it was opened";
    let is_stale = |before: &Resource, after: Resource| {
        check_version_change(before, after, Err(Errno::STALE), Err(told));
    };
    is_stale(&strong(), other().etag("\"2\""));
    is_stale(&strong(), other());
    let weak = |tag: &str| Resource::new(archive(1)).etag(tag);
    is_stale(&weak("W/\"1\""), other().etag("W/\"2\""));
    let longer = [archive(2), vec![0; 512]].concat();
    is_stale(&Resource::new(archive(1)), Resource::new(longer));
    // Two servers with the same version.
    check_version_change(&strong(), strong(), Ok(()), Ok(()));
    check_version_change(&weak("W/\"1\""), weak("W/\"1\""), Ok(()), Ok(()));
}

/// Without versions, the checksums of the archive and of the index detect the change.
// Promises: check-first-scan, fault-scope, fault-in-scan, fault-swapped
#[test]
fn changed_bytes_without_version_are_damage() {
    let [before, after] = [1, 2].map(|version| Packing::Lz4.pack(&archive(version).into()));
    assert_eq!(before.len(), after.len(), "or the length would tell");
    let [before, after] = [before, after].map(Resource::new);
    let faults = move |_: usize, _: &Request| Some(Fault::Other(after.clone()));
    read_cached(&before, faults.clone());
    read_in_warm_mount(
        &before,
        AMPLE_TIMEOUT_SECONDS,
        faults.clone(),
        Err(Errno::IO),
    );
    let place = Place::serve(&before);
    place.serve_with_faults(before, move |number, request| {
        (number > 1).then(|| faults(number, request)).flatten()
    });
    let url = place.server.url(PATH);
    let output = place.run(&["materialize", "-q", &url, "-C", "out", "--atomic"]);
    let told = program::stderr_text(&output);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("checksum"), "{told}");
    let written = fs::read_dir(place.path("out")).expect("there").count();
    assert_eq!(written, 0, "nothing of a mixture appears");
}

/// Mounts an archive from a server without ranges. The first response is slow and breaks off at
/// `cut`.
fn read_once(resource: Resource, cut: usize) -> (Place, Output) {
    let place = Place::serve(&resource);
    let resource = resource.without_ranges();
    place.server.route(PATH, move |request| {
        let answer = resource.answer(request);
        match request.number {
            1 => answer.paced(64 << 10, millis(20)).cut_after(cut),
            _ => answer,
        }
    });
    let url = place.server.url(PATH);
    let output = place.run(&["mount", &url, "mnt", "--timeout", AMPLE_TIMEOUT_SECONDS]);
    (place, output)
}

// Promises: http-no-ranges, fault-no-ranges
#[test]
fn server_without_ranges_is_restarted_if_cut_off() {
    let cut = 3_000_000;
    let (place, output) = read_once(strong(), cut);
    assert!(output.status.success(), "{}", program::stderr_text(&output));
    for (number, name) in FILES.iter().enumerate() {
        assert!(place.read(name).expect("readable") == content(1, number));
    }
    assert_eq!(place.server.requests(PATH).len(), 2);
    assert_eq!(place.counter("source_retries"), 1);
    // Without a version the second response may be another archive, so it is not used.
    let (place, output) = read_once(Resource::new(archive(1)), cut);
    assert!(output.status.success(), "{}", program::stderr_text(&output));
    assert!(place.read("first").expect("readable") == content(1, 0));
    let error = place.read("third").expect_err("never came");
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));

    for (resource, expected) in [
        (strong(), Ok(())),
        (Resource::new(archive(1)), Err("cannot read")),
    ] {
        let place = Place::serve(&resource);
        place.serve_with_faults(resource.without_ranges(), move |number, _| {
            (number == 1).then_some(Fault::Short(cut))
        });
        let output = place.run(&["materialize", "-q", &place.server.url(PATH), "-C", "out"]);
        let told = program::stderr_text(&output);
        assert_eq!(output.status.success(), expected.is_ok(), "{told}");
        assert!(told.contains(expected.err().unwrap_or_default()), "{told}");
        for (number, name) in FILES.iter().enumerate() {
            let written = fs::read(place.path("out").join(name)).unwrap_or_default();
            assert!(
                content(1, number).starts_with(&written),
                "wrong bytes in {name}"
            );
            assert!(expected.is_err() || written.len() == FILE_LEN);
        }
    }
}

// Promises: auth-origin, fault-harmless
#[test]
fn redirect_to_another_host_sends_no_secrets() {
    let place = Place::serve(&strong());
    place.server.serve("/elsewhere", strong());
    let elsewhere = place.server.other_url("/elsewhere");
    place.serve_with_faults(strong(), move |_, _| {
        Some(Fault::Redirect(elsewhere.clone()))
    });
    let url = place
        .server
        .url(PATH)
        .replace("http://", "http://me:secret@");
    let header = ["--header", "X-Key: secret"];
    place.run_ok(&[&["index", &url][..], &header].concat());
    place.run_ok(&[&["mount", &url, "mnt"][..], &header].concat());
    assert!(place.read("second").expect("readable") == content(1, 1));
    place.run_ok(&[&["materialize", "-q", &url, "-C", "out"][..], &header].concat());
    let written = fs::read(place.path("out/third")).expect("there");
    assert!(written == content(1, 2));
    for seen in place.server.requests(PATH) {
        assert_eq!(seen.request.header("x-key"), Some("secret"));
        assert!(seen.request.header("authorization").is_some());
    }
    let seen = place.server.requests("/elsewhere");
    assert!(seen.len() > 3);
    for seen in seen {
        for name in ["x-key", "authorization", "cookie", "referer"] {
            assert_eq!(seen.request.header(name), None);
        }
    }
}

// Promises: retry-which
#[test]
fn retries_are_limited_by_flag() {
    for (words, requests) in [
        (&[][..], 5),
        (&["--retries", "0"][..], 1),
        (&["--retries", "2"][..], 3),
    ] {
        let place = Place::serve(&strong());
        place.serve_with_faults(strong(), every_request(Fault::Status(503)));
        let url = place.server.url(PATH);
        let output = place.run(&[&["ls", &url][..], words].concat());
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(place.server.requests(PATH).len(), requests, "{words:?}");
    }
}
