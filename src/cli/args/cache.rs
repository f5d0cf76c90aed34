//! Location and size of the cache.

use std::path::PathBuf;

use clap::Args;

use super::size::Size;
use crate::cli::environment;

/// Location of the cache.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct CacheDirArgs {
    #[arg(
        long,
        value_name = "DIR",
        env = environment::CACHE_DIR,
        help = "Directory for indexes and decoded data [default: $XDG_CACHE_HOME/tarfs, \
                ~/.cache/tarfs, or /var/cache/tarfs for system mounts]"
    )]
    pub cache_dir: Option<PathBuf>,
}

impl CacheDirArgs {
    /// Returns the cache directory, which may not exist yet.
    ///
    /// # Errors
    /// Neither a flag nor the environment names a directory.
    pub(crate) fn directory(&self) -> anyhow::Result<PathBuf> {
        match &self.cache_dir {
            Some(directory) => Ok(directory.clone()),
            None => environment::cache_dir(),
        }
    }
}

/// Location of saved indexes.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct SavedIndexArgs {
    #[command(flatten)]
    pub cache_dir: CacheDirArgs,

    /// Use this index file instead of looking in the cache
    #[arg(long, value_name = "FILE")]
    pub index: Option<PathBuf>,
}

/// Location and size of the cache of indexes and decoded data.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheArgs {
    #[command(flatten)]
    pub saved: SavedIndexArgs,

    /// Maximum disk space for decoded data of all archives [default: leave 10 % of the disk free]
    ///
    /// The least recently used data is evicted first.
    #[arg(
        long,
        value_name = "SIZE",
        env = environment::CACHE_SIZE
    )]
    pub cache_size: Option<Size>,

    /// Keep no decoded data on disk
    ///
    /// Data that is not in memory is fetched and decoded again.
    #[arg(long)]
    pub no_disk_cache: bool,

    /// Send no request, and use only saved indexes and cached data
    ///
    /// Without this flag, a server that cannot be reached is not needed either, as long as all data is cached.
    #[arg(long)]
    pub offline: bool,
}
