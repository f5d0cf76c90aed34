//! The plan of an update, from a comparison of its source with the destination.
//!
//! A file is written again if its size or time differs, or with `--checksum` its size or content. The time is the last
//! attribute that a writer sets. So a file that a killed run left incomplete is written again. So is a set-id file that
//! another owner has.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;

use super::extra::Deletion;
use crate::archive::Volume;
use crate::base::archive_path::ArchivePath;
use crate::base::sync::Mutex;
use crate::base::xattr::posix_acl;
use crate::materialize::error::{Cause, StepError};
use crate::materialize::options::Options;
use crate::materialize::write::{AttributePolicy, Directory, is_temporary};
use crate::tar::Timestamp;
use crate::tree::{Difference, Differences, FileId, FileKind, Item, Metadata, Property, Tree};

type Report = Box<dyn Fn(&[u8], io::Error) + Send + Sync>;

/// Collects the differences of a source from the destination.
#[expect(
    missing_debug_implementations,
    reason = "functions have no form for it"
)]
pub struct SyncPlanner {
    policy: AttributePolicy,
    /// Mode, owner and group of a directory that a run makes because paths of an archive imply it; `None` if they depend on an ACL.
    made_directory: Option<(u32, u32, u32)>,
    /// Whether the source is merged from layers, whose implied directories have attributes of their own.
    is_merged: bool,
    with_contents: bool,
    report: Report,
    plan: Mutex<SyncPlan>,
}

/// A file with several names, in the source or in the destination.
#[derive(Debug)]
struct NamedFile {
    path: ArchivePath,
    first: FileId,
    /// Whether the source has other names of it.
    is_shared: bool,
    /// The file in the destination, if its content is right.
    second: Option<FileId>,
    change: Option<AttributeChange>,
}

/// New attributes of an entry whose content is right.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct AttributeChange {
    pub(super) owner: Option<(u32, u32)>,
    pub(super) mode: Option<u32>,
    pub(super) mtime: Timestamp,
    /// Whether its extended attributes are removed, because only other paths imply it.
    pub(super) removes_xattrs: bool,
    pub(super) is_directory: bool,
}

/// Reason why an update deletes nothing, although it should.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeletionRefusal {
    /// Something could not be compared, or a member is damaged.
    #[error("nothing is deleted, because not everything can be compared")]
    Incomplete,
    /// The archive at this location may be cut between two members.
    #[error(
        "{0}: nothing is deleted, because the archive has no end marker, so members may be lost (check that it is \
         complete, and append 1024 zero bytes, or confirm its digest by --expect-sha256)"
    )]
    NoEndMarker(String),
}

/// Changes that bring a destination to the state of a source.
#[derive(Default, Debug)]
pub struct SyncPlan {
    /// Entries to write with their number in the source.
    pub(super) written: BTreeMap<ArchivePath, u64>,
    /// Entries of which only attributes differ.
    pub(super) changed: BTreeMap<ArchivePath, AttributeChange>,
    /// Names to link to the file at another path, whose content is right.
    pub(super) links: BTreeMap<ArchivePath, ArchivePath>,
    /// Entries that the source lacks, and that are removed with all below them.
    pub(super) extra: Vec<ArchivePath>,
    /// Temporary files that a killed update has left.
    pub(super) leftovers: Vec<ArchivePath>,
    /// Files that are added when all are known.
    named: Vec<NamedFile>,
    /// Sockets of the source, which no run makes.
    pub sockets: BTreeSet<ArchivePath>,
    /// Entries in whose place directories with entries stay, and the reasons that a run gives.
    pub blocked: BTreeMap<ArchivePath, Cause>,
    /// Whether entries that the source lacks are removed.
    pub(super) deletes: bool,
    /// Why they are not, although the caller asked for it.
    pub deletion_refusal: Option<DeletionRefusal>,
    /// Whether something could not be compared, or a member of the source is damaged.
    pub is_incomplete: bool,
    /// Whether something is mounted on an entry of the source, which is left alone.
    pub has_mounts: bool,
}

impl SyncPlan {
    /// The paths that are not blocked, in their order, and whether a run will `write`, `change`, `link` or `delete` each.
    pub fn steps(&self) -> BTreeMap<&ArchivePath, &'static str> {
        let written = self.written.keys().map(|path| (path, "write"));
        let changed = self.changed.keys().map(|path| (path, "change"));
        let links = self.links.keys().map(|path| (path, "link"));
        let extra = self.extra.iter().chain(&self.leftovers);
        let extra = extra.map(|path| (path, "delete"));
        let steps = written.chain(changed).chain(links).chain(extra);
        steps
            .filter(|(path, _)| !self.blocked.contains_key(*path))
            .collect()
    }

    fn refusal(&self, source: Option<&dyn Volume>) -> Option<DeletionRefusal> {
        if self.is_incomplete {
            return Some(DeletionRefusal::Incomplete);
        }
        let archives = source.map(Volume::archives).unwrap_or_default();
        let cut = archives.into_iter().find(|archive| !archive.is_whole())?;
        Some(DeletionRefusal::NoEndMarker(
            cut.source().location().to_string(),
        ))
    }

    /// Adds a file of the source with that in its place, whether the latter has the right content, and what else
    /// differs.
    fn add(
        &mut self,
        path: ArchivePath,
        first: &Metadata,
        second: Option<(&Metadata, bool)>,
        change: Option<AttributeChange>,
    ) {
        let right = second.filter(|(_, is_right)| *is_right);
        if first.is_shared() || second.is_some_and(|(second, _)| second.is_shared()) {
            self.named.push(NamedFile {
                path,
                first: first.id(),
                is_shared: first.links > 1,
                second: right.map(|(second, _)| second.id()),
                change,
            });
        } else if right.is_none() {
            self.written.insert(path, first.inode);
        } else if let Some(change) = change {
            self.changed.insert(path, change);
        }
    }

    /// Adds files with several names. A file is right under the names of one file only, and of one source only.
    fn add_named(&mut self) {
        let mut named = std::mem::take(&mut self.named);
        named.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        let mut sources = HashMap::new();
        for file in &mut named {
            file.second = file
                .second
                .filter(|second| *sources.entry(*second).or_insert(file.first) == file.first);
        }
        let mut right = HashMap::new();
        for file in named.iter().filter(|file| file.is_shared) {
            if let Some(second) = file.second {
                right
                    .entry(file.first)
                    .or_insert_with(|| (second, file.path.clone()));
            }
        }
        for file in named {
            match (file.second, right.get(&file.first)) {
                (second, Some((found, first))) if second != Some(*found) => {
                    self.links.insert(file.path, first.clone());
                }
                (None, _) => drop(self.written.insert(file.path, file.first.1)),
                // Perhaps another name of the right file.
                (Some(_), _) => self.changed.extend(Some(file.path).zip(file.change)),
            }
        }
    }
}

impl SyncPlanner {
    /// Plans a run with `options` over the archive or image `source`, if it is no directory. Errors go to `report` with the path that they are about. `with_contents` says that
    /// contents of files are compared, so that times mean nothing.
    pub fn new(
        options: &Options,
        source: Option<&dyn Volume>,
        destination: &Path,
        with_contents: bool,
        report: impl Fn(&[u8], io::Error) + Send + Sync + 'static,
    ) -> Self {
        let mut policy = AttributePolicy::new(options);
        policy.xattrs.acls &= has_acls(destination);
        Self {
            made_directory: made_directory(destination, &policy),
            is_merged: source.is_some_and(Volume::is_merged),
            policy,
            with_contents,
            report: Box::new(report),
            plan: Mutex::default(),
        }
    }

    /// The plan, after the comparison of `source` with the directory `top` of `tree`. Without a `source` it was a
    /// directory. With `delete` it removes no mount point and nothing below it, and reports each.
    pub fn finish<T: Tree + Send + 'static>(
        &self,
        source: Option<&dyn Volume>,
        tree: &Arc<T>,
        top: &T::Directory,
        delete: bool,
    ) -> SyncPlan {
        let mut plan = std::mem::take(&mut *self.plan.lock());
        plan.add_named();
        plan.is_incomplete |= source.is_some_and(|volume| volume.index().problem_count() > 0);
        let refusal = plan.refusal(source).filter(|_| delete);
        plan.deletes = delete && refusal.is_none();
        // An archive whose writer adds no end marker may be updated as long as nothing is to be deleted.
        plan.deletion_refusal = refusal
            .filter(|_| plan.is_incomplete || !plan.extra.is_empty() || !plan.blocked.is_empty());
        if plan.deletes {
            plan.blocked.clear();
            let deletion = Deletion::plan(tree, top, std::mem::take(&mut plan.extra));
            for path in deletion.mounts {
                (self.report)(path.as_bytes(), io::ErrorKind::CrossesDevices.into());
            }
            plan.extra = deletion.removed;
        } else {
            plan.extra.clear();
        }
        plan
    }

    fn has_right_content(&self, first: &Metadata, properties: &[Property]) -> bool {
        let has = |property| properties.contains(&property);
        let has_owner = !has(Property::Uid) && !has(Property::Gid);
        match first.kind {
            // Its owner could still change the bytes that would get the rights of another one.
            FileKind::File if !has_owner && first.mode & 0o6000 != 0 => false,
            FileKind::File if self.with_contents => !has(Property::Size) && !has(Property::Content),
            FileKind::File => !has(Property::Size) && !has(Property::Mtime),
            _ => !has(Property::Target) && !has(Property::Device),
        }
    }

    fn receive_both(
        &self,
        path: ArchivePath,
        properties: &[Property],
        (first, second): (&Metadata, &Metadata),
    ) {
        let mut plan = self.plan.lock();
        if properties.contains(&Property::Type) {
            return plan.add(path, first, None, None);
        }
        let is_right = self.has_right_content(first, properties);
        let change = change(first, properties);
        plan.add(path, first, Some((second, is_right)), change);
    }
}

impl<A: Tree, B: Tree> Differences<A, B> for SyncPlanner {
    /// The attributes that the entry of the source gets in the destination.
    fn prepare(
        &self,
        (item, replaced): (&Item<'_, A>, &Item<'_, B>),
        first: &mut Metadata,
        second: &mut Metadata,
        is_implied: bool,
    ) -> io::Result<bool> {
        if is_implied {
            first.mtime = second.mtime;
            if !self.is_merged {
                let made = self.made_directory;
                (first.mode, first.uid, first.gid) = made.unwrap_or_default();
                return Ok(made.is_some());
            }
        }
        let ids = (first.uid, first.gid);
        let needs_names = !self.policy.numeric_owner;
        let user = if needs_names { item.user()? } else { None };
        let group = if needs_names { item.group()? } else { None };
        let names = (
            user.as_deref().unwrap_or_default(),
            group.as_deref().unwrap_or_default(),
        );
        let owner = self.policy.final_owner(ids, names);
        let (uid, gid) = owner.unwrap_or((second.uid, second.gid));
        // chown(2) reads the highest value as "do not change".
        let known = |wanted, current| if wanted == u32::MAX { current } else { wanted };
        first.uid = known(uid, second.uid);
        first.gid = known(gid, second.gid);
        let is_directory = first.kind == FileKind::Directory;
        first.mode = self
            .policy
            .final_mode(first.mode, is_directory, ids, second.uid);
        if !self.policy.same_permissions && is_directory {
            // New directories inherit it.
            first.mode |= second.mode & 0o2000;
        }
        if self.policy.xattrs.acls
            && let Some(acl) = item.access_acl()?
        {
            let replaced = replaced.access_acl()?;
            first.mode =
                if replaced.is_some_and(|other| posix_acl::differ_only_in_mode(&acl, &other)) {
                    posix_acl::mode_with_acl(first.mode, Some(acl))
                } else {
                    posix_acl::mode_without_acl(first.mode, &acl)
                };
        }
        Ok(true)
    }

    fn has_other_xattrs(&self, item: &Item<'_, B>) -> io::Result<bool> {
        let xattrs = item.xattrs()?;
        Ok(xattrs
            .iter()
            .any(|(name, _)| self.policy.replaces_xattr(name)))
    }

    fn receive(&self, difference: Difference<'_, A, B>) -> io::Result<ControlFlow<()>> {
        let path = |item: &[u8]| ArchivePath::sanitize(item).path;
        match difference {
            Difference::OnlyFirst(item) if item.kind() == FileKind::Socket => {
                self.plan.lock().sockets.insert(path(item.path()));
            }
            Difference::Both(_, first, second) if first.kind() == FileKind::Socket => {
                self.plan.lock().sockets.insert(path(first.path()));
                if second.kind() == FileKind::Socket {
                    return Ok(ControlFlow::Continue(()));
                }
                return self.receive(Difference::<A, B>::OnlySecond(second));
            }
            Difference::OnlyFirst(item) => {
                let metadata = item.metadata()?;
                let mut plan = self.plan.lock();
                plan.add(path(item.path()), &metadata, None, None);
            }
            Difference::OnlySecond(item) => {
                let mut plan = self.plan.lock();
                let is_leftover = item.kind() != FileKind::Directory && is_temporary(item.name());
                let list = if is_leftover {
                    &mut plan.leftovers
                } else {
                    &mut plan.extra
                };
                list.push(path(item.path()));
            }
            Difference::Both(properties, first, second) => {
                let metadata = (&first.metadata()?, &second.metadata()?);
                let path = path(first.path());
                if first.kind() != FileKind::Directory
                    && second.kind() == FileKind::Directory
                    && !second.is_empty_directory().unwrap_or(false)
                {
                    let (action, errno) = (create_action(first.kind()), Errno::EXIST);
                    let cause = StepError { action, errno }.into();
                    self.plan.lock().blocked.insert(path.clone(), cause);
                }
                self.receive_both(path, properties, metadata);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn wants_all(&self) -> bool {
        true
    }

    fn report(&self, path: &[u8], error: io::Error) {
        let mut plan = self.plan.lock();
        // The comparison never looks below a mount, so nothing there is planned.
        if error.kind() == io::ErrorKind::CrossesDevices {
            plan.has_mounts = true;
        } else {
            plan.is_incomplete = true;
        }
        drop(plan);
        (self.report)(path, error);
    }
}

/// Action in the error of a run that cannot make an entry of this type.
fn create_action(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Symlink => "create the symbolic link",
        FileKind::CharDevice | FileKind::BlockDevice => "create the device",
        FileKind::Fifo => "create the FIFO",
        FileKind::File | FileKind::Directory | FileKind::Socket => "create the file",
    }
}

/// Whether the file system of the directory has ACLs.
fn has_acls(directory: &Path) -> bool {
    let name = posix_acl::Kind::Access.attribute();
    let found = rustix::fs::getxattr(directory, name, &mut [0_u8; 0][..]);
    found != Err(Errno::OPNOTSUPP)
}

/// Mode, owner and group of a new directory below `destination`; `None` if they depend on an ACL.
fn made_directory(destination: &Path, policy: &AttributePolicy) -> Option<(u32, u32, u32)> {
    let top = Directory::open_top(destination).ok()?;
    let stat = rustix::fs::fstat(&top).ok()?;
    let mode = 0o777 & !policy.umask;
    if top.inherits_acl() {
        return None;
    }
    Some(if stat.st_mode & 0o2000 != 0 {
        (mode | 0o2000, policy.user, stat.st_gid)
    } else {
        (mode, policy.user, policy.group)
    })
}

/// The attributes to change, if any.
fn change(first: &Metadata, properties: &[Property]) -> Option<AttributeChange> {
    let has = |property| properties.contains(&property);
    let owner = has(Property::Uid) || has(Property::Gid);
    let removes_xattrs = has(Property::Xattrs);
    // An ACL is a part of the mode.
    let has_mode = first.kind != FileKind::Symlink;
    let mode = has(Property::Mode) || (owner || removes_xattrs) && has_mode;
    (owner || mode || has(Property::Mtime)).then(|| AttributeChange {
        owner: owner.then_some((first.uid, first.gid)),
        mode: mode.then_some(first.mode),
        mtime: first.mtime,
        removes_xattrs,
        is_directory: first.kind == FileKind::Directory,
    })
}
