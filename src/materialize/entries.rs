//! Directories, links and special files: made on the scan's thread, at once.

use rustix::fs::{AtFlags, FileType, Mode, makedev};
use rustix::io::Errno;

use super::attributes::{Subject, Xattrs};
use super::context::Made;
use super::file::Job;
use super::policy::Policy;
use super::problem::{Cause, Trouble, While};
use super::root::{Directory, Identity, Missing, Ownership, name_of, parent_of, status};
use super::{Existing, Materializer};
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::ResolveError;
use crate::index::MAX_FORWARD_LINK_PASSES;
use crate::tar::{Device, Kind};

/// Hard links whose targets had not come yet.
#[derive(Debug, Default)]
pub(super) struct Links(Vec<LateLink>);

/// A hard link that is made at the end.
#[derive(Debug)]
pub(super) struct LateLink {
    pub(super) path: ArchivePath,
    pub(super) target: ArchivePath,
}

impl Links {
    /// The one put off last.
    pub(super) fn last(&self) -> Option<&LateLink> {
        self.0.last()
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }
}

/// Why a link is not there.
enum LinkFailure {
    /// Its target is not there.
    NoTarget,
    Cause(Cause),
    Trouble(Trouble),
}

impl From<Trouble> for LinkFailure {
    fn from(trouble: Trouble) -> Self {
        Self::Trouble(trouble)
    }
}

impl From<ResolveError<Trouble>> for LinkFailure {
    fn from(error: ResolveError<Trouble>) -> Self {
        match error {
            ResolveError::Path(refusal) => Self::Cause(Cause::Refused(refusal)),
            ResolveError::Tree(Trouble {
                errno: Errno::NOENT,
                ..
            }) => Self::NoTarget,
            ResolveError::Tree(trouble) => Self::Trouble(trouble),
        }
    }
}

impl Materializer {
    /// Makes an entry that is not a regular file.
    pub(super) fn make_entry(&mut self, job: Job) {
        self.writers
            .settle(job.directory.identity(), name_of(&job.path));
        let made = match &job.member.kind {
            Kind::Directory => {
                self.make_directory(job);
                return;
            }
            Kind::HardLink(target) => {
                let target = target.clone();
                self.make_link(&job, &target);
                return;
            }
            Kind::Symlink(target) => self.make_symlink(&job, target),
            Kind::CharDevice(device) => self.make_node(
                &job,
                FileType::CharacterDevice,
                *device,
                "create the device",
            ),
            Kind::BlockDevice(device) => {
                self.make_node(&job, FileType::BlockDevice, *device, "create the device")
            }
            Kind::Fifo => {
                self.make_node(&job, FileType::Fifo, Device::default(), "create the FIFO")
            }
            Kind::File => return,
        };
        match made {
            Ok(Made::New(())) => {
                self.context.stats.written_entries.increment();
                self.journal_entry(&job);
            }
            Ok(Made::Kept) => {}
            Err(trouble) => self.context.fail_job(&job, trouble, 0),
        }
    }

    fn make_symlink(&mut self, job: &Job, target: &[u8]) -> Result<Made<()>, Trouble> {
        let (directory, name) = (&job.directory, job.name());
        let made = self
            .context
            .make(
                directory,
                name,
                || self.writers.settle_all(),
                || rustix::fs::symlinkat(target, directory, name),
            )
            .while_trying_to("create the symbolic link")?;
        if let Made::New(()) = made {
            self.dress(job, None)?;
        }
        Ok(made)
    }

    fn make_node(
        &mut self,
        job: &Job,
        kind: FileType,
        device: Device,
        action: &'static str,
    ) -> Result<Made<()>, Trouble> {
        let (directory, name) = (&job.directory, job.name());
        let mode = self.context.policy.mode(&job.member);
        let first = self
            .context
            .policy
            .first_mode(mode, !self.is_ours(job), false);
        let number = makedev(device.major, device.minor);
        // The kernel would take what it can of it for another device.
        if u32::try_from(number).is_err() {
            return Err(Errno::INVAL).while_trying_to(action);
        }
        let made = self
            .context
            .make(
                directory,
                name,
                || self.writers.settle_all(),
                || {
                    let mode = Mode::from_raw_mode(first.mode);
                    match rustix::fs::mknodat(directory, name, kind, mode, number) {
                        Err(Errno::PERM) if self.context.device_placeholders => {
                            rustix::fs::mknodat(directory, name, FileType::RegularFile, mode, 0)?;
                            self.context.stats.written_device_placeholders.increment();
                            Ok(())
                        }
                        made => made,
                    }
                },
            )
            .while_trying_to(action)?;
        if let Made::New(()) = made {
            let again = first.again || directory.inherits_acl();
            self.dress(job, again.then_some(mode))?;
        }
        Ok(made)
    }

    /// Gives a new link or special file its owner, mode, attributes and time.
    fn dress(&self, job: &Job, chmod: Option<u32>) -> Result<(), Trouble> {
        let subject = Subject::named(&job.directory, job.name());
        let xattrs = Xattrs {
            list: &job.member.xattrs,
            path: &job.path,
            context: &self.context,
        };
        let owner = self
            .context
            .policy
            .owner(&job.member)
            .filter(|_| !self.is_ours(job));
        let chown = owner.map_or(Ok(()), |owner| subject.chown(owner));
        xattrs.set_plain(subject);
        if chmod.is_some() && job.directory.inherits_acl() {
            xattrs.drop_inherited(subject);
        }
        let chmod = chmod.map_or(Ok(()), |mode| subject.chmod(mode));
        xattrs.set_acls(subject);
        let times = subject.set_mtime(job.member.mtime);
        chown.and(chmod).and(times)
    }

    /// Whether an entry made by us needs no other owner.
    fn is_ours(&self, job: &Job) -> bool {
        let owner = self.context.policy.owner(&job.member);
        let known = owner.is_none() || job.directory.ownership() == Ownership::Ours;
        known && self.context.policy.is_ours(owner)
    }

    fn make_directory(&mut self, job: Job) {
        match self.try_make_directory(&job) {
            Ok(Some((directory, new))) => {
                let identity = directory.identity();
                self.root.remember(job.path.as_bytes(), directory);
                self.context.stats.written_entries.increment();
                let policy: &Policy = &self.context.policy;
                let place = job.directory.place_of(job.name()).unwrap_or(job.path);
                self.directories
                    .add(place, identity, new, *job.member, policy);
                self.journal_directory(&job.directory);
            }
            Ok(None) => {}
            Err(trouble) => self.context.fail(&job.path, &job.directory, trouble, 0),
        }
    }

    /// The directory and whether it is new; `None` when something else keeps its place.
    pub(super) fn try_make_directory(
        &mut self,
        job: &Job,
    ) -> Result<Option<(Directory, bool)>, Trouble> {
        const OPEN: &str = "open the directory";
        let (parent, name) = (&job.directory, job.name());
        let mode = Mode::from_raw_mode(self.first_directory_mode(job));
        let make = || rustix::fs::mkdirat(parent, name, mode);
        let new = match make() {
            Ok(()) => true,
            Err(Errno::EXIST) if self.context.existing != Existing::Replace => return Ok(None),
            Err(Errno::EXIST) if is_directory(parent, name) => false,
            Err(Errno::EXIST) => {
                self.root.forget(job.path.as_bytes());
                let made = self.context.make(parent, name, || (), make);
                made.while_trying_to("create the directory")?;
                true
            }
            Err(errno) => return Err(errno).while_trying_to("create the directory"),
        };
        let directory = if new {
            self.root.open_new(parent, name, &mut self.writers)
        } else {
            self.root.open_child(parent, name, &mut self.writers)
        };
        let new = new || self.was_made(job);
        Ok(Some((directory.while_trying_to(OPEN)?, new)))
    }

    /// The mode to make a directory with: its last one, unless that keeps us out, or lets someone
    /// in who is not to see what belongs to another owner.
    fn first_directory_mode(&self, job: &Job) -> u32 {
        const OURS: u32 = 0o700;
        let policy = &self.context.policy;
        let mode = policy.mode(&job.member);
        let has_xattrs = !job.member.xattrs.is_empty();
        let first = policy.first_mode(mode, !self.is_ours(job), has_xattrs);
        if first.again || mode & OURS != OURS {
            OURS
        } else {
            mode
        }
    }

    fn make_link(&mut self, job: &Job, target: &[u8]) {
        let target = ArchivePath::sanitize(target).path;
        let Some(target) = self
            .selection
            .place(target)
            .filter(|target| !target.is_root())
        else {
            self.context.problems.add(&job.path, Cause::EmptyTarget);
            return;
        };
        match self.try_make_link(&job.directory, &job.path, &target) {
            Ok(()) => {
                self.journal_entry(job);
                self.leave_link(&job.path, &target);
            }
            Err(LinkFailure::NoTarget) => self.put_off(job, target),
            Err(failure) => self.report_link(&job.path, &job.directory, target, failure),
        }
    }

    /// Keeps a link for the end. What has its name already stays, as in GNU tar: a name is only
    /// given up for a link that can be made.
    fn put_off(&mut self, job: &Job, target: ArchivePath) {
        let name = name_of(&job.path);
        let is_taken = match status(&job.directory, name) {
            Ok(_) => true,
            Err(Errno::NOENT) => self.context.promises.has(&job.directory, name),
            Err(errno) => {
                let action = "create the hard link";
                let trouble = Trouble { action, errno };
                self.context.fail(&job.path, &job.directory, trouble, 0);
                return;
            }
        };
        match self.context.existing {
            Existing::Skip if is_taken => {}
            _ if is_taken => {
                let cause = Cause::NoTarget { target };
                self.context.problems.add(&job.path, cause);
            }
            _ => {
                self.context.promises.make(&job.directory, name);
                let place = job.directory.place_of(name);
                self.links.0.push(LateLink {
                    path: place.unwrap_or_else(|| job.path.clone()),
                    target,
                });
                self.journal_link();
            }
        }
    }

    /// Takes up the links that an earlier run put off.
    pub(super) fn put_off_again(&mut self, links: Vec<LateLink>) {
        for link in &links {
            let parent = parent_of(&link.path);
            let directory = self
                .root
                .directory(parent, Missing::Fail, &mut self.writers);
            if let Ok(directory) = directory {
                let name = name_of(&link.path);
                self.context.promises.make(&directory, name);
            }
        }
        self.links = Links(links);
    }

    fn try_make_link(
        &mut self,
        directory: &Directory,
        path: &ArchivePath,
        target: &ArchivePath,
    ) -> Result<(), LinkFailure> {
        let name = name_of(path);
        let parent = parent_of(target);
        let target_directory = self
            .root
            .directory(parent, Missing::Fail, &mut self.writers)?;
        let target_name = name_of(target);
        self.writers
            .settle(target_directory.identity(), target_name);
        self.come_to_link(&target_directory, target_name);
        let link = || {
            let flags = AtFlags::empty();
            rustix::fs::linkat(&target_directory, target_name, directory, name, flags)
        };
        // A link to what has this name already must not remove it first.
        let made = match link() {
            Err(Errno::EXIST) if is_same(&target_directory, target_name, directory, name) => {
                Ok(Made::New(()))
            }
            // No link can be made to a directory, so nothing is removed for one.
            Err(Errno::EXIST) if is_directory(&target_directory, target_name) => Err(Errno::PERM),
            Err(Errno::EXIST) => {
                let settle = || self.writers.settle_all();
                self.context.make(directory, name, settle, link)
            }
            result => result.map(Made::New),
        };
        match made {
            Ok(Made::New(())) => self.context.stats.written_entries.increment(),
            Ok(Made::Kept) => {}
            Err(Errno::NOENT) => return Err(LinkFailure::NoTarget),
            Err(errno) => Err(errno).while_trying_to("create the hard link")?,
        }
        Ok(())
    }

    fn report_link(
        &self,
        path: &ArchivePath,
        directory: &Directory,
        target: ArchivePath,
        failure: LinkFailure,
    ) {
        match failure {
            LinkFailure::NoTarget => self.context.problems.add(path, Cause::NoTarget { target }),
            LinkFailure::Cause(cause) => self.context.problems.add(path, cause),
            LinkFailure::Trouble(trouble) => self.context.fail(path, directory, trouble, 0),
        }
    }

    /// Makes the links that were put off, the last first: a link that comes before its target
    /// often is a chain's first.
    pub(super) fn make_late_links(&mut self) {
        let mut links = std::mem::take(&mut self.links.0);
        for _ in 0..MAX_FORWARD_LINK_PASSES {
            let before = links.len();
            links = links
                .into_iter()
                .rev()
                .filter(|link| matches!(self.make_late_link(link), Err(LinkFailure::NoTarget)))
                .collect();
            if links.is_empty() || links.len() == before {
                break;
            }
        }
        for link in links {
            let top = self.root.top().clone();
            self.report_link(&link.path, &top, link.target, LinkFailure::NoTarget);
        }
        self.context.promises.clear();
    }

    /// Tries once more; only a missing target comes back as a failure, others are reported.
    fn make_late_link(&mut self, link: &LateLink) -> Result<(), LinkFailure> {
        let parent = parent_of(&link.path);
        let result = match self
            .root
            .directory(parent, Missing::Make, &mut self.writers)
        {
            Ok(directory) if status(&directory, name_of(&link.path)).is_ok() => Ok(()),
            Ok(directory) => {
                let made = self.try_make_link(&directory, &link.path, &link.target);
                // Of no member that is still to come.
                self.journal_name(0, &directory, &link.path);
                made
            }
            Err(error) => Err(error.into()),
        };
        match result {
            Err(LinkFailure::NoTarget) => Err(LinkFailure::NoTarget),
            Err(failure) => {
                let top = self.root.top().clone();
                self.report_link(&link.path, &top, link.target.clone(), failure);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

fn is_directory(directory: &Directory, name: &[u8]) -> bool {
    status(directory, name)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Whether two names are links to one file.
fn is_same(one: &Directory, one_name: &[u8], other: &Directory, other_name: &[u8]) -> bool {
    match (status(one, one_name), status(other, other_name)) {
        (Ok(one), Ok(other)) => Identity::of(&one) == Identity::of(&other),
        _ => false,
    }
}
