//! Inventory of a cache directory: indexes and disk caches of all archives, in use or not.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::open::opener::disk_cache_name;
use crate::base::retention::{RetainedItem, RetentionPolicy};
use crate::base::shared_dir::SharedFile;
use crate::base::trusted_dir::TrustedDir;
use crate::cache::{self, DiskCacheDir};
use crate::index::Origin;
use crate::index::store::{self, RETENTION_POLICY, Store};

/// Subdirectories of a cache directory. A nonempty directory without them was made for another purpose.
const CACHE_SUBDIRECTORIES: [&str; 2] = ["index", "disk-cache"];

/// Reason why a cache directory cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum InventoryError {
    /// The directory was made for another purpose.
    #[error("{} is not a cache of tarfs", .0.display())]
    Foreign(PathBuf),
    /// The system denies access, or other users have access, too.
    #[error("cannot use the cache {}", .path.display())]
    System {
        /// Path of the cache directory.
        path: PathBuf,
        /// The error.
        #[source]
        cause: io::Error,
    },
}

/// A file in a cache directory.
#[derive(Clone, Debug)]
pub struct CacheEntry {
    /// Kind of the file.
    pub kind: Kind,
    /// Path below the cache directory.
    pub path: PathBuf,
    /// Path or location of its archive, without secrets, if an index names it.
    pub source: Option<Vec<u8>>,
    /// Version of its archive.
    pub version: Option<String>,
    /// Disk space that it occupies, in bytes.
    pub held_bytes: u64,
    /// Time of the last use.
    pub used: SystemTime,
    /// Whether a process is using it now.
    pub in_use: bool,
    file: SharedFile,
    remove: fn(&SharedFile) -> io::Result<bool>,
}

/// Kind of a file in a cache directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The index of an archive.
    Index,
    /// A manifest or configuration of an image in a registry.
    Document,
    /// Decoded data of an archive.
    DiskCache,
    /// An index or a disk cache that is not finished.
    Unfinished,
}

impl CacheEntry {
    /// Removes the file unless it is in use; returns whether it did.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self) -> io::Result<bool> {
        match (self.remove)(&self.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            removed => removed,
        }
    }
}

/// Lists the files of the cache at `cache_dir`, most recently used first. A missing directory has no files.
///
/// # Errors
/// When the directory is not a cache, other users have access to it, or it cannot be read.
pub fn list(cache_dir: &Path) -> Result<Vec<CacheEntry>, InventoryError> {
    let system = |cause| InventoryError::System {
        path: cache_dir.to_owned(),
        cause,
    };
    let names = match TrustedDir::open(cache_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened.and_then(|directory| directory.names()),
    };
    let names = names.map_err(system)?;
    let is_ours = |name: &String| CACHE_SUBDIRECTORIES.contains(&name.as_str());
    if !names.is_empty() && !names.iter().any(is_ours) {
        return Err(InventoryError::Foreign(cache_dir.to_owned()));
    }
    let stored = Store::new(cache_dir).files().map_err(system)?;
    let cached = DiskCacheDir::new(cache_dir, None).files().map_err(system)?;
    let mut origins = HashMap::new();
    let mut all: Vec<_> = stored
        .into_iter()
        .map(|stored| {
            let origin = store::origin(&stored);
            let entry = index_entry(stored, origin.as_ref());
            if let Some(origin) = origin {
                origins.insert(disk_cache_name(&origin), origin);
            }
            entry
        })
        .collect();
    let cached = cached.into_iter();
    all.extend(cached.filter_map(|file| data_entry(file, &origins)));
    all.sort_by(|one, other| other.used.cmp(&one.used).then(one.path.cmp(&other.path)));
    Ok(all)
}

fn index_entry(stored: SharedFile, origin: Option<&Origin>) -> CacheEntry {
    let is_document = store::is_document(&stored.name);
    let kind = match (store::is_finished(&stored.name), is_document) {
        (true, false) => Kind::Index,
        (true, true) => Kind::Document,
        (false, _) => Kind::Unfinished,
    };
    CacheEntry {
        remove: store::remove,
        ..entry(kind, "index", stored, origin)
    }
}

fn data_entry(cache_file: SharedFile, origins: &HashMap<String, Origin>) -> Option<CacheEntry> {
    let content = cache::content_key(&cache_file.name);
    let kind = match content {
        Some(content) if is_content_hash(content) => Kind::DiskCache,
        None if cache::is_unfinished(&cache_file.name) => Kind::Unfinished,
        // Leaves files alone that tarfs does not seem to have made.
        Some(_) | None => return None,
    };
    let origin = content.and_then(|content| origins.get(content));
    Some(entry(kind, "disk-cache", cache_file, origin))
}

fn entry(kind: Kind, directory: &str, file: SharedFile, origin: Option<&Origin>) -> CacheEntry {
    CacheEntry {
        kind,
        path: Path::new(directory).join(&file.name),
        source: origin.map(source_of),
        version: origin.map(|origin| origin.locator.fingerprint.clone()),
        held_bytes: file.held_bytes,
        used: file.used,
        in_use: file.is_in_use(),
        file,
        remove: SharedFile::remove,
    }
}

fn source_of(origin: &Origin) -> Vec<u8> {
    match &origin.local_path {
        path if path.is_empty() => origin.locator.canonical.clone().into(),
        path => path.clone(),
    }
}

fn is_content_hash(content: &str) -> bool {
    content.len() == 64 && content.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the entries of `all` to remove.
///
/// These are unfinished files, files unused for `max_age`, and the least recently used ones beyond
/// `max_bytes`. Without either limit, the maximum age of indexes applies. Files in use are never removed.
pub fn surplus(
    all: &[CacheEntry],
    max_bytes: Option<u64>,
    max_age: Option<Duration>,
    now: SystemTime,
) -> Vec<&CacheEntry> {
    let default_age = match max_bytes {
        Some(_) => Duration::MAX,
        None => RETENTION_POLICY.max_age,
    };
    let bounds = RetentionPolicy {
        max_bytes: max_bytes.unwrap_or(u64::MAX),
        max_age: max_age.unwrap_or(default_age),
    };
    bounds.expired(all, now, |entry| RetainedItem {
        last_used: entry.used,
        bytes: entry.held_bytes,
        in_use: entry.in_use,
        is_finished: entry.kind != Kind::Unfinished,
    })
}
