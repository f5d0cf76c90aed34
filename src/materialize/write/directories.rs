//! Deferred directory attributes: owner, mode, attributes and times are set at the end.
//!
//! A read-only directory could not be filled, and filling a directory changes its time.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::os::fd::AsFd;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use super::attribute_policy::AttributePolicy;
use super::attributes::{AttributeTarget, Xattrs};
use super::context::Context;
use super::destination::{
    DestinationRoot, Directory, Identity, IfMissing, lstat_at, name_of, parent_of,
};
use super::pool::WriterPool;
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::ResolveError;
use crate::materialize::error::{StepError, WithAction};
use crate::materialize::resume::journal::{FieldDecoder, FieldEncoder};
use crate::tar::{Member, Timestamp};

const STAT_DIRECTORY: &str = "look at the directory";

/// Directories that still need their attributes, in archive order.
#[derive(Debug, Default)]
pub(crate) struct PendingDirectories(Vec<PendingDirectory>);

/// A directory that still needs its attributes.
#[derive(Debug)]
pub(crate) struct PendingDirectory {
    path: ArchivePath,
    /// Identity when it was added. Another directory in its place is left alone.
    identity: Identity,
    /// We made it, so attributes inherited from its parent are removed.
    is_new: bool,
    mode: u32,
    owner: Option<(u32, u32)>,
    mtime: Timestamp,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// No member describes it. Only its time is set.
    is_implied: bool,
}

/// Failure to reopen a pending directory.
enum RestoreError {
    /// It is missing, or was replaced.
    Replaced,
    Step(StepError),
}

impl From<StepError> for RestoreError {
    fn from(error: StepError) -> Self {
        Self::Step(error)
    }
}

impl PendingDirectories {
    /// Adds a directory with its final attributes.
    pub(crate) fn add(
        &mut self,
        path: ArchivePath,
        identity: Identity,
        is_new: bool,
        member: Member,
        policy: &AttributePolicy,
    ) {
        self.0.push(PendingDirectory::new(
            path, identity, is_new, member, policy,
        ));
    }

    /// Adds an implied directory. It gets the time 0, unless a member describes it.
    pub(crate) fn add_implied(&mut self, path: ArchivePath, identity: Identity) {
        self.0.push(PendingDirectory::implied(path, identity));
    }

    /// The directory added last.
    pub(crate) fn last(&self) -> Option<&PendingDirectory> {
        self.0.last()
    }

    /// The pending directories that an earlier run journaled.
    pub(crate) fn from_journal(pending: Vec<PendingDirectory>) -> Self {
        Self(pending)
    }

    /// Sets all attributes, deepest directories first. The last member of a directory wins.
    pub(crate) fn apply_all(
        self,
        root: &mut DestinationRoot,
        writers: &mut WriterPool,
        context: &Context,
    ) {
        let mut made = HashSet::new();
        let mut pending = self.0;
        made.extend(
            pending
                .iter()
                .filter(|pending| pending.is_new)
                .map(|pending| pending.identity),
        );
        let mut seen = HashSet::new();
        pending.reverse();
        pending.retain(|pending| seen.insert(pending.identity));
        // In reverse byte order, entries below a directory precede it.
        pending.sort_unstable_by(|one, other| Reverse(&one.path).cmp(&Reverse(&other.path)));
        for mut pending in pending {
            pending.is_new = made.contains(&pending.identity);
            match pending.reopen_and_apply(root, writers, context) {
                Ok(()) => {}
                // The directory was replaced, or another user owns it.
                Err(_) if pending.is_implied => {}
                Err(RestoreError::Replaced) => context.problems.warn(&format!(
                    "{}: the directory was replaced before it got its attributes, left as it is",
                    pending.path
                )),
                Err(RestoreError::Step(error)) => context.problems.add(&pending.path, error),
            }
        }
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
            xattrs: member.xattrs,
            is_implied: false,
        }
    }

    /// A directory that only paths of members imply.
    pub(crate) fn implied(path: ArchivePath, identity: Identity) -> Self {
        Self {
            path,
            identity,
            is_new: false,
            mode: 0,
            owner: None,
            mtime: Timestamp::default(),
            xattrs: Vec::new(),
            is_implied: true,
        }
    }

    /// Path and identity.
    pub(crate) fn location(&self) -> (&ArchivePath, Identity) {
        (&self.path, self.identity)
    }

    /// Encodes it for [`PendingDirectory::decode`].
    pub(crate) fn encode(&self, fields: &mut FieldEncoder) {
        fields.bytes(self.path.as_bytes());
        for number in self.identity.numbers() {
            fields.number(number);
        }
        fields.number(self.is_new.into());
        fields.number(self.is_implied.into());
        fields.number(self.mode.into());
        let owner = self
            .owner
            .map(|(user, group)| [u64::from(user), u64::from(group)]);
        fields.number(owner.is_some().into());
        for number in owner.unwrap_or_default() {
            fields.number(number);
        }
        fields.number(self.mtime.seconds.cast_unsigned());
        fields.number(self.mtime.nanoseconds.into());
        fields.number(self.xattrs.len() as u64);
        for (name, value) in &self.xattrs {
            fields.bytes(name);
            fields.bytes(value);
        }
    }

    /// Decodes the output of [`PendingDirectory::encode`]; `None` if it is invalid.
    pub(crate) fn decode(fields: &mut FieldDecoder<'_>) -> Option<Self> {
        let small = |number: u64| u32::try_from(number).ok();
        Some(Self {
            path: fields.path()?,
            identity: Identity::from_numbers([fields.number()?, fields.number()?]),
            is_new: fields.number()? != 0,
            is_implied: fields.number()? != 0,
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
            xattrs: {
                let mut xattrs = Vec::new();
                for _ in 0..fields.number()? {
                    xattrs.push((fields.bytes()?.to_vec(), fields.bytes()?.to_vec()));
                }
                xattrs
            },
        })
    }

    /// Reopens the directory and sets its attributes.
    fn reopen_and_apply(
        &self,
        root: &mut DestinationRoot,
        writers: &mut WriterPool,
        context: &Context,
    ) -> Result<(), RestoreError> {
        if self.path.is_root() && self.is_implied {
            let top = root.top();
            return Ok(AttributeTarget::Open(top.as_fd()).set_mtime(self.mtime)?);
        }
        if self.path.is_root() {
            return Ok(self.apply_to(root.top(), context)?);
        }
        let name = name_of(&self.path);
        let parent = match root.resolve_directory(parent_of(&self.path), IfMissing::Fail, writers) {
            Ok(parent) => parent,
            Err(ResolveError::Path(_)) => return Err(RestoreError::Replaced),
            Err(ResolveError::Tree(error)) => return Err(restore_error(error)),
        };
        let stat = lstat_at(&parent, name)
            .with_action(STAT_DIRECTORY)
            .map_err(restore_error)?;
        // A new entry may have reused the inode number.
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_directory || Identity::of(&stat) != self.identity {
            return Err(RestoreError::Replaced);
        }
        if self.is_implied || self.needs_only_mtime(&stat, &parent, context) {
            // No need to open it.
            return Ok(AttributeTarget::named(&parent, name).set_mtime(self.mtime)?);
        }
        let directory = root
            .open_child(&parent, name, writers)
            .with_action("open the directory")
            .map_err(restore_error)?;
        if directory.identity() != self.identity {
            return Err(RestoreError::Replaced);
        }
        Ok(self.apply(&directory, &stat, context)?)
    }

    fn needs_only_mtime(&self, stat: &Stat, parent: &Directory, context: &Context) -> bool {
        self.xattrs.is_empty()
            && !(self.is_new && parent.inherits_acl())
            && self.new_owner(stat).is_none()
            && self.final_mode(stat.st_mode, context) == stat.st_mode & 0o7777
    }

    /// The owner to set; `None` if it is already right.
    fn new_owner(&self, stat: &Stat) -> Option<(u32, u32)> {
        self.owner
            .filter(|&owner| owner != (stat.st_uid, stat.st_gid))
    }

    /// Sets the attributes on `directory`, which is this directory.
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
        let target = AttributeTarget::Open(directory.as_fd());
        let xattrs = Xattrs {
            list: &self.xattrs,
            path: &self.path,
            context,
        };
        let owner = self.new_owner(stat);
        let chown = owner.map_or(Ok(()), |owner| target.chown(owner));
        xattrs.set_non_acls(target);
        let inherited_acl = self.is_new && directory.inherits_acl();
        if inherited_acl {
            xattrs.remove_inherited_acls(target);
        }
        let mode = self.final_mode(stat.st_mode, context);
        let chmod = if owner.is_some() || inherited_acl || mode != stat.st_mode & 0o7777 {
            target.chmod(mode)
        } else {
            Ok(())
        };
        xattrs.set_acls(target);
        let times = target.set_mtime(self.mtime);
        chown.and(chmod).and(times)
    }

    /// Final mode. Without the archive's set-id bits, a new directory keeps its inherited set-group-id bit.
    fn final_mode(&self, current: u32, context: &Context) -> u32 {
        if self.is_new && !context.policy.same_permissions {
            self.mode | current & 0o2000
        } else {
            self.mode
        }
    }
}

fn restore_error(error: StepError) -> RestoreError {
    match error.errno {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP => RestoreError::Replaced,
        _ => RestoreError::Step(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;

    use super::*;
    use crate::materialize::test_support::{context, member};
    use crate::tar::Kind;

    #[test]
    fn reused_inode_is_not_taken_for_the_directory() {
        let place = tempfile::tempdir().expect("a directory");
        fs::write(place.path().join("x"), "1").expect("written");
        let mut root = DestinationRoot::open(place.path()).expect("there");
        let context = Arc::new(context());
        let mut writers = WriterPool::start(1, &context).expect("threads");
        let top = root.top().clone();
        let identity = Identity::of(&lstat_at(&top, b"x").expect("there"));
        let mut directories = PendingDirectories::default();
        let path = ArchivePath::sanitize(b"x").path;
        let directory = member(b"x/", Kind::Directory);
        directories.add(path, identity, true, directory, &context.policy);
        let before = fs::metadata(place.path().join("x")).expect("there");
        directories.apply_all(&mut root, &mut writers, &context);
        let after = fs::metadata(place.path().join("x")).expect("there");
        assert_eq!(
            (after.mtime(), after.mode()),
            (before.mtime(), before.mode())
        );
    }
}
