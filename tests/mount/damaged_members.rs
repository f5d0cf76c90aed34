//! Damaged members: what `mount`, its log and its status report.
//!
//! `tests/library` has the tests without a mount.

use std::fs;
use std::time::Duration;

use rustix::io::Errno;
use serde_json::Value;

use crate::support::damaged::{archive, damaged_member_line};
use crate::support::fixture::TestMount;
use crate::support::http::{Fault, Resource, Server};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::Archive;
use crate::support::wait;

/// A fixture with the archive `a.tar`.
fn place_with(archive: &[u8]) -> TestMount {
    let place = TestMount::new(&[]);
    place.put("a.tar", archive);
    place
}

/// Standard error of a mount with `flags`.
fn mount(place: &TestMount, flags: &[&str]) -> String {
    let output = place.tarfs(&[&["mount"], flags, &["mnt"]].concat());
    assert!(output.status.success(), "{}", stderr_text(&output));
    stderr_text(&output)
}

fn wait_for_phase(place: &TestMount, phase: &str) {
    wait::wait_until(phase, || {
        place.status().pointer("/index/phase") == Some(&Value::from(phase))
    });
}

fn count_of(status: &Value) -> Option<u64> {
    status.pointer("/damaged_members").and_then(Value::as_u64)
}

// Promises: damaged-listed, damaged-logged
#[test]
fn mount_names_damaged_members_of_a_known_index() {
    for flags in [&["--wait-index"][..], &[]] {
        let place = place_with(&archive(12));
        // The second mount uses the index of the first one.
        for named in [12, 10] {
            let said = mount(&place, &[flags, &["a.tar"]].concat());
            wait_for_phase(&place, "complete");
            let count =
                "12 members are damaged or not in the tree; `tarfs status` names the first ones";
            if !flags.is_empty() || named == 10 {
                for number in 0..named {
                    assert!(
                        said.contains(&damaged_member_line(number)),
                        "{flags:?} {named}: {said}"
                    );
                }
                assert!(said.contains(count), "{flags:?} {named}: {said}");
            }
            let status = place.status();
            assert_eq!(count_of(&status), Some(12));
            let first: Vec<_> = (0..10).map(damaged_member_line).collect();
            assert_eq!(status.pointer("/damaged"), Some(&Value::from(first)));
            let output = place.tarfs(&["status", "mnt"]);
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.contains("damaged members      12\n"), "{text}");
            assert!(text.contains(&format!(
                "damaged              {}\n",
                damaged_member_line(9)
            )));
            place.umount();
        }
    }
}

// Promises: truncated-error
#[test]
fn damage_behind_the_first_member_does_not_end_mount() {
    let intact = Archive::new()
        .file("first", "1")
        .file("cut", vec![7; 100_000])
        .end();
    for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd, Packing::Xz] {
        let packed = packing.pack(&intact.clone().into());
        // A tenth of the plain stream is missing, or the checksum at the end of the packed one.
        let cut = match packing {
            Packing::Plain => &packed[..packed.len() - 10_000],
            _ => &packed[..packed.len() - 4],
        };
        let place = place_with(cut);
        mount(&place, &["--log-file", "log", "a.tar"]);
        wait_for_phase(&place, "failed");
        let failure = place.status();
        let failure = failure.pointer("/index/failure").and_then(Value::as_str);
        assert!(
            failure.is_some_and(|failure| failure.contains("truncated")),
            "{failure:?}"
        );
        let log = || fs::read_to_string(place.path("log")).expect("a log");
        wait::wait_until("the log names the failure", || {
            log().contains("indexing failed")
        });
        assert_eq!(fs::read(place.mounted("first")).expect("intact"), b"1");
        let missing = fs::read(place.mounted("missing")).expect_err("unknown");
        assert_eq!(missing.raw_os_error(), Some(Errno::IO.raw_os_error()));
        place.umount();
    }
}

// Promises: truncated-error
#[test]
fn damage_before_the_first_member_ends_mount_with_2() {
    let packed = Packing::Zstd.pack(&archive(0).into());
    let headless = Archive::new().file("a", "1").end();
    for bytes in [&packed[..20], &headless[..300], &vec![7; 100_000]] {
        let place = place_with(bytes);
        place.error_of(&["mount", "a.tar", "mnt"]);
        assert!(!place.is_mounted());
    }
}

// Promises: damaged-listed
#[test]
fn mount_of_intact_archive_prints_nothing() {
    let place = place_with(&archive(0));
    assert_eq!(mount(&place, &["a.tar"]), "");
    assert_eq!(count_of(&place.status()), Some(0));
    place.umount();
}

// Promises: damaged-logged
#[test]
fn log_names_every_damaged_member() {
    let place = place_with(b"");
    let server = Server::start();
    let resource = Resource::new(archive(150)).etag("\"1\"");
    server.serve_with_faults("/a.tar", resource, |_| {
        Some(Fault::Paced(16 << 10, Duration::from_millis(100)))
    });
    let said = mount(&place, &["--log-file", "log", &server.url("/a.tar")]);
    wait_for_phase(&place, "complete");
    let count = "150 members are damaged or not in the tree";
    let all = || said.clone() + &fs::read_to_string(place.path("log")).expect("a log");
    wait::wait_until("the count is logged", || all().contains(count));
    let all = all();
    for number in 0..150 {
        assert!(
            all.contains(&damaged_member_line(number)),
            "{number}: {all}"
        );
    }
    place.umount();
}
