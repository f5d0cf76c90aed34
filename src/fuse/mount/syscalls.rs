//! System calls that mount and unmount: mount(2) and umount(2), or fusermount3 without permission.

use std::ffi::{CString, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags, fstat, makedev, statx};
use rustix::io::{Errno, FdFlags, fcntl_setfd, retry_on_intr};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
    mount_change, move_mount, open_tree,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
    recvmsg, socketpair,
};
use rustix::process::{getgid, getuid};

use super::error::{FUSE_DEVICE, FUSERMOUNT, MountError, UnmountError};
use super::mountinfo;
use super::options::MountOptions;
use super::pinned::{
    Liveness, MountpointEntry, PinnedMount, UnmountMode, ask_for_liveness, proc_fd_path,
};
use crate::base::foreign_command::foreign_command;
use crate::base::mount_point::UniqueMountId;
use crate::base::passwd::Accounts;
use crate::base::wait::wait_for;

/// Major number of the FUSE device on every Linux: a miscellaneous character device.
const FUSE_MAJOR: u32 = 10;
const FUSE_MINOR: u32 = 229;
/// Environment variable with the socket on which the helper sends the device.
const FUSERMOUNT_SOCKET_ENV: &str = "_FUSE_COMMFD";
const SUBTYPE: &str = "tarfs";
pub(super) const TARFS_FS_TYPE: &str = "fuse.tarfs";

/// An open directory to mount on. Another user cannot redirect the mount by a rename or a link.
#[derive(Debug)]
pub(super) struct Mountpoint(pub(super) OwnedFd);

impl Mountpoint {
    /// Its path now: absolute, without symbolic links.
    pub(super) fn path(&self) -> Result<PathBuf, MountError> {
        Ok(fs::read_link(proc_fd_path(&self.0))?)
    }
}

pub(super) fn open_mountpoint(path: &Path) -> Result<Mountpoint, MountError> {
    let at = |errno: Errno| MountError::at(path, errno.into());
    if unmount_dead(path) == Liveness::Silent {
        return Err(MountError::Silent(path.to_owned()));
    }
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty()).map_err(at)?;
    let stat = fstat(&directory).map_err(at)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        Ok(Mountpoint(directory))
    } else {
        Err(MountError::NotADirectory(path.to_owned()))
    }
}

/// Unmounts the tarfs mount at `path` if it is dead. Returns its liveness, which is [`Liveness::Dead`] without a mount.
pub fn unmount_dead(path: &Path) -> Liveness {
    let Ok(Some((canonical, mount))) = pin(path) else {
        return Liveness::Dead;
    };
    let liveness = ask_for_liveness(&mount.mount).unwrap_or(Liveness::Alive);
    if liveness == Liveness::Dead {
        match unmount_pinned(mount, &canonical, UnmountMode::Force) {
            Ok(()) => tracing::info!(mountpoint = %canonical.display(), "unmounted a dead mount"),
            Err(error) => tracing::debug!(%error, "cannot unmount a dead mount"),
        }
    }
    liveness
}

/// Whether the tarfs mount at `path` is dead. False without one.
pub(super) fn is_dead(path: &Path) -> bool {
    let mount = pin(path).ok().flatten();
    let liveness = mount.map(|(_, mount)| ask_for_liveness(&mount.mount));
    liveness.is_some_and(|liveness| liveness.is_ok_and(|liveness| liveness == Liveness::Dead))
}

/// The tarfs mount at `path`, if there is one, and its canonical mountpoint.
fn pin(path: &Path) -> io::Result<Option<(PathBuf, PinnedMount)>> {
    let canonical = mountinfo::canonical_mountpoint(path)?;
    let mount = PinnedMount::open(&canonical, TARFS_FS_TYPE)?;
    Ok(mount.map(|mount| (canonical, mount)))
}

pub(super) fn check_available() -> Result<(), MountError> {
    match open_fuse_device() {
        Ok(_) => Ok(()),
        // The helper may have the permission.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        Err(error) => Err(device_open_error(error)),
    }
}

fn open_fuse_device() -> io::Result<File> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open(FUSE_DEVICE)?;
    let found = device.metadata()?;
    if found.file_type().is_char_device() && found.rdev() == makedev(FUSE_MAJOR, FUSE_MINOR) {
        Ok(device)
    } else {
        Err(Errno::NODEV.into())
    }
}

fn device_open_error(error: io::Error) -> MountError {
    match Errno::from_io_error(&error) {
        // ENXIO and ENODEV: the device node exists, but the driver does not.
        Some(Errno::NOENT | Errno::NXIO | Errno::NODEV) => MountError::NoDevice,
        _ => MountError::System(error),
    }
}

/// A mount that was just made.
#[derive(Debug)]
pub(super) struct Connection {
    /// The FUSE device.
    pub(super) device: OwnedFd,
    /// The mount's root, which keeps the mount in use. `None` if mount(2) or the helper mounted it.
    pub(super) root: Option<OwnedFd>,
    /// A detached copy of the mount, of which the kernel makes others.
    pub(super) template: Option<OwnedFd>,
}

/// A detached copy of `mount`, which may be detached itself since Linux 6.15. It has no mounts below, and is not changed when
/// `mount` is.
pub(super) fn copy_mount(mount: impl AsFd) -> io::Result<OwnedFd> {
    const EMPTY_PATH: OpenTreeFlags = OpenTreeFlags::AT_EMPTY_PATH;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | EMPTY_PATH;
    let copy = open_tree(mount, "", flags)?;
    mount_change(proc_fd_path(&copy), MountPropagationFlags::PRIVATE)?;
    Ok(copy)
}

/// A detached copy of the mount `mount_id`, if that is on top at `mountpoint`.
pub(super) fn copy_mount_at(
    mountpoint: &Path,
    mount_id: UniqueMountId,
) -> Result<OwnedFd, MountError> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::open(mountpoint, flags, Mode::empty())?;
    if UniqueMountId::of(&root) != Some(mount_id) {
        return Err(MountError::NotReady);
    }
    Ok(copy_mount(root)?)
}

/// Whether a mount has the attributes that `options` give a new one. A user may have changed them.
pub(super) fn has_attributes(mount_id: UniqueMountId, options: &MountOptions) -> bool {
    let all = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW;
    let found = mount_id.attributes().ok().flatten();
    found.is_some_and(|found| found & all.bits() == mount_attrs(options).bits())
}

/// Mounts the detached mount `root`.
pub(super) fn attach(root: impl AsFd, mountpoint: &Mountpoint) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(root, "", &mountpoint.0, "", flags)?)
}

/// The device number of the file system with this root. Sends no request to it.
pub(super) fn device_number(root: &OwnedFd) -> Result<(u32, u32), MountError> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = statx(root, "", flags, StatxFlags::empty())?;
    Ok((found.stx_dev_major, found.stx_dev_minor))
}

/// Creates a detached mount: its FUSE device and root. Needs Linux 5.2, and at most 255 bytes of `source`.
pub(super) fn create_detached(
    source: &str,
    options: &MountOptions,
) -> Result<(OwnedFd, OwnedFd), MountError> {
    let device = open_fuse_device().map_err(device_open_error)?;
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [
        ("source", source),
        ("subtype", SUBTYPE),
        ("fd", &device.as_raw_fd().to_string()),
        ("rootmode", "40000"),
        ("user_id", &getuid().as_raw().to_string()),
        ("group_id", &getgid().as_raw().to_string()),
    ] {
        fsconfig_set_string(&context, key, value)?;
    }
    for word in fuse_flags(options).chain(["ro"]) {
        fsconfig_set_flag(&context, word)?;
    }
    fsconfig_create(&context)?;
    let flags = FsMountFlags::FSMOUNT_CLOEXEC;
    let root = fsmount(&context, flags, mount_attrs(options))?;
    Ok((device.into(), root))
}

fn mount_attrs(options: &MountOptions) -> MountAttrFlags {
    let mut attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOSUID, !options.suid);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NODEV, !options.dev);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, options.noexec);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW, options.nosymfollow);
    attributes
}

fn mount_by_fsmount(
    mountpoint: &Mountpoint,
    source: &str,
    options: &MountOptions,
) -> Result<Connection, MountError> {
    let (device, root) = create_detached(source, options)?;
    let template = copy_mount(&root);
    let template =
        template.inspect_err(|error| tracing::debug!(%error, "no other mount shares it"));
    attach(&root, mountpoint)?;
    Ok(Connection {
        device,
        root: Some(root),
        template: template.ok(),
    })
}

pub(super) fn mount(
    mountpoint: &Mountpoint,
    source: &str,
    options: &MountOptions,
) -> Result<Connection, MountError> {
    // mount(2) may work where the new calls are missing or forbidden, and its error is the better one.
    match mount_by_fsmount(mountpoint, source, options) {
        Ok(mount) => return Ok(mount),
        Err(error) => tracing::debug!(error = format!("{error:?}"), "falls back to mount(2)"),
    }
    let device = mount_by_path(mountpoint, source, options)?;
    Ok(Connection {
        device,
        root: None,
        template: None,
    })
}

fn mount_by_path(
    mountpoint: &Mountpoint,
    source: &str,
    options: &MountOptions,
) -> Result<OwnedFd, MountError> {
    let mount_with_fusermount =
        || mount_with_fusermount(&mountpoint.path()?, &fusermount_options(source, options));
    let path = proc_fd_path(&mountpoint.0);
    match open_fuse_device() {
        Ok(device) => match mount_directly(&device, &path, source, options) {
            Ok(()) => Ok(device.into()),
            Err(Errno::PERM) => mount_with_fusermount(),
            Err(Errno::NODEV) => Err(MountError::NoDevice),
            Err(errno) => Err(errno.into()),
        },
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => mount_with_fusermount(),
        Err(error) => Err(device_open_error(error)),
    }
}

fn mount_directly(
    device: &File,
    mountpoint: &Path,
    source: &str,
    options: &MountOptions,
) -> rustix::io::Result<()> {
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={}",
        device.as_raw_fd(),
        getuid().as_raw(),
        getgid().as_raw(),
    );
    for word in fuse_flags(options) {
        data.push(',');
        data.push_str(word);
    }
    let data = CString::new(data).map_err(|_| Errno::INVAL)?;
    let flags = MountFlags::RDONLY | mount_flags(options);
    rustix::mount::mount(source, mountpoint, TARFS_FS_TYPE, flags, data.as_c_str())
}

fn fuse_flags(options: &MountOptions) -> impl Iterator<Item = &'static str> {
    [
        (options.allow_other, "allow_other"),
        (options.checks_permissions(), "default_permissions"),
    ]
    .into_iter()
    .filter_map(|(wanted, word)| wanted.then_some(word))
}

/// The flags of mount(2), without `MS_RDONLY`.
pub(super) fn mount_flags(options: &MountOptions) -> MountFlags {
    let mut flags = MountFlags::empty();
    flags.set(MountFlags::NOSUID, !options.suid);
    flags.set(MountFlags::NODEV, !options.dev);
    flags.set(MountFlags::NOEXEC, options.noexec);
    flags.set(MountFlags::NOSYMFOLLOW, options.nosymfollow);
    flags
}

pub(super) fn mount_with_fusermount(
    mountpoint: &Path,
    options: &str,
) -> Result<OwnedFd, MountError> {
    // Without close-on-exec, because the helper must inherit its end.
    let flags = SocketFlags::empty();
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    fcntl_setfd(&ours, FdFlags::CLOEXEC)?;
    let helper = foreign_command(FUSERMOUNT)
        .arg("-o")
        .arg(options)
        .arg("--")
        .arg(mountpoint)
        .env(FUSERMOUNT_SOCKET_ENV, theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => MountError::NoFusermount,
            _ => MountError::System(error),
        })?;
    drop(theirs);
    let device = receive_device(&ours);
    drop(ours);
    let output = helper.wait_with_output()?;
    match device {
        Ok(Some(device)) if output.status.success() => Ok(device),
        _ => Err(MountError::Fusermount(
            mountpoint.to_owned(),
            stderr_message(&output),
        )),
    }
}

fn fusermount_options(source: &str, options: &MountOptions) -> String {
    // The helper always mounts nosuid and nodev for ordinary users. It warns about other options.
    let mut words = vec!["ro", "nosuid", "nodev"];
    if options.noexec {
        words.push("noexec");
    }
    if options.nosymfollow {
        // A helper that does not know it fails and says so.
        words.push("nosymfollow");
    }
    words.extend(fuse_flags(options));
    let (words, source) = (words.join(","), MountOptions::escape(source));
    format!("{words},fsname={source},subtype={SUBTYPE}")
}

/// Receives a descriptor; `None` if the socket closes without one.
fn receive_device(socket: impl AsFd) -> rustix::io::Result<Option<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    retry_on_intr(|| {
        let buffers = &mut [IoSliceMut::new(&mut byte)];
        recvmsg(&socket, buffers, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

/// The helper's last message, in one line and without its name.
fn stderr_message(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let prefix = format!("{FUSERMOUNT}: ");
    let mut lines = text
        .lines()
        .map(|line| line.trim_start_matches(&prefix).trim());
    let line = lines.rfind(|line| !line.is_empty());
    line.map_or_else(
        || format!("{FUSERMOUNT} failed ({})", output.status),
        str::to_owned,
    )
}

pub(super) fn is_connected(device: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&device, PollFlags::IN)];
    wait_for(&mut polled, Duration::ZERO).ok();
    let [polled] = polled;
    !polled.revents().contains(PollFlags::ERR)
}

/// Whether `mount` belongs to `connection`, if both have the same device number. The number is unique while
/// the connection is alive. A dead mount of that number may be unmounted, even if it is another connection's.
pub(super) fn is_mount_of_connection(connection: impl AsFd, mount: impl AsFd) -> bool {
    is_connected(connection)
        || ask_for_liveness(mount).is_ok_and(|liveness| liveness == Liveness::Dead)
}

pub(super) fn unmount_or_warn(fs_type: &str, mountpoint: &Path, device: Option<(u32, u32)>) {
    if let Err(error) = unmount(fs_type, mountpoint, device, UnmountMode::Force) {
        tracing::warn!(%error, "cannot unmount");
    }
}

/// Unmounts the mount of type `fs_type` at the canonical `mountpoint`. With `device`, only that file system.
pub(super) fn unmount(
    fs_type: &str,
    mountpoint: &Path,
    device: Option<(u32, u32)>,
    mode: UnmountMode,
) -> Result<(), UnmountError> {
    unmount_if(fs_type, mountpoint, device, mode, |_| true)
}

pub(super) fn unmount_if(
    fs_type: &str,
    mountpoint: &Path,
    device: Option<(u32, u32)>,
    mode: UnmountMode,
    is_target: impl FnOnce(&PinnedMount) -> bool,
) -> Result<(), UnmountError> {
    let found = PinnedMount::open(mountpoint, fs_type);
    let found = found.map_err(|cause| UnmountError::at(mountpoint, cause))?;
    match found.filter(|mount| device.is_none_or(|device| mount.device == device)) {
        Some(mount) if is_target(&mount) => unmount_pinned(mount, mountpoint, mode),
        _ => Err(UnmountError::NotMounted(mountpoint.to_owned())),
    }
}

/// Unmounts `mount`, which the user knows as `mountpoint`. Without permission, by the helper.
fn unmount_pinned(
    mount: PinnedMount,
    mountpoint: &Path,
    mode: UnmountMode,
) -> Result<(), UnmountError> {
    mount.unmount(mode).or_else(|(errno, entry)| match errno {
        Errno::PERM => unmount_with_fusermount(&entry, mountpoint, mode),
        errno => Err(UnmountError::at(mountpoint, errno.into())),
    })
}

/// Unmounts with the helper, which runs in the parent directory and gets the mountpoint's name.
fn unmount_with_fusermount(
    entry: &MountpointEntry,
    mountpoint: &Path,
    mode: UnmountMode,
) -> Result<(), UnmountError> {
    let system = |cause| UnmountError::System(mountpoint.to_owned(), cause);
    let output = foreign_command(FUSERMOUNT)
        .arg(if mode == UnmountMode::IfIdle {
            "-u"
        } else {
            "-uz"
        })
        .arg("--")
        .arg(&entry.name)
        .current_dir(entry.parent_path())
        .stdin(Stdio::null())
        .output()
        .map_err(system)?;
    if output.status.success() {
        return Ok(());
    }
    let stderr_message = stderr_message(&output);
    if let Some(owner) = other_owner(mountpoint) {
        Err(UnmountError::NotOwner(mountpoint.to_owned(), owner))
    } else if stderr_message.contains("busy") {
        Err(UnmountError::Busy(mountpoint.to_owned()))
    } else if stderr_message.contains("not found") || stderr_message.contains("not mounted") {
        Err(UnmountError::NotMounted(mountpoint.to_owned()))
    } else {
        Err(system(io::Error::other(stderr_message)))
    }
}

/// Name and number of the owner of the top mount at `mountpoint`, unless it is this user.
fn other_owner(mountpoint: &Path) -> Option<String> {
    let top = mountinfo::top_mount(mountpoint).ok()??;
    let word = |prefix: &[u8]| {
        let mut words = top.options.split(|&byte| byte == b',');
        words.find_map(|word| word.strip_prefix(prefix))
    };
    let number = if let Some(number) = word(b"user_id=") {
        std::str::from_utf8(number).ok()?.parse().ok()?
    } else {
        // The owner of an overlay owns the parent of its upper directory.
        let upper = PathBuf::from(OsString::from_vec(mountinfo::unescape(word(b"upperdir=")?)));
        fs::metadata(upper.parent()?).ok()?.uid()
    };
    if number == getuid().as_raw() {
        return None;
    }
    let accounts = Accounts::load_system();
    let name = accounts.user_name(number);
    let name = name.unwrap_or(b"a user without a name");
    Some(format!("{} ({number})", String::from_utf8_lossy(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mount that no process serves and that gets no requests.
    fn mounted(on: &Path) -> OwnedFd {
        fs::create_dir_all(on).expect("made");
        let on = open_mountpoint(on).expect("a directory");
        let mounted = mount(&on, "sample.tar", &MountOptions::default());
        mounted.expect("root and FUSE run the tests").device
    }

    // Promises: unmount-number
    #[test]
    #[ignore = "needs root and /dev/fuse"]
    fn unmount_follows_pinned_mount_after_rename() {
        for mode in [UnmountMode::Force, UnmountMode::IfIdle] {
            let directory = tempfile::tempdir().expect("a directory");
            let top = fs::canonicalize(directory.path()).expect("there");
            let (before, after) = (top.join("before"), top.join("after"));
            let device = mounted(&before.join("mnt"));
            let pinned = PinnedMount::open(&before.join("mnt"), TARFS_FS_TYPE);
            let pinned = pinned.expect("readable").expect("mounted");
            fs::rename(&before, &after).expect("renamed");
            let other = mounted(&before.join("mnt"));
            unmount_pinned(pinned, &before.join("mnt"), mode).expect("unmounted");
            let left = |path: &Path| mountinfo::device_at(&path.join("mnt"), TARFS_FS_TYPE);
            assert_eq!(left(&after).expect("readable"), None, "{mode:?}");
            let number = left(&before).expect("readable");
            assert!(number.is_some() && is_connected(&other), "{mode:?}");
            // A mount of another number on the same directory is not unmounted either.
            let wrong = number.map(|(major, minor)| (major, minor + 1));
            assert!(matches!(
                unmount(TARFS_FS_TYPE, &before.join("mnt"), wrong, mode),
                Err(UnmountError::NotMounted(_))
            ));
            unmount(TARFS_FS_TYPE, &before.join("mnt"), number, mode).expect("unmounted");
            assert_eq!(left(&before).expect("readable"), None, "{mode:?}");
            drop((device, other));
        }
    }

    // Promises: start-place
    #[test]
    #[ignore = "needs root and /dev/fuse"]
    fn mount_after_rename_lands_on_opened_directory() {
        for by_path in [false, true] {
            mount_after_rename(by_path);
        }
    }

    fn mount_after_rename(by_path: bool) {
        let options = MountOptions::default();
        let mount = |mountpoint: &Mountpoint| {
            if by_path {
                mount_by_path(mountpoint, "sample.tar", &options)
            } else {
                mount_by_fsmount(mountpoint, "sample.tar", &options).map(|mount| mount.device)
            }
        };
        let directory = tempfile::tempdir().expect("a directory");
        let top = fs::canonicalize(directory.path()).expect("there");
        let (before, after) = (top.join("before"), top.join("after"));
        fs::create_dir_all(before.join("mnt")).expect("made");
        fs::create_dir_all(top.join("victim/mnt")).expect("made");
        let opened = open_mountpoint(&before.join("mnt")).expect("a directory");
        fs::rename(&before, &after).expect("renamed");
        std::os::unix::fs::symlink("victim", &before).expect("made");
        let device = mount(&opened).expect("root and FUSE run the tests");
        let number = |path: &str| {
            let found = mountinfo::device_at(&top.join(path), TARFS_FS_TYPE);
            found.expect("readable")
        };
        let (victim, opened) = (number("victim/mnt"), number("after/mnt"));
        for path in ["victim/mnt", "after/mnt"] {
            drop(unmount(
                TARFS_FS_TYPE,
                &top.join(path),
                None,
                UnmountMode::Force,
            ));
        }
        drop(device);
        assert!(victim.is_none() && opened.is_some(), "{by_path}");
    }

    // Promises: option-nosymfollow
    #[test]
    fn fusermount_options_follow_mount_options() {
        let options = MountOptions {
            allow_other: true,
            nosymfollow: true,
            ..MountOptions::default()
        };
        assert_eq!(
            fusermount_options("http://host/a,b.tar", &options),
            "ro,nosuid,nodev,nosymfollow,allow_other,default_permissions,\
             fsname=http://host/a\\,b.tar,subtype=tarfs"
        );
    }

    // Promises: option-nosuid
    #[test]
    fn mount_is_nosuid_and_nodev_by_default() {
        let harmless = MountFlags::NOSUID | MountFlags::NODEV;
        assert_eq!(mount_flags(&MountOptions::default()), harmless);
        let root = MountOptions {
            suid: true,
            dev: true,
            noexec: true,
            nosymfollow: true,
            ..MountOptions::default()
        };
        let asked = MountFlags::NOEXEC | MountFlags::NOSYMFOLLOW;
        assert_eq!(mount_flags(&root), asked);
    }

    #[test]
    fn mountpoint_that_is_no_directory_fails() {
        let missing = open_mountpoint(Path::new("/nowhere/at/all")).expect_err("missing");
        assert_eq!(missing.hint(), Some("make the directory first"));
        assert!(matches!(
            open_mountpoint(Path::new("/etc/passwd")),
            Err(MountError::NotADirectory(_))
        ));
    }
}
