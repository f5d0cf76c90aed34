//! Index files: found by locator, published by rename. The only file here that does more than
//! compute.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufReader, BufWriter};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::OFlags;

use super::format::{self, Error as Cause};
use super::{Index, Locator};

/// How old a temporary file must be to be someone's who died.
const ABANDONED: Duration = Duration::from_hours(24);

/// How temporary files begin.
const TEMPORARY: &str = ".tmp-";

/// Bytes that are read or written at once where sections are small.
const BUFFER_BYTES: usize = 64 << 10;

/// What failed with which file.
#[derive(Debug, thiserror::Error)]
#[error("index file {}", path.display())]
pub struct Error {
    /// The file, or the directory for it.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub cause: Cause,
}

/// The saved indexes of a cache directory.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
}

impl Store {
    /// The store below `cache_dir`. Nothing is touched until it is used.
    pub fn new(cache_dir: &Path) -> Self {
        Self {
            directory: cache_dir.join("index"),
        }
    }

    /// Where the index for `locator` is or would be.
    pub fn path(&self, locator: &Locator) -> PathBuf {
        self.directory.join(locator.file_name())
    }

    /// The index that was published for `locator`; `None` when none was.
    ///
    /// # Errors
    /// When there is a file that cannot be used: unreadable, damaged, of another version, another
    /// user or another source. Publishing replaces it.
    pub fn find(&self, locator: &Locator) -> Result<Option<Index>, Error> {
        let path = self.path(locator);
        let index = match open(&path, OFlags::NOFOLLOW).and_then(own).and_then(load) {
            Ok(index) => index,
            Err(Cause::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(cause) => return Err(Error { path, cause }),
        };
        if index.origin.locator != *locator {
            let cause = Cause::Mismatch;
            return Err(Error { path, cause });
        }
        Ok(Some(index))
    }

    /// Makes `index` the one that is found by `locator`, at once and whole. Directories that are
    /// missing are made for this user only.
    ///
    /// Nothing is forced to disk: what a power failure leaves is noticed and made again.
    ///
    /// # Errors
    /// When the file cannot be written; whatever was found before is still found then.
    pub fn publish(&self, locator: &Locator, index: &Index) -> Result<PathBuf, Error> {
        let path = self.path(locator);
        match self.try_publish(&path, locator, index) {
            Ok(()) => Ok(path),
            Err(error) => Err(failed(&path, error)),
        }
    }

    fn try_publish(&self, path: &Path, locator: &Locator, index: &Index) -> io::Result<()> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)?;
        self.remove_abandoned();
        replace(path, locator, index)
    }

    /// Removes what writers that died have left. A failure is not worth a word: the next one
    /// tries again.
    fn remove_abandoned(&self) {
        let entries = fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten();
        for entry in entries {
            let temporary = entry
                .file_name()
                .as_encoded_bytes()
                .starts_with(TEMPORARY.as_bytes());
            let modified = entry.metadata().and_then(|metadata| metadata.modified());
            let age = modified.ok().and_then(|modified| modified.elapsed().ok());
            if temporary && age.is_some_and(|age| age > ABANDONED) {
                fs::remove_file(entry.path()).ok();
            }
        }
    }
}

/// Reads the index file at `path`, wherever it came from. The caller decides whether its origin
/// is the right one.
///
/// # Errors
/// When it cannot be read, or is not an index of this version, whole and undamaged.
pub fn read(path: &Path) -> Result<Index, Error> {
    open(path, OFlags::empty())
        .and_then(load)
        .map_err(|cause| Error {
            path: path.to_owned(),
            cause,
        })
}

/// Writes an index file at `path`, at once and whole, in place of what is there; the directory
/// must exist. It is readable to this user only, as the archive may not be meant for others.
///
/// # Errors
/// When it cannot be written; what was there is still there then.
pub fn write(path: &Path, index: &Index) -> Result<(), Error> {
    replace(path, &index.origin.locator, index).map_err(|error| failed(path, error))
}

fn failed(path: &Path, error: io::Error) -> Error {
    Error {
        path: path.to_owned(),
        cause: error.into(),
    }
}

/// Opens a regular file, and waits for nothing: a FIFO would let nobody through.
fn open(path: &Path, flags: OFlags) -> Result<File, Cause> {
    let flags = (flags | OFlags::NONBLOCK).bits();
    let flags = i32::try_from(flags).map_err(io::Error::other)?;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        // With O_NOFOLLOW a symbolic link says that there are too many of them.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Err(Cause::Untrusted);
        }
        other => other?,
    };
    if !file.metadata()?.is_file() {
        return Err(Cause::Untrusted);
    }
    Ok(file)
}

/// Lets only this user's files pass: a checksum proves nothing about who wrote one.
fn own(file: File) -> Result<File, Cause> {
    let metadata = file.metadata()?;
    let ours = metadata.uid() == rustix::process::geteuid().as_raw();
    let open_to_others = metadata.mode() & 0o022 != 0;
    if !ours || open_to_others {
        return Err(Cause::Untrusted);
    }
    Ok(file)
}

fn load(file: File) -> Result<Index, Cause> {
    let len = file.metadata()?.len();
    format::read(BufReader::with_capacity(BUFFER_BYTES, file), len)
}

/// Writes beside `path`, then renames.
fn replace(path: &Path, locator: &Locator, index: &Index) -> io::Result<()> {
    let temporary = temporary_beside(path);
    let written = write_new(&temporary, locator, index).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        fs::remove_file(&temporary).ok();
    }
    written
}

fn write_new(path: &Path, locator: &Locator, index: &Index) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    format::write(index, locator, BufWriter::with_capacity(BUFFER_BYTES, file))
}

/// A name that no other writer uses, on this machine.
fn temporary_beside(path: &Path) -> PathBuf {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!("{TEMPORARY}{}-{number}", std::process::id()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::super::Origin;
    use super::super::sample::file;
    use super::super::{Builder, Options};
    use super::*;

    fn locator(options: &str) -> Locator {
        Locator {
            canonical: "file".to_owned(),
            fingerprint: "len=1".to_owned(),
            options: options.to_owned(),
        }
    }

    fn index(locator: Locator) -> Index {
        let mut builder = Builder::new(Options::default());
        builder.member(&file("a", 0..1)).unwrap();
        builder.finish(Origin {
            locator,
            ..Origin::default()
        })
    }

    fn cause(found: Result<Option<Index>, Error>) -> Cause {
        found.expect_err("nothing usable").cause
    }

    #[test]
    fn what_was_published_is_found_by_its_locator_only() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        assert!(store.find(&locator("")).unwrap().is_none());
        let path = store.publish(&locator(""), &index(locator(""))).unwrap();
        assert_eq!(store.find(&locator("")).unwrap().unwrap().entry_count(), 2);
        assert!(store.find(&locator("x")).unwrap().is_none());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(
            fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777,
            0o700
        );
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn an_index_can_be_published_under_another_locator() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        store
            .publish(&locator("new"), &index(locator("old")))
            .unwrap();
        let found = store.find(&locator("new")).unwrap().unwrap();
        assert_eq!(found.origin().locator, locator("new"));
    }

    #[test]
    fn a_file_for_another_source_is_not_used() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = store.publish(&locator("a"), &index(locator("a"))).unwrap();
        fs::rename(path, store.path(&locator("b"))).unwrap();
        assert!(matches!(cause(store.find(&locator("b"))), Cause::Mismatch));
    }

    #[test]
    fn a_damaged_file_is_noticed_and_replaced() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = store.publish(&locator(""), &index(locator(""))).unwrap();
        fs::write(&path, b"").unwrap();
        assert!(matches!(cause(store.find(&locator(""))), Cause::Foreign));
        store.publish(&locator(""), &index(locator(""))).unwrap();
        assert!(store.find(&locator("")).unwrap().is_some());
    }

    #[test]
    fn a_symbolic_link_is_not_followed_and_what_it_names_not_overwritten() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let elsewhere = cache.path().join("elsewhere");
        write(&elsewhere, &index(locator(""))).unwrap();
        let before = fs::read(&elsewhere).unwrap();
        let path = store.path(&locator(""));
        fs::create_dir(path.parent().unwrap()).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(matches!(cause(store.find(&locator(""))), Cause::Untrusted));
        store.publish(&locator(""), &index(locator(""))).unwrap();
        assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
        assert_eq!(fs::read(&elsewhere).unwrap(), before);
    }

    #[test]
    fn a_file_that_others_can_write_is_not_used() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = store.publish(&locator(""), &index(locator(""))).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(matches!(cause(store.find(&locator(""))), Cause::Untrusted));
    }

    #[test]
    fn a_directory_in_its_place_is_an_error() {
        let cache = tempfile::tempdir().unwrap();
        assert!(matches!(
            read(cache.path()).unwrap_err().cause,
            Cause::Untrusted
        ));
        let error = write(cache.path(), &index(locator(""))).unwrap_err();
        assert!(matches!(error.cause, Cause::Io(_)));
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
    }

    #[test]
    fn files_of_dead_writers_are_removed() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = store.publish(&locator(""), &index(locator(""))).unwrap();
        let temporary = |name: &str| path.with_file_name(format!("{TEMPORARY}{name}"));
        for (name, age) in [("old", ABANDONED * 2), ("new", Duration::ZERO)] {
            let file = File::create(temporary(name)).unwrap();
            file.set_modified(std::time::SystemTime::now() - age)
                .unwrap();
        }
        store.publish(&locator(""), &index(locator(""))).unwrap();
        assert!(!temporary("old").exists());
        assert!(temporary("new").exists());
    }
}
