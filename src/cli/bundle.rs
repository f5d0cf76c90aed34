//! `tarfs bundle`: an image as a runtime wants it, a tree and what to run in it.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid};

use super::args::{CacheDirArgs, SourceArgs};
use super::materialize::{self, MaterializeArgs};
use super::{given, open, output};
use crate::base::stats::Stats;
use crate::image::{self, Config, User};

/// What a bundle consists of.
const CONFIG: &str = "config.json";
const ROOTFS: &str = "rootfs";

/// The longest passwd(5) or group(5) that is read, in bytes.
const MAX_ACCOUNTS_LEN: u64 = 4 << 20;

/// Arguments of `tarfs bundle`.
#[derive(clap::Args, Debug)]
pub(super) struct BundleArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    place: CacheDirArgs,

    /// The bundle's directory, made if it is missing
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// Arguments for what the image runs, instead of its own
    #[arg(value_name = "ARG", last = true)]
    args: Vec<String>,

    /// Replace the bundle that is there
    #[arg(long)]
    force: bool,

    /// Give what it runs a terminal
    #[arg(short, long)]
    terminal: bool,

    /// Show no progress
    #[arg(short, long)]
    quiet: bool,
}

pub(super) fn run(args: &BundleArgs) -> anyhow::Result<ExitCode> {
    let reference = given::reference(&args.source).context(
        "SOURCE names no image (write oci-archive:FILE, docker-archive:FILE or oci:DIR)",
    )?;
    ensure!(
        !args.source.allow_truncated,
        "--allow-truncated cannot be used with a bundle, which is whole or not there"
    );
    let directory = &args.directory;
    let config_file = directory.join(CONFIG);
    // Before anything is fetched for nothing.
    if !args.force && fs::symlink_metadata(&config_file).is_ok() {
        bail!(
            "{}: there is a bundle already (replace it with --force)",
            directory.display()
        );
    }
    let image = {
        let network = open::network()?;
        let stats = Arc::new(Stats::default());
        let outer = given::Outer::new(&args.place, args.quiet);
        given::image(&reference, &args.source, &outer, &network, &stats)?
    };
    // Fails now if the configuration cannot be made, before anything is written.
    runtime_config(args, &image.config, root())?;
    prepare(directory, &config_file, args.force)?;
    let pinned = SourceArgs {
        expect_sha256: Some(image.digest),
        ..args.source.clone()
    };
    let rootfs = directory.join(ROOTFS);
    let writing = MaterializeArgs::whole(pinned, args.place.clone(), rootfs.clone(), args.quiet);
    let code = materialize::run(&writing)?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let user = user(&rootfs, &image.config)?;
    let text = runtime_config(args, &image.config, user)?;
    write(directory, &config_file, &text)
        .with_context(|| format!("cannot write {}", config_file.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Makes `directory`, in which nothing of an earlier bundle is left.
fn prepare(directory: &Path, config_file: &Path, force: bool) -> anyhow::Result<()> {
    let made = DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory);
    made.with_context(|| format!("cannot make {}", directory.display()))?;
    if !force {
        return Ok(());
    }
    // In this order: what has a config is whole.
    let gone = |removed: std::io::Result<()>, path: &Path| match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    };
    gone(fs::remove_file(config_file), config_file)?;
    let opened = File::open(directory)?;
    let removed = crate::materialize::remove(&opened, ROOTFS.as_ref());
    gone(removed, &directory.join(ROOTFS))
}

fn root() -> User {
    User {
        uid: 0,
        gid: 0,
        groups: Vec::new(),
        home: None,
    }
}

fn runtime_config(args: &BundleArgs, config: &Config, user: User) -> anyhow::Result<String> {
    let name = args.directory.file_name().unwrap_or_default();
    let is_root = geteuid().is_root();
    let bundle = image::Bundle {
        user,
        args: args.args.clone(),
        name: name.to_string_lossy().into_owned(),
        terminal: args.terminal,
        rootless: (!is_root).then(|| (geteuid().as_raw(), getegid().as_raw())),
    };
    Ok(image::bundle(config, &bundle)?)
}

/// As whom the image runs, by its own accounts.
fn user(rootfs: &Path, config: &Config) -> anyhow::Result<User> {
    let accounts = |name: &str| {
        let read = accounts(rootfs, name);
        read.with_context(|| format!("cannot read {}/etc/{name}", rootfs.display()))
    };
    let user = User::find(
        &config.execution.user,
        &accounts("passwd")?,
        &accounts("group")?,
    )?;
    if user.uid != 0 && !geteuid().is_root() {
        output::complain(format_args!(
            "it runs as root of a namespace of its own instead of as '{}', because there is only \
             this user's own number to give away",
            config.execution.user.escape_debug()
        ));
        return Ok(User {
            home: user.home,
            ..root()
        });
    }
    Ok(user)
}

/// What is in `etc/NAME` of the tree, links followed as they would be in it; nothing if that is not
/// there.
fn accounts(rootfs: &Path, name: &str) -> anyhow::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let directory = openat(CWD, rootfs, flags | OFlags::DIRECTORY, Mode::empty())?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let path = format!("etc/{name}");
    let file = match openat2(&directory, path, flags, Mode::empty(), resolve) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    ensure!(file.metadata()?.is_file(), "it is no regular file");
    let mut text = Vec::new();
    file.take(MAX_ACCOUNTS_LEN + 1).read_to_end(&mut text)?;
    ensure!(text.len() as u64 <= MAX_ACCOUNTS_LEN, "it is too long");
    Ok(text)
}

/// Writes `text` to `path` in `directory`, at once or not at all.
fn write(directory: &Path, path: &Path, text: &str) -> std::io::Result<()> {
    let beside = directory.join(format!(".{CONFIG}.{}", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&beside)
        .and_then(|mut file| {
            file.set_permissions(Permissions::from_mode(0o644))?;
            file.write_all(text.as_bytes())
        })
        .and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        drop(fs::remove_file(&beside));
    }
    written
}
