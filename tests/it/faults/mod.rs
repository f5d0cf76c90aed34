//! Faults of the network, one by one, each met by reads in real mounts and by `materialize`: right
//! bytes or an error that says why, and both in time. The table in docs/semantics.md is made of these.

mod unmounts;
mod ways;

use std::fs;
use std::io::ErrorKind;
use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use self::ways::{
    AMPLE, FILE_LEN, FILES, Faults, PATH, Place, Read, SHORT, Written, archive, content,
    read_in_a_cold_mount, read_in_a_mount, read_what_is_kept, strong, write_the_tree,
};
use crate::support::http::{Fault, Request, Resource};
use crate::support::packing::Packing;
use crate::support::program;
use crate::support::wait::ends;

/// A read of what is not there yet, one of what is kept, and the tree.
#[track_caller]
fn both(timeout: &str, faults: impl Faults + Clone, read: Read, written: Written) {
    let [of_mount, of_kept] = [(); 2].map(|()| faults.clone());
    std::thread::scope(|scope| {
        scope.spawn(|| read_in_a_mount(&strong(), timeout, of_mount, read));
        scope.spawn(|| read_what_is_kept(&strong(), of_kept));
        write_the_tree(&strong(), timeout, faults, written);
    });
}

/// These, and a mount without an index, which comes to `cold`.
#[track_caller]
fn each_way(timeout: &str, faults: impl Faults + Clone, read: Read, cold: Read, written: Written) {
    let of_cold = faults.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| read_in_a_cold_mount(&strong(), timeout, of_cold, cold));
        both(timeout, faults, read, written);
    });
}

/// Whose scan waits for what may pass, and fails at what will not.
fn of_scan(read: Read) -> Read {
    read.map_err(|errno| match errno {
        Errno::TIMEDOUT => errno,
        _ => Errno::IO,
    })
}

/// Each way, where a scan comes to what a read comes to.
#[track_caller]
fn all_ways(timeout: &str, faults: impl Faults + Clone, read: Read, written: Written) {
    each_way(timeout, faults, read, of_scan(read), written);
}

/// The first few requests meet with `fault`.
fn at_first(count: usize, fault: Fault) -> impl Faults + Clone {
    move |number, _: &Request| (number <= count).then(|| fault.clone())
}

fn always(fault: Fault) -> impl Faults + Clone {
    at_first(usize::MAX, fault)
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[test]
fn late_answers_are_waited_for() {
    all_ways(AMPLE, always(Fault::Late(millis(100))), Ok(()), Ok(()));
}

#[test]
fn slow_and_steady_connections_are_waited_for() {
    let fault = Fault::Paced(32 << 10, millis(10));
    all_ways(AMPLE, always(fault), Ok(()), Ok(()));
}

#[test]
fn drops_do_not_count_as_bytes() {
    let fault = Fault::Paced(1, millis(100));
    all_ways(
        SHORT,
        always(fault),
        Err(Errno::TIMEDOUT),
        Err("next to nothing comes"),
    );
}

#[test]
fn an_error_of_the_server_is_met_with_repeats() {
    all_ways(AMPLE, at_first(3, Fault::Status(500)), Ok(()), Ok(()));
    each_way(
        SHORT,
        always(Fault::Status(500)),
        Err(Errno::IO),
        Err(Errno::TIMEDOUT),
        Err("status 500"),
    );
}

#[test]
fn an_outage_is_waited_for_until_the_deadline() {
    all_ways(AMPLE, at_first(5, Fault::Status(502)), Ok(()), Ok(()));
    all_ways(
        SHORT,
        always(Fault::Status(503)),
        Err(Errno::TIMEDOUT),
        Err("status 503"),
    );
}

#[test]
fn a_server_that_asks_for_a_pause_gets_it_unless_it_is_longer_than_the_deadline() {
    let fault = Fault::Busy(503, "1".to_owned());
    all_ways(AMPLE, at_first(2, fault), Ok(()), Ok(()));
    // Longer than a mount lets anybody wait, too.
    let fault = Fault::Busy(429, "12".to_owned());
    all_ways(
        SHORT,
        always(fault),
        Err(Errno::TIMEDOUT),
        Err("left alone for 12 s"),
    );
}

#[test]
fn connections_that_are_reset_anywhere_cost_nothing_but_time() {
    let cuts = |number: usize, _: &Request| Some(Fault::Reset(number * 7_919 % 200_000 + 70_000));
    all_ways(AMPLE, cuts, Ok(()), Ok(()));
    all_ways(AMPLE, at_first(5, Fault::Reset(1)), Ok(()), Ok(()));
}

#[test]
fn a_server_that_is_gone_is_waited_for_until_the_deadline() {
    all_ways(AMPLE, at_first(5, Fault::HangUp), Ok(()), Ok(()));
    all_ways(
        SHORT,
        always(Fault::HangUp),
        Err(Errno::TIMEDOUT),
        Err("the connection broke"),
    );
}

#[test]
fn short_bodies_are_completed() {
    let cuts = |number: usize, _: &Request| Some(Fault::Short(number * 104_729 % 200_000 + 70_000));
    all_ways(AMPLE, cuts, Ok(()), Ok(()));
    each_way(
        SHORT,
        always(Fault::Short(0)),
        Err(Errno::IO),
        Err(Errno::TIMEDOUT),
        Err("it ends before its length"),
    );
}

#[test]
fn silence_ends_by_the_deadline() {
    all_ways(AMPLE, at_first(1, Fault::Silence), Ok(()), Ok(()));
    all_ways(
        SHORT,
        always(Fault::Silence),
        Err(Errno::TIMEDOUT),
        Err("the server is silent"),
    );
}

/// After a failure the kernel asks once more for the page that is wanted; who reads waits once.
#[test]
fn a_read_ends_by_its_deadline_and_not_by_twice_that() {
    let place = Place::new(&strong());
    let url = place.server.url(PATH);
    place.succeeds(&["index", &url]);
    let timeout = Duration::from_secs(6);
    let words = [
        "mount",
        &url,
        "mnt",
        "--no-disk-cache",
        "--prefetch",
        "none",
    ];
    place.succeeds(&[&words[..], &["--timeout", "6"]].concat());
    place.disturb(strong(), always(Fault::Silence));
    // By one and the same thread: who asks again waits anew.
    let path = place.path("mnt").join("second");
    let waits = ends(move || {
        [(); 2].map(|()| {
            let start = Instant::now();
            let error = fs::read(&path).expect_err("nothing comes");
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            start.elapsed()
        })
    });
    assert!(waits.iter().all(|&waited| waited >= timeout), "{waits:?}");
    // A busy machine may delay one.
    assert!(
        waits.iter().any(|&waited| waited < 2 * timeout),
        "{waits:?}"
    );
}

#[test]
fn a_stall_in_the_middle_ends_by_the_deadline() {
    all_ways(AMPLE, at_first(1, Fault::Stall(50_000)), Ok(()), Ok(()));
    all_ways(
        SHORT,
        always(Fault::Stall(0)),
        Err(Errno::TIMEDOUT),
        Err("the server is silent"),
    );
}

#[test]
fn another_range_is_never_taken_for_the_one_that_was_asked_for() {
    all_ways(AMPLE, at_first(2, Fault::OtherRange), Ok(()), Ok(()));
    all_ways(
        AMPLE,
        always(Fault::OtherRange),
        Err(Errno::IO),
        Err("the server sends bytes"),
    );
}

#[test]
fn everything_is_never_taken_for_a_part() {
    all_ways(AMPLE, at_first(2, Fault::Whole), Ok(()), Ok(()));
    let told = "stopped answering with ranges";
    all_ways(AMPLE, always(Fault::Whole), Err(Errno::IO), Err(told));
}

#[test]
fn a_range_that_is_denied_is_asked_for_again() {
    all_ways(AMPLE, at_first(2, Fault::Unsatisfiable), Ok(()), Ok(()));
    let told = "refuses a range inside its length";
    all_ways(
        AMPLE,
        always(Fault::Unsatisfiable),
        Err(Errno::IO),
        Err(told),
    );
}

#[test]
fn a_server_without_head_is_as_good_as_any() {
    all_ways(AMPLE, |_: usize, _: &Request| None, Ok(()), Ok(()));
}

#[test]
fn bodies_in_chunks_are_as_good_as_any() {
    all_ways(AMPLE, always(Fault::Chunked), Ok(()), Ok(()));
}

#[test]
fn wrapped_bytes_are_never_taken_for_bytes() {
    all_ways(AMPLE, at_first(2, Fault::Gzip), Ok(()), Ok(()));
    let told = "Content-Encoding: gzip";
    all_ways(AMPLE, always(Fault::Gzip), Err(Errno::IO), Err(told));
}

#[test]
fn access_that_is_refused_in_the_midst_is_said_to_be() {
    for status in [401, 403] {
        let fault = always(Fault::Status(status));
        all_ways(AMPLE, fault, Err(Errno::ACCESS), Err("refuses access"));
    }
    for status in [404, 410] {
        all_ways(
            AMPLE,
            always(Fault::Status(status)),
            Err(Errno::STALE),
            Err("not found"),
        );
    }
}

/// All ways with a server that has other bytes in the midst.
#[track_caller]
fn changed(before: &Resource, after: Resource, read: Read, written: Written) {
    let after = Arc::new(after);
    let late = move |number: usize, _: &Request| {
        (number > 2).then(|| Fault::Other(Resource::clone(&after)))
    };
    let at_once = late.clone();
    let at_once = move |number: usize, request: &Request| at_once(number + 2, request);
    read_what_is_kept(before, at_once.clone());
    read_in_a_mount(before, AMPLE, at_once.clone(), read);
    read_in_a_cold_mount(before, AMPLE, at_once, of_scan(read));
    write_the_tree(before, AMPLE, late, written);
}

#[test]
fn a_version_that_changes_in_the_midst_is_never_mixed_in() {
    let other = || Resource::new(archive(2));
    let told = "changed since it was opened";
    let is_stale = |before: &Resource, after: Resource| {
        changed(before, after, Err(Errno::STALE), Err(told));
    };
    is_stale(&strong(), other().etag("\"2\""));
    is_stale(&strong(), other());
    let weak = |tag: &str| Resource::new(archive(1)).etag(tag);
    is_stale(&weak("W/\"1\""), other().etag("W/\"2\""));
    let longer = [archive(2), vec![0; 512]].concat();
    is_stale(&Resource::new(archive(1)), Resource::new(longer));
    // The same version in two nodes.
    changed(&strong(), strong(), Ok(()), Ok(()));
    changed(&weak("W/\"1\""), weak("W/\"1\""), Ok(()), Ok(()));
}

/// Where nothing tells versions apart, the archive's own checksums do, and the index's.
#[test]
fn other_bytes_of_a_server_that_names_no_versions_are_damage() {
    let [before, after] = [1, 2].map(|version| Packing::Lz4.pack(&archive(version).into()));
    assert_eq!(before.len(), after.len(), "or the length would tell");
    let [before, after] = [before, after].map(Resource::new);
    let faults = move |_: usize, _: &Request| Some(Fault::Other(after.clone()));
    read_what_is_kept(&before, faults.clone());
    read_in_a_mount(&before, AMPLE, faults.clone(), Err(Errno::IO));
    let place = Place::new(&before);
    place.disturb(before, move |number, request| {
        (number > 1).then(|| faults(number, request)).flatten()
    });
    let url = place.server.url(PATH);
    let output = place.tarfs(&["materialize", "-q", &url, "-C", "out", "--atomic"]);
    let told = program::told(&output);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("checksum"), "{told}");
    let written = fs::read_dir(place.path("out")).expect("there").count();
    assert_eq!(written, 0, "nothing of a mixture appears");
}

/// A mount of what a server that knows no ranges sends, broken off at `cut`, and not before it is there.
fn read_once(resource: Resource, cut: usize) -> (Place, Output) {
    let place = Place::new(&resource);
    let resource = resource.without_ranges();
    place.server.route(PATH, move |request| {
        let answer = resource.answer(request);
        match request.number {
            1 => answer.paced(64 << 10, millis(20)).cut_after(cut),
            _ => answer,
        }
    });
    let url = place.server.url(PATH);
    let output = place.tarfs(&["mount", &url, "mnt", "--timeout", AMPLE]);
    (place, output)
}

#[test]
fn a_server_without_ranges_is_read_from_the_front_and_again_when_it_breaks_off() {
    let cut = 3_000_000;
    let (place, output) = read_once(strong(), cut);
    assert!(output.status.success(), "{}", program::told(&output));
    for (number, name) in FILES.iter().enumerate() {
        assert!(place.read(name).expect("readable") == content(1, number));
    }
    assert_eq!(place.server.seen(PATH).len(), 2);
    assert_eq!(place.counter("source_retries"), 1);
    // What may be another version is not taken for the rest.
    let (place, output) = read_once(Resource::new(archive(1)), cut);
    assert!(output.status.success(), "{}", program::told(&output));
    assert!(place.read("first").expect("readable") == content(1, 0));
    let error = place.read("third").expect_err("never came");
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));

    for (resource, expected) in [
        (strong(), Ok(())),
        (Resource::new(archive(1)), Err("cannot read")),
    ] {
        let place = Place::new(&resource);
        place.disturb(resource.without_ranges(), move |number, _| {
            (number == 1).then_some(Fault::Short(cut))
        });
        let output = place.tarfs(&["materialize", "-q", &place.server.url(PATH), "-C", "out"]);
        let told = program::told(&output);
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

#[test]
fn another_host_gets_bytes_to_send_and_no_secrets() {
    let place = Place::new(&strong());
    place.server.serve("/elsewhere", strong());
    let elsewhere = place.server.other_url("/elsewhere");
    place.disturb(strong(), move |_, _| {
        Some(Fault::Redirect(elsewhere.clone()))
    });
    let url = place
        .server
        .url(PATH)
        .replace("http://", "http://me:secret@");
    let header = ["--header", "X-Key: secret"];
    place.succeeds(&[&["index", &url][..], &header].concat());
    place.succeeds(&[&["mount", &url, "mnt"][..], &header].concat());
    assert!(place.read("second").expect("readable") == content(1, 1));
    place.succeeds(&[&["materialize", "-q", &url, "-C", "out"][..], &header].concat());
    let written = fs::read(place.path("out/third")).expect("there");
    assert!(written == content(1, 2));
    for seen in place.server.seen(PATH) {
        assert_eq!(seen.request.header("x-key"), Some("secret"));
        assert!(seen.request.header("authorization").is_some());
    }
    let seen = place.server.seen("/elsewhere");
    assert!(seen.len() > 3);
    for seen in seen {
        for name in ["x-key", "authorization", "cookie", "referer"] {
            assert_eq!(seen.request.header(name), None);
        }
    }
}

#[test]
fn retries_are_as_many_as_are_asked_for() {
    for (words, requests) in [
        (&[][..], 5),
        (&["--retries", "0"][..], 1),
        (&["--retries", "2"][..], 3),
    ] {
        let place = Place::new(&strong());
        place.disturb(strong(), always(Fault::Status(503)));
        let url = place.server.url(PATH);
        let output = place.tarfs(&[&["ls", &url][..], words].concat());
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(place.server.seen(PATH).len(), requests, "{words:?}");
    }
}
