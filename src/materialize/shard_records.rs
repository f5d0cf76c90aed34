//! Records of the versions whose shards are below a destination.
//!
//! A hidden directory has an empty file for each, named by the version. So no two writers must agree on its content, on
//! any file system that machines share.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;

use super::error::Error;
use super::write::Directory;
use crate::archive::Version;
use crate::index::{Index, Ino};

const NAME: &str = ".tarfs-shards";

/// The records below one destination.
pub(super) struct ShardRecords<'a> {
    top: &'a Directory,
    /// A name that no entry of the archive has.
    name: String,
    version: &'a Version,
}

impl<'a> ShardRecords<'a> {
    /// The records in `top` for shards of `index`, which has this version.
    pub(super) fn new(top: &'a Directory, index: &Index, version: &'a Version) -> Self {
        let mut name = NAME.to_owned();
        while index.lookup(Ino::ROOT, name.as_bytes()).is_some() {
            name.push('~');
        }
        Self { top, name, version }
    }

    /// Records the version before a shard is written.
    ///
    /// # Errors
    /// [`Error::OtherVersion`], and [`Error::ShardRecord`] when the destination cannot be written.
    pub(super) fn add(&self) -> Result<(), Error> {
        self.check()?;
        self.try_add().map_err(Error::ShardRecord)?;
        // Another version may have come meanwhile.
        let checked = self.check();
        if checked.is_err() {
            // The other version has a record there, too, so the directory stays.
            self.remove().ok();
        }
        checked
    }

    fn try_add(&self) -> Result<(), Errno> {
        match rustix::fs::mkdirat(self.top, &*self.name, Mode::from_raw_mode(0o777)) {
            Err(Errno::EXIST) | Ok(()) => {}
            Err(error) => return Err(error),
        }
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o666);
        rustix::fs::openat(self.open()?, self.version.to_string(), flags, mode)?;
        Ok(())
    }

    /// Checks that no other version is recorded.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub(super) fn check(&self) -> Result<(), Error> {
        let versions = self.recorded().map_err(Error::ShardRecord)?;
        let mut others = versions.iter().filter(|it| !it.is_same(self.version));
        others.next().map_or(Ok(()), |_| Err(Error::OtherVersion))
    }

    /// Removes the records of this version, once all shards are written.
    pub(super) fn remove(&self) -> Result<(), Errno> {
        let records = match self.open() {
            Err(Errno::NOENT) => return Ok(()),
            records => records?,
        };
        for version in self.recorded()? {
            if version.is_same(self.version) {
                rustix::fs::unlinkat(&records, version.to_string(), AtFlags::empty())?;
            }
        }
        rustix::fs::unlinkat(self.top, &*self.name, AtFlags::REMOVEDIR)
    }

    fn open(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(self.top, &*self.name, flags, Mode::empty())
    }

    fn recorded(&self) -> Result<Vec<Version>, Errno> {
        let records = match self.open() {
            Err(Errno::NOENT) => return Ok(Vec::new()),
            records => records?,
        };
        let names = Dir::read_from(records)?.map(|entry| {
            let entry = entry?;
            let name = entry.file_name().to_str().ok();
            Ok(name.and_then(|name| name.parse().ok()))
        });
        let versions: Result<Vec<_>, Errno> = names.collect();
        Ok(versions?.into_iter().flatten().collect())
    }
}
