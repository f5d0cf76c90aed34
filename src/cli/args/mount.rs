//! Flags of `tarfs mount`.

use std::convert::Infallible;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use clap_complete::engine::ArgValueCompleter;

use super::{
    CacheArgs, LayerArgs, PrefetchArgs, SourceArgs, XattrArgs, count_parser, heading,
    seconds_parser,
};
use crate::cli::completion;
use crate::cli::ui::output::UsageError;
use tarfs::fuse::MountOptions;
use tarfs::serve::MountSpec;

/// Arguments of `tarfs mount`.
#[derive(Clone, Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct MountArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub layers: LayerArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub prefetch: PrefetchArgs,
    #[command(flatten)]
    pub xattrs: XattrArgs,
    /// The directory to mount on
    pub mountpoint: PathBuf,
    /// Return only when the whole archive is indexed
    ///
    /// Without this flag, the mount is usable at once, and early callers wait for the files that they want.
    /// --root, --strip-components, --writable, --layer and images imply this flag.
    #[arg(long, help_heading = heading::PROCESS)]
    pub wait_index: bool,
    /// Restart the process that serves the mount when it dies; open files stay open
    ///
    /// Without this flag, an isolated mount is unmounted then, and any other one only if it cannot be continued. With
    /// --foreground, the process that the user started stays alive.
    #[arg(long, help_heading = heading::PROCESS)]
    pub restart: bool,
    /// After a restart: seconds that a new process may take to read the index before the mount is unmounted
    ///
    /// Time in which the source is unreachable does not count.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = seconds_parser(1..=86_400),
          help_heading = heading::PROCESS, hide_short_help = true)]
    pub restart_timeout: u64,
    /// Stay in the foreground instead of returning once the mount is ready
    #[arg(short, long, help_heading = heading::PROCESS)]
    pub foreground: bool,
    /// Serve the mount by a process of its own, which shares nothing with this user's other mounts
    ///
    /// Its memory and time then belong to the job that mounts. --foreground, --log-file, --copy-to, --record,
    /// --namespace, a log level in the environment, standard input, /dev/fd, a directory of archives, a
    /// program name that begins with @, and Linux before 6.9 imply this flag. Otherwise one process reads
    /// an archive once for all mounts of it.
    #[arg(long, help_heading = heading::PROCESS, hide_short_help = true)]
    pub isolated: bool,
    /// Make the mount writable, with an overlay over the archive
    #[arg(long)]
    pub writable: bool,
    /// With --writable: keep changes in DIR/upper for later mounts [default: discard them on unmount]
    ///
    /// DIR must be on a local file system.
    #[arg(
        long,
        value_name = "DIR",
        requires = "writable",
        hide_short_help = true
    )]
    pub upper: Option<PathBuf>,
    #[arg(
        short = 'o',
        value_name = "OPTIONS",
        value_parser = parse_mount_options,
        add = ArgValueCompleter::new(completion::mount_options),
        help = "Mount options, separated by commas, such as allow_other or uid=N; repeatable",
        long_help = "Mount options, separated by commas; repeatable\n\n\
                     They are allow_other, default_permissions, uid=N, gid=N, umask=OCTAL, suid, dev, \
                     noexec, nosymfollow, ro and fsname=NAME.")]
    pub options: Vec<String>,
    /// Show only this directory of the archive
    #[arg(long, value_name = "PATH", help_heading = heading::SELECTION)]
    pub root: Option<OsString>,
    /// Descend this many levels first, each through the only directory there
    ///
    /// Files beside that directory are not shown.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = count_parser::<usize>(0..=u64::MAX),
          help_heading = heading::SELECTION)]
    pub strip_components: usize,
    /// Append log messages to this file [default: the journal or syslog]
    ///
    /// Messages before the mount is ready are printed to the terminal. With --foreground, all are printed
    /// there by default.
    #[arg(long, value_name = "FILE", help_heading = heading::PROCESS, hide_short_help = true)]
    pub log_file: Option<PathBuf>,
    /// Copy the tree to DIR in the background, and read complete files from there
    ///
    /// The kernel reads these files itself if it permits that. DIR must be empty for the first mount. A
    /// later mount continues the copy.
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub copy_to: Option<PathBuf>,
    /// Mount in the mount namespace of process PID, or in that of the file PATH
    ///
    /// PATH is a file like /proc/PID/ns/mnt. MOUNTPOINT must be an absolute path in that namespace. All
    /// other paths and programs are those of the current namespace. Needs root and Linux 5.8.
    #[arg(long, value_name = "PID|PATH", value_parser = |argument: &str| Ok::<_, Infallible>(namespace_path(argument)),
          conflicts_with_all = ["writable", "restart", "copy_to"], hide_short_help = true)]
    pub namespace: Option<PathBuf>,
    /// For a directory of archives: close an archive that was not used for this long
    ///
    /// The next use opens it again.
    #[arg(long, value_name = "SECONDS", default_value_t = MountSpec::IDLE_TIMEOUT.as_secs(), value_parser = seconds_parser(1..=86_400),
          help_heading = heading::PROCESS, hide_short_help = true)]
    pub idle_timeout: u64,
    /// Serve the data of `tarfs status` to Prometheus at http://ADDR:PORT/metrics
    ///
    /// The page shows all mounts of its process. Anyone who can connect to the port can read it.
    #[arg(long, value_name = "ADDR:PORT", help_heading = heading::PROCESS, hide_short_help = true)]
    pub metrics: Option<SocketAddr>,
}

/// Validates `-o` while clap parses it, so that clap reports the error.
fn parse_mount_options(argument: &str) -> Result<String, tarfs::fuse::OptionError> {
    MountOptions::default().apply(argument)?;
    Ok(argument.to_owned())
}

/// Returns the file that names a mount namespace, from a process ID or a path.
fn namespace_path(argument: &str) -> PathBuf {
    let is_process = !argument.is_empty() && argument.bytes().all(|byte| byte.is_ascii_digit());
    if is_process {
        format!("/proc/{argument}/ns/mnt").into()
    } else {
        argument.into()
    }
}

impl MountArgs {
    pub(crate) fn mount_options(&self) -> anyhow::Result<MountOptions> {
        let mut options = MountOptions::default();
        for argument in &self.options {
            options.apply(argument)?;
        }
        Ok(options)
    }

    /// Refuses a combination of flags that clap cannot refuse.
    pub(crate) fn check(&self) -> Result<(), UsageError> {
        let is_writing = self
            .mount_options()
            .is_ok_and(|options| options.read_only == Some(false));
        let refuse = |text: &str| Err(UsageError(text.to_owned()));
        if is_writing && !self.writable {
            return refuse(
                "mount option `rw` asks for writing, but a mount is read-only without --writable",
            );
        }
        if self.writable && self.restart && self.copy_to.is_some() {
            return refuse(
                "--restart with --copy-to mounts again when the process dies, which is not possible with --writable \
                 (leave out one of the three)",
            );
        }
        if self.namespace.is_some() && !self.mountpoint.is_absolute() {
            return refuse("with --namespace the mountpoint must be an absolute path");
        }
        if self.source.source.is_place() {
            self.source.given.check_place()?;
        }
        Ok(())
    }

    /// Whether the whole archive must be indexed before the mount.
    pub(crate) fn waits_for_index(&self) -> bool {
        // overlayfs requires that its lower layer does not change.
        self.writable
            || self.wait_index
            || self.root.is_some()
            || self.strip_components > 0
            || self.layers.is_set()
    }
}
