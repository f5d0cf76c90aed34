//! Selection of members, and their output paths.

mod paths;

#[cfg(test)]
mod tests;

use super::error::{Cause, Problems};
use crate::base::archive_path::ArchivePath;
use crate::base::glob::Glob;
use crate::tar::{Member, MemberKind};

use self::paths::MAX_LINK_BYTES;
pub use self::paths::{PathLinks, SelectedPath};

/// The members to take from an archive; by default all.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Selection {
    /// Number of leading components to drop. Members with no more components are skipped. Targets of hard
    /// links lose them too, targets of symbolic links do not.
    pub strip_components: usize,
    /// Members that match one of these are skipped. This overrides the other fields.
    pub exclude: Vec<Glob>,
    /// If not empty, only members that match one of these are selected.
    pub include: Vec<Glob>,
    /// If not empty, only these members and their descendants are selected.
    pub paths: Vec<SelectedPath>,
    /// The links that [`Self::paths`] go through.
    pub links: PathLinks,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct OutputPath {
    pub(super) path: ArchivePath,
    /// Prefix removed from the name to keep it inside the destination.
    pub(super) stripped: Vec<u8>,
}

impl Selection {
    /// Whether the member at `path` is selected. Notes the [`Self::paths`] found.
    pub fn selects(&mut self, path: &ArchivePath) -> bool {
        let is_listed = self.paths.is_empty() || self.lists(path);
        let matched = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(path.as_bytes()));
        is_listed && !matched(&self.exclude) && (self.include.is_empty() || matched(&self.include))
    }

    /// Whether one of the requested paths leads to `path` or above it.
    fn lists(&mut self, path: &ArchivePath) -> bool {
        self.add_paths();
        let links = &mut self.links;
        let follows = links.is_followed && !links.targets.is_empty();
        let place = follows.then(|| links.resolve(path, &mut Vec::new()));
        let place = place.and_then(Result::ok).filter(|place| place != path);
        let mut is_listed = false;
        for start in [Some(path.clone()), place].into_iter().flatten() {
            let above = |path: &ArchivePath| path.split_last().map(|(above, _)| above);
            for place in std::iter::successors(Some(start), above) {
                is_listed |= links.selected.has(&place);
                for number in links.missing.take(&place) {
                    if let Some(selected) = self.paths.get_mut(number) {
                        selected.found = true;
                    }
                }
            }
        }
        is_listed
    }

    /// Adds the requested paths to the table by which they are found.
    fn add_paths(&mut self) {
        if !self.links.selected.0.is_empty() {
            return;
        }
        for (number, selected) in self.paths.iter().enumerate() {
            let entry = (selected.path.clone(), number);
            self.links.missing.0.insert(entry.clone());
            self.links.selected.0.insert(entry);
            self.links.add(number, selected);
        }
    }

    /// Whether every member is selected under its own name.
    pub(super) fn is_whole(&self) -> bool {
        let lists = [self.exclude.len(), self.include.len(), self.paths.len()];
        self.strip_components == 0 && lists == [0; 3]
    }

    /// Path of a member, or of a hard link's target, after stripping. `None` if no component remains.
    pub fn strip_path(&self, path: ArchivePath) -> Option<ArchivePath> {
        if self.strip_components == 0 {
            return Some(path);
        }
        path.strip_components(self.strip_components)
    }

    /// Output path of a selected member; `None` if it is not selected or no component remains. A
    /// name with `..` is added to `problems`.
    pub(super) fn select_member(
        &mut self,
        member: &Member,
        problems: &Problems,
    ) -> Option<OutputPath> {
        let name = ArchivePath::sanitize(&member.name);
        if !name.has_parent_component {
            self.note_member(&name.path, &member.kind);
        }
        if !self.selects(&name.path) {
            return None;
        }
        if name.has_parent_component {
            let cause = Cause::ParentComponent(member.name.clone());
            problems.add(&name.path, cause);
            return None;
        }
        Some(OutputPath {
            path: self.strip_path(name.path)?,
            stripped: name.stripped,
        })
    }

    fn note_member(&mut self, path: &ArchivePath, kind: &MemberKind) {
        let may_matter = matches!(kind, MemberKind::Symlink(_)) || !self.links.targets.is_empty();
        if self.paths.is_empty() || self.links.is_full || !may_matter {
            return;
        }
        while let Some((place, is_own_link)) = self.links.place_of(path) {
            if !(is_own_link && self.links.is_replaced_by(&place, kind)) {
                return self.note_place(&place, kind);
            }
            self.note_place(&place, &MemberKind::Directory);
        }
    }

    /// Notes a member at `place`, and resolves the requested paths again that go through it.
    fn note_place(&mut self, place: &ArchivePath, kind: &MemberKind) {
        if !self.links.note(place, kind) {
            return;
        }
        self.add_paths();
        for number in self.links.take_passing(place) {
            if let Some(selected) = self.paths.get_mut(number)
                && self.links.bytes <= MAX_LINK_BYTES
            {
                self.links.update(number, selected);
            }
        }
        if self.links.bytes > MAX_LINK_BYTES {
            // Without all links, a path could lead to another file.
            self.links = PathLinks {
                is_full: true,
                ..PathLinks::default()
            };
            for selected in &mut self.paths {
                selected.resolved = None;
            }
        }
    }

    pub(super) fn found_flags(&self) -> Vec<u8> {
        let found = self.paths.iter().map(|selected| selected.found.into());
        found.collect()
    }

    /// Marks the paths that an earlier run found.
    pub(super) fn merge_found_flags(&mut self, found: &[u8]) {
        for (selected, found) in self.paths.iter_mut().zip(found) {
            selected.found |= *found != 0;
        }
    }

    pub(super) fn report_unmatched_paths(&self, problems: &Problems) {
        for selected in self.paths.iter().filter(|selected| !selected.found) {
            let cause = match selected.resolved.clone() {
                Some(Err(error)) => Cause::Rejected(error),
                Some(Ok(place)) => Cause::ThroughLink(place),
                None => Cause::NotFound,
            };
            problems.add(&selected.path, cause);
        }
    }
}
