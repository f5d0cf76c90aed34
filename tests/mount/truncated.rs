//! Mounts of truncated archives with --allow-truncated.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::io::Errno;
use serde_json::Value;

use crate::support::fixture::TestMount;
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::wait;

/// Length of the file that is cut. Blocks of LZ4 have up to 8 MiB, and only whole ones are decoded.
fn file_len(packing: Packing) -> usize {
    match packing {
        Packing::Lz4 | Packing::Lz4Linked | Packing::Lz4Frames | Packing::Lz4Legacy => 14_000_001,
        _ => 2_000_001,
    }
}

/// A fixture with a truncated archive `a.tar`, whose last file `cut` is cut, and the bytes of that file before the cut.
fn place_with_cut_file(packing: Packing) -> (TestMount, Vec<u8>) {
    let content = Rng::new(3).bytes(file_len(packing));
    let archive = Archive::new()
        .file("whole", vec![7; 10_000])
        .file("cut", &content);
    let packed = packing.pack(&archive.end().into());
    let place = TestMount::new(&["out"]);
    let (front, _) = packed.split_at(packed.len() * 2 / 3 + 11);
    place.put("a.tar", front);
    let words = ["materialize", "--allow-truncated", "a.tar", "-C", "out"];
    let output = place.tarfs(&words);
    assert_eq!(
        output.status.code(),
        Some(2),
        "{packing:?}: {}",
        stderr_text(&output)
    );
    let written = fs::read(place.path("out/cut")).expect("written");
    assert!(content.starts_with(&written));
    (place, written)
}

/// Reads `file` from the start until an error, `step` bytes at a time.
fn read_to_error(file: &mut File, step: usize) -> (Vec<u8>, std::io::Error) {
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; step]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => panic!("the end of the file after {} bytes", bytes.len()),
            Ok(len) => bytes.extend(buffer.iter().take(len)),
            Err(error) => return (bytes, error),
        }
    }
}

fn assert_cut_file(place: &TestMount, packing: Packing, expected: &[u8]) {
    assert_eq!(
        fs::read(place.mounted("whole")).expect("whole"),
        [7; 10_000]
    );
    let metadata = fs::metadata(place.mounted("cut")).expect("known");
    assert_eq!(metadata.size(), file_len(packing) as u64);
    for step in [100_000, 128 << 10, 4 << 20] {
        let mut file = File::open(place.mounted("cut")).expect("known");
        let (bytes, error) = read_to_error(&mut file, step);
        assert_eq!(bytes.len(), expected.len(), "{step}");
        assert!(bytes == expected, "{step}");
        assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
        let (start, mut last) = (expected.len() as u64 - 1, [0; 5000]);
        assert_eq!(file.read_at(&mut last, start).expect("there"), 1);
        assert_eq!(Some(&last[0]), expected.last());
    }
}

// Promises: truncated-allowed
#[test]
fn cut_file_of_a_mount_has_every_byte_before_the_cut() {
    for packing in Packing::ALL {
        let (place, expected) = place_with_cut_file(packing);
        // The second mount uses the index of the first one.
        for _ in 0..2 {
            place.succeeds(&["mount", "--allow-truncated", "a.tar", "mnt"]);
            assert_cut_file(&place, packing, &expected);
            assert!(place.counter("failed_reads") > 0, "{packing:?}");
            place.umount();
        }
    }
}

// Promises: truncated-allowed
#[test]
fn copy_of_layers_keeps_the_cut_file_of_a_lower_layer() {
    let (place, expected) = place_with_cut_file(Packing::Gzip);
    place.put(
        "b.tar",
        Archive::new().file("upper", vec![8; 5_000_000]).end(),
    );
    let words = ["mount", "--allow-truncated", "a.tar", "--layer", "b.tar"];
    place.succeeds(&[&words[..], &["mnt", "--copy-to", "copy"]].concat());
    wait::wait_until("the copy has ended", || {
        place.status().pointer("/copy/state") == Some(&Value::from("incomplete"))
    });
    assert!(fs::read(place.path("copy/cut")).expect("kept") == expected);
    assert_eq!(
        fs::metadata(place.path("copy/upper"))
            .expect("whole")
            .size(),
        5_000_000
    );
    assert_cut_file(&place, Packing::Gzip, &expected);
    place.umount();
}

// Promises: truncated-allowed
#[test]
fn copy_keeps_the_available_bytes_of_a_cut_file_and_names_it_once() {
    let (place, expected) = place_with_cut_file(Packing::Gzip);
    let words = [
        "mount",
        "--allow-truncated",
        "a.tar",
        "mnt",
        "--copy-to",
        "copy",
    ];
    for _ in 0..2 {
        fs::write(place.path("log"), "").expect("written");
        let output = place.tarfs(&[&words[..], &["--log-file", "log"]].concat());
        assert!(output.status.success(), "{}", stderr_text(&output));
        wait::wait_until("the copy has ended", || {
            place.status().pointer("/copy/state") == Some(&Value::from("incomplete"))
        });
        let status = place.status();
        let failures = status.pointer("/copy/failures").and_then(Value::as_u64);
        assert_eq!(failures, Some(1), "{status}");
        assert!(fs::read(place.path("copy/cut")).expect("kept") == expected);
        assert_cut_file(&place, Packing::Gzip, &expected);
        place.umount();
        // Before the mount leaves the terminal, it writes to both or to the terminal alone.
        let log = fs::read_to_string(place.path("log")).expect("a log");
        let terminal = stderr_text(&output);
        let count = |text: &str| text.matches("missing from the copy").count();
        let named = count(&log).max(count(&terminal));
        assert_eq!(named, 1, "{log}");
    }
}
