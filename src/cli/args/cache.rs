//! Location and size of the cache.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;

use super::heading;
use crate::cli::environment;
use tarfs::Sha256;
use tarfs::archive::TreeOrigin;
use tarfs::internal::size::Size;
use tarfs::locate::{CacheSpec, PublishedIndexChoice};

/// Location of the cache.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct CacheDirArgs {
    /// Directory for indexes and decoded data
    ///
    /// The default is `$XDG_CACHE_HOME/tarfs` or `~/.cache/tarfs`, and for system mounts or root without
    /// HOME `/var/cache/tarfs`.
    #[arg(long, value_name = "DIR", env = environment::CACHE_DIR,
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub cache_dir: Option<PathBuf>,
}

impl CacheDirArgs {
    /// Returns the absolute path of the cache directory, which may not exist yet. It fails if neither a flag nor the
    /// environment names one.
    pub(crate) fn directory(&self) -> anyhow::Result<PathBuf> {
        let directory = match &self.cache_dir {
            Some(directory) => directory.clone(),
            None => environment::cache_dir().context(
                "no place for the cache: set --cache-dir, TARFS_CACHE_DIR, XDG_CACHE_HOME or HOME",
            )?,
        };
        // A mount leaves the current directory.
        std::path::absolute(&directory)
            .with_context(|| format!("cannot find {}", directory.display()))
    }
}

/// Location of saved indexes.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct SavedIndexArgs {
    #[command(flatten)]
    pub cache_dir: CacheDirArgs,

    /// Use this index instead of looking in the cache and beside SOURCE
    #[arg(long, value_name = "FILE|URL", help_heading = heading::NETWORK, hide_short_help = true)]
    pub index: Option<PathBuf>,

    /// Do not use an index that is published beside SOURCE
    ///
    /// Otherwise SOURCE.tarfs is used if it describes SOURCE as it is now. Its author chooses names and attributes,
    /// and of gzip and linked lz4 also contents. SOCI indexes and eStargz TOCs of images are
    /// left out, too.
    #[arg(long, help_heading = heading::NETWORK, hide_short_help = true)]
    pub no_published_index: bool,

    /// Fail unless the published index has this SHA-256
    #[arg(long, value_name = "HEX", conflicts_with = "no_published_index",
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub index_sha256: Option<Sha256>,
}

impl SavedIndexArgs {
    /// Sets which indexes are used: those of the origin `least`, which the verb accepts, or a stronger one.
    pub(crate) fn apply(&self, cache: &mut CacheSpec, least: TreeOrigin) {
        let index = self.index.as_deref();
        let (location, file) = index.map(PublishedIndexChoice::place_of).unzip();
        let (mut location, mut file) = (location.flatten(), file.flatten());
        if self.index_sha256.is_some() {
            let pinned = file.take().map(|path| path.to_string_lossy().into_owned());
            location = location.or(pinned);
        }
        cache.index_file = file.map(Into::into);
        cache.published_index = PublishedIndexChoice {
            least_origin: match (&self.index, self.no_published_index) {
                (Some(_), _) => TreeOrigin::User,
                (None, true) => TreeOrigin::Archive,
                (None, false) => least,
            },
            // A verb that reads usually needs one.
            is_searched_early: least == TreeOrigin::Publisher,
            is_required: location.is_some() || self.index_sha256.is_some(),
            location,
            sha256: self.index_sha256,
        };
    }
}

/// Location and size of the cache of indexes and decoded data.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheArgs {
    #[command(flatten)]
    pub saved: SavedIndexArgs,

    /// Maximum disk space for decoded data of all archives [default: leave 10 % of the disk free, and
    /// at most half of the free disk for one archive]
    ///
    /// Unused archives are evicted first, then what is least read and soonest decoded.
    #[arg(long, value_name = "SIZE", env = environment::CACHE_SIZE,
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub cache_size: Option<Size>,

    /// Keep no decoded data on disk
    ///
    /// Data that is not in memory is fetched and decoded again.
    #[arg(long, help_heading = heading::NETWORK, hide_short_help = true)]
    pub no_disk_cache: bool,

    /// Send no request, and use only saved indexes and cached data
    ///
    /// Without this flag, a server that cannot be reached is not needed either, as long as all data is cached.
    #[arg(long, help_heading = heading::NETWORK, hide_short_help = true)]
    pub offline: bool,
}
