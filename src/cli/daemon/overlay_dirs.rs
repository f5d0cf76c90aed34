//! `tarfs mount --writable`: the directories of the overlay and their lifetime.
//!
//! `upper` and `work` are in the --upper directory, for later mounts too, or else in a scratch directory,
//! which only this user can enter and which is removed with the mount. The read-only mount is also in a
//! scratch directory until the overlay covers it.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rustix::fs::{
    AtFlags, CWD, Timestamps, XattrFlags, lgetxattr, llistxattr, lsetxattr, statfs, utimensat,
};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::scratch_dir::remove_scratch;
use super::supervisor::{SupervisorLink, TakeoverState};
use crate::cli::args::MountArgs;
use crate::cli::environment;
use tarfs::fuse::{
    LOWER_DIR_NAME, Mount, MountOptions, MountTarget, SCRATCH_PREFIX, SuperblockWatch, UpperDirs,
};
use tarfs::internal::directory::create_missing_dir;
use tarfs::internal::lock::{LockHolder, LockKind, lock as lock_file};
use tarfs::internal::publish::random_suffix;
use tarfs::layers::WhiteoutFormat;
use tarfs::serve::OverlayStatus;

/// Time for which a dead process may still hold its lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// `OVERLAYFS_SUPER_MAGIC`, `FUSE_SUPER_MAGIC` and `NFS_SUPER_MAGIC`, which overlayfs rejects for `upper`.
const UNSUPPORTED_FS_TYPES: [i128; 3] = [0x794c_7630, 0x6573_5546, 0x6969];

#[derive(Debug)]
pub(crate) struct OverlayDirs {
    /// The --upper directory and its lock. Without it, `upper` and `work` are in the scratch directory.
    persistent: Option<(PathBuf, Option<File>)>,
    scratch: OnceLock<ScratchDir>,
}

/// Scratch directory of one mount, removed with it.
#[derive(Debug)]
struct ScratchDir {
    path: PathBuf,
    /// Whether this process removes it. A later successor may need an inherited directory.
    is_owned: AtomicBool,
    has_overlay: AtomicBool,
    has_lower_ended: AtomicBool,
    overlay: OnceLock<SuperblockWatch>,
    /// Programs that delete old temporary files skip a locked directory.
    _lock: Option<File>,
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        if self.is_owned.load(Ordering::Relaxed) && self.is_unused() {
            remove_scratch(&self.path);
        }
    }
}

/// Locks the --upper directory of `args`, before the long work; `None` without --writable.
pub(crate) fn open_overlay_dirs(
    args: &MountArgs,
    takeover: Option<&TakeoverState>,
) -> anyhow::Result<Option<OverlayDirs>> {
    if !args.writable {
        return Ok(None);
    }
    let scratch = OnceLock::new();
    let inherited = takeover.and_then(|takeover| takeover.scratch.clone());
    let is_successor = inherited.is_some();
    let persistent = match &args.upper {
        None => None,
        // A successor has the same current directory, so a relative path leads to the mount's directory.
        Some(named) if is_successor => Some(reopen_persistent_dir(named)),
        Some(named) => Some(open_persistent_dir(named, &args.mountpoint)?),
    };
    if let Some(inherited) = inherited {
        // Cannot fail, because it is set only once.
        drop(scratch.set(ScratchDir::at(inherited, false)));
    } else {
        Mount::check_writable()?;
    }
    Ok(Some(OverlayDirs {
        persistent,
        scratch,
    }))
}

/// Refuses `--restart` unless a successor can take over the mount (`is_possible`).
pub(crate) fn ensure_restart_possible(args: &MountArgs, is_possible: bool) -> anyhow::Result<()> {
    ensure!(
        is_possible || !args.restart,
        "--restart with --writable needs Linux 6.9 or later and a source that identifies each version reliably"
    );
    Ok(())
}

impl ScratchDir {
    fn at(path: PathBuf, is_owned: bool) -> Self {
        let lock = File::open(&path).ok();
        if let Some(lock) = &lock {
            // No process locks it exclusively, so this lock is always granted.
            lock_file(lock, LockKind::Shared, Duration::ZERO).ok();
        }
        Self {
            path,
            is_owned: AtomicBool::new(is_owned),
            has_overlay: AtomicBool::new(!is_owned),
            has_lower_ended: AtomicBool::new(false),
            overlay: OnceLock::new(),
            _lock: lock,
        }
    }

    /// Returns a watch for the end of the overlay at `site`, which writes to this directory from now on.
    fn watch_overlay(&self, site: &MountTarget) -> Option<&SuperblockWatch> {
        self.has_overlay.store(true, Ordering::Relaxed);
        match SuperblockWatch::on(&site.mountpoint) {
            Ok(watch) => Some(self.overlay.get_or_init(|| watch)),
            Err(error) => {
                tracing::warn!(%error, "the end of the overlay cannot be watched");
                None
            }
        }
    }

    /// Whether no process uses the overlay. Otherwise the supervisor removes the directory later.
    fn is_unused(&self) -> bool {
        let has_ended = || self.has_lower_ended.load(Ordering::Relaxed);
        let ended = self
            .overlay
            .get()
            .map_or_else(has_ended, SuperblockWatch::has_ended);
        ended || !self.has_overlay.load(Ordering::Relaxed)
    }
}

impl OverlayDirs {
    /// Creates the directory for the read-only mount until the overlay covers it.
    pub(crate) fn create_lower_dir(
        &self,
        supervisor: Option<&SupervisorLink>,
    ) -> anyhow::Result<PathBuf> {
        let path = create_scratch_dir(self.persistent.is_none())?;
        let scratch = self.scratch.get_or_init(|| ScratchDir::at(path, true));
        if let Some(supervisor) = supervisor {
            supervisor.report_scratch_dir(&scratch.path);
        }
        Ok(scratch.path.join(LOWER_DIR_NAME))
    }

    /// Records that this process has taken over the inherited mount.
    pub(crate) fn mark_adopted(&self) {
        if let Some(scratch) = self.scratch.get() {
            scratch.is_owned.store(true, Ordering::Relaxed);
        }
    }

    /// Records that the mount below has ended, and the overlay with it.
    pub(crate) fn mark_lower_ended(&self) {
        if let Some(scratch) = self.scratch.get() {
            scratch.has_lower_ended.store(true, Ordering::Relaxed);
        }
    }

    fn upper(&self) -> UpperDirs {
        let persistent = self.persistent.as_ref().map(|(home, _)| home);
        let scratch = self.scratch.get().map(|scratch| &scratch.path);
        let home = persistent.or(scratch).cloned().unwrap_or_default();
        UpperDirs {
            upper: home.join("upper"),
            work: home.join("work"),
            is_temporary: self.persistent.is_none(),
        }
    }

    /// Mounts the overlay over `mount`, which is in the directory of
    /// [`create_lower_dir`](Self::create_lower_dir). If that fails, `mount` is unchanged.
    pub(crate) fn mount_overlay(
        &self,
        mount: &mut Mount,
        source: &str,
        mountpoint: &Path,
        options: &MountOptions,
        supervisor: Option<&SupervisorLink>,
    ) -> anyhow::Result<()> {
        let upper = self.upper();
        let lower = mount.target.mountpoint.clone();
        create_upper(&lower, &upper)
            .with_context(|| format!("cannot make {}", upper.upper.display()))?;
        mount.add_overlay(&upper, source, mountpoint, options, |site| {
            let scratch = self.scratch.get().filter(|_| upper.is_temporary);
            let watch = scratch.and_then(|scratch| scratch.watch_overlay(site));
            if let Some(supervisor) = supervisor {
                supervisor.report_overlay(site, watch);
            }
        })?;
        // If this fails, they are removed with the mount.
        drop(fs::remove_dir(&lower));
        if let (false, Some(scratch)) = (upper.is_temporary, lower.parent()) {
            drop(fs::remove_dir(scratch));
        }
        Ok(())
    }

    pub(crate) fn status(&self, mount: &Mount) -> OverlayStatus {
        let upper = self.upper();
        OverlayStatus {
            upper: upper.upper.to_string_lossy().into_owned(),
            is_temporary: upper.is_temporary,
            by: (mount.target.overlay)
                .map_or("", |(cover, _)| cover.name())
                .to_owned(),
        }
    }
}

/// Creates the --upper directory if it is missing, for this user alone, and locks it.
fn open_persistent_dir(named: &Path, mountpoint: &Path) -> anyhow::Result<(PathBuf, Option<File>)> {
    let name = || named.display().to_string();
    create_missing_dir(named, 0o700).with_context(|| format!("cannot make {}", name()))?;
    let home = fs::canonicalize(named).with_context(|| format!("cannot use {}", name()))?;
    let mountpoint = tarfs::fuse::canonical_mountpoint(mountpoint)?;
    ensure!(
        !home.starts_with(&mountpoint),
        "{}: the mount on {} would hide it (name a directory beside it)",
        home.display(),
        mountpoint.display()
    );
    let lock = File::open(&home).with_context(|| format!("cannot use {}", name()))?;
    match lock_file(&lock, LockKind::Exclusive, Duration::ZERO) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => bail!(
            "{}: another mount writes there ({} has locked it)",
            home.display(),
            LockHolder::of(&lock)
        ),
        Err(errno) => return Err(errno).with_context(|| format!("cannot lock {}", name())),
    }
    Ok((home, Some(lock)))
}

/// Opens --upper again for a successor, even without the lock, which the dead process may still hold.
fn reopen_persistent_dir(named: &Path) -> (PathBuf, Option<File>) {
    let home = fs::canonicalize(named).unwrap_or_else(|_| named.to_owned());
    let lock = File::open(&home).ok();
    let lock = lock.filter(|lock| lock_file(lock, LockKind::Exclusive, LOCK_TIMEOUT).is_ok());
    (home, lock)
}

/// Creates a scratch directory with a mountpoint in the best place, for `upper` too if `holds_upper`.
fn create_scratch_dir(holds_upper: bool) -> anyhow::Result<PathBuf> {
    let places = environment::scratch_dirs();
    let fit = places
        .iter()
        .find(|place| !holds_upper || supports_upper(place));
    let Some(place) = fit.or(places.first()) else {
        bail!("there is no place for temporary directories");
    };
    let name = format!("{SCRATCH_PREFIX}{}", random_suffix());
    let made = fs::canonicalize(place).and_then(|place| {
        let scratch = place.join(name);
        DirBuilder::new().mode(0o700).create(&scratch)?;
        if let Err(error) = fs::create_dir(scratch.join(LOWER_DIR_NAME)) {
            fs::remove_dir(&scratch)?;
            return Err(error);
        }
        Ok(scratch)
    });
    made.with_context(|| format!("cannot make a directory in {}", place.display()))
}

/// Whether overlayfs accepts `directory` for `upper`, as far as is known.
fn supports_upper(directory: &Path) -> bool {
    statfs(directory).is_ok_and(|found| is_supported_fs_type(found.f_type.into()))
}

/// Compares 32 bits, because `f_type` is a signed word on some machines.
fn is_supported_fs_type(f_type: i128) -> bool {
    !UNSUPPORTED_FS_TYPES.contains(&(f_type & 0xFFFF_FFFF))
}

/// Creates the missing directories of `upper`. The overlay shows its attributes, so they come from `lower`.
fn create_upper(lower: &Path, upper: &UpperDirs) -> io::Result<()> {
    create_missing_dir(&upper.work, 0o700)?;
    if upper.upper.is_dir() {
        return Ok(());
    }
    // The final name appears only with all attributes.
    let new = upper.upper.with_extension("new");
    create_missing_dir(&new, 0o700)?;
    copy_attributes(lower, &new)?;
    fs::rename(new, &upper.upper)
}

/// Copies attributes from `from` to `to`, as far as this user may.
fn copy_attributes(from: &Path, to: &Path) -> io::Result<()> {
    let found = fs::metadata(from)?;
    if rustix::process::geteuid().is_root() {
        for (user, group) in [(Some(found.uid()), None), (None, Some(found.gid()))] {
            match chown(to, user, group) {
                // The ID is not mapped in this user namespace.
                Err(error) if error.kind() == ErrorKind::InvalidInput => {}
                done => done?,
            }
        }
    }
    fs::set_permissions(to, Permissions::from_mode(found.mode() & 0o7777))?;
    for name in list_xattrs(from)? {
        // Attributes of overlayfs itself must not be copied.
        if WhiteoutFormat::Overlay.hides_xattr(&name) {
            continue;
        }
        let name = OsStr::from_bytes(&name);
        let mut value = vec![0; 1 << 16];
        let copied = lgetxattr(from, name, &mut value).and_then(|len| {
            lsetxattr(
                to,
                name,
                value.get(..len).unwrap_or_default(),
                XattrFlags::empty(),
            )
        });
        match copied {
            // Not permitted, not supported, removed, or of users that are not mapped here.
            Ok(()) | Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NODATA | Errno::INVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    let time = |tv_sec, nanos: i64| Timespec {
        tv_sec,
        tv_nsec: nanos,
    };
    let times = Timestamps {
        last_access: time(found.atime(), found.atime_nsec()),
        last_modification: time(found.mtime(), found.mtime_nsec()),
    };
    Ok(utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

fn list_xattrs(path: &Path) -> io::Result<Vec<Vec<u8>>> {
    let mut list = vec![0; 1 << 16];
    let len = match llistxattr(path, &mut list) {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => 0,
        Err(errno) => return Err(errno.into()),
    };
    list.truncate(len);
    let names = list
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty());
    Ok(names.map(<[u8]>::to_vec).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: upper-root
    #[test]
    fn new_upper_copies_root_attributes_and_existing_keeps_its_own() {
        let place = tempfile::tempdir().expect("a directory");
        let lower = place.path().join("lower");
        fs::create_dir(&lower).expect("made");
        fs::set_permissions(&lower, Permissions::from_mode(0o1751)).expect("set");
        lsetxattr(&lower, "user.colour", b"red", XattrFlags::empty()).expect("set");
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 5,
                tv_nsec: 6,
            },
            last_modification: Timespec {
                tv_sec: 7,
                tv_nsec: 8,
            },
        };
        utimensat(CWD, &lower, &times, AtFlags::empty()).expect("set");
        let upper = UpperDirs {
            upper: place.path().join("upper"),
            work: place.path().join("work"),
            is_temporary: false,
        };
        create_upper(&lower, &upper).expect("made");
        let found = fs::metadata(&upper.upper).expect("there");
        assert_eq!(found.mode() & 0o7777, 0o1751);
        assert_eq!((found.mtime(), found.mtime_nsec()), (7, 8));
        let mut value = [0; 8];
        assert_eq!(lgetxattr(&upper.upper, "user.colour", &mut value), Ok(3));

        fs::set_permissions(&upper.upper, Permissions::from_mode(0o700)).expect("set");
        create_upper(&lower, &upper).expect("there");
        let found = fs::metadata(&upper.upper).expect("there");
        assert_eq!(found.mode() & 0o7777, 0o700);
    }

    #[test]
    fn unsupported_upper_filesystem_is_skipped() {
        // ext4, and overlayfs.
        assert!(is_supported_fs_type(0xef53) && !is_supported_fs_type(0x794c_7630));
    }

    #[test]
    fn only_a_scratch_directory_is_removed() {
        let place = tempfile::tempdir().expect("a directory");
        let kept = place.path().join("kept");
        let scratch = place.path().join(format!("{SCRATCH_PREFIX}1"));
        for directory in [&kept, &scratch] {
            fs::create_dir_all(directory.join("deep")).expect("made");
            remove_scratch(directory);
        }
        assert!(kept.exists() && !scratch.exists());
        remove_scratch(&scratch);
    }
}
