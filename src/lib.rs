//! tarfs mounts, lists and extracts remote tarballs without downloading them first.
//!
//! # Read a file of a remote archive
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tarfs::ArchivePath;
//! use tarfs::locate::{OpenContext, SourceSpec};
//!
//! let network = tokio::runtime::Runtime::new()?;
//! let context = OpenContext::new(network.handle().clone());
//! let source = SourceSpec::from("https://example.com/data.tar.gz");
//! let volume = context.open(&source.into())?;
//! let path = ArchivePath::sanitize(b"a/table.csv").path;
//! let file = volume.index().read(|tree| tree.find(&path).map(|entry| (entry.ino(), entry.size())))?;
//! let (ino, size) = file.ok_or("no such file")?;
//! let bytes = volume.read_blocking(ino, 0, size.try_into()?)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Write the tree to disk
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use tarfs::archive::scan;
//! use tarfs::locate::{OpenContext, SourceSpec};
//! use tarfs::materialize::{Materializer, Options};
//!
//! let network = tokio::runtime::Runtime::new()?;
//! let context = OpenContext::new(network.handle().clone());
//! let source = context.open_source(&SourceSpec::from("https://example.com/data.tar.zst"))?;
//! let stats = &context.source.stats;
//! let mut writer = Materializer::new(Path::new("out"), Options::for_this_user(), Arc::clone(stats))?;
//! scan::scan(&source, &scan::Options::default(), network.handle(), stats, &mut writer)?;
//! writer.finish()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Open a container image
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tarfs::locate::{OpenContext, SourceSpec};
//!
//! let network = tokio::runtime::Runtime::new()?;
//! let context = OpenContext::new(network.handle().clone());
//! let image = SourceSpec::from("oci-archive:https://example.com/image.tar:latest");
//! println!("{} layers", context.open_image(&image)?.layers.len());
//! let root = context.open(&image.into())?;
//! println!("{} entries", root.index().entry_count());
//! # Ok(())
//! # }
//! ```
//!
//! Functions that wait for the network must be called outside the threads of its runtime.
//!
//! # How it works
//!
//! The data path, from the network to the user:
//!
//! ```text
//! source ── fetch ── codec ── tar ── index ─┬─ archive ─┬─ fuse (mount)
//! ranges    chunks   plain    members tree  │  spans    ├─ materialize (writers)
//!           in order bytes +          +     │  + cache  └─ tree, list (ls)
//!                    seek pts         seek  │
//!                                     points┘
//! ```
//!
//! *Cold*: one [`archive::scan`] streams the source once and feeds one sink, the index or the writer.
//! *Warm*: [`archive::Volume::read`] starts at the seek point before the wanted bytes.
//!
//! The modules below are layers, the lowest first. Each imports only from those above it in this list, and
//! `tests/architecture` checks that. The program's own layer, `cli`, is above them (`src/main.rs`).

mod base;

pub mod codec;
pub mod source;
pub mod tar;

mod cache;
pub mod fetch;
pub mod index;

pub mod archive;

pub mod layers;

pub mod fuse;
pub mod image;
pub mod tree;

pub mod change;
pub mod list;
pub mod materialize;

pub mod locate;

pub mod serve;

#[cfg(feature = "python")]
mod python;

pub use base::archive_path::{ArchivePath, Sanitized};
pub use base::extent::{Coordinate, Extent, Packed, Plain};
pub use base::sha256::{ParseSha256Error, Sha256};
pub use base::stats::Stats;

/// Parts that the program and the tests share with the library. They are not a stable interface.
#[doc(hidden)]
pub mod internal {
    pub use crate::base::{
        bounded_read, buffer_pool, descriptor_limit, directory, environment, error_chain, escape,
        free_list, lock, memory_reclaim, passwd, periodic, process, publish, redact, regular_file,
        resolve, rooted, shared_dir, size, span_hash, stats, sync, thread, time, trusted_dir, wait,
        xattr::posix_acl,
    };
    pub use crate::cache::{
        DiskCache, DiskCacheDir, DiskCacheError, DiskCacheOptions, QueueTimeout, ReadRate,
        SparseExtent,
    };
}
