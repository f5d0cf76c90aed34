//! Hard links, and those that precede their targets.

use std::mem;

use super::build_tree::{MemberError, NameError, ROOT, TargetResolver, check_kind};
use super::{Builder, Placement, check_path_len};
use crate::base::archive_path::ArchivePath;
use crate::base::resolve;
use crate::base::resolve::{PathError, ResolveError};
use crate::index::arrays::push_row;
use crate::index::problem::Problem;
use crate::index::storage::row_types::{Dirent, FORWARD_LINK, InodeRow, LinkRow, UnresolvedRow};
use crate::index::tree::Ino;
use crate::tar::MemberKind;

/// Forward links that one step of [`Builder::resolve_forward_links`] looks up.
const FORWARD_LINKS_PER_STEP: usize = 1024;

enum LinkTarget {
    Entry(u32),
    /// No entry yet, or a link whose own target is missing.
    Missing,
    /// Not known yet, because the path leads through a link without a target.
    ThroughForwardLink,
}

impl Builder {
    /// Whether a member of `kind` replaces the link whose dirent is `number`.
    pub(super) fn is_replaced_by(
        &self,
        number: u32,
        kind: &MemberKind,
    ) -> Result<bool, MemberError> {
        check_kind(kind)?;
        let MemberKind::HardLink(target) = kind else {
            return Ok(true);
        };
        let target = ArchivePath::sanitize(target).path;
        check_path_len(&target)?;
        Ok(match self.find_link_target(&target)? {
            LinkTarget::Entry(ino) => {
                ino != self.tree.dirent(number).ino.get() && !self.tree.inode(ino).is_directory()
            }
            LinkTarget::Missing | LinkTarget::ThroughForwardLink => false,
        })
    }

    /// Adds a name for `target`, if it exists, even over another entry, as in GNU tar.
    pub(super) fn insert_link(
        &mut self,
        (parent, name): (u32, &[u8]),
        target: &ArchivePath,
        header: u64,
    ) -> Result<Placement, MemberError> {
        check_path_len(target)?;
        let existing = self.tree.find(parent, name);
        let LinkTarget::Entry(ino) = self.find_link_target(target)? else {
            return match existing {
                Some(_) => Err(MemberError::MissingTarget),
                None => self.insert_forward_link((parent, name), target, None, header),
            };
        };
        self.link_name((parent, name), existing, ino, header)?;
        Ok(Placement::Link(Ino(ino)))
    }

    fn link_name(
        &mut self,
        (parent, name): (u32, &[u8]),
        existing: Option<u32>,
        ino: u32,
        header: u64,
    ) -> Result<(), MemberError> {
        let number = match existing {
            // Also for a directory's own name.
            Some(number) if self.tree.dirent(number).ino.get() == ino => return Ok(()),
            _ if self.tree.inode(ino).is_directory() => return Err(MemberError::LinkToDirectory),
            Some(number) => {
                self.tree.relink(number, ino)?;
                number
            }
            None => self.tree.link(parent, name, ino)?,
        };
        self.add_link_row(number, header);
        Ok(())
    }

    /// Records where the header of the hard link that is dirent `number` begins.
    fn add_link_row(&mut self, number: u32, header: u64) {
        let row = LinkRow {
            name_offset: self.tree.dirent(number).name.offset().into(),
            header: header.into(),
        };
        push_row(self.tree.index.arrays.links.vec_mut(), row);
    }

    /// Adds a name for the entry at `target` in the layer so far, or else in the lower layers.
    pub(super) fn insert_layer_link(
        &mut self,
        (parent, name): (u32, &[u8]),
        target: &ArchivePath,
        header: u64,
    ) -> Result<Placement, MemberError> {
        check_path_len(target)?;
        let Some((directory, target_name)) = target.split_last() else {
            return Err(MemberError::LinkToDirectory);
        };
        let way =
            resolve::directory_with_path(&mut TargetResolver(&self.tree), directory.components());
        let (directory, mut target) = match way {
            Ok(found) => found,
            Err(ResolveError::Path(refusal)) => return Err(refusal.into()),
            Err(ResolveError::Tree(_)) => return Err(MemberError::MissingTarget),
        };
        target.push(target_name);
        let existing = self.tree.find(parent, name);
        let found = directory.and_then(|directory| self.tree.find(directory, target_name));
        let found = found.map(|number| self.tree.dirent(number).ino.get());
        let Some(ino) = found.filter(|&ino| !self.tree.inode(ino).is_whiteout_only()) else {
            return self.insert_forward_link((parent, name), &target, existing, header);
        };
        self.link_name((parent, name), existing, ino, header)?;
        if self.tree.is_forward_link(ino) {
            return Ok(Placement::Forward);
        }
        Ok(Placement::Link(Ino(ino)))
    }

    /// Gives a link whose target may still appear the name `name`, whose present dirent is `existing`.
    fn insert_forward_link(
        &mut self,
        (parent, name): (u32, &[u8]),
        target: &ArchivePath,
        existing: Option<u32>,
        header: u64,
    ) -> Result<Placement, MemberError> {
        let target = target.as_bytes();
        let inode = InodeRow {
            mode: FORWARD_LINK.into(),
            data: (self.tree.index.arrays.arena.push(target) as u64).into(),
            // A path has at most 65,535 bytes.
            children: u32::try_from(target.len()).unwrap_or_default().into(),
            size: header.into(),
            ..InodeRow::default()
        };
        let ino = match existing {
            Some(number) => self.tree.replace(number, inode)?,
            None => self.tree.add(parent, name, inode)?,
        };
        push_row(&mut self.forward.links, ino);
        Ok(Placement::Forward)
    }

    fn find_link_target(&self, path: &ArchivePath) -> Result<LinkTarget, MemberError> {
        let Some((directory, name)) = path.split_last() else {
            return Ok(LinkTarget::Entry(ROOT));
        };
        let parent =
            match resolve::directory(&mut TargetResolver(&self.tree), directory.components()) {
                Ok(parent) => parent,
                Err(ResolveError::Tree(NameError::Missing)) => return Ok(LinkTarget::Missing),
                Err(ResolveError::Tree(NameError::Forward)) => {
                    return Ok(LinkTarget::ThroughForwardLink);
                }
                Err(ResolveError::Path(refusal)) => return Err(refusal.into()),
            };
        let number = parent.and_then(|parent| self.tree.find(parent, name));
        let ino = number.map(|number| self.tree.dirent(number).ino.get());
        let ino = ino.filter(|&ino| !self.tree.is_forward_link(ino));
        Ok(ino.map_or(LinkTarget::Missing, LinkTarget::Entry))
    }

    /// Resolves the next forward links after the last member, the last one first, as on disk. Retries links that
    /// wait for other links. Links without a target become problems. Returns whether there are more.
    pub fn resolve_forward_links(&mut self) -> bool {
        if self.tree.is_layer() {
            self.finish_layer();
            return false;
        }
        for _ in 0..FORWARD_LINKS_PER_STEP {
            let Some(ino) = self.forward.links.pop() else {
                if !self.forward.begin_pass() {
                    return false;
                }
                continue;
            };
            if self.forward.is_last_pass {
                self.drop_link_without_target(ino);
            } else if !self.resolve_forward_link(ino) {
                self.forward.waiting.push(ino);
            }
        }
        true
    }

    fn drop_link_without_target(&mut self, ino: u32) {
        let error = match self.find_link_target(&self.target_path(ino)) {
            Ok(LinkTarget::ThroughForwardLink) => {
                MemberError::Unreachable(PathError::NotADirectory)
            }
            _ => MemberError::MissingTarget,
        };
        self.drop_link(ino, error);
    }

    /// Whether the link no longer waits for its target.
    fn resolve_forward_link(&mut self, forward: u32) -> bool {
        if !self.tree.is_forward_link(forward) {
            // A later member replaced it.
            return true;
        }
        let InodeRow { dirent, size, .. } = *self.tree.inode(forward);
        let number = dirent.get();
        let resolved = match self.find_link_target(&self.target_path(forward)) {
            Ok(LinkTarget::Missing | LinkTarget::ThroughForwardLink) => return false,
            Ok(LinkTarget::Entry(ino)) if self.tree.inode(ino).is_directory() => {
                Err(MemberError::LinkToDirectory)
            }
            Ok(LinkTarget::Entry(ino)) => {
                let relinked = self.tree.relink(number, ino);
                relinked.inspect(|()| self.add_link_row(number, size.get()))
            }
            Err(error) => Err(error),
        };
        if let Err(error) = resolved {
            self.drop_link(forward, error);
        }
        true
    }

    fn target_path(&self, forward: u32) -> ArchivePath {
        let inode = self.tree.inode(forward);
        let target = self.tree.index.arrays.target(inode);
        ArchivePath::sanitize(target.unwrap_or_default()).path
    }

    fn drop_link(&mut self, forward: u32, error: MemberError) {
        let number = self.tree.inode(forward).dirent.get();
        let dirent = self.tree.dirent(number);
        let directory = self.tree.inode(dirent.parent.get()).dirent.get();
        let arrays = &self.tree.index.arrays;
        let mut path = arrays.path(directory).unwrap_or_default();
        path.push(arrays.arena.name(dirent.name).unwrap_or_default());
        self.add_problem(Problem {
            path: Some(path),
            offset: None,
            what: error.to_string(),
        });
        self.tree.unlink(number);
    }

    /// Turns forward links into links to the layers below.
    fn finish_layer(&mut self) {
        self.tree.prune_replaced_directories();
        if mem::take(&mut self.forward).links.is_empty() {
            return;
        }
        for number in 0..self.tree.dirent_count() {
            let Dirent { name, ino, parent } = *self.tree.dirent(number);
            if ino.get() == 0 || !self.tree.is_forward_link(ino.get()) {
                continue;
            }
            let inode = *self.tree.inode(ino.get());
            let row = UnresolvedRow {
                name,
                target_offset: inode.data,
                target_len: inode.children,
                parent,
            };
            push_row(self.tree.index.arrays.unresolved.vec_mut(), row);
            if inode.dirent.get() == number {
                // Further names have rows of their own.
                self.add_link_row(number, inode.size.get());
            }
            self.tree.unlink(number);
        }
        let links = self.tree.index.arrays.links.vec_mut();
        // A replaced link of the same name has an earlier header.
        links.sort_unstable_by_key(|link| (link.name_offset.get(), link.header.get()));
    }
}
