//! Archives that unpack to a thousand times their size. `scripts/soak bombs` uses ten gigabytes.

use std::fs;

use crate::support::adversarial::{MEMORY, pack, tree};
use crate::support::bombs::{
    Bomb, CHUNK, INDEX_MEMORY_ERROR, LEN, ended_archive, file, gzip, zstd,
};
use crate::support::http::{Response, Server};
use crate::support::measured_runner::Run;
use crate::support::raw::{Archive, Header};

/// A counter of `--stats`.
fn counter(run: &Run, name: &str) -> u64 {
    let mark = format!("{name}: ");
    let found = run
        .said
        .split(&mark)
        .nth(1)
        .and_then(|rest| rest.lines().next());
    found
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("{name}: {run:?}"))
}

// Promises: limit-size
#[test]
fn bomb_is_rejected_before_it_is_unpacked() {
    for packed in [
        gzip(&file(), LEN + CHUNK as u64),
        zstd(&file(), LEN + CHUNK as u64),
    ] {
        let mut bomb = Bomb::new(&packed);
        let words = [
            "materialize",
            "--stats",
            MEMORY,
            "--max-unpacked-size=100M",
            "../../a",
        ];
        let run = bomb.run(&words);
        assert_eq!(run.code, 2, "{run:?}");
        assert!(
            run.said.contains(&format!("'zeros' of {LEN} bytes")),
            "{run:?}"
        );
        assert_eq!(tree(&bomb.place.root_of("own")).len(), 1);
        assert_eq!(counter(&run, "written_bytes"), 1);
    }
}

// Promises: limit-size
#[test]
fn bomb_after_the_end_or_excluded_is_stopped_at_the_limit() {
    let left_out = ["--max-unpacked-size=600M", "--exclude=zeros"];
    for (start, flags) in [
        (ended_archive(), &["--max-unpacked-size=16M"][..]),
        (file(), &left_out),
    ] {
        for packed in [gzip(&start, LEN * 2), zstd(&start, LEN * 2)] {
            let mut bomb = Bomb::new(&packed);
            let words = [&["materialize", "--stats", MEMORY, "../../a"], flags].concat();
            let run = bomb.run(&words);
            assert_eq!(run.code, 2, "{run:?}");
            assert!(run.said.contains("unpacked to more than"), "{run:?}");
            assert!(run.said.contains("--max-unpacked-size"), "{run:?}");
            // The run decodes at most the allowed bytes, plus those in flight.
            let allowed = if start == ended_archive() {
                16 << 20
            } else {
                600 << 20
            };
            let decoded = counter(&run, "decoded_bytes");
            assert!(decoded < allowed + (40 << 20), "{decoded}: {run:?}");
        }
    }
}

// Promises: limit-index-memory, memory-index
#[test]
fn whiteouts_of_a_layer_count_as_index_memory() {
    let whiteouts = (0..200_000).fold(Archive::new(), |archive, number| {
        archive.file(&format!("{number}/.wh.x"), "")
    });
    let mut bomb = Bomb::new(&pack(&["gzip", "-1"], &whiteouts.end()));
    fs::write(bomb.place.path("low"), Archive::new().file("x", "1").end()).expect("space");
    let layers = [
        MEMORY,
        "--index-memory=32MiB",
        "../../low",
        "--layer=../../a",
    ];
    for verb in ["ls", "materialize"] {
        let run = bomb.run(&[&[verb], &layers[..]].concat());
        assert_eq!(run.code, 0, "{verb}: {run:?}");
        // Both limits, and the program.
        assert!(run.peak_bytes < (32 + 32 + 16) << 20, "{verb}: {run:?}");
    }
}

// Promises: limit-index-memory
#[test]
fn claimed_length_does_not_make_index_unbounded() {
    const TOTAL: u64 = 1 << 60;
    let header = Header::new("huge", b'0').binary(124, 12, 1 << 59);
    let start = Archive::new().file("a", "1").add(header, "").unfinished();
    let server = Server::start();
    server.route("/a.tar", move |request| {
        let (from, to) = request.range().unwrap_or((0, TOTAL));
        let to = to.min(TOTAL).min(from + (8 << 20));
        let mut body = vec![0; usize::try_from(to - from).expect("a few MiB")];
        if from == 0 {
            let len = body.len().min(start.len());
            body[..len].copy_from_slice(&start[..len]);
        }
        Response::new(206)
            .with("Content-Range", format!("bytes {from}-{}/{TOTAL}", to - 1))
            .with("ETag", "\"1\"")
            .with_body(body)
    });
    let mut bomb = Bomb::of(b"");
    let run = bomb.run(&["ls", MEMORY, "--index-memory=16MiB", &server.url("/a.tar")]);
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.said.contains(INDEX_MEMORY_ERROR), "{run:?}");
}
