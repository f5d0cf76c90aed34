//! One regular file, from its creation to its last attribute.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use super::attributes::Attributes;
use super::context::Context;
use super::directory::Directory;
use super::job::Job;
use super::temporary::TemporaryEntry;
use crate::archive::scan::PayloadEnd;
use crate::base::AttributeTarget;
use crate::materialize::error::{Cause, StepError, WithAction};
use crate::tar::Segment;

/// Largest content that is copied by one read and one write, which the kernel's own copy is not faster than.
const SMALL_COPY_BYTES: u64 = 128 << 10;
/// Largest piece of a copy through our memory.
const COPY_BUFFER_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct FileWriter {
    job: Job,
    fd: OwnedFd,
    temporary: Option<TemporaryEntry>,
    chown: Option<(u32, u32)>,
    chmod: Option<u32>,
    written: u64,
    /// Current segment of a sparse file, and its bytes written so far.
    segment: usize,
    segment_written: u64,
}

/// A new file, with its temporary name, and the owner and mode to set at the end.
type NewFile = (
    OwnedFd,
    Option<TemporaryEntry>,
    Option<(u32, u32)>,
    Option<u32>,
);

impl FileWriter {
    /// Creates the file. `None` means that an existing entry was kept, or a reported error.
    pub(crate) fn create(
        job: Job,
        context: &Context,
        wait_for_files: impl FnMut(),
    ) -> Option<Self> {
        match Self::try_create(&job, context, wait_for_files) {
            Ok(Some((fd, temporary, chown, chmod))) => Some(Self {
                job,
                fd,
                temporary,
                chown,
                chmod,
                written: 0,
                segment: 0,
                segment_written: 0,
            }),
            Ok(None) => None,
            Err(error) => {
                let missing_bytes = job.member.payload.len();
                context.record_job_failure(&job, error, missing_bytes);
                None
            }
        }
    }

    fn try_create(
        job: &Job,
        context: &Context,
        wait_for_files: impl FnMut(),
    ) -> Result<Option<NewFile>, StepError> {
        let policy = &context.policy;
        let directory = &job.directory;
        let owner = policy.owner(&job.member);
        let mode = policy.mode(&job.member);
        let is_process_owner =
            policy.is_process_owner(owner) && directory.creates_as_process_owner() != Some(false);
        let has_xattrs = !job.member.xattrs.is_empty();
        let (initial, needs_chmod) = policy.initial_mode(mode, !is_process_owner, has_xattrs);
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let name = job.name();
        let made = context.create(directory, name, wait_for_files, |name| {
            rustix::fs::openat(directory, name, flags, Mode::from_raw_mode(initial))
        });
        let Some((fd, temporary)) = made.with_action("create the file")? else {
            return Ok(None);
        };
        let is_process_owner =
            is_process_owner && creates_as_process_owner(directory, &fd, context)?;
        let needs_chmod = needs_chmod || directory.inherits_acl();
        let chown = owner.filter(|_| !is_process_owner);
        Ok(Some((fd, temporary, chown, needs_chmod.then_some(mode))))
    }

    /// Writes the next piece of the payload. On failure, reports the error and gives up the file.
    pub(crate) fn write(mut self, bytes: &[u8], context: &Context) -> Option<Self> {
        match self.try_write(bytes) {
            Ok(()) => {
                context.stats.written_bytes.add(bytes.len() as u64);
                Some(self)
            }
            Err(error) => {
                let missing_bytes = self.job.member.payload.len().saturating_sub(self.written);
                self.record_failure(error, missing_bytes, context);
                None
            }
        }
    }

    fn record_failure(&self, error: StepError, missing_bytes: u64, context: &Context) {
        let job = &self.job;
        if self.temporary.is_some() {
            context.note_failure(job);
        }
        context.record_failure(&job.path, &job.directory, error, missing_bytes);
    }

    fn try_write(&mut self, mut bytes: &[u8]) -> Result<(), StepError> {
        if self.job.member.sparse.is_none() {
            return self.write_all(bytes, None);
        }
        while let Some(segment) = self.current_segment() {
            let left = segment.len - self.segment_written;
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
            if len == 0 {
                break;
            }
            let (now, later) = bytes.split_at(len);
            self.write_all(
                now,
                Some(segment.offset.saturating_add(self.segment_written)),
            )?;
            self.segment_written += len as u64;
            bytes = later;
        }
        Ok(())
    }

    /// Copies the open file `source` of the job's size. Reports errors, and a source that changes. Returns whether the
    /// file is made.
    pub(crate) fn copy(job: Job, source: BorrowedFd<'_>, context: &Context) -> bool {
        let Some(mut file) = Self::create(job, context, || ()) else {
            return false;
        };
        let copied = file.try_copy(source);
        context.stats.written_bytes.add(file.written);
        let (path, size, mtime) = (
            file.job.path.clone(),
            file.job.member.size,
            file.job.member.mtime,
        );
        match copied {
            Ok(()) => {}
            Err(Cause::System(error)) => {
                let missing_bytes = size.saturating_sub(file.written);
                context.record_job_failure(&file.job, error, missing_bytes);
                return false;
            }
            Err(cause) => {
                context.problems.add(&path, cause);
                return false;
            }
        }
        // Not the access time, for which a remote file system would be asked again.
        let mask = StatxFlags::SIZE | StatxFlags::MTIME;
        let is_same = rustix::fs::statx(source, "", AtFlags::EMPTY_PATH, mask).is_ok_and(|now| {
            let time = (now.stx_mtime.tv_sec, now.stx_mtime.tv_nsec);
            (now.stx_size, time) == (size, (mtime.seconds, mtime.nanoseconds))
        });
        if !is_same {
            context.problems.add(&path, Cause::Changed);
        }
        // An update keeps the old file then.
        let is_kept = is_same || file.temporary.is_none();
        is_kept && file.finish(PayloadEnd::Complete, context).is_some()
    }

    fn try_copy(&mut self, source: BorrowedFd<'_>) -> Result<(), Cause> {
        let size = self.job.member.size;
        let mut offset = 0;
        while offset < size {
            let mut end = size;
            if self.job.member.sparse.is_some() {
                match rustix::fs::seek(source, SeekFrom::Data(offset)) {
                    Ok(data) => offset = data.max(offset),
                    Err(Errno::NXIO) => break,
                    // The file system knows no holes.
                    Err(_) => {}
                }
                let hole = rustix::fs::seek(source, SeekFrom::Hole(offset));
                end = hole.ok().filter(|&hole| hole > offset).unwrap_or(size);
            }
            self.copy_range(source, offset, end.min(size))?;
            offset = end;
        }
        Ok(())
    }

    /// Copies the bytes from `offset` to `end`: few of them by one read, others inside the kernel if it can.
    fn copy_range(
        &mut self,
        source: BorrowedFd<'_>,
        mut offset: u64,
        end: u64,
    ) -> Result<(), Cause> {
        let mut in_kernel = end.saturating_sub(offset) > SMALL_COPY_BYTES;
        let mut buffer = Vec::new();
        while offset < end {
            let len = usize::try_from(end - offset).unwrap_or(usize::MAX);
            if in_kernel {
                let (mut from, mut to) = (offset, offset);
                let (from, to) = (Some(&mut from), Some(&mut to));
                let copied = rustix::fs::copy_file_range(source, from, &self.fd, to, len);
                let copied = copied.unwrap_or(0) as u64;
                // If it cannot, reading and writing succeed or name the error.
                in_kernel = copied > 0;
                self.written += copied;
                offset += copied;
                continue;
            }
            buffer.clear();
            buffer.reserve_exact(len.min(COPY_BUFFER_BYTES));
            match rustix::io::pread(source, spare_capacity(&mut buffer), offset) {
                Ok(0) => return Err(Cause::Changed),
                Err(Errno::INTR) => continue,
                read => read.map_err(Cause::Unreadable)?,
            };
            buffer.truncate(len);
            self.write_all(&buffer, Some(offset))?;
            offset += buffer.len() as u64;
        }
        Ok(())
    }

    fn current_segment(&mut self) -> Option<Segment> {
        let segments = self.job.member.sparse.as_deref().unwrap_or_default();
        while let Some(segment) = segments.get(self.segment) {
            if self.segment_written < segment.len {
                return Some(*segment);
            }
            self.segment += 1;
            self.segment_written = 0;
        }
        None
    }

    /// Writes at `offset`, or after the last write.
    fn write_all(&mut self, mut bytes: &[u8], mut offset: Option<u64>) -> Result<(), StepError> {
        while !bytes.is_empty() {
            let written = match offset {
                Some(offset) => rustix::io::pwrite(&self.fd, bytes, offset),
                None => rustix::io::write(&self.fd, bytes),
            };
            let len = match written {
                Err(Errno::INTR) => continue,
                Ok(0) => Err(Errno::IO),
                result => result,
            }
            .with_action("write to the file")?;
            bytes = bytes.get(len..).unwrap_or_default();
            offset = offset.map(|offset| offset.saturating_add(len as u64));
            self.written += len as u64;
        }
        Ok(())
    }

    /// Sets size and attributes. An incomplete file keeps its bytes so far. `None` after a reported error.
    pub(crate) fn finish(mut self, end: PayloadEnd, context: &Context) -> Option<OwnedFd> {
        let cause = Cause::of_end(end);
        let cut = cause.is_some();
        if cut && self.temporary.is_some() {
            context.note_failure(&self.job);
            context.problems.add(&self.job.path, Cause::Incomplete);
            return None;
        }
        // A resumed run writes the file again.
        let observer = context.file_observer.get();
        if let Some(cause) = cause.filter(|_| observer.is_none()) {
            context.problems.add(&self.job.path, cause);
        }
        match self.try_finish(cut, context) {
            Ok(()) => {
                if let Some(observer) = observer.filter(|_| !cut) {
                    observer.file_complete(&self.job, &self.fd);
                }
                context.stats.written_entries.increment();
                Some(self.fd)
            }
            Err(error) => {
                self.record_failure(error, 0, context);
                None
            }
        }
    }

    fn try_finish(&mut self, cut: bool, context: &Context) -> Result<(), StepError> {
        let member = &self.job.member;
        if member.sparse.is_some() && !cut {
            rustix::fs::ftruncate(&self.fd, member.size)
                .with_action("set the size of the sparse file")?;
        }
        let attributes = Attributes {
            path: &self.job.path,
            owner: self.chown,
            mode: self.chmod,
            mtime: member.mtime,
            atime: self.job.atime,
            xattrs: &member.xattrs,
            removes_inherited_acls: self.job.directory.inherits_acl(),
            removes_xattrs: false,
            context,
        };
        attributes.apply(AttributeTarget::Open(self.fd.as_fd()))?;
        if let Some(temporary) = self.temporary.take() {
            let placed = temporary.place(self.job.name(), || context.note_replacement());
            placed
                .inspect_err(|_| context.note_failure(&self.job))
                .with_action("create the file")?;
        }
        Ok(())
    }
}

/// Whether new files in this directory belong to our user and group. The first file shows it.
fn creates_as_process_owner(
    directory: &Directory,
    fd: &OwnedFd,
    context: &Context,
) -> Result<bool, StepError> {
    let policy = &context.policy;
    if directory.creates_as_process_owner().is_none() && policy.sets_owners() {
        let stat = rustix::fs::fstat(fd).with_action("look at the new file")?;
        let is_process_owner = (stat.st_uid, stat.st_gid) == (policy.user, policy.group);
        directory.set_creates_as_process_owner(is_process_owner);
    }
    Ok(directory.creates_as_process_owner() != Some(false))
}
