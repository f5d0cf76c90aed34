//! Plain bytes on disk, for streams that cannot be decoded from the middle.
//!
//! One sparse file: plain byte *n* lies at file offset *n*, and whatever was not spooled is a
//! hole. There is no table of contents, because none is needed: a reader knows each span's hash
//! from the index, so a hole, a torn write or a foreign file is simply not what it looks for.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::base::extent::{Extent, Plain};

/// A spool file: written during a scan, or piece by piece as its bytes are decoded, and read.
#[derive(Debug)]
pub struct Spool {
    file: File,
    place: Mutex<Place>,
    limit_bytes: u64,
    spooled_bytes: AtomicU64,
}

/// Where a spool's file lies.
#[derive(Clone, Debug)]
struct Place {
    path: PathBuf,
    /// Whether that is the name by which later mounts find it.
    published: bool,
}

/// Why bytes were not spooled.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// The spool would grow over its limit.
    #[error("the spool needs more than the {limit_bytes} bytes it may take")]
    Full {
        /// The limit.
        limit_bytes: u64,
    },
    /// The disk said no.
    #[error("cannot write the spool {path}")]
    Io {
        /// Which file.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Spool {
    /// A new, nameless-to-others spool in `directory` that may take `limit_bytes` of disk. It
    /// disappears when dropped, unless published.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn create(directory: &Path, limit_bytes: u64) -> Result<Self, SpoolError> {
        let failed = |path: &Path, source| SpoolError::Io {
            path: path.display().to_string(),
            source,
        };
        std::fs::create_dir_all(directory).map_err(|error| failed(directory, error))?;
        let process = std::process::id();
        for attempt in 0..1000 {
            let path = directory.join(format!(".{process}-{attempt}.spool"));
            let made = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path);
            match made {
                Ok(file) => {
                    return Ok(Self {
                        file,
                        place: Mutex::new(Place {
                            path,
                            published: false,
                        }),
                        limit_bytes,
                        spooled_bytes: AtomicU64::new(0),
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(&path, error)),
            }
        }
        Err(failed(directory, io::ErrorKind::AlreadyExists.into()))
    }

    /// The spool that an earlier mount published under `name`, if it is there. What it holds
    /// already counts against `limit_bytes`.
    pub fn open(directory: &Path, name: &str, limit_bytes: u64) -> Option<Self> {
        let path = directory.join(name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
            .open(&path)
            .ok()?;
        let held_bytes = file.metadata().ok()?.blocks().saturating_mul(512);
        Some(Self {
            file,
            place: Mutex::new(Place {
                path,
                published: true,
            }),
            limit_bytes,
            spooled_bytes: AtomicU64::new(held_bytes),
        })
    }

    /// Makes room in `directory` for a new spool: removes published ones, the one written longest
    /// ago first, until those that stay hold at most half of `limit_bytes`, and returns how much
    /// of the limit is left. Whoever still reads a removed spool keeps it until done.
    pub fn make_room(directory: &Path, limit_bytes: u64) -> u64 {
        let mut spools = published(directory);
        spools.sort_by_key(|spool| spool.written);
        let mut held_bytes: u64 = spools.iter().map(|spool| spool.held_bytes).sum();
        for spool in spools {
            if held_bytes <= limit_bytes / 2 {
                break;
            }
            if std::fs::remove_file(&spool.path).is_ok() {
                held_bytes -= spool.held_bytes;
            }
        }
        limit_bytes.saturating_sub(held_bytes)
    }

    /// Writes plain bytes to their place.
    ///
    /// # Errors
    /// [`SpoolError::Full`] at the limit; [`SpoolError::Io`] when the disk says no. Bytes may
    /// then be there in part, which a reader notices by their hash.
    pub fn write(&self, offset: Plain, bytes: &[u8]) -> Result<(), SpoolError> {
        let len = bytes.len() as u64;
        let before = self.spooled_bytes.fetch_add(len, Ordering::Relaxed);
        if before.saturating_add(len) > self.limit_bytes {
            self.spooled_bytes.fetch_sub(len, Ordering::Relaxed);
            return Err(SpoolError::Full {
                limit_bytes: self.limit_bytes,
            });
        }
        self.file
            .write_all_at(bytes, offset.0)
            .map_err(|source| SpoolError::Io {
                path: self.place().path.display().to_string(),
                source,
            })
    }

    /// The plain bytes of `extent` as the file has them, zeros where nothing was spooled; `None`
    /// when the file ends before. The caller verifies them.
    pub fn read(&self, extent: Extent<Plain>) -> Option<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(extent.len()).ok()?];
        self.file.read_exact_at(&mut bytes, extent.start().0).ok()?;
        Some(bytes)
    }

    /// Gives the file the name by which later mounts find it.
    ///
    /// # Errors
    /// When it cannot be renamed.
    pub fn publish(&self, name: &str) -> io::Result<()> {
        let mut place = self.place();
        let path = place.path.with_file_name(name);
        std::fs::rename(&place.path, &path)?;
        *place = Place {
            path,
            published: true,
        };
        Ok(())
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes it holds, or a few more: those written twice count twice.
    pub fn spooled_bytes(&self) -> u64 {
        self.spooled_bytes.load(Ordering::Relaxed)
    }
}

/// A spool file of a directory, open or not.
struct Published {
    path: PathBuf,
    held_bytes: u64,
    written: SystemTime,
}

fn published(directory: &Path) -> Vec<Published> {
    let Ok(entries) = directory.read_dir() else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let metadata = entry.metadata().ok().filter(Metadata::is_file)?;
            Some(Published {
                path: entry.path(),
                held_bytes: metadata.blocks().saturating_mul(512),
                written: metadata.modified().ok()?,
            })
        })
        .collect()
}

impl Drop for Spool {
    fn drop(&mut self) {
        let place = self.place();
        if !place.published {
            // Nothing can be done about a failure, and a later cleaning finds the file.
            drop(std::fs::remove_file(&place.path));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_from_their_own_offset() {
        let directory = tempfile::tempdir().expect("a directory");
        let spool = Spool::create(directory.path(), 100).expect("a spool");
        spool.write(Plain(1 << 30), b"far").expect("room");
        let extent = Extent::with_len(Plain(1 << 30), 3);
        assert_eq!(spool.read(extent).as_deref(), Some(&b"far"[..]));
        assert_eq!(spool.read(Extent::with_len(Plain((1 << 30) + 1), 3)), None);
    }

    #[test]
    fn the_limit_counts_what_is_written_and_not_where() {
        let directory = tempfile::tempdir().expect("a directory");
        let spool = Spool::create(directory.path(), 4).expect("a spool");
        spool.write(Plain(1000), b"four").expect("room");
        assert!(matches!(
            spool.write(Plain(2000), b"x"),
            Err(SpoolError::Full { limit_bytes: 4 })
        ));
    }

    #[test]
    fn old_spools_make_room_for_a_new_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let publish = |name: &str| {
            let spool = Spool::create(directory.path(), 1 << 20).expect("a spool");
            spool.write(Plain(0), &[1; 8192]).expect("room");
            spool.file.sync_all().expect("blocks are allocated");
            spool.publish(name).expect("renamed");
        };
        publish("first");
        publish("second");
        assert_eq!(
            Spool::make_room(directory.path(), 1 << 20),
            (1 << 20) - 16384
        );
        assert_eq!(Spool::make_room(directory.path(), 20_000), 20_000 - 8192);
        assert!(Spool::open(directory.path(), "first", 0).is_none());
        assert!(Spool::open(directory.path(), "second", 0).is_some());
        assert_eq!(Spool::make_room(&directory.path().join("none"), 7), 7);
    }

    #[test]
    fn only_a_published_spool_outlives_its_owner() {
        let directory = tempfile::tempdir().expect("a directory");
        drop(Spool::create(directory.path(), 4).expect("a spool"));
        assert_eq!(directory.path().read_dir().expect("readable").count(), 0);

        let spool = Spool::create(directory.path(), 4).expect("a spool");
        spool.write(Plain(0), b"four").expect("room");
        spool.publish("known").expect("renamed");
        drop(spool);
        let spool = Spool::open(directory.path(), "known", 1 << 20).expect("published");
        assert!(spool.spooled_bytes() >= 4, "what is there counts");
        spool.write(Plain(4), b"more").expect("room");
        assert_eq!(
            spool.read(Extent::with_len(Plain(0), 4)).as_deref(),
            Some(&b"four"[..])
        );
    }
}
