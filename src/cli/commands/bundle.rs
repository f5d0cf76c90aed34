//! `tarfs bundle`: writes an image's tree and configuration for a container runtime.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail, ensure};
use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, RenameFlags, ResolveFlags, Timespec, Timestamps, openat,
    renameat_with, utimensat,
};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid};
use rustix::thread::{CapabilitySet, capability_is_in_bounding_set};

use super::write::materialize::{self, MaterializeOptions};
use crate::cli::args::{CacheDirArgs, QuietArg, SourceArgs};
use crate::cli::open_archive;
use crate::cli::ui::cleanup_on_signal::CleanupOnSignal;
use crate::cli::ui::output;
use tarfs::image::{self, Config, SeccompProfile, User, VOLUMES_DIR};
use tarfs::internal::bounded_read::{MAX_SETTINGS_BYTES, read_at_most};
use tarfs::internal::directory::create_missing_dir;
use tarfs::internal::error_chain::error_chain;
use tarfs::internal::escape::escape;
use tarfs::internal::publish::random_suffix;
use tarfs::internal::regular_file;
use tarfs::internal::rooted;
use tarfs::tree::remove_tree;

/// Names of the parts of a bundle.
const CONFIG: &str = "config.json";
const ROOTFS: &str = "rootfs";

/// Arguments of `tarfs bundle`.
#[derive(clap::Args, Debug)]
pub(crate) struct BundleArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    cache_dir: CacheDirArgs,

    /// The bundle's directory, created if it is missing
    #[arg(value_name = "DIR", conflicts_with = "allow_truncated")]
    directory: PathBuf,

    /// Arguments for the image's entry point, instead of its own command
    #[arg(value_name = "ARG", last = true)]
    args: Vec<String>,

    /// Replace an existing bundle
    #[arg(long)]
    force: bool,

    /// Give the container a terminal
    #[arg(short, long)]
    terminal: bool,

    /// Grant these capabilities in addition to the default ones, separated by commas; or ALL
    #[arg(long, value_name = "CAPABILITY", value_delimiter = ',', value_parser = parse_capability)]
    cap_add: Vec<String>,

    /// Do not grant these capabilities, separated by commas; or ALL
    #[arg(long, value_name = "CAPABILITY", value_delimiter = ',', value_parser = parse_capability)]
    cap_drop: Vec<String>,

    /// Filter system calls by a profile of Docker's format: seccomp=FILE, or seccomp=unconfined for none
    ///
    /// The default is the built-in profile.
    #[arg(long, value_name = "OPTION", value_parser = parse_seccomp, hide_short_help = true)]
    security_opt: Option<Seccomp>,

    #[command(flatten)]
    quiet: QuietArg,
}

#[derive(Clone, Debug)]
enum Seccomp {
    None,
    ProfileFile(PathBuf),
}

fn parse_seccomp(option: &str) -> Result<Seccomp, String> {
    match option.strip_prefix("seccomp=") {
        Some("unconfined") => Ok(Seccomp::None),
        Some(file) if !file.is_empty() => Ok(Seccomp::ProfileFile(file.into())),
        _ => Err("write seccomp=FILE or seccomp=unconfined".to_owned()),
    }
}

const ALL_CAPABILITIES: &str = "ALL";

/// Returns a capability's name for runtimes, or [`ALL_CAPABILITIES`].
fn parse_capability(name: &str) -> Result<String, String> {
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
    if upper == ALL_CAPABILITIES {
        return Ok(upper);
    }
    match CapabilitySet::from_name(short) {
        Some(_) => Ok(format!("CAP_{short}")),
        None => Err("there is no such capability (capabilities(7) has a list)".to_owned()),
    }
}

impl BundleArgs {
    /// Options of the bundle that are not in the image, with root as user and no volumes.
    fn bundle_options(&self) -> anyhow::Result<image::BundleOptions> {
        let name = self.directory.file_name().unwrap_or_default();
        let (uid, gid) = (geteuid(), getegid());
        Ok(image::BundleOptions {
            user: root_user(),
            args: self.args.clone(),
            name: name.to_string_lossy().into_owned(),
            terminal: self.terminal,
            capabilities: self.capabilities(),
            seccomp: self.seccomp()?,
            volumes: Vec::new(),
            rootless: (!uid.is_root()).then(|| (uid.as_raw(), gid.as_raw())),
        })
    }

    fn capabilities(&self) -> Vec<String> {
        let has_all = |names: &[String]| names.iter().any(|name| name == ALL_CAPABILITIES);
        let mut granted: BTreeSet<String> = if has_all(&self.cap_add) {
            all_capabilities()
        } else if has_all(&self.cap_drop) {
            BTreeSet::new()
        } else {
            image::DEFAULT_CAPABILITIES.map(str::to_owned).into()
        };
        granted.extend(self.cap_add.iter().cloned());
        granted.retain(|name| name != ALL_CAPABILITIES && !self.cap_drop.contains(name));
        granted.into_iter().collect()
    }

    fn seccomp(&self) -> anyhow::Result<Option<SeccompProfile>> {
        match &self.security_opt {
            None => Ok(Some(SeccompProfile::built_in()?)),
            Some(Seccomp::None) => Ok(None),
            Some(Seccomp::ProfileFile(file)) => {
                let profile = read_profile(file);
                profile
                    .map(Some)
                    .with_context(|| file.display().to_string())
            }
        }
    }
}

/// Returns the capabilities that a container of this user can have.
fn all_capabilities() -> BTreeSet<String> {
    // A new user namespace has all capabilities of the kernel.
    let is_available = |capability| match capability_is_in_bounding_set(capability) {
        Ok(is_bounded) => is_bounded || !geteuid().is_root(),
        Err(_) => false,
    };
    let all = CapabilitySet::all();
    let all = all
        .iter_names()
        .filter(|&(_, capability)| is_available(capability));
    all.map(|(name, _)| format!("CAP_{name}")).collect()
}

fn read_profile(file: &Path) -> anyhow::Result<SeccompProfile> {
    let text = File::open(file).and_then(|file| read_at_most(file, MAX_SETTINGS_BYTES));
    let text = text.context("cannot read the seccomp profile")?;
    let profile = SeccompProfile::parse(&text, kernel_version());
    profile.context("it is not a seccomp profile")
}

/// Returns the first two numbers of this kernel's version.
fn kernel_version() -> (u32, u32) {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    let mut number = || numbers.next().and_then(|digits| digits.parse().ok());
    (number().unwrap_or_default(), number().unwrap_or_default())
}

pub(crate) fn run(args: &BundleArgs) -> anyhow::Result<ExitCode> {
    let directory = &args.directory;
    let options = args.bundle_options()?;
    // Checked before anything is fetched.
    if !args.force {
        ensure_no_bundle(directory)?;
    }
    let image = open_archive::open_image(&args.source, &args.cache_dir, args.quiet.is_set)?;
    // Reports an invalid configuration before anything is written.
    image::runtime_spec(&image.config, &options)?;
    let made = make_directory(directory);
    made.with_context(|| format!("cannot make {}", directory.display()))?;
    let pinned = SourceArgs {
        expect_sha256: Some(image.digest),
        ..args.source.clone()
    };
    // Built beside the existing bundle, which stays until every step that can fail has succeeded.
    let new = Arc::new(BundleInProgress::in_directory(directory));
    let to_remove = Arc::clone(&new);
    let cleanup = CleanupOnSignal::install(move || to_remove.remove())?;
    new.make_rootfs()
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    let materialize_options = MaterializeOptions::for_bundle(
        args.cache_dir.clone(),
        new.rootfs.clone(),
        directory.join(ROOTFS),
        args.quiet.is_set,
    );
    let code = materialize::run_with(&pinned, &materialize_options, Some(&cleanup))
        .map_err(without_flag_hints)?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    // From here on, a signal waits, so that the bundle is complete or unchanged.
    let _blocked = cleanup.block();
    let user = resolve_user(&new.rootfs, &image.config)?;
    let volumes = usable_volumes(&new.rootfs, &image.config.execution.volumes);
    let moved = new.move_volumes(&volumes);
    moved.with_context(|| format!("cannot write to {}", directory.display()))?;
    let options = image::BundleOptions {
        user,
        volumes,
        ..options
    };
    let text = image::runtime_spec(&image.config, &options)?;
    let written = new.write_config(&text);
    written.with_context(|| format!("cannot write {}", new.config.display()))?;
    let committed = new.commit(args.force);
    committed.with_context(|| format!("cannot create a bundle in {}", directory.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses a directory with a bundle, or with files in its way.
fn ensure_no_bundle(directory: &Path) -> anyhow::Result<()> {
    let name = directory.display();
    if fs::symlink_metadata(directory.join(CONFIG)).is_ok() {
        bail!("{name}: there is a bundle already (replace it with --force)");
    }
    for tree in [ROOTFS, VOLUMES_DIR].map(|name| directory.join(name)) {
        if let Ok(status) = fs::symlink_metadata(&tree) {
            let is_empty = || Ok::<_, io::Error>(fs::read_dir(&tree)?.next().is_none());
            ensure!(
                status.is_dir() && is_empty()?,
                "{}: is there already and not empty (replace it with --force)",
                tree.display()
            );
        }
    }
    Ok(())
}

/// Creates the directory for this user alone, because others could run the image's set-user-ID programs.
fn make_directory(directory: &Path) -> io::Result<()> {
    if let Some(parent) = directory.parent() {
        fs::create_dir_all(parent)?;
    }
    if create_missing_dir(directory, 0o700)? {
        return Ok(());
    }
    let status = fs::metadata(directory)?;
    if !status.is_dir() {
        return Err(ErrorKind::NotADirectory.into());
    }
    if status.permissions().mode() & 0o011 != 0 {
        let name = directory.display();
        output::print_warning(format_args!(
            "other users can reach {name}, and run set-user-ID programs of the image in it on this \
             system: close it with `chmod 700 {name}`"
        ));
    }
    Ok(())
}

/// A bundle under construction, with random names beside the final ones. A killed process leaves parts that
/// do not disturb later runs. Parts without their final name are removed when this is dropped.
struct BundleInProgress {
    directory: PathBuf,
    rootfs: PathBuf,
    /// Missing for an image without volumes.
    volumes: PathBuf,
    config: PathBuf,
}

impl BundleInProgress {
    fn in_directory(directory: &Path) -> Self {
        let suffix = random_suffix();
        let temporary_path = |name: &str| directory.join(format!(".{name}-{suffix}"));
        Self {
            directory: directory.to_owned(),
            rootfs: temporary_path(ROOTFS),
            volumes: temporary_path(VOLUMES_DIR),
            config: temporary_path(CONFIG),
        }
    }

    /// Creates the new tree with the default mode of a container's root, which the image may change.
    fn make_rootfs(&self) -> io::Result<()> {
        fs::create_dir(&self.rootfs)?;
        fs::set_permissions(&self.rootfs, Permissions::from_mode(0o755))
    }

    /// Moves `volumes` out of the tree, each to [`image::volume_directory`]. Creates the missing ones.
    fn move_volumes(&self, volumes: &[String]) -> io::Result<()> {
        if volumes.is_empty() {
            return Ok(());
        }
        DirBuilder::new().mode(0o700).create(&self.volumes)?;
        // Inner directories are moved before the outer ones that contain them.
        for (number, path) in volumes.iter().enumerate().rev() {
            let source = self.rootfs.join(path.trim_start_matches('/'));
            let volume = self.volumes.join(number.to_string());
            if exists(fs::symlink_metadata(&source))? {
                move_directory(&source, &volume)?;
            } else {
                fs::create_dir(&volume)?;
                fs::set_permissions(&volume, Permissions::from_mode(0o755))?;
            }
        }
        Ok(())
    }

    fn write_config(&self, text: &str) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&self.config)?;
        file.set_permissions(Permissions::from_mode(0o644))?;
        file.write_all(text.as_bytes())
    }

    /// Gives the parts their final names, the configuration last, so that it marks a complete bundle. With
    /// `force`, they replace an existing bundle, which is restored on failure.
    fn commit(&self, force: bool) -> io::Result<()> {
        let config = self.directory.join(CONFIG);
        let old_config = self.config.with_added_extension("old");
        let has_old = force && exists(fs::rename(&config, &old_config))?;
        if let Err(error) = self.rename_parts(&config, force) {
            if has_old {
                fs::rename(&old_config, &config)?;
            }
            return Err(error);
        }
        if has_old {
            fs::remove_file(&old_config)?;
        }
        // After an exchange, these names hold old trees. If they cannot be removed, `remove` reports that.
        drop(self.remove_tree(&self.volumes));
        drop(self.remove_tree(&self.rootfs));
        Ok(())
    }

    fn rename_parts(&self, config: &Path, force: bool) -> io::Result<()> {
        let rootfs = self.directory.join(ROOTFS);
        let volumes = self.directory.join(VOLUMES_DIR);
        let swap = |new: &Path, place: &Path| {
            if force {
                exchange(new, place)
            } else {
                rename_if_exists(new, place)
            }
        };
        let swap_back = |new: &Path, place: &Path| {
            drop(if force {
                exchange(new, place)
            } else {
                rename_if_exists(place, new)
            });
        };
        swap(&self.volumes, &volumes)?;
        swap(&self.rootfs, &rootfs).inspect_err(|_| swap_back(&self.volumes, &volumes))?;
        fs::rename(&self.config, config).inspect_err(|_| {
            swap_back(&self.rootfs, &rootfs);
            swap_back(&self.volumes, &volumes);
        })
    }

    /// Removes a tree with a temporary name, if it exists.
    fn remove_tree(&self, tree: &Path) -> io::Result<()> {
        let Ok(status) = fs::symlink_metadata(tree) else {
            return Ok(());
        };
        if !status.is_dir() {
            return fs::remove_file(tree);
        }
        let directory = File::open(&self.directory)?;
        let name = tree.file_name().unwrap_or_default();
        Ok(remove_tree(&directory, name.as_bytes())?)
    }

    fn remove(&self) {
        drop(fs::remove_file(&self.config));
        for tree in [&self.rootfs, &self.volumes] {
            if let Err(error) = self.remove_tree(tree) {
                output::print_error(format_args!("cannot remove {}: {error}", tree.display()));
            }
        }
    }
}

impl Drop for BundleInProgress {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Removes hints about flags of `materialize`, which the user did not call.
fn without_flag_hints(error: anyhow::Error) -> anyhow::Error {
    use tarfs::materialize::Error;
    match error.downcast_ref::<Error>() {
        Some(Error::Staging { .. } | Error::CannotRename { .. }) => {
            anyhow!(error_chain(&*error))
        }
        _ => error,
    }
}

fn rename_if_exists(from: &Path, to: &Path) -> io::Result<()> {
    exists(fs::rename(from, to)).map(drop)
}

/// Moves the directory `from` to `to`, and leaves an empty one. An ordinary user needs write permission for
/// it and its parent, so both modes are changed and restored.
fn move_directory(from: &Path, to: &Path) -> io::Result<()> {
    let parent = from.parent().unwrap_or(from);
    let parent_status = fs::symlink_metadata(parent)?;
    let status = fs::symlink_metadata(from)?;
    let writable = |mode: u32| Permissions::from_mode(mode | 0o300);
    fs::set_permissions(parent, writable(parent_status.mode()))?;
    fs::set_permissions(from, writable(status.mode()))?;
    fs::rename(from, to)?;
    fs::create_dir(from)?;
    fs::set_permissions(to, status.permissions())?;
    fs::set_permissions(parent, parent_status.permissions())?;
    let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    let times = Timestamps {
        last_access: time(parent_status.atime(), parent_status.atime_nsec()),
        last_modification: time(parent_status.mtime(), parent_status.mtime_nsec()),
    };
    Ok(utimensat(CWD, parent, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Exchanges two names, atomically if the file system supports it. Either may be missing.
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    if !exists(fs::symlink_metadata(other))? {
        return rename_if_exists(one, other);
    }
    if !exists(fs::symlink_metadata(one))? {
        return fs::rename(other, one);
    }
    match renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS) => {
            let aside = one.with_added_extension("old");
            fs::rename(other, &aside)?;
            fs::rename(one, other).inspect_err(|_| drop(fs::rename(&aside, other)))?;
            fs::rename(&aside, one)
        }
        exchanged => Ok(exchanged?),
    }
}

fn exists<T>(result: io::Result<T>) -> io::Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn root_user() -> User {
    User {
        uid: 0,
        gid: 0,
        groups: Vec::new(),
        home: None,
    }
}

/// Returns the usable `volumes`, resolved in `rootfs`, outer ones first. Prints which are left out.
fn usable_volumes(rootfs: &Path, volumes: &BTreeSet<String>) -> Vec<String> {
    let mut usable = BTreeSet::new();
    for volume in volumes {
        // A missing one is accepted, because runtimes create it.
        let found = rooted::directory_in_chroot(rootfs, volume.as_bytes());
        let found = found
            .as_ref()
            .and_then(|path| str::from_utf8(path.as_bytes()).ok());
        let reason = match found.map(|path| format!("/{path}")) {
            Some(path) if image::hides_system_directory(&path) => {
                "would hide a directory of the system"
            }
            Some(path) => {
                usable.insert(path);
                continue;
            }
            None => "is not a directory",
        };
        output::print_warning(format_args!(
            "the image's volume '{}' is left out, because it {reason}",
            escape(volume.as_bytes())
        ));
    }
    usable.into_iter().collect()
}

/// Finds the image's user in the tree's own accounts.
fn resolve_user(rootfs: &Path, config: &Config) -> anyhow::Result<User> {
    let accounts = |name: &str| {
        let read = read_account_file(rootfs, name);
        read.with_context(|| format!("cannot read {}/etc/{name}", rootfs.display()))
    };
    let user = User::find(
        &config.execution.user,
        &accounts("passwd")?,
        &accounts("group")?,
    )?;
    if (user.uid, user.gid) != (0, 0) && !geteuid().is_root() {
        output::print_warning(format_args!(
            "the container runs as root of its own user namespace instead of as '{}', because this \
             user can map only its own ID",
            escape(config.execution.user.as_bytes())
        ));
        return Ok(User {
            home: user.home,
            ..root_user()
        });
    }
    Ok(user)
}

/// Reads `etc/NAME` of the tree and resolves links within the tree; empty if it is missing.
fn read_account_file(rootfs: &Path, name: &str) -> anyhow::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECTORY;
    let directory = openat(CWD, rootfs, flags, Mode::empty())?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let path = format!("etc/{name}");
    let file = match regular_file::open(&directory, &path, resolve) {
        Ok(file) => file.context("it is not a regular file")?,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error.into()),
    };
    Ok(read_at_most(file, MAX_SETTINGS_BYTES)?)
}
