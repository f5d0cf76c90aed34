//! Description of a mount, by which any process of its user can serve it.

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use super::failure::Failure;
use super::prefetch::PrefetchSpec;
use super::source_variables::source_variables;
use crate::archive::Volume;
use crate::base::environment::is_name_of_process;
use crate::fuse::{MountOptions, Ownership, Subtree};
use crate::index::{Index, Ino};
use crate::locate::{OpenSpec, SourceSpec, TreeSpec};
use crate::materialize::XattrFilter;
use crate::source::Revalidation;

/// Description of a mount: its tree, and how it is served. It never changes, and a successor of the process that serves
/// it gets the same. It has secrets, so it is never shown.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct MountSpec {
    /// SOURCE and its layers, with absolute paths.
    pub tree: TreeSpec,
    /// How they are opened.
    pub open: OpenSpec,
    /// Directory of the tree that is shown, as a path.
    pub root: OsString,
    /// Number of levels below it to descend first, each through the only directory there.
    pub strip_components: usize,
    /// Whether nothing is shown before the whole tree is known.
    pub waits_for_index: bool,
    /// Options of the mount.
    pub options: MountOptions,
    /// Selection of extended attributes.
    pub xattrs: XattrFilter,
    /// Whether an overlay makes it writable.
    pub is_writable: bool,
    /// Its prefetch.
    pub prefetch: PrefetchSpec,
    /// Time after which an unused archive of a directory is closed.
    pub idle_timeout: Duration,
    /// The directory to mount on.
    pub mountpoint: OsString,
    /// Directory of the copy of the tree, if there is one.
    pub copy_to: Option<OsString>,
    /// Address at which metrics are served.
    pub metrics: Option<SocketAddr>,
    /// Directory of the socket on which the process that serves it answers questions.
    pub runtime_dir: OsString,
    /// Whether it is in another mount namespace.
    pub is_in_other_namespace: bool,
    /// Whether the mount ends with the process that keeps it.
    pub ends_with_monitor: bool,
    /// Whether that process receives the progress of the index.
    pub reports_index: bool,
}

impl MountSpec {
    /// Default time after which an unused archive of a directory is closed.
    pub const IDLE_TIMEOUT: Duration = Duration::from_mins(5);

    /// A mount of `tree` on `mountpoint`, which is opened as `open` says. Its socket is in `runtime_dir`.
    pub fn new(
        tree: TreeSpec,
        open: OpenSpec,
        mountpoint: OsString,
        runtime_dir: OsString,
    ) -> Self {
        Self {
            tree,
            open,
            root: OsString::new(),
            strip_components: 0,
            waits_for_index: false,
            options: MountOptions::default(),
            xattrs: XattrFilter::default(),
            is_writable: false,
            prefetch: PrefetchSpec::default(),
            idle_timeout: Self::IDLE_TIMEOUT,
            mountpoint,
            copy_to: None,
            metrics: None,
            runtime_dir,
            is_in_other_namespace: false,
            ends_with_monitor: false,
            reports_index: false,
        }
    }

    /// Whether only a process of its own can serve it: one that works for it alone, and has the files that have their name
    /// only in the process of its user.
    pub fn needs_own_process(&self) -> bool {
        let environment = source_variables(&self.open.user.environment);
        let cache = &self.open.cache;
        let files = [&self.open.user.netrc, &cache.index_file];
        let files = files.into_iter().flatten().map(OsString::as_os_str);
        let published = cache.published_index.location.as_deref();
        // Such as `GOOGLE_APPLICATION_CREDENTIALS`.
        let variables = environment.variables().map(|(_, value)| value);
        let mut files = files.chain(published.map(OsStr::new)).chain(variables);
        let is_own = |file: &OsStr| is_name_of_process(file.as_ref());
        let replay = self.prefetch.replay.as_deref().map(SourceSpec::from);
        let mut sources = self.tree.sources().chain(&replay);
        let has_files_of_process = files.any(is_own) || sources.any(SourceSpec::is_of_process);
        has_files_of_process
            || self.ends_with_monitor
            || self.is_in_other_namespace
            || self.copy_to.is_some()
            || self.prefetch.record.is_some()
            || self.tree.source.is_place()
    }

    /// The part of `volume` that is shown.
    ///
    /// # Errors
    /// If the root is no directory, or a link to it differs from its header.
    pub fn view(&self, volume: &dyn Volume) -> Result<Subtree, Failure> {
        let root = self.root.as_bytes();
        let compared = volume.compare_path_blocking(root, true);
        compared.map_err(|error| {
            let root = self.root.display();
            Failure::to(format!("cannot follow the links of --root {root}"), &error)
        })?;
        let find = |index: &Index| Subtree::new(index, root, self.strip_components);
        let found = volume.index().read(find);
        let found = found.map_err(|error| Failure::of(&error))?;
        found.map_err(|error| Failure::of(&error))
    }

    /// The description for a successor, which continues the mount with `version`.
    #[must_use]
    pub fn continuing(mut self, version: &str) -> Self {
        self.open.archive.shown_version = Some(version.to_owned());
        if self.open.server.revalidation != Revalidation::Never {
            self.open.server.revalidation = Revalidation::UnlessLate;
        }
        self
    }

    /// Options of the mount itself, which the overlay may cover. The kernel then finds the mount's ACLs, and the mount
    /// admits the same callers as the overlay does, if this user may decide that.
    pub fn own_options(&self) -> MountOptions {
        let mut options = self.options.clone();
        if self.is_writable {
            let is_root = geteuid().is_root();
            options.allow_other = is_root;
            options.default_permissions |= is_root;
        }
        options
    }

    /// Whether files of a mount with the root `root` have the numbers and attributes of the index.
    pub(super) fn shows_index(&self, root: Ino) -> bool {
        let has_own_attributes =
            self.options.ownership != Ownership::default() || !self.xattrs.acls;
        !self.tree.source.is_place() && root == Ino::ROOT && !has_own_attributes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::environment::Environment;

    fn needs_own_process(source: &str, change: impl FnOnce(&mut OpenSpec)) -> bool {
        let mut open = OpenSpec::default();
        open.user.environment = Environment::default();
        change(&mut open);
        let tree = SourceSpec::from(source).into();
        MountSpec::new(tree, open, "/mnt".into(), "/run".into()).needs_own_process()
    }

    // Promises: shared-isolated
    #[test]
    fn file_of_a_process_needs_a_process_of_its_own() {
        let url = "https://h/a.tar";
        let with_variable = |name: &str, value: &str| {
            let variables = [(name.into(), value.into())];
            needs_own_process(url, |open| {
                open.user.environment = Environment::new(variables, "/".into());
            })
        };
        let with_index = |place: &str| {
            needs_own_process(url, |open| {
                open.cache.published_index.location = Some(place.to_owned());
            })
        };
        for own in [
            needs_own_process("-", |_| {}),
            needs_own_process("/dev/fd/3", |_| {}),
            needs_own_process(url, |open| open.user.netrc = Some("/proc/self/fd/3".into())),
            with_variable("GOOGLE_APPLICATION_CREDENTIALS", "/dev/fd/3"),
            with_index("/dev/fd/3"),
        ] {
            assert!(own);
        }
        for other in [
            needs_own_process(url, |_| {}),
            with_variable("GOOGLE_APPLICATION_CREDENTIALS", "/etc/key"),
            with_variable("BASH_ENV", "/dev/fd/3"),
            with_index("https://h/a.idx"),
        ] {
            assert!(!other);
        }
    }
}
