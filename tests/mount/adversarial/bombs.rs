//! Archives that unpack to a thousand times their size, mounted.

use std::fs;

use serde_json::Value;

use crate::support::adversarial::{MEMORY, MOST_BYTES, pack};
use crate::support::bombs::{
    Bomb, CHUNK, INDEX_MEMORY_ERROR, LEN, ended_archive, file, gzip, zstd,
};
use crate::support::fixture::PROGRAM;
use crate::support::program::peak_mib;
use crate::support::raw::{Archive, Header, random_bytes};

// Promises: hostile-memory
#[test]
fn bomb_is_listed_and_mounted_in_bounded_memory() {
    for packed in [
        gzip(&file(), LEN + CHUNK as u64),
        zstd(&file(), LEN + CHUNK as u64),
    ] {
        let mut bomb = Bomb::new(&packed);
        let listed = bomb.run(&["ls", "-ln", MEMORY, "../../a"]);
        assert!(
            listed.code == 0 && listed.said.contains(&LEN.to_string()),
            "{listed:?}"
        );
        fs::create_dir(bomb.place.path("mnt")).expect("fresh");
        let mnt = bomb.place.path("mnt");
        let mnt = mnt.to_str().expect("UTF-8");
        let mounted = bomb.run(&[
            "mount",
            "--no-disk-cache",
            "--wait-index",
            MEMORY,
            "../../a",
            mnt,
        ]);
        assert_eq!(mounted.code, 0, "{mounted:?}");
        let zeros = fs::metadata(bomb.place.path("mnt/zeros")).expect("listed");
        let status = bomb.run(&["status", "--json", mnt]);
        let status: Value = serde_json::from_str(&status.said).expect("JSON");
        let process = format!("/proc/{}/status", status.get("pid").expect("a number"));
        let process = fs::read_to_string(process).expect("it runs");
        let unmounted = bomb.run(&["umount", mnt]);
        assert_eq!((zeros.len(), unmounted.code), (LEN, 0));
        let peak = process.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|text| text.trim().strip_suffix(" kB"));
        let peak: u64 = peak
            .and_then(|text| text.trim().parse().ok())
            .expect("a number");
        assert!(peak << 10 < MOST_BYTES, "{peak} KiB");
    }
}

/// Peak memory of the process that serves the mount at `mnt`.
fn peak_of_mount(bomb: &mut Bomb, mnt: &str) -> u64 {
    let status = bomb.run(&["status", "--json", mnt]);
    let status: Value = serde_json::from_str(&status.said).expect("JSON");
    let pid = status.get("pid").and_then(Value::as_u64).expect("a number");
    peak_mib(u32::try_from(pid).expect("a number")).expect("it runs") << 20
}

// Promises: decode-memory
#[test]
fn bzip2_blocks_of_long_runs_are_read_within_memory_limit() {
    // Packed to more than an eighth of a block's work memory, and 51 times as long unpacked.
    let runs: Vec<u8> = random_bytes(600_000)
        .into_iter()
        .flat_map(|byte| [byte; 255])
        .collect();
    let archive = Archive::new().file("runs", &runs).end();
    let mut bomb = Bomb::new(&pack(&["bzip2", "-9"], &archive));
    let verified = bomb.run(&["verify", MEMORY, "../../a"]);
    assert_eq!(verified.code, 0, "{verified:?}");
    let written = bomb.run(&["materialize", MEMORY, "../../a"]);
    assert_eq!(written.code, 0, "{written:?}");
    fs::create_dir(bomb.place.path("mnt")).expect("fresh");
    let mnt = bomb.place.path("mnt");
    let mnt = mnt.to_str().expect("UTF-8");
    let mounted = bomb.run(&["mount", "--no-disk-cache", MEMORY, "../../a", mnt]);
    assert_eq!(mounted.code, 0, "{mounted:?}");
    let root = bomb.place.root_of("own");
    let compared = ["cmp", &format!("{mnt}/runs"), "runs"];
    let compared = bomb.runner.run(&root, &compared);
    let peak_bytes = peak_of_mount(&mut bomb, mnt);
    let unmounted = bomb.run(&["umount", mnt]);
    assert_eq!((compared.code, unmounted.code), (0, 0), "{compared:?}");
    assert!(peak_bytes < MOST_BYTES, "{} MiB", peak_bytes >> 20);
    assert!(fs::read(root.join("runs")).expect("written") == runs);
}

// Promises: unmount-quick
#[test]
fn umount_ends_process_whose_threads_are_busy() {
    // Half a terabyte of zeros in few chunks after the end: a scan decodes them for minutes.
    let mut bomb = Bomb::of(&zstd(&ended_archive(), 512 << 30));
    fs::create_dir(bomb.place.path("mnt")).expect("fresh");
    let mnt = bomb.place.path("mnt");
    let mnt = mnt.to_str().expect("UTF-8");
    let mounted = bomb.run(&["mount", "../../a", mnt]);
    assert_eq!(mounted.code, 0, "{mounted:?}");
    // This fails if the process runs for another half minute.
    let unmounted = bomb.run(&["umount", mnt]);
    assert_eq!(unmounted.code, 0, "{unmounted:?}");
}

// Promises: limit-index-memory, memory-index
#[test]
fn index_of_long_links_fails_at_its_memory_limit() {
    let target = "x".repeat(3900);
    let archive = (0..12_000).fold(Archive::new(), |archive, number| {
        let link = Header::new(format!("link{number}"), b'2').link("x");
        archive.long(b'K', &target).add(link, "")
    });
    let mut bomb = Bomb::new(&gzip(&archive.end(), 0));
    fs::create_dir(bomb.place.path("mnt")).expect("fresh");
    let mnt = bomb.place.path("mnt");
    let mnt = mnt.to_str().expect("UTF-8");
    let limit = "--index-memory=16MiB";
    for words in [
        &["ls", MEMORY, limit, "../../a"][..],
        &["index", MEMORY, limit, "../../a"],
        &["mount", "--wait-index", MEMORY, limit, "../../a", mnt],
    ] {
        let run = bomb.run(words);
        assert_eq!(run.code, 2, "{words:?}: {run:?}");
        assert!(run.said.contains(INDEX_MEMORY_ERROR), "{words:?}: {run:?}");
    }
    let root = bomb.place.root_of("own");
    let made = bomb.runner.run(&root, &[PROGRAM, "index", "../../a"]);
    assert_eq!(made.code, 0, "{made:?}");
    // The saved index is as large, and is not loaded either.
    let run = bomb.run(&["ls", MEMORY, limit, "../../a"]);
    assert!(
        run.code == 2 && run.said.contains(INDEX_MEMORY_ERROR),
        "{run:?}"
    );
}

// Promises: limit-index-memory, memory-index
#[test]
fn layer_merge_fails_at_memory_limit_of_the_index() {
    let archive = (0..100_000).fold(Archive::new(), |archive, number| {
        archive.symlink(&number.to_string(), "x")
    });
    let mut bomb = Bomb::new(&pack(&["gzip", "-1"], &archive.end()));
    let limit = "--index-memory=16MiB";
    let alone = bomb.run(&["ls", MEMORY, limit, "../../a"]);
    assert_eq!(alone.code, 0, "{alone:?}");
    fs::create_dir(bomb.place.path("mnt")).expect("fresh");
    let mnt = bomb.place.path("mnt");
    let mnt = mnt.to_str().expect("UTF-8");
    let layer = [MEMORY, limit, "--whiteouts=oci", "../../a"];
    for words in [&["ls"][..], &["materialize"], &["mount"]] {
        let place = [mnt];
        let place = if words == ["mount"] { &place[..] } else { &[] };
        let run = bomb.run(&[words, &layer, place].concat());
        assert_eq!(run.code, 2, "{words:?}: {run:?}");
        assert!(run.said.contains(INDEX_MEMORY_ERROR), "{words:?}: {run:?}");
    }
    let left = fs::read_dir(bomb.place.root_of("own")).expect("there");
    assert_eq!(left.count(), 0);
}
