//! Limits on the size and the number of entries of an archive.

use std::fs;

use crate::support::adversarial::{Place, tree};
use crate::support::cli;
use crate::support::fixture::PROGRAM;
use crate::support::measured_runner::{MeasuredRunner, Run};
use crate::support::packing::Packing;
use crate::support::raw::{Archive, Header};

/// Runs `tarfs` in a writable place, without lines of progress. The archive's name follows the flags.
fn run(place: &Place, verb: &str, flags: &[&str]) -> Run {
    let mut runner = MeasuredRunner::start(place.root());
    let quiet = if verb == "ls" { &[][..] } else { &["-q"] };
    let words = [&[PROGRAM, verb], quiet, flags, &["../../a"]].concat();
    runner.run(&place.root_of("own"), &words)
}

#[track_caller]
fn assert_rejected(run: &Run, words: &[&str]) {
    assert_eq!(run.code, 2, "{run:?}");
    for word in words {
        assert!(run.said.contains(word), "{word}: {run:?}");
    }
}

#[track_caller]
fn assert_success(run: &Run) {
    assert_eq!(
        (run.code, run.said.contains("tarfs:")),
        (0, false),
        "{run:?}"
    );
}

/// The names in the place's root.
fn names(place: &Place) -> Vec<String> {
    let lines = tree(&place.root_of("own"));
    let name = |line: String| line.split(' ').next().map(str::to_owned);
    lines.into_iter().filter_map(name).collect()
}

// Promises: limit-size
#[test]
fn tree_over_size_limit_stops_before_file_that_does_not_fit() {
    let archive = Archive::new()
        .directory("d/")
        .file("d/a", vec![1; 600])
        .file("b", vec![2; 400])
        .file("c", "3")
        .file("d/e", "")
        .end();
    let place_of_all = Place::with_archive(&archive);
    assert_success(&run(
        &place_of_all,
        "materialize",
        &["--max-unpacked-size=1001"],
    ));
    assert_eq!(names(&place_of_all), ["b", "c", "d", "d/a", "d/e"]);
    let place = Place::with_archive(&archive);
    let outcome = run(&place, "materialize", &["--max-unpacked-size=1000"]);
    assert_rejected(
        &outcome,
        &[
            "'c' of 1 bytes",
            "to 1001",
            "1000 bytes are allowed",
            "--max-unpacked-size",
        ],
    );
    assert_eq!(names(&place), ["b", "d", "d/a"]);
}

// Promises: limit-size
#[test]
fn atomic_tree_over_size_limit_does_not_appear() {
    let place = Place::with_archive(&Archive::new().file("a", "1").file("b", "2").end());
    let flags = ["--atomic", "-C", "new", "--max-unpacked-size=1"];
    assert_rejected(
        &run(&place, "materialize", &flags),
        &["'b'", "--max-unpacked-size"],
    );
    assert!(names(&place).is_empty());
}

// Promises: limit-size
#[test]
fn holes_count_with_their_full_size() {
    let keywords = [("GNU.sparse.map", "0,0"), ("GNU.sparse.size", "1000001")];
    let hole = Archive::new().pax(&keywords).file("hole", "").end();
    for flags in [
        &["--max-unpacked-size=1MB"][..],
        &["--max-unpacked-size=1MB", "-O"],
    ] {
        let place = Place::with_archive(&hole);
        assert_rejected(&run(&place, "materialize", flags), &["'hole' of 1000001"]);
        assert!(names(&place).is_empty());
    }
    let place = Place::with_archive(&hole);
    assert_success(&run(
        &place,
        "materialize",
        &["--max-unpacked-size=1000001"],
    ));
}

// Promises: limit-size
#[test]
fn data_outside_of_files_counts_towards_limit() {
    const FLAG: &str = "--max-unpacked-size=1MiB";
    let bulk = vec![0; 3 << 20];
    let archives = [
        (
            "behind the end",
            [Archive::new().file("a", "1").end(), bulk.clone()].concat(),
        ),
        ("a listing", {
            Archive::new()
                .add(Header::new("d/", b'D').mode(0o755), &bulk)
                .end()
        }),
        ("a lost file", {
            let keywords = [("GNU.sparse.map", "5,1,0,1"), ("GNU.sparse.size", "9")];
            Archive::new()
                .file("a", "1")
                .pax(&keywords)
                .file("l", &bulk)
                .end()
        }),
        ("an extended header", {
            Archive::new()
                .file("a", "1")
                .pax(&[("comment", &bulk)])
                .file("b", "1")
                .end()
        }),
        ("bad records", {
            Archive::new()
                .file("a", "1")
                .raw([7; 512].repeat(6000))
                .end()
        }),
    ];
    for (name, archive) in archives {
        let place = Place::with_archive(&archive);
        let outcome = run(&place, "materialize", &[FLAG]);
        assert_rejected(&outcome, &["unpacked to more than", "--max-unpacked-size"]);
        let place = Place::create();
        fs::write(place.path("a"), &archive).expect("space");
        let more = run(&place, "materialize", &["--max-unpacked-size=4MiB"]);
        assert!(
            !more.said.contains("--max-unpacked-size"),
            "{name}: {more:?}"
        );
    }
}

// Promises: limit-size
#[test]
fn headers_of_small_files_are_within_any_size_limit() {
    let mut archive = Archive::new();
    for number in 0..3000 {
        let long = format!("{number}-{}", "n".repeat(150));
        archive = archive.pax(&[("path", &long)]).file("x", "1");
    }
    let archive = archive.end();
    assert_success(&run(
        &Place::with_archive(&archive),
        "materialize",
        &["--max-unpacked-size=3000"],
    ));
    // In pieces of 4 MiB, so that the members of a piece are unknown when it arrives.
    let packed = Packing::Lz4.pack(&archive.into());
    assert_success(&run(
        &Place::with_archive(&packed),
        "materialize",
        &["--max-unpacked-size=3000"],
    ));
}

// Promises: limit-entries, limit-index-entries
#[test]
fn more_entries_than_limit_are_rejected_by_every_verb() {
    // With the implied directory d/e there are four entries: `./` exists anyway.
    let archive = Archive::new()
        .directory("./")
        .file("a", "")
        .directory("d/")
        .file("d/e/f", "")
        .directory(".")
        .end();
    for verb in ["materialize", "ls", "index"] {
        let place = Place::with_archive(&archive);
        let outcome = run(&place, verb, &["--max-entries=3"]);
        assert_rejected(&outcome, &["d/e/f", "3 that are allowed", "--max-entries"]);
    }
    for verb in ["materialize", "ls", "index"] {
        let place = Place::with_archive(&archive);
        assert_success(&run(&place, verb, &["--max-entries=4"]));
    }
    let place = Place::with_archive(&archive);
    assert_rejected(
        &run(&place, "materialize", &["--max-entries=2"]),
        &["'d/e/f'", "2 that are allowed"],
    );
    assert_eq!(names(&place), ["a", "d"]);
}

// Promises: limit-entries
#[test]
fn implied_directories_count_where_a_tree_is_made_or_indexed() {
    let place = cli::Place::new();
    place.put("a.tar", Archive::new().file("a/b/c", "").end());
    for (code, words) in [
        (0, &["verify", "-q", "a.tar"][..]),
        (0, &["materialize", "-q", "--to-stdout", "a.tar"]),
        (0, &["materialize", "-q", "--dry-run", "a.tar", "-C", "out"]),
        (2, &["materialize", "-q", "a.tar", "-C", "out"]),
        (2, &["sync", "-q", "a.tar", "copy"]),
        (2, &["index", "-q", "a.tar"]),
        (2, &["ls", "a.tar"]),
        (2, &["find", "a.tar"]),
        (2, &["du", "a.tar"]),
    ] {
        let outcome = place.run(&[&[words[0], "--max-entries=1"], &words[1..]].concat());
        assert_eq!(outcome.code, code, "{words:?}: {}", outcome.complaints);
    }
}

// Promises: limit-entries
#[test]
fn saved_index_with_too_many_entries_is_rejected() {
    let place = Place::with_archive(&Archive::new().file("a", "").file("b", "").end());
    assert_success(&run(&place, "index", &[]));
    let outcome = run(&place, "ls", &["--max-entries=1"]);
    assert_rejected(&outcome, &["2 entries, and 1 are allowed", "--max-entries"]);
    assert_success(&run(&place, "index", &["--output", "index"]));
    let outcome = run(&place, "ls", &["--index=index", "--max-entries=1"]);
    assert_rejected(&outcome, &["2 entries, and 1 are allowed"]);
    assert_success(&run(&place, "ls", &["--index=index", "--max-entries=2"]));
}

/// Limits are about the archive, whichever part of it is written, and whether its index is saved or not.
// Promises: shard-limits, limit-size, limit-entries
#[test]
fn limits_count_the_same_with_a_saved_index() {
    // Two of the five members are replaced or further names, and there is an implied directory.
    let archive = Archive::new()
        .directory("./")
        .file("a", [1; 3000])
        .file("a", [2; 4000])
        .hard_link("h", "a")
        .file("d/e", [3; 5000])
        .symlink("l", "a");
    let place = cli::Place::new();
    place.put("a.tar", archive.end());
    let ways: [(&[&str], &[&str]); 3] = [
        (&["materialize"], &["-C", "limited"]),
        (&["sync"], &["limited"]),
        (&["shard", "write"], &["1/1", "-C", "limited"]),
    ];
    for (limit, is_enough) in [
        ("--max-entries=6", true),
        ("--max-entries=5", false),
        ("--max-unpacked-size=12000", true),
        ("--max-unpacked-size=11999", false),
    ] {
        for (way, place_words) in ways {
            for has_index in [false, true] {
                place.succeeds(&["cache", "clear"]);
                if has_index {
                    place.succeeds(&["index", "-q", "a.tar"]);
                }
                fs::create_dir(place.path("limited")).expect("made");
                let words = [way, &["-q", limit, "a.tar"], place_words].concat();
                let outcome = place.run(&words);
                let what = format!("{limit} {way:?} {has_index}: {}", outcome.complaints);
                assert_eq!(outcome.code, if is_enough { 0 } else { 2 }, "{what}");
                if has_index && !is_enough {
                    // The index says it before anything is written.
                    let written = fs::read_dir(place.path("limited")).expect("made");
                    assert_eq!(written.count(), 0, "{what}");
                }
                fs::remove_dir_all(place.path("limited")).expect("ours");
            }
        }
    }
}

// Promises: limit-size
#[test]
fn size_limit_of_layers_counts_only_files() {
    let place = cli::Place::new();
    let layer = |name, len| Archive::new().file(name, vec![1; len]).end();
    place.put("a.tar", layer("a", 3000));
    place.put("b.tar", layer("b", 4000));
    for (limit, code) in [("7000", 0), ("6999", 2)] {
        for way in [
            &["materialize", "-C", "limited", "a.tar"][..],
            &["sync", "a.tar", "limited"],
        ] {
            fs::create_dir(place.path("limited")).expect("made");
            let more = ["-q", "--max-unpacked-size", limit, "--layer", "b.tar"];
            let outcome = place.run(&[way, &more].concat());
            assert_eq!(
                outcome.code, code,
                "{limit} {way:?}: {}",
                outcome.complaints
            );
            fs::remove_dir_all(place.path("limited")).expect("ours");
        }
    }
}

// Promises: limit-components
#[test]
fn path_with_too_many_components_loses_only_its_member() {
    let deep = "a/".repeat(2048) + "f";
    let archive = Archive::new()
        .pax(&[("path", &deep)])
        .file("x", "1")
        .file("b", "2")
        .end();
    let place = Place::with_archive(&archive);
    let outcome = run(&place, "materialize", &[]);
    assert_rejected(
        &outcome,
        &["more components in a name than the limit of 2048"],
    );
    assert_eq!(names(&place), ["b"]);
    let outcome = run(&place, "ls", &["-R"]);
    assert_rejected(&outcome, &["b\n", "1 member is damaged or not in the tree"]);
}
