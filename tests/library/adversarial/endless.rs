//! Zeros after an archive, endless or not.

use std::fs;
use std::process::{Command, Stdio};

use crate::support::adversarial::MEMORY;
use crate::support::endless::{assert_rejected, place, run_script};
use crate::support::fixture::PROGRAM;

/// Number of zeros after an archive that are accepted.
const PADDING: usize = 32 << 20;

// Promises: decode-zeros
#[test]
fn endless_zeros_after_archive_or_packed_are_an_error() {
    let (place, mut runner) = place();
    let behind = ["cat", "gzip", "bzip2", "xz"]
        .map(|pack| format!("{{ {pack} < a.tar; cat /dev/zero; }} | $0 ls {MEMORY} /dev/stdin"));
    let packed = format!("cat a.tar /dev/zero | gzip -1 | $0 verify {MEMORY} /dev/stdin");
    for script in behind.iter().chain([&packed]) {
        assert_rejected(&run_script(&place, &mut runner, script), script);
    }
}

// Promises: decode-zeros
#[test]
fn finite_zeros_after_archive_are_padding() {
    let (place, mut runner) = place();
    for script in [
        format!("{{ cat a.tar; head -c {PADDING} /dev/zero; }} | $0 verify {MEMORY} /dev/stdin"),
        format!("{{ gzip < a.tar; head -c {PADDING} /dev/zero; }} | $0 verify {MEMORY} /dev/stdin"),
        // A file has a known length.
        format!("truncate -s 300M a.tar && $0 verify {MEMORY} a.tar"),
        format!("$0 ls --ignore-zeros {MEMORY} a.tar"),
    ] {
        let run = run_script(&place, &mut runner, &script);
        assert_eq!(run.code, 0, "{script}: {run:?}");
    }
}

// Promises: decode-zeros
#[test]
fn file_may_hold_any_number_of_zeros() {
    let (place, _) = place();
    fs::File::create(place.path("zeros"))
        .and_then(|file| file.set_len(200 << 20))
        .expect("space");
    let mut tar = Command::new("tar")
        .args(["-c", "zeros", "a.tar"])
        .current_dir(place.root())
        .stdout(Stdio::piped())
        .spawn()
        .expect("tar is needed");
    let output = Command::new(PROGRAM)
        .args(["ls", MEMORY, "/dev/stdin"])
        .stdin(tar.stdout.take().expect("piped"))
        .env("TARFS_CACHE_DIR", place.path("cache"))
        .output()
        .expect("started");
    assert!(tar.wait().expect("a child").success());
    assert!(output.status.success(), "{output:?}");
    let listed = String::from_utf8_lossy(&output.stdout);
    assert!(
        listed.contains("zeros") && listed.contains("a.tar"),
        "{listed}"
    );
}
