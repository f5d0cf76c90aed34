use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use super::parallel::MIN_WAIT;
use super::{Level, Start, Visit, Visitor, walk_parallel};
use crate::base::sync::Mutex;
use crate::index::test_support::{directory, file, index};
use crate::index::{Index, Ino, LazyIndex};
use crate::tree::{Batch, Name, Tree};
use crate::tree::{FileKind, IndexTree, Metadata};
use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::Arc;

/// An index in which directories called `closed` cannot be opened.
struct TestTree(IndexTree);

impl TestTree {
    fn new(index: Index) -> Arc<Self> {
        Arc::new(Self(IndexTree::new(LazyIndex::new(Arc::new(index)), true)))
    }
}

impl Tree for TestTree {
    type Directory = Ino;

    fn open(&self, parent: &Ino, name: Name<'_>) -> io::Result<Ino> {
        if name.name == b"closed" {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        self.0.open(parent, name)
    }

    fn read(&self, directory: &Ino, position: &mut u64, batch: &mut Batch) -> io::Result<()> {
        self.0.read(directory, position, batch)
    }

    fn metadata(&self, directory: &Ino, name: Name<'_>) -> io::Result<Metadata> {
        self.0.metadata(directory, name)
    }

    fn target(&self, directory: &Ino, name: Name<'_>) -> io::Result<Cow<'_, [u8]>> {
        self.0.target(directory, name)
    }

    fn user(&self, metadata: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>> {
        self.0.user(metadata)
    }

    fn group(&self, metadata: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>> {
        self.0.group(metadata)
    }
}

/// Records the calls of a walk, and ends it at the name `quit`.
///
/// Directories called `again` are read twice.
#[derive(Default)]
struct Recorder(Mutex<Vec<String>>);

impl Recorder {
    fn record(&self, call: &str, path: &[u8]) {
        let path = String::from_utf8_lossy(path);
        self.0.lock().push(format!("{call} {path}"));
    }
}

impl Visitor<TestTree> for Recorder {
    type State = ();

    fn visit(
        &self,
        names: &Visit<'_, TestTree, ()>,
        descend: &mut Vec<(usize, ())>,
    ) -> ControlFlow<()> {
        for (number, item) in names.items() {
            assert_ne!(item.name(), b"panic", "a visitor may panic");
            self.record("visit", item.path());
            if item.name() == b"quit" {
                return ControlFlow::Break(());
            }
            if item.kind() == FileKind::Directory {
                descend.push((number, ()));
            }
        }
        ControlFlow::Continue(())
    }

    fn is_done(&self, level: &Arc<Level<TestTree, ()>>) -> bool {
        if level.name != b"again" {
            return true;
        }
        let call = String::from_utf8_lossy(&level.path()).into_owned() + " is read again";
        let mut calls = self.0.lock();
        let is_done = calls.contains(&call);
        if !is_done {
            calls.push(call);
        }
        is_done
    }

    fn leave(&self, level: &Arc<Level<TestTree, ()>>) -> ControlFlow<()> {
        self.record("leave", &level.path());
        ControlFlow::Continue(())
    }

    fn report(&self, path: &[u8], _: io::Error) {
        self.record("report", path);
    }
}

fn calls(index: Index, threads: usize) -> (Vec<String>, ControlFlow<()>) {
    let recorder = Arc::new(Recorder::default());
    let start = Start {
        path: b".".to_vec(),
        inode: 1,
        directory: Ino::ROOT,
        state: (),
    };
    let jobs = NonZeroUsize::new(threads);
    let flow = walk_parallel(&TestTree::new(index), &recorder, vec![start], jobs);
    let calls = std::mem::take(&mut *recorder.0.lock());
    (calls, flow)
}

#[test]
fn one_thread_goes_down_before_it_goes_on() {
    let index = index(&[file("a/b/c", 0..1), file("a/d", 0..1), file("e/f", 0..1)]);
    let (calls, flow) = calls(index, 1);
    let expected = "visit ./a,visit ./e,visit ./a/b,visit ./a/d,visit ./a/b/c,leave ./a/b,leave ./a,\
                    visit ./e/f,leave ./e,leave .";
    assert_eq!(calls.join(","), expected);
    assert_eq!(flow, ControlFlow::Continue(()));
}

#[test]
fn many_threads_visit_each_name_once_and_leave_directories_last() {
    let mut members = Vec::new();
    for number in 0..3000 {
        members.push(file(&format!("flat/{number}"), 0..1));
        members.push(file(&format!("d{}/e{}/f", number % 7, number), 0..1));
    }
    let (calls, _) = calls(index(&members), 8);
    let mut places = BTreeMap::new();
    for (number, call) in calls.iter().enumerate() {
        assert!(places.insert(call.as_str(), number).is_none(), "{call}");
    }
    // The root, 8 directories in it and 3,000 below them are left; all but the root are visited, too.
    assert_eq!(calls.len(), 3009 + 3008 + 6000);
    for (call, number) in &places {
        let Some(path) = call.strip_prefix("leave ") else {
            continue;
        };
        if let Some((above, _)) = path.rsplit_once('/') {
            assert!(places[&*format!("visit {path}")] < *number, "{path}");
            assert!(places[&*format!("leave {above}")] > *number, "{path}");
        }
    }
}

#[test]
fn a_break_ends_the_walk_of_all_threads() {
    let mut members: Vec<_> = (0..1000)
        .map(|number| file(&format!("d{number}/f"), 0..1))
        .collect();
    members.push(file("a/quit", 0..1));
    for threads in [1, 8] {
        let (calls, flow) = calls(index(&members), threads);
        assert_eq!(flow, ControlFlow::Break(()));
        assert!(!calls.contains(&"leave .".to_owned()), "{threads}");
    }
}

/// Waits at each directory, and records the thread.
#[derive(Default)]
struct SlowVisitor(Mutex<BTreeSet<String>>);

impl Visitor<TestTree> for SlowVisitor {
    type State = ();

    fn visit(
        &self,
        names: &Visit<'_, TestTree, ()>,
        descend: &mut Vec<(usize, ())>,
    ) -> ControlFlow<()> {
        let thread = std::thread::current().id();
        self.0.lock().insert(format!("{thread:?}"));
        std::thread::sleep(2 * MIN_WAIT);
        let directories = names
            .names()
            .filter(|(_, found)| found.kind == FileKind::Directory);
        descend.extend(directories.map(|(number, _)| (number, ())));
        ControlFlow::Continue(())
    }

    fn report(&self, _: &[u8], _: io::Error) {}
}

#[test]
fn a_fixed_number_of_threads_stays_while_they_wait() {
    let members: Vec<_> = (0..200)
        .map(|number| file(&format!("d{number}/f"), 0..1))
        .collect();
    let tree = TestTree::new(index(&members));
    for threads in [1, 3] {
        let visitor = Arc::new(SlowVisitor::default());
        let start = Start {
            path: b".".to_vec(),
            inode: 1,
            directory: Ino::ROOT,
            state: (),
        };
        let jobs = NonZeroUsize::new(threads);
        let flow = walk_parallel(&tree, &visitor, vec![start], jobs);
        assert_eq!(flow, ControlFlow::Continue(()));
        assert!(visitor.0.lock().len() <= threads, "{threads}");
    }
}

#[test]
fn directory_that_cannot_be_opened_is_reported_and_skipped() {
    let index = index(&[directory("closed", 0o755), file("open/f", 0..1)]);
    let (calls, flow) = calls(index, 1);
    let expected = "visit ./closed,visit ./open,report ./closed,leave ./closed,visit ./open/f,\
                    leave ./open,leave .";
    assert_eq!(calls.join(","), expected);
    assert_eq!(flow, ControlFlow::Continue(()));
}

// Promises: rm-others
#[test]
fn directory_that_is_not_done_is_read_again() {
    let index = index(&[file("again/a/f", 0..1), file("b", 0..1)]);
    let (calls, _) = calls(index, 1);
    let once = "visit ./again/a,visit ./again/a/f,leave ./again/a";
    let expected = format!(
        "visit ./again,visit ./b,{once},./again is read again,{once},leave ./again,leave ."
    );
    assert_eq!(calls.join(","), expected);
}

#[test]
fn a_deep_tree_is_walked_without_recursion() {
    let index = index(&[file(&("a/".repeat(8_000) + "f"), 0..1)]);
    let (calls, _) = calls(index, 2);
    assert_eq!(calls.len(), 8_000 + 1 + 8_001);
}

#[test]
#[should_panic(expected = "a visitor may panic")]
fn a_panic_of_a_visitor_ends_the_walk() {
    let mut members: Vec<_> = (0..1000)
        .map(|number| file(&format!("d{number}/f"), 0..1))
        .collect();
    members.push(file("a/panic", 0..1));
    let (calls, _) = calls(index(&members), 8);
    assert!(calls.is_empty(), "it has ended");
}
