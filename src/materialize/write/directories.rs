//! Deferred directory attributes: owner, mode, attributes and times are set at the end.
//!
//! A read-only directory could not be filled, and filling a directory changes its time.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::os::fd::AsFd;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use super::attribute_policy::{AttributePolicy, changes_owner};
use super::attributes::{Attributes, CHANGE_TIMES};
use super::context::Context;
use super::destination::{Destination, IfMissing};
use super::directory::{Directory, Identity, lstat_at, name_of, parent_of};
use super::encoding::{FieldDecoder, FieldEncoder};
use super::job::member_of;
use crate::base::AttributeTarget;
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::ResolveError;
use crate::index::Entry;
use crate::materialize::error::{StepError, WithAction};
use crate::tar::{Member, Timestamp};

const STAT_DIRECTORY: &str = "look at the directory";

/// A directory that still needs its attributes.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct PendingDirectory {
    pub(crate) path: ArchivePath,
    /// Another directory in its place is left alone.
    identity: Identity,
    /// We made it, so inherited attributes are removed.
    is_new: bool,
    mode: u32,
    owner: Option<(u32, u32)>,
    mtime: Timestamp,
    /// Time of last access, if it is kept. Not in the journal, because only copies keep it.
    atime: Option<Timestamp>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Removes the extended attributes of an earlier tree. Not in the journal, because only updates do that.
    removes_xattrs: bool,
}

enum RestoreError {
    /// It is missing, or was replaced.
    Replaced,
    Step(StepError),
}

/// For a step that looks for the directory.
impl From<StepError> for RestoreError {
    fn from(error: StepError) -> Self {
        match error.errno {
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Self::Replaced,
            _ => Self::Step(error),
        }
    }
}

pub(crate) fn mtime_of(stat: &Stat) -> Timestamp {
    Timestamp {
        seconds: stat.st_mtime,
        nanoseconds: u32::try_from(stat.st_mtime_nsec).unwrap_or_default(),
    }
}

/// Sets all attributes, deepest directories first. `pending` is in archive order, so the last member wins.
pub(crate) fn apply_all(mut pending: Vec<PendingDirectory>, destination: &mut Destination) {
    let new = pending.iter().filter(|pending| pending.is_new);
    let new: HashSet<_> = new.map(|pending| pending.identity).collect();
    let mut seen = HashSet::new();
    pending.reverse();
    pending.retain(|pending| seen.insert(pending.identity));
    // In reverse byte order, entries below a directory precede it.
    pending.sort_unstable_by(|one, other| Reverse(&one.path).cmp(&Reverse(&other.path)));
    for mut pending in pending {
        pending.is_new = new.contains(&pending.identity);
        pending.apply_closed(destination);
    }
}

impl PendingDirectory {
    pub(crate) fn new(
        path: ArchivePath,
        identity: Identity,
        is_new: bool,
        member: Member,
        policy: &AttributePolicy,
    ) -> Self {
        Self {
            path,
            identity,
            is_new,
            mode: policy.mode(&member),
            owner: policy.owner(&member),
            mtime: member.mtime,
            atime: None,
            xattrs: member.xattrs,
            removes_xattrs: false,
        }
    }

    /// A new directory that gets the attributes of `entry`, but keeps its time if only other paths imply it.
    pub(crate) fn of_entry(
        path: ArchivePath,
        entry: Entry<'_>,
        directory: &Directory,
        policy: &AttributePolicy,
    ) -> Self {
        let mut member = member_of(entry);
        if entry.is_implied()
            && let Ok(stat) = rustix::fs::fstat(directory)
        {
            member.mtime = mtime_of(&stat);
        }
        Self::new(path, directory.identity(), true, member, policy)
    }

    /// Keeps its time of last access.
    pub(crate) fn with_atime(self, atime: Option<Timestamp>) -> Self {
        Self { atime, ..self }
    }

    /// A directory that was there before the run. It gets its attributes of then, except those that are given.
    pub(crate) fn existing(
        path: ArchivePath,
        stat: &Stat,
        (owner, mode): (Option<(u32, u32)>, Option<u32>),
        mtime: Option<Timestamp>,
    ) -> Self {
        Self {
            path,
            identity: Identity::of(stat),
            is_new: false,
            mode: mode.unwrap_or(stat.st_mode & 0o7777),
            owner,
            mtime: mtime.unwrap_or_else(|| mtime_of(stat)),
            atime: None,
            xattrs: Vec::new(),
            removes_xattrs: false,
        }
    }

    /// Removes the extended attributes of an earlier tree, too.
    pub(crate) fn without_xattrs(self, removes_xattrs: bool) -> Self {
        Self {
            removes_xattrs,
            ..self
        }
    }

    pub(crate) fn encode(&self, fields: &mut FieldEncoder) {
        fields.bytes(self.path.as_bytes());
        fields.number(self.identity.device);
        fields.number(self.identity.inode);
        fields.number(self.is_new);
        fields.number(self.mode);
        let (user, group) = self.owner.unwrap_or_default();
        fields.number(self.owner.is_some());
        fields.number(user);
        fields.number(group);
        fields.number(self.mtime.seconds.cast_unsigned());
        fields.number(self.mtime.nanoseconds);
        fields.number(self.xattrs.len() as u64);
        for (name, value) in &self.xattrs {
            fields.bytes(name);
            fields.bytes(value);
        }
    }

    pub(crate) fn decode(fields: &mut FieldDecoder<'_>) -> Option<Self> {
        let small = |number: u64| u32::try_from(number).ok();
        Some(Self {
            path: fields.path()?,
            identity: Identity {
                device: fields.number()?,
                inode: fields.number()?,
            },
            is_new: fields.number()? != 0,
            mode: small(fields.number()?)?,
            owner: {
                let is_some = fields.number()? != 0;
                let owner = (small(fields.number()?)?, small(fields.number()?)?);
                is_some.then_some(owner)
            },
            mtime: Timestamp {
                seconds: fields.number()?.cast_signed(),
                nanoseconds: small(fields.number()?)?,
            },
            atime: None,
            xattrs: {
                let mut xattrs = Vec::new();
                for _ in 0..fields.number()? {
                    xattrs.push((fields.bytes()?.to_vec(), fields.bytes()?.to_vec()));
                }
                xattrs
            },
            removes_xattrs: false,
        })
    }

    /// Opens the directory, sets its attributes, and reports an error.
    pub(crate) fn apply_closed(&self, destination: &mut Destination) {
        let applied = self.reopen_and_apply(destination);
        let problems = &destination.context.problems;
        match applied {
            Ok(()) => {}
            Err(RestoreError::Replaced) => problems.warn(&format!(
                "{}: the directory was replaced before it got its attributes, left as it is",
                self.path
            )),
            Err(RestoreError::Step(error)) => problems.add(&self.path, error),
        }
    }

    fn reopen_and_apply(&self, destination: &mut Destination) -> Result<(), RestoreError> {
        if self.path.is_root() {
            let applied = self.apply_to(&destination.top, &destination.context);
            return applied.map_err(RestoreError::Step);
        }
        let name = name_of(&self.path);
        let parent = match destination.resolve_directory(parent_of(&self.path), IfMissing::Fail) {
            Ok(parent) => parent,
            Err(ResolveError::Path(_)) => return Err(RestoreError::Replaced),
            Err(ResolveError::Tree(error)) => return Err(error.into()),
        };
        let stat = lstat_at(&parent, name).with_action(STAT_DIRECTORY)?;
        // A new entry may have reused the inode number.
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_directory || Identity::of(&stat) != self.identity {
            return Err(RestoreError::Replaced);
        }
        let policy = &destination.context.policy;
        let needs_only_mtime = self.xattrs.is_empty()
            && !self.removes_xattrs
            && !(self.is_new && parent.inherits_acl())
            && self.new_owner(&stat).is_none()
            && self.final_mode(stat.st_mode, policy) == stat.st_mode & 0o7777;
        if needs_only_mtime {
            // No need to open it.
            let target = AttributeTarget::named(&parent, name);
            let changed = target.set_times(self.mtime, self.atime);
            let changed = changed.with_action(CHANGE_TIMES);
            return changed.map_err(RestoreError::Step);
        }
        let directory = destination
            .open_child(&parent, name, false)
            .with_action("open the directory")?;
        if directory.identity() != self.identity {
            return Err(RestoreError::Replaced);
        }
        self.apply(&directory, &stat, &destination.context)
            .map_err(RestoreError::Step)
    }

    fn new_owner(&self, stat: &Stat) -> Option<(u32, u32)> {
        let current = (stat.st_uid, stat.st_gid);
        self.owner.filter(|&owner| changes_owner(owner, current))
    }

    pub(crate) fn apply_to(
        &self,
        directory: &Directory,
        context: &Context,
    ) -> Result<(), StepError> {
        let stat = rustix::fs::fstat(directory).with_action(STAT_DIRECTORY)?;
        self.apply(directory, &stat, context)
    }

    fn apply(
        &self,
        directory: &Directory,
        stat: &Stat,
        context: &Context,
    ) -> Result<(), StepError> {
        let owner = self.new_owner(stat);
        let removes_inherited_acls = self.is_new && directory.inherits_acl();
        let mode = self.final_mode(stat.st_mode, &context.policy);
        let has_new_acl = removes_inherited_acls || self.removes_xattrs;
        let needs_chmod = owner.is_some() || has_new_acl || mode != stat.st_mode & 0o7777;
        let attributes = Attributes {
            path: &self.path,
            owner,
            mode: needs_chmod.then_some(mode),
            mtime: self.mtime,
            atime: self.atime,
            xattrs: &self.xattrs,
            removes_inherited_acls,
            removes_xattrs: self.removes_xattrs,
            context,
        };
        attributes.apply(AttributeTarget::Open(directory.as_fd()))
    }

    /// Without the archive's set-id bits, a new directory keeps its inherited set-group-id bit.
    fn final_mode(&self, current: u32, policy: &AttributePolicy) -> u32 {
        if self.is_new && !policy.same_permissions {
            self.mode | current & 0o2000
        } else {
            self.mode
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::materialize::test_support::{destination, member};
    use crate::tar::MemberKind;

    #[test]
    fn reused_inode_is_not_taken_for_the_directory() {
        let place = tempfile::tempdir().expect("a directory");
        fs::write(place.path().join("x"), "1").expect("written");
        let mut destination = destination(place.path());
        let identity = Identity::of(&lstat_at(&destination.top, b"x").expect("there"));
        let path = ArchivePath::sanitize(b"x").path;
        let directory = member(b"x/", MemberKind::Directory);
        let policy = &destination.context.policy;
        let pending = PendingDirectory::new(path, identity, true, directory, policy);
        let before = fs::metadata(place.path().join("x")).expect("there");
        apply_all(vec![pending], &mut destination);
        let after = fs::metadata(place.path().join("x")).expect("there");
        assert_eq!(
            (after.mtime(), after.mode()),
            (before.mtime(), before.mode())
        );
    }
}
