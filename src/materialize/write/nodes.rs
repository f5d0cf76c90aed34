//! Makes directories, symbolic links and special files, without a lookup, so that any thread may do it.

use rustix::fs::{FileType, Mode};
use rustix::io::Errno;

use super::attributes::Attributes;
use super::context::Context;
use super::directory::is_directory;
use super::job::Job;
use super::temporary::TemporaryEntry;
use crate::base::AttributeTarget;
use crate::base::chmod::OWNER_RWX;
use crate::materialize::error::{StepError, WithAction};
use crate::materialize::options::Existing;
use crate::tar::{Device, MemberKind};

impl Context {
    /// Makes a symbolic link or special file. Returns whether it was made, and reports errors.
    pub(crate) fn make_special(&self, job: &Job, wait_for_files: impl FnMut()) -> bool {
        const CREATE_DEVICE: &str = "create the device";
        let none = Device::default();
        let (file_type, device, action) = match &job.member.kind {
            MemberKind::Symlink(_) => (FileType::Symlink, none, "create the symbolic link"),
            MemberKind::CharDevice(device) => (FileType::CharacterDevice, *device, CREATE_DEVICE),
            MemberKind::BlockDevice(device) => (FileType::BlockDevice, *device, CREATE_DEVICE),
            MemberKind::Fifo => (FileType::Fifo, none, "create the FIFO"),
            MemberKind::File | MemberKind::Directory | MemberKind::HardLink(_) => return false,
        };
        let made = self.try_make_special(job, (file_type, device), action, wait_for_files);
        match made {
            Ok(Some(())) => self.stats.written_entries.increment(),
            Ok(None) => {}
            Err(error) => self.record_job_failure(job, error, 0),
        }
        matches!(made, Ok(Some(())))
    }

    /// Creates a link or special file, and sets its attributes.
    fn try_make_special(
        &self,
        job: &Job,
        (kind, device): (FileType, Device),
        action: &'static str,
        wait_for_files: impl FnMut(),
    ) -> Result<Option<()>, StepError> {
        let (directory, name) = (&job.directory, job.name());
        let needs_chown = self.needs_chown(job);
        let mode = self.policy.mode(&job.member);
        let (initial, needs_chmod) = self.policy.initial_mode(mode, needs_chown, false);
        let Some(number) = device.linux_number() else {
            return Err(Errno::INVAL).with_action(action);
        };
        let needs_chmod = kind != FileType::Symlink && (needs_chmod || directory.inherits_acl());
        let made = self.create(directory, name, wait_for_files, |name| {
            if let MemberKind::Symlink(target) = &job.member.kind {
                return rustix::fs::symlinkat(&**target, directory, name);
            }
            let mode = Mode::from_raw_mode(initial);
            match rustix::fs::mknodat(directory, name, kind, mode, number.into()) {
                Err(Errno::PERM) if self.device_placeholders => {
                    rustix::fs::mknodat(directory, name, FileType::RegularFile, mode, 0)?;
                    self.stats.written_device_placeholders.increment();
                    Ok(())
                }
                made => made,
            }
        });
        let made = made.with_action(action)?;
        if let Some(((), temporary)) = made {
            let owner = self.policy.owner(&job.member);
            let attributes = Attributes {
                path: &job.path,
                owner: owner.filter(|_| needs_chown),
                mode: needs_chmod.then_some(mode),
                mtime: job.member.mtime,
                atime: job.atime,
                xattrs: &job.member.xattrs,
                removes_inherited_acls: needs_chmod && directory.inherits_acl(),
                removes_xattrs: false,
                context: self,
            };
            let made_name = temporary.as_ref().map_or(name, TemporaryEntry::name);
            attributes.apply(AttributeTarget::named(directory, made_name))?;
            if let Some(temporary) = temporary {
                temporary
                    .place(name, || self.note_replacement())
                    .with_action(action)?;
            }
            return Ok(Some(()));
        }
        Ok(None)
    }

    /// Whether an entry that we make may not have its final owner.
    fn needs_chown(&self, job: &Job) -> bool {
        let owner = self.policy.owner(&job.member);
        let is_known = owner.is_none() || job.directory.creates_as_process_owner() == Some(true);
        !(is_known && self.policy.is_process_owner(owner))
    }

    /// Makes the directory, unless it exists, and says whether it is new; `None` if another entry is kept. Calls
    /// `invalidate` before it replaces another entry.
    pub(crate) fn make_directory(
        &self,
        job: &Job,
        invalidate: impl FnOnce(),
    ) -> Result<Option<bool>, StepError> {
        let (parent, name) = (&job.directory, job.name());
        let mode = Mode::from_raw_mode(self.initial_directory_mode(job));
        let make = || rustix::fs::mkdirat(parent, name, mode);
        let is_new = match make() {
            Ok(()) => true,
            Err(Errno::EXIST) if self.existing != Existing::Replace => return Ok(None),
            Err(Errno::EXIST) if is_directory(parent, name) => false,
            Err(Errno::EXIST) => {
                invalidate();
                let made = self.create_or_replace(parent, name, || (), make);
                made.with_action("create the directory")?;
                true
            }
            Err(errno) => return Err(errno).with_action("create the directory"),
        };
        Ok(Some(is_new))
    }

    /// The final mode, unless that denies us access, or grants access before the owner is set.
    fn initial_directory_mode(&self, job: &Job) -> u32 {
        let policy = &self.policy;
        let mode = policy.mode(&job.member);
        let has_xattrs = !job.member.xattrs.is_empty();
        let (_, needs_chmod) = policy.initial_mode(mode, self.needs_chown(job), has_xattrs);
        if needs_chmod || mode & OWNER_RWX != OWNER_RWX {
            OWNER_RWX
        } else {
            mode
        }
    }
}
