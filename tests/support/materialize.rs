//! Members that the library writes to disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use bytes::Bytes;
use tarfs::Stats;
use tarfs::archive::scan::{PayloadEnd, Sink};
use tarfs::materialize::{Error, Materializer, Options, Summary, XattrFilter};
use tarfs::tar::{Member, MemberKind, Timestamp};
use tarfs::{Extent, Plain};

/// A member and its payload.
pub(crate) type Entry = (Member, Vec<u8>);

pub(crate) fn member(name: impl AsRef<[u8]>, kind: MemberKind) -> Entry {
    let mode = if kind == MemberKind::Directory {
        0o755
    } else {
        0o644
    };
    let member = Member {
        mode,
        mtime: Timestamp {
            seconds: 1_000_000_000,
            nanoseconds: 123_456_789,
        },
        ..Member::new(name.as_ref(), kind)
    };
    (member, Vec::new())
}

pub(crate) fn file(name: impl AsRef<[u8]>, content: impl Into<Vec<u8>>) -> Entry {
    let content = content.into();
    let (mut member, _) = member(name, MemberKind::File);
    member.payload = Extent::with_len(Plain(512), content.len() as u64);
    member.size = content.len() as u64;
    (member, content)
}

pub(crate) fn directory(name: &str) -> Entry {
    member(name, MemberKind::Directory)
}

pub(crate) fn link(name: &str, target: &str) -> Entry {
    member(name, MemberKind::Symlink(target.as_bytes().to_vec()))
}

pub(crate) fn hard_link(name: &str, target: &str) -> Entry {
    member(name, MemberKind::HardLink(target.as_bytes().to_vec()))
}

pub(crate) fn with(mut entry: Entry, change: impl FnOnce(&mut Member)) -> Entry {
    change(&mut entry.0);
    entry
}

/// Options that restore all attributes. Only root restores owners.
pub(crate) fn options() -> Options {
    Options {
        same_permissions: true,
        xattrs: XattrFilter::everything(),
        ..Options::for_this_user()
    }
}

pub(crate) fn try_materialize(
    destination: &Path,
    options: Options,
    entries: Vec<Entry>,
) -> Result<Summary, Error> {
    let mut sink = Materializer::new(destination, options, Arc::new(Stats::default()))?;
    let fed = entries.into_iter().try_for_each(|(member, content)| {
        sink.member(member)?;
        for piece in Bytes::from(content).chunks(100_000) {
            sink.payload(Bytes::copy_from_slice(piece))?;
        }
        sink.member_end(PayloadEnd::Complete)
    });
    let finished = sink.finish();
    fed.and(finished)
}

pub(crate) fn materialize(destination: &Path, entries: Vec<Entry>) -> Summary {
    try_materialize(destination, options(), entries).expect("the destination is fine")
}

pub(crate) fn materialize_without_problems(destination: &Path, entries: Vec<Entry>) {
    let summary = materialize(destination, entries);
    assert_eq!(problems(&summary), Vec::<String>::new());
}

pub(crate) fn problems(summary: &Summary) -> Vec<String> {
    assert_eq!(summary.errors, summary.problems.len() as u64);
    summary.problems.iter().map(ToString::to_string).collect()
}

pub(crate) fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

pub(crate) fn status(path: PathBuf) -> fs::Metadata {
    fs::symlink_metadata(path).expect("an entry")
}

pub(crate) fn content(path: PathBuf) -> String {
    fs::read_to_string(path).expect("a file")
}

pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().expect("a command that exists");
    assert!(
        output.status.success(),
        "{command:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn assert_same_trees(one: &Path, other: &Path) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/compare-trees");
    run(Command::new(script).args([one, other]));
}
