//! Limits on the number of entries of a mount.

use std::fs;

use crate::support::adversarial::Place;
use crate::support::fixture::PROGRAM;
use crate::support::measured_runner::MeasuredRunner;
use crate::support::mounts::is_mounted;
use crate::support::raw::Archive;

// Promises: limit-entries
#[test]
fn mount_of_too_many_entries_fails() {
    let place = Place::with_archive(&Archive::new().file("a", "").file("b", "").end());
    let mut runner = MeasuredRunner::start(place.root());
    fs::create_dir(place.path("mnt")).expect("fresh");
    let words = ["mount", "--wait-index", "--max-entries=1", "a", "mnt"];
    let outcome = runner.run(place.root(), &[&[PROGRAM], &words[..]].concat());
    assert_eq!(outcome.code, 2, "{outcome:?}");
    for word in ["'b'", "1 that are allowed", "--max-entries"] {
        assert!(outcome.said.contains(word), "{word}: {outcome:?}");
    }
    assert!(!is_mounted(&place.path("mnt")));
}
