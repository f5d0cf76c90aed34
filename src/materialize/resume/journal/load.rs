//! Recovers the state of a run from the items of its journal.

use std::collections::{HashMap, HashSet};

use super::item::ItemKind;
use crate::archive::ResumePoint;
use crate::base::archive_path::ArchivePath;
use crate::materialize::sidecar::StatSnapshot;
use crate::materialize::write::{DeferredLink, FieldDecoder, PendingDirectory};

#[derive(Debug)]
pub(crate) struct RecoveredState {
    pub(crate) resume_point: ResumePoint,
    pub(crate) progress: CheckpointInfo,
    /// In the order of the journal.
    pub(crate) tree_items: Vec<TreeItem>,
    pub(crate) directories: Vec<PendingDirectory>,
    pub(crate) links: Vec<DeferredLink>,
    /// Directories that only unfinished members may have made.
    pub(crate) new_directories: HashSet<ArchivePath>,
}

/// Item about the tree. Its path has no links.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum TreeItem {
    /// An entry was complete.
    Complete(ArchivePath, StatSnapshot),
    /// The inode's link count was about to change, which changes its ctime.
    Touched(u64),
    /// The entry was about to be replaced, or is a directory, which is checked when it gets its attributes.
    Unchecked(ArchivePath),
}

/// Progress recorded in a checkpoint.
#[derive(Debug)]
pub(crate) struct CheckpointInfo {
    /// Number of members before the resume point.
    pub(crate) before: u64,
    /// Minimum number of members that are done.
    pub(crate) members: u64,
    /// Entries made by the finished members.
    pub(crate) entries: u64,
    pub(crate) errors: u64,
    /// For each requested path, whether it was found.
    pub(crate) found: Vec<u8>,
}

/// Items read so far, with the numbers of their members.
#[derive(Debug, Default)]
pub(super) struct JournalLoader {
    /// Each item belongs to the member of that number, or to any member.
    tree_items: Vec<(Option<u64>, TreeItem)>,
    directories: Vec<(u64, PendingDirectory)>,
    links: Vec<(u64, DeferredLink)>,
    /// Places where something was replaced, with the number of links before. Those had no place there any more.
    replaced: HashMap<ArchivePath, usize>,
    new_directories: Vec<(u64, ArchivePath)>,
    checkpoint: Option<(ResumePoint, CheckpointInfo)>,
}

impl JournalLoader {
    /// `None` for an invalid item, of which nothing is added.
    pub(super) fn add_item(&mut self, kind: ItemKind, body: &[u8]) -> Option<()> {
        let mut fields = FieldDecoder(body);
        match kind {
            ItemKind::RunKey => return None,
            ItemKind::Entry => {
                let number = fields.number()?;
                let snapshot = StatSnapshot {
                    inode: fields.number()?,
                    size: fields.number()?.cast_signed(),
                    mtime: (fields.number()?.cast_signed(), fields.number()?),
                    ctime: (fields.number()?.cast_signed(), fields.number()?),
                };
                let whole = TreeItem::Complete(fields.path()?, snapshot);
                fields.end()?;
                self.tree_items.push((Some(number), whole));
            }
            ItemKind::Directory => {
                let number = fields.number()?;
                let unchecked = TreeItem::Unchecked(fields.path()?);
                let pending = PendingDirectory::decode(&mut fields)?;
                fields.end()?;
                self.tree_items.push((Some(number), unchecked));
                self.directories.push((number, pending));
            }
            ItemKind::Link => {
                let number = fields.number()?;
                let (path, target) = (fields.path()?, fields.path()?);
                fields.end()?;
                self.links.push((number, DeferredLink { path, target }));
            }
            ItemKind::Checkpoint => {
                let checkpoint = parse_checkpoint(&mut fields)?;
                fields.end()?;
                self.checkpoint = Some(checkpoint);
            }
            // These items invalidate others, so they count after the last checkpoint, too.
            ItemKind::Touch => {
                let touched = TreeItem::Touched(fields.number()?);
                fields.end()?;
                self.tree_items.push((None, touched));
            }
            ItemKind::Replace => {
                let path = fields.path()?;
                fields.end()?;
                self.replaced.insert(path.clone(), self.links.len());
                self.tree_items.push((None, TreeItem::Unchecked(path)));
            }
            ItemKind::Make => {
                let made = (fields.number()?, fields.path()?);
                fields.end()?;
                self.new_directories.push(made);
            }
        }
        Some(())
    }

    pub(super) fn finish(mut self) -> Option<RecoveredState> {
        let mut count = 0;
        self.links.retain(|(_, link)| {
            count += 1;
            let replaced = self.replaced.get(&link.path);
            replaced.is_none_or(|&before| count > before)
        });
        let (resume_point, progress) = self.checkpoint?;
        let done = progress.members;
        let items = self.tree_items.into_iter();
        let items = items.filter(|(number, _)| number.is_none_or(|number| number < done));
        let made = self.new_directories.into_iter();
        let made = made.filter(|(number, _)| *number >= done);
        Some(RecoveredState {
            resume_point,
            progress,
            tree_items: items.map(|(_, item)| item).collect(),
            directories: items_before(self.directories, done),
            links: items_before(self.links, done),
            new_directories: made.map(|(_, path)| path).collect(),
        })
    }
}

fn items_before<T>(items: Vec<(u64, T)>, end: u64) -> Vec<T> {
    let before = items.into_iter().filter(|(number, _)| *number < end);
    before.map(|(_, item)| item).collect()
}

fn parse_checkpoint(fields: &mut FieldDecoder<'_>) -> Option<(ResumePoint, CheckpointInfo)> {
    let (before, members) = (fields.number()?, fields.number()?);
    let progress = CheckpointInfo {
        before,
        members: members.max(before),
        entries: fields.number()?,
        errors: fields.number()?,
        found: fields.bytes()?.to_vec(),
    };
    Some((ResumePoint::decode(fields.bytes()?)?, progress))
}
