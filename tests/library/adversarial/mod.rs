//! Malicious archives: each ends as with GNU tar, or in a clear error.
//!
//! Memory is bounded, and nothing outside the destination changes. `tests/mount` has the tests that
//! need root.

mod bombs;
mod codecs;
mod confinement;
mod endless;
mod headers;
mod limits;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::thread;

use crate::support::adversarial::{MEMORY, MOST_BYTES, Place, tree, walk};
use crate::support::fixture::PROGRAM;
use crate::support::measured_runner::{MeasuredRunner, Run};

/// Number of cases that run at once.
const PARALLEL_CASES: usize = 4;

/// An archive and the expected outcome.
struct Case {
    name: &'static str,
    archive: Vec<u8>,
    /// Additional options for GNU tar.
    gnu_options: &'static [&'static str],
    /// Additional options for tarfs.
    options: &'static [&'static str],
    expected: Expected,
}

/// Expected outcome of a case.
#[derive(Clone, Copy)]
enum Expected {
    /// The same tree and verdict as GNU tar.
    Same,
    /// An error with these words, as GNU tar reports one as well.
    ///
    /// The trees written before the error are not compared.
    Refused(&'static str),
    /// A documented difference from GNU tar.
    Differs {
        /// Whether GNU tar succeeds.
        gnu: bool,
        /// Whether tarfs succeeds.
        own: bool,
        /// Comparison of the trees.
        tree: Tree,
        /// Words of the error.
        words: &'static str,
        /// Reason for the difference.
        why: &'static str,
    },
}

/// Comparison with the tree of GNU tar.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tree {
    Same,
    Other,
    /// GNU tar's tree and errors depend on inode numbers of the file system.
    Either,
}

fn case(name: &'static str, archive: impl Into<Vec<u8>>) -> Case {
    Case {
        name,
        archive: archive.into(),
        gnu_options: &[],
        options: &[],
        expected: Expected::Same,
    }
}

impl Case {
    fn refused(self, words: &'static str) -> Self {
        self.expecting(Expected::Refused(words))
    }

    /// tarfs rejects, with these words, an archive that GNU tar accepts.
    fn stricter(self, words: &'static str, why: &'static str) -> Self {
        self.expecting(Expected::Differs {
            gnu: true,
            own: false,
            tree: Tree::Other,
            words,
            why,
        })
    }

    /// Like [`stricter`](Self::stricter), but the trees are the same.
    fn stricter_alike(self, words: &'static str, why: &'static str) -> Self {
        self.expecting(Expected::Differs {
            gnu: true,
            own: false,
            tree: Tree::Same,
            words,
            why,
        })
    }

    /// Both report errors, and the trees differ.
    fn other_tree(self, words: &'static str, why: &'static str) -> Self {
        self.expecting(Expected::Differs {
            gnu: false,
            own: false,
            tree: Tree::Other,
            words,
            why,
        })
    }

    /// tarfs accepts an archive that GNU tar rejects, and writes at least as much.
    fn laxer(self, tree: Tree, why: &'static str) -> Self {
        self.expecting(Expected::Differs {
            gnu: false,
            own: true,
            tree,
            words: "",
            why,
        })
    }

    /// Both succeed, with different trees.
    fn different_tree(self, tree: Tree, why: &'static str) -> Self {
        self.expecting(Expected::Differs {
            gnu: true,
            own: true,
            tree,
            words: "",
            why,
        })
    }

    fn expecting(mut self, expected: Expected) -> Self {
        self.expected = expected;
        self
    }

    fn gnu(mut self, options: &'static [&'static str]) -> Self {
        self.gnu_options = options;
        self
    }

    fn with(mut self, options: &'static [&'static str]) -> Self {
        self.options = options;
        self
    }
}

/// Runs all cases, several at once, and reports all mismatches. Nothing in `outside` may change.
#[track_caller]
fn check(outside: &Path, cases: Vec<Case>) {
    let names: BTreeSet<&str> = cases.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases.len(), "two cases have one name");
    let before = tree(outside);
    let surprises = Mutex::new(Vec::new());
    let cases = Mutex::new(cases.into_iter());
    thread::scope(|scope| {
        for _ in 0..PARALLEL_CASES {
            scope.spawn(|| {
                let home = tempfile::tempdir().expect("a directory");
                let mut runner = MeasuredRunner::start(home.path());
                loop {
                    let Some(case) = cases.lock().expect("no panic").next() else {
                        break;
                    };
                    let found = mismatch(&case, &mut runner);
                    surprises.lock().expect("no panic").extend(found);
                }
            });
        }
    });
    assert_eq!(tree(outside), before, "something outside was touched");
    let surprises = surprises.into_inner().expect("no panic");
    assert!(surprises.is_empty(), "\n{}", surprises.join("\n"));
}

/// Description of a case's mismatch.
fn mismatch(case: &Case, runner: &mut MeasuredRunner) -> Option<String> {
    let place = Place::create();
    fs::write(place.path("a"), &case.archive).expect("space");
    let around = place.around("own");
    let gnu = ["tar", "--numeric-owner", "--delay-directory-restore"];
    let gnu = [&gnu[..], case.gnu_options, &["-xpf", "../../a"]].concat();
    let gnu = runner.run(&place.root_of("gnu"), &gnu);
    let own = [PROGRAM, "materialize", "-qp", MEMORY, "--numeric-owner"];
    let own = [&own[..], case.options, &["../../a"]].concat();
    let own = runner.run(&place.root_of("own"), &own);
    let listed = [&[PROGRAM, "ls", "-RA", MEMORY, "../../a"], case.options].concat();
    let listed = runner.run(&place.root_of("own"), &listed);
    let (gnu_tree, own_tree) = (tree(&place.root_of("gnu")), tree(&place.root_of("own")));

    let mut faults = Vec::new();
    for (verb, run) in [("materialize", &own), ("ls", &listed)] {
        faults.extend(conduct_errors(verb, run));
    }
    if place.around("own") != around {
        faults.push("something outside was touched".to_owned());
    }
    if own.code == 0 && listed.code == 0 {
        let paths = walk(&place.root_of("own")).len();
        let lines = listed.said.lines().count();
        if paths != lines {
            faults.push(format!("ls lists {lines} entries, and {paths} are written"));
        }
    }
    let found = (gnu.code == 0, own.code == 0, gnu_tree == own_tree);
    let (right, words, why) = match case.expected {
        Expected::Same => (found.0 == found.1 && found.2, "", ""),
        Expected::Refused(words) => (!found.0 && !found.1, words, "an error for both"),
        Expected::Differs {
            gnu,
            own,
            tree,
            words,
            why,
        } => {
            let as_known = found.0 == gnu && found.2 == (tree == Tree::Same);
            (
                found.1 == own && (as_known || tree == Tree::Either),
                words,
                why,
            )
        }
    };
    if !right {
        faults.push("not as expected".to_owned());
    }
    if !own.said.contains(words) {
        faults.push(format!("'{words}' is not reported"));
    }
    if faults.is_empty() {
        return None;
    }
    let only = |one: &BTreeSet<String>, other| -> Vec<String> {
        one.difference(other).take(5).cloned().collect()
    };
    Some(format!(
        "== {} ({why}): {}\ntar: {} {:?}\nmaterialize: {} {:?}\nls: {} {:?}\nonly tar: {:#?}\n\
         only materialize: {:#?}",
        case.name,
        faults.join("; "),
        gnu.code,
        gnu.said,
        own.code,
        own.said,
        listed.code,
        listed.said,
        only(&gnu_tree, &own_tree),
        only(&own_tree, &gnu_tree),
    ))
}

/// Violations of rules that apply to every archive.
fn conduct_errors(verb: &str, run: &Run) -> Vec<String> {
    let mut faults = Vec::new();
    if !matches!(run.code, 0 | 2) {
        faults.push(format!("{verb} ended with {}", run.code));
    }
    if run.code == 2 && run.said.is_empty() {
        faults.push(format!("{verb} does not say why"));
    }
    if run.said.contains("panicked") {
        faults.push(format!("{verb} panicked"));
    }
    if run.peak_bytes > MOST_BYTES {
        faults.push(format!("{verb} took {} bytes", run.peak_bytes));
    }
    faults
}
