//! State of a run over layers: their indexes, and where their files are.

use std::collections::HashMap;

use super::placement::{TreePlacement, find_unused_name, report_left_out};
use super::unplaced::{
    UNPLACED_DIRECTORY, directory_name, file_name, make_private_directory, make_unplaced_top,
};
use crate::base::archive_path::ArchivePath;
use crate::index::{
    Builder, EntryKind, Index, Ino, MemberError, MemoryLimit, MergeError, MergedIndex, Options,
    Origin, Placement,
};
use crate::layers::{WhiteoutFormat, merge};
use crate::materialize::error::{Error, StepError, WithAction};
use crate::materialize::tree_writer::TreeWriter;
use crate::materialize::write::{Destination, Directory, Job};
use crate::tar::Member;
use crate::tree::remove_tree;

#[derive(Debug)]
pub(in crate::materialize) struct LayerState {
    whiteouts: WhiteoutFormat,
    memory: MemoryLimit,
    builder: Option<Builder>,
    /// Of the layers below the current one.
    indexes: Vec<Index>,
    unplaced_top: Option<Directory>,
    /// Name and directory for the next files.
    current_directory: Option<(Vec<u8>, Directory)>,
}

impl LayerState {
    pub(in crate::materialize) fn new(whiteouts: WhiteoutFormat, memory: MemoryLimit) -> Self {
        Self {
            whiteouts,
            memory,
            builder: None,
            indexes: Vec::new(),
            unplaced_top: None,
            current_directory: None,
        }
    }

    /// Starts the next layer. All layers together have at most `max_entries` entries.
    pub(in crate::materialize) fn begin_layer(&mut self, max_entries: u32) {
        let used = self.indexes.iter().map(Index::member_count);
        let used = u32::try_from(used.fold(0, u64::saturating_add)).unwrap_or(u32::MAX);
        let builder = Builder::new(Options {
            max_entries: max_entries.saturating_sub(used),
            whiteouts: Some(self.whiteouts),
            ..Options::default()
        });
        self.builder = Some(builder.with_memory_limit(&self.memory));
    }

    /// Ends the current layer, if there is one. Returns the bytes of its files, holes included.
    pub(in crate::materialize) fn end_layer(&mut self) -> u64 {
        let builder = self.builder.take();
        let index = builder.map(|builder| builder.finish(Origin::default()));
        let file_bytes = index.as_ref().map_or(0, Index::file_bytes);
        self.indexes.extend(index);
        file_bytes
    }

    /// Adds a member of the current layer. Returns a regular file, for its payload to be written.
    pub(in crate::materialize) fn apply_member(
        &mut self,
        mut member: Member,
        tree: &mut TreeWriter,
    ) -> Option<Job> {
        let builder = self.builder.as_mut()?;
        let name = ArchivePath::sanitize(&member.name);
        // Owners in layers are numbers, because the names refer to the account files in the image.
        member.user.clear();
        member.group.clear();
        let placed = builder.add_member(&member);
        let problems = &tree.context.problems;
        if let Err(error) = builder.check_memory() {
            problems.stop(error.into());
            return None;
        }
        match placed {
            Ok(Placement::Entry(ino))
                if builder.index().entry(ino).map(|entry| entry.kind())
                    == Some(EntryKind::File) =>
            {
                problems.report_stripped_prefix(name.stripped);
                return self.unplaced_file(ino, member, name.path, tree);
            }
            Ok(_) => problems.report_stripped_prefix(name.stripped),
            Err(MemberError::TooManyEntries) => {
                let limit = tree.context.entry_quota.limit;
                problems.stop(Error::TooManyEntries(name.path, limit));
            }
            // The index lists it as a problem.
            Err(_) => {}
        }
        None
    }

    fn unplaced_file(
        &mut self,
        ino: Ino,
        mut member: Member,
        path: ArchivePath,
        tree: &mut TreeWriter,
    ) -> Option<Job> {
        let name = file_name(self.indexes.len(), ino);
        let directory = match self.unplaced_directory(ino, &mut tree.destination) {
            Ok(directory) => directory,
            Err(error) => {
                tree.context.failed_files.lock().insert(name);
                let (top, missing_bytes) = (&tree.destination.top, member.payload.len());
                tree.context
                    .record_failure(&path, top, error, missing_bytes);
                return None;
            }
        };
        let whiteouts = self.whiteouts;
        member
            .xattrs
            .retain(|(name, _)| !whiteouts.hides_xattr(name));
        Some(Job {
            name: Some(name),
            ..Job::new(directory, path, member)
        })
    }

    fn unplaced_directory(
        &mut self,
        ino: Ino,
        destination: &mut Destination,
    ) -> Result<Directory, StepError> {
        let name = directory_name(self.indexes.len(), ino);
        if let Some((_, directory)) = self
            .current_directory
            .as_ref()
            .filter(|(last, _)| *last == name)
        {
            return Ok(directory.clone());
        }
        let top = UNPLACED_DIRECTORY.as_bytes();
        let unplaced_top = make_unplaced_top(&mut self.unplaced_top, top, destination)?;
        let directory = make_private_directory(&unplaced_top, &name, destination)?;
        self.current_directory = Some((name, directory.clone()));
        Ok(directory)
    }

    /// Builds the merged tree and removes unplaced files that are not in it. The caller has waited for all
    /// files, and calls [`finish_root`] afterwards.
    pub(in crate::materialize) fn place_all(
        mut self,
        tree: &mut TreeWriter,
    ) -> Option<MergedIndex> {
        // The current layer, if it ended with an error.
        self.end_layer();
        let all: Vec<&Index> = self.indexes.iter().collect();
        let merged = merge(&all, self.whiteouts, &self.memory);
        let problems = &tree.context.problems;
        let merged = match merged {
            _ if problems.fatal().is_some() => None,
            Ok(merged) => Some(merged),
            Err(error) => {
                problems.stop(match error {
                    MergeError::TooMuchMemory(error) => error.into(),
                    MergeError::TooLarge => {
                        let limit = tree.context.entry_quota.limit;
                        Error::TooManyEntries(ArchivePath::root(), limit)
                    }
                });
                None
            }
        };
        drop(self.indexes);
        let mut name = UNPLACED_DIRECTORY.as_bytes().to_vec();
        if let Some(merged) = &merged {
            report_left_out(&merged.index, tree);
            name = find_unused_name(&merged.index, name, self.unplaced_top.is_some(), tree);
            let placement = TreePlacement {
                tree: &mut *tree,
                merged,
                unplaced_top: self.unplaced_top,
                name: name.clone(),
                open: HashMap::new(),
            };
            placement.place_entries();
        }
        let removed = remove_tree(&tree.destination.top, &name);
        if let Err(error) = removed.with_action("remove the directory of unplaced files") {
            let mut path = ArchivePath::root();
            path.push(&name);
            tree.context.problems.add(&path, error);
        }
        merged
    }
}
