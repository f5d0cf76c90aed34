//! Records of the versions whose shards are below a destination.
//!
//! Each is an empty hidden file, named by the version. So no two writers must agree on a content, on any file system that
//! machines share.

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::error::Error;
use super::write::Directory;
use crate::archive::Version;
use crate::index::{Index, Ino};

const PREFIX: &str = ".tarfs-shards-";

/// The records below one destination.
pub(super) struct ShardRecords<'a> {
    top: &'a Directory,
    index: &'a Index,
    version: &'a Version,
}

impl<'a> ShardRecords<'a> {
    /// The records in `top` for shards of `index`, which has this version.
    pub(super) fn new(top: &'a Directory, index: &'a Index, version: &'a Version) -> Self {
        Self {
            top,
            index,
            version,
        }
    }

    /// Records the version before a shard is written, and proves afterwards that no other one came meanwhile. Otherwise
    /// the error is [`Error::OtherVersion`].
    pub(super) fn add(&self) -> Result<(), Error> {
        self.check()?;
        let name = format!("{PREFIX}{}", self.version);
        let is_new = make_record(self.top, &name).map_err(Error::ShardRecord)?;
        // Another version may have come meanwhile.
        let checked = self.check();
        // Shards that still run may share an older record.
        if checked.is_err() && is_new {
            rustix::fs::unlinkat(self.top, name, AtFlags::empty()).ok();
        }
        checked
    }

    /// Checks that no other version is recorded.
    pub(super) fn check(&self) -> Result<(), Error> {
        let versions = self.recorded().map_err(Error::ShardRecord)?;
        let mut others = versions.iter().filter(|other| !other.is_same(self.version));
        others.next().map_or(Ok(()), |_| Err(Error::OtherVersion))
    }

    /// Removes the records of this version, once all shards are written.
    pub(super) fn remove(&self) -> Result<(), Errno> {
        for version in self.recorded()? {
            if version.is_same(self.version) {
                let name = format!("{PREFIX}{version}");
                rustix::fs::unlinkat(self.top, name, AtFlags::empty())?;
            }
        }
        Ok(())
    }

    /// The recorded versions. An entry of the archive is no record.
    fn recorded(&self) -> Result<Vec<Version>, Errno> {
        let mut versions = Vec::new();
        for entry in Dir::read_from(self.top)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            let version = str::from_utf8(name).ok();
            let version = version.and_then(|name| name.strip_prefix(PREFIX)?.parse().ok());
            if let Some(version) = version.filter(|_| self.index.lookup(Ino::ROOT, name).is_none())
            {
                versions.push(version);
            }
        }
        Ok(versions)
    }
}

/// Makes the file `name`, unless it exists, and returns whether it is new. Anything else there is `EEXIST`.
fn make_record(top: &Directory, name: &str) -> Result<bool, Errno> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NONBLOCK;
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(top, name, flags, Mode::from_raw_mode(0o666)) {
        Ok(_) => Ok(true),
        Err(Errno::EXIST) => {
            let stat = rustix::fs::statat(top, name, AtFlags::SYMLINK_NOFOLLOW)?;
            let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
            is_file.then_some(false).ok_or(Errno::EXIST)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::CWD;

    use super::*;

    // Promises: shard-version
    #[test]
    fn record_is_made_once_and_only_a_file_is_one() {
        let place = tempfile::tempdir().expect("a directory");
        let top = Directory::open_top(place.path()).expect("there");
        assert_eq!(make_record(&top, "record"), Ok(true));
        assert_eq!(make_record(&top, "record"), Ok(false));
        let path = |name| place.path().join(name);
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(CWD, path("fifo"), FileType::Fifo, mode, 0).expect("made");
        std::os::unix::fs::symlink("record", path("link")).expect("made");
        for name in ["fifo", "link"] {
            assert_eq!(make_record(&top, name), Err(Errno::EXIST), "{name}");
        }
    }
}
