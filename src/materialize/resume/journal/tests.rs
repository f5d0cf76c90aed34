use std::sync::Arc;

use proptest::prelude::*;

use super::file::MAX_MAGIC_OFFSET;
use super::item::{ItemKind, ItemReader};
use super::load::JournalLoader;
use super::{CheckpointInfo, Journal, RecoveredState, TreeItem};
use crate::archive::ResumePoint;
use crate::base::archive_path::ArchivePath;
use crate::materialize::error::Error;
use crate::materialize::error::Problems;
use crate::materialize::options::Options;
use crate::materialize::test_support::member;
use crate::materialize::write::Context;
use crate::materialize::write::{DeferredLink, FieldEncoder, Identity, PendingDirectory};
use crate::tar::limits::{MAX_NAME_BYTES, MAX_XATTR_BYTES, MAX_XATTRS};
use crate::tar::{Member, MemberKind, Timestamp};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

fn resume_point(member: u64) -> ResumePoint {
    let mut bytes = vec![0; 80];
    bytes[8..16].copy_from_slice(&member.to_le_bytes());
    ResumePoint {
        globals: Arc::new(vec![b"12 uname=me\n".to_vec()]),
        ..ResumePoint::decode(&bytes).expect("a plain one at the front")
    }
}

fn path(name: &str) -> ArchivePath {
    ArchivePath::sanitize(name.as_bytes()).path
}

fn progress(members: u64) -> CheckpointInfo {
    CheckpointInfo {
        before: members,
        members,
        entries: 5,
        errors: 3,
        found: vec![1, 0],
    }
}

/// A directory with an entry of member 0, a link of member 1, and checkpoints after both.
fn written() -> (tempfile::TempDir, PathBuf) {
    let base = tempfile::tempdir().expect("a directory");
    let out = base.path().join("out");
    std::fs::create_dir(&out).expect("made");
    let (journal, recovered) = Journal::open(&out, "owner").expect("new");
    assert!(recovered.is_none());
    let stat = rustix::fs::stat(&out).expect("there");
    journal.record_entry(0, &path("a"), &stat);
    assert!(journal.checkpoint(&resume_point(1024), &progress(1)));
    let link = DeferredLink {
        path: path("b"),
        target: path("../a"),
    };
    journal.record_link(1, &link);
    // The item of a member that is made again.
    journal.record_entry(7, &path("z"), &stat);
    assert!(journal.checkpoint(&resume_point(4096), &progress(2)));
    journal.record_touch(99);
    (base, out)
}

/// A directory whose path and attributes are as large as an archive may have them.
fn largest_directory() -> PendingDirectory {
    let size = |limit: u64| usize::try_from(limit).expect("small");
    let names = (0..MAX_XATTRS).map(|number| format!("user.{number}").into_bytes());
    let mut xattrs: Vec<_> = names.map(|name| (name, Vec::new())).collect();
    let name_bytes: usize = xattrs.iter().map(|(name, _)| name.len()).sum();
    xattrs[5].1 = vec![b'x'; size(MAX_XATTR_BYTES) - name_bytes];
    let member = Member {
        mode: 0o6751,
        uid: u32::MAX - 1,
        gid: 77,
        user: b"root".to_vec(),
        group: b"nosuch".to_vec(),
        mtime: Timestamp {
            seconds: -5,
            nanoseconds: 999_999_999,
        },
        xattrs,
        ..member(b"d", MemberKind::Directory)
    };
    let options = Options {
        same_owner: true,
        same_permissions: true,
        ..Options::for_this_user()
    };
    let context = Context::new(&options, Problems::new(None), Arc::default());
    let path = path(&"d".repeat(size(MAX_NAME_BYTES)));
    let identity = Identity {
        device: u64::MAX,
        inode: 1 << 40,
    };
    PendingDirectory::new(path, identity, true, member, &context.policy)
}

fn reopened(out: &Path) -> Option<RecoveredState> {
    Journal::open(out, "owner").expect("a journal").1
}

#[test]
fn journal_recovers_items_before_the_last_checkpoint() {
    let (_base, out) = written();
    for _ in 0..2 {
        let recovered = reopened(&out).expect("a past");
        let progress = &recovered.progress;
        assert_eq!((progress.before, progress.members), (2, 2));
        assert_eq!((progress.entries, progress.errors), (5, 3));
        assert_eq!(recovered.resume_point, resume_point(4096));
        assert_eq!(progress.found, [1, 0]);
        // Touch items after the last checkpoint survive every reopening.
        let [TreeItem::Complete(whole, _), TreeItem::Touched(99)] = recovered.tree_items.as_slice()
        else {
            panic!("{:?}", recovered.tree_items);
        };
        assert_eq!(*whole, path("a"));
        assert_eq!(recovered.links.len(), 1);
    }
}

#[test]
fn largest_directory_is_recovered_with_all_attributes() {
    let base = tempfile::tempdir().expect("a directory");
    let out = base.path().join("out");
    std::fs::create_dir(&out).expect("made");
    let (journal, _) = Journal::open(&out, "owner").expect("new");
    let pending = largest_directory();
    journal.record_directory(0, None, &pending);
    assert!(journal.checkpoint(&resume_point(1024), &progress(1)));
    drop(journal);
    let recovered = reopened(&out).expect("a past");
    assert!(recovered.directories == [pending], "an attribute is lost");
}

#[test]
fn journal_item_with_bytes_behind_its_fields_is_invalid() {
    let base = tempfile::tempdir().expect("a directory");
    let out = base.path().join("out");
    std::fs::create_dir(&out).expect("made");
    let (journal, _) = Journal::open(&out, "owner").expect("new");
    let stat = rustix::fs::stat(&out).expect("there");
    let mut numbered_path = FieldEncoder::default();
    numbered_path.number(3_u64);
    numbered_path.bytes(b"a");
    journal.record_entry(0, &path("a"), &stat);
    journal.record_directory(0, None, &largest_directory());
    let (path, target) = (path("b"), path("a"));
    journal.record_link(0, &DeferredLink { path, target });
    assert!(journal.checkpoint(&resume_point(1024), &progress(1)));
    journal.record_touch(99);
    let path_only = FieldEncoder(numbered_path.0[8..].to_vec());
    journal.add_and_flush(ItemKind::Replace, &path_only);
    journal.add_and_flush(ItemKind::Make, &numbered_path);

    let file = File::open(&journal.path).expect("there");
    let mut items = ItemReader {
        input: BufReader::new(&file),
        chain: 0,
        end: 0,
    };
    let mut kinds = Vec::new();
    while let Some((kind, mut body)) = items.next_item().expect("readable") {
        kinds.push(kind);
        let is_valid = |body: &[u8]| JournalLoader::default().add_item(kind, body).is_some();
        assert_eq!(is_valid(&body), kind != ItemKind::RunKey, "{kind:?}");
        body.push(0);
        assert!(!is_valid(&body), "{kind:?}");
    }
    assert_eq!(kinds, ItemKind::ALL);
}

#[test]
fn journal_of_another_run_is_discarded() {
    let (_base, out) = written();
    assert!(Journal::open(&out, "other").expect("ours").1.is_none());
    assert!(reopened(&out).is_none());
}

#[test]
fn second_run_cannot_lock_the_journal() {
    let (_base, out) = written();
    let _first = Journal::open(&out, "owner").expect("ours");
    let second = Journal::open(&out, "owner");
    assert!(matches!(second, Err(Error::InUse(..))));
}

#[test]
fn invalidated_journal_is_never_recovered() {
    let (_base, out) = written();
    let (journal, recovered) = Journal::open(&out, "owner").expect("ours");
    assert!(recovered.is_some());
    journal.invalidate();
    assert!(!journal.checkpoint(&resume_point(8192), &progress(3)));
    drop(journal);
    assert!(reopened(&out).is_none());
}

#[test]
fn damaged_journal_keeps_checkpoints_before_the_damage() {
    let (base, out) = written();
    let file = base.path().join(".out.tarfs-journal");
    let whole = std::fs::read(&file).expect("there");
    let ends: Vec<usize> = {
        let file = File::open(&file).expect("there");
        let mut items = ItemReader {
            input: BufReader::new(&file),
            chain: 0,
            end: 0,
        };
        let ends = std::iter::from_fn(|| {
            items.next_item().expect("readable")?;
            usize::try_from(items.end).ok()
        });
        ends.collect()
    };
    // The first checkpoint follows the run key and an entry, the second one a link and an entry.
    let (first, second) = (ends[2], ends[5]);
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x40;
        for bytes in [damaged, whole[..at].to_vec()] {
            std::fs::write(&file, bytes).expect("written");
            let Ok((_, recovered)) = Journal::open(&out, "owner") else {
                // Without its magic it may be any file of the user.
                assert!(at < MAX_MAGIC_OFFSET, "{at}");
                continue;
            };
            let members = recovered.map(|recovered| recovered.progress.members);
            let expected = if at >= second {
                Some(2)
            } else {
                (at >= first).then_some(1)
            };
            assert_eq!(members, expected, "{at}");
        }
    }
}

proptest! {
    /// A right checksum does not prove that the fields of an item are valid.
    #[test]
    fn any_bytes_are_a_journal_item_or_nothing(
        kind in proptest::sample::select(ItemKind::ALL.to_vec()),
        numbers in proptest::collection::vec(prop_oneof![0_u64..20, any::<u64>()], 0..30),
        text in proptest::collection::vec(any::<u8>(), 0..20),
    ) {
        let mut body: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
        body.extend(text);
        let mut loader = JournalLoader::default();
        let nothing = format!("{loader:?}");
        let is_item = loader.add_item(kind, &body).is_some();
        prop_assert_eq!(format!("{loader:?}") == nothing, !is_item);
    }
}
