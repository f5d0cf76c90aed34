//! Scripts that read sources without an end.

use std::fs;

use super::adversarial::{MOST_BYTES, Place};
use super::fixture::PROGRAM;
use super::measured_runner::{MeasuredRunner, Run};
use super::raw::Archive;

/// Error of every verb for endless zeros.
pub(crate) const ZEROS_ERROR: &str = "more than 64 MiB of zeros";

/// Runs `script` with `tarfs` as `$0`.
pub(crate) fn run_script(place: &Place, runner: &mut MeasuredRunner, script: &str) -> Run {
    runner.run(place.root(), &["sh", "-c", script, PROGRAM])
}

#[track_caller]
pub(crate) fn assert_rejected(run: &Run, script: &str) {
    assert_eq!(run.code, 2, "{script}: {run:?}");
    assert!(run.said.contains(ZEROS_ERROR), "{script}: {run:?}");
    assert!(run.peak_bytes < MOST_BYTES, "{script}: {run:?}");
}

pub(crate) fn place() -> (Place, MeasuredRunner) {
    let place = Place::create();
    fs::create_dir(place.path("mnt")).expect("fresh");
    fs::write(place.path("a.tar"), Archive::new().file("a", "1").end()).expect("space");
    let runner = MeasuredRunner::start(place.root());
    (place, runner)
}
