//! Publishing a file: it is made under a temporary name and then renamed.

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Prefix of [temporary names](temporary_name).
pub const TEMPORARY_PREFIX: &str = ".tmp-";

/// Length of [`random_suffix`], in bytes.
pub const SUFFIX_LEN: usize = 16;

/// A random part of a name, in hexadecimal digits. Containers that share a directory reuse process numbers.
pub fn random_suffix() -> String {
    format!("{:016x}", RandomState::new().hash_one(()))
}

/// A hidden name that no other writer uses or has used.
pub fn temporary_name() -> String {
    format!("{TEMPORARY_PREFIX}{}", random_suffix())
}

/// Renames the file that `create` makes at a temporary path to `path`, atomically, in the same directory.
///
/// # Errors
/// If `create` or the rename fails. The temporary file is then removed.
pub fn publish<T>(path: &Path, create: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    publish_from(&path.with_file_name(temporary_name()), path, create)
}

/// As [`publish`], by the path `temporary`, which no other process uses at this moment.
///
/// # Errors
/// As `publish`.
pub fn publish_from<T>(
    temporary: &Path,
    path: &Path,
    create: impl FnOnce(&Path) -> io::Result<T>,
) -> io::Result<T> {
    let published = create(temporary).and_then(|made| {
        fs::rename(temporary, path)?;
        Ok(made)
    });
    if published.is_err() {
        // It may not exist.
        fs::remove_file(temporary).ok();
    }
    published
}

/// As [`publish`], for a file with the contents that `write` gives it. Only this user can read it.
///
/// # Errors
/// As `publish`.
pub fn publish_private(path: &Path, write: impl FnOnce(File) -> io::Result<()>) -> io::Result<()> {
    publish(path, |temporary| {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        write(options.open(temporary)?)
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn published_file_is_private_and_replaces_the_old_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        for text in ["old", "new"] {
            publish_private(&path, |mut file| file.write_all(text.as_bytes())).expect("written");
            assert_eq!(fs::read_to_string(&path).expect("read"), text);
        }
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn failed_publication_keeps_the_old_file_and_leaves_no_other() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        fs::write(&path, "old").expect("written");
        let failed = publish_private(&path, |_| Err(io::ErrorKind::StorageFull.into()));
        assert!(failed.is_err());
        let no_directory = directory.path().join("none").join("file");
        assert!(publish_private(&no_directory, |_| Ok(())).is_err());
        assert_eq!(fs::read_to_string(&path).expect("read"), "old");
        assert_eq!(fs::read_dir(directory.path()).expect("read").count(), 1);
    }

    #[test]
    fn temporary_names_differ() {
        assert_ne!(temporary_name(), temporary_name());
        assert_eq!(random_suffix().len(), SUFFIX_LEN);
    }
}
