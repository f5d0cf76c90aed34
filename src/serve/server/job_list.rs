//! Job list of a shared file system: the process that serves it, its mounts, and the jobs that they belong to.
//!
//! A job may be killed together with the daemon. Its mount then lives on by the connection that other monitors keep, and no
//! process knows it. So these have the job list, in memory without a name, and give it to the next daemon.
//!
//! Each monitor decides for itself which process continues with its mount. The first such process claims the file system in
//! the job list. Others refuse to serve it while that one lives, and monitors go where it serves.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};
use serde::{Deserialize, Serialize};

use super::cgroup::ControlGroup;
use crate::base::bounded_read::read_at_most;
use crate::base::lock::{LockKind, RETRY_INTERVAL, lock};
use crate::base::process::ProcessId;
use crate::base::sync::Mutex;
use crate::base::wait::wait_until;
use crate::fuse::MountTarget;

/// Length of the claim at the start, in bytes. A path of a socket has at most 108, each of which JSON expands to four.
const CLAIM_BYTES: usize = 1024;

/// Timeout for the end of a killed process that has claimed the file system, and for another one that does so.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(1);

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

/// The process that serves a file system.
#[derive(PartialEq, Debug, Serialize, Deserialize)]
struct Claim {
    process: ProcessId,
    /// The socket on which it accepts other monitors of the file system.
    socket: Option<OsString>,
}

impl Claim {
    /// That of a process that lives.
    fn read(memory: &File) -> Option<Self> {
        Self::read_last(memory).filter(|claim| claim.process.is_alive())
    }

    fn read_last(memory: &File) -> Option<Self> {
        let mut bytes = [0; CLAIM_BYTES];
        memory.read_exact_at(&mut bytes, 0).ok()?;
        serde_json::from_slice(&bytes).ok()
    }
}

/// The mounts of a shared file system that belong to jobs, one in a line of JSON behind the claim of this process. Dropping it
/// ends the claim.
#[derive(Debug)]
pub(super) struct JobList {
    memory: File,
    /// Length of what is written, and of the last trimmed state.
    lengths: Mutex<(u64, u64)>,
}

/// Path of the socket of the daemon that serves the file system of the job list in `memory`, if one does.
pub fn socket_of_claim(memory: BorrowedFd<'_>) -> Option<PathBuf> {
    let memory = File::from(memory.try_clone_to_owned().ok()?);
    Some(Claim::read(&memory)?.socket?.into())
}

impl AsFd for JobList {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

impl JobList {
    /// Claims the file system of the job list in `memory` for this process, which accepts monitors on `socket`. Without
    /// `memory`, makes an empty one.
    ///
    /// # Errors
    /// If another process serves the file system, or the system has no more memory or descriptors.
    pub(super) fn claim(memory: Option<OwnedFd>, socket: Option<&Path>) -> io::Result<Self> {
        let make = || memfd_create("jobs", MemfdFlags::CLOEXEC);
        let memory = File::from(memory.map_or_else(make, Ok)?);
        // The processes share an open file, so a lock needs one of its own.
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let locked = File::options().read(true).write(true).open(path)?;
        lock(&locked, LockKind::Exclusive, CLAIM_TIMEOUT)?;
        let process = ProcessId::own();
        let is_free = || Claim::read(&memory).is_none_or(|claim| claim.process == process);
        if !wait_until(CLAIM_TIMEOUT, RETRY_INTERVAL, is_free) {
            return Err(io::Error::other("another process serves the file system"));
        }
        let last = Claim::read_last(&memory).map(|claim| claim.process);
        if let Some(last) = last.filter(|&last| last != process) {
            // A thread of a killed process takes requests until it ends, and the kernel sends again only what was taken
            // before. One that waits for the mount itself takes none.
            wait_until(CLAIM_TIMEOUT, RETRY_INTERVAL, || !last.has_threads());
        }
        let socket = socket.map(OsString::from);
        let mut bytes = serde_json::to_vec(&Claim { process, socket })?;
        bytes.resize(CLAIM_BYTES, b' ');
        memory.write_all_at(&bytes, 0)?;
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
        seek(file, SeekFrom::Start(CLAIM_BYTES as u64))?;
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
            self.memory.write_all_at(&kept, CLAIM_BYTES as u64)?;
            *len = (CLAIM_BYTES + kept.len()) as u64;
            self.memory.set_len(*len)?;
            *trimmed = *len;
        }
        Ok(())
    }
}

impl Drop for JobList {
    fn drop(&mut self) {
        // Otherwise the claim ends with this process.
        drop(self.memory.write_all_at(&[b' '; CLAIM_BYTES], 0));
    }
}

fn line(mount: &JobMount) -> io::Result<Vec<u8>> {
    let mut line = vec![b'\n'];
    serde_json::to_writer(&mut line, mount)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    // Promises: shared-restart
    #[test]
    fn file_system_is_claimed_by_one_process_at_a_time() {
        let socket = Path::new("/run/a.daemon");
        let list = JobList::claim(None, Some(socket)).expect("new");
        let memory = list.memory.try_clone().expect("a descriptor");
        let memory = OwnedFd::from(memory);
        assert_eq!(socket_of_claim(memory.as_fd()).as_deref(), Some(socket));
        drop(list);
        assert_eq!(socket_of_claim(memory.as_fd()), None);
        let mut child = Command::new("sleep").arg("60").spawn().expect("installed");
        let claim = Claim {
            process: ProcessId::of(child.id().cast_signed()),
            socket: None,
        };
        let file = File::from(memory.try_clone().expect("a descriptor"));
        let mut bytes = serde_json::to_vec(&claim).expect("valid");
        bytes.resize(CLAIM_BYTES, b' ');
        file.write_all_at(&bytes, 0).expect("written");
        let again = || JobList::claim(Some(memory.try_clone().expect("a descriptor")), None);
        again().expect_err("it is served");
        assert_eq!(Claim::read(&file), Some(claim));
        child.kill().expect("a child");
        // A killed process needs not be reaped.
        again().expect("free");
        child.wait().expect("a child");
    }
}
