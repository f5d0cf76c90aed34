//! Job list of a shared file system: its mounts, and the jobs that they belong to.
//!
//! A job may be killed together with the daemon. Its mount then lives on by the connection that other monitors keep, and no
//! process knows it. So these have the job list, in memory without a name, and give it to the next daemon.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};
use serde::{Deserialize, Serialize};

use super::cgroup::ControlGroup;
use crate::base::bounded_read::read_at_most;
use crate::base::sync::Mutex;
use crate::fuse::MountTarget;

/// Length of a job list, in bytes, from which on the lines of ended mounts are removed.
const MIN_TRIMMED_BYTES: u64 = 64 << 10;

/// Maximum length of a job list that is read, in bytes. A line has about 300.
const MAX_BYTES: u64 = 64 << 20;

/// A mount of a job.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct JobMount {
    pub(super) target: MountTarget,
    pub(super) group: ControlGroup,
    /// Its directory, if it has an overlay.
    pub(super) scratch: Option<OsString>,
}

/// The mounts of a shared file system that belong to jobs, one in a line of JSON.
#[derive(Debug)]
pub(super) struct JobList {
    memory: File,
    /// Length of what is written, and of the last trimmed state.
    lengths: Mutex<(u64, u64)>,
}

impl AsFd for JobList {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

impl JobList {
    /// An empty one.
    ///
    /// # Errors
    /// If the system has no more memory or descriptors.
    pub(super) fn new() -> io::Result<Self> {
        let memory = File::from(memfd_create("jobs", MemfdFlags::CLOEXEC)?);
        Ok(Self {
            memory,
            lengths: Mutex::default(),
        })
    }

    /// The one in `memory`, which another process has written.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(super) fn of(memory: OwnedFd) -> io::Result<Self> {
        let memory = File::from(memory);
        let len = memory.metadata()?.len();
        Ok(Self {
            memory,
            lengths: Mutex::new((len, len)),
        })
    }

    /// Its mounts, of which some have ended. A line that its writer could not finish is none.
    ///
    /// # Errors
    /// If it cannot be read, or is too long.
    pub(super) fn mounts(&self) -> io::Result<Vec<JobMount>> {
        let mut file = &self.memory;
        seek(file, SeekFrom::Start(0))?;
        let bytes = read_at_most(&mut file, MAX_BYTES)?;
        let lines = bytes.split(|&byte| byte == b'\n');
        Ok(lines
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect())
    }

    /// Adds `mount`. Drops those that are not in the tree of mounts if the job list has become long.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn add(&self, mount: &JobMount) -> io::Result<()> {
        let mut lengths = self.lengths.lock();
        let (len, trimmed) = &mut *lengths;
        // The newline before it ends a line that was cut.
        let line = line(mount)?;
        self.memory.write_all_at(&line, *len)?;
        *len += line.len() as u64;
        if *len > MIN_TRIMMED_BYTES.max(2 * *trimmed) {
            // Each line only moves forward. So if this process is killed meanwhile, each is still there once.
            let mut kept = Vec::new();
            for mount in self
                .mounts()?
                .into_iter()
                .filter(|mount| mount.target.is_attached())
            {
                kept.write_all(&self::line(&mount)?)?;
            }
            self.memory.write_all_at(&kept, 0)?;
            self.memory.set_len(kept.len() as u64)?;
            *len = kept.len() as u64;
            *trimmed = *len;
        }
        Ok(())
    }
}

fn line(mount: &JobMount) -> io::Result<Vec<u8>> {
    let mut line = vec![b'\n'];
    serde_json::to_writer(&mut line, mount)?;
    line.push(b'\n');
    Ok(line)
}
