//! SOURCE: parses what users write, and opens it as one source, its layers, or one tree.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tarfs::locate::{OpenContext, SourceSpec};
//!
//! let runtime = tokio::runtime::Runtime::new()?;
//! let context = OpenContext::new(runtime.handle().clone());
//! let source = SourceSpec::from("tar:https://example.com/a.tar!/b.tar.gz");
//! let volume = context.open(&source.into())?;
//! println!("{} entries", volume.index().entry_count());
//! # Ok(())
//! # }
//! ```

mod context;
mod directory;
mod error;
mod glob;
mod hint;
mod open_spec;
mod publish;
mod published;
mod spec;

pub use context::{OpenContext, ProgressFn, PublishedIndexChoice, Sources, start_network};
pub use directory::SourceArchives;
pub use error::Error;
pub use hint::{describe, unwrap_transparent};
pub use open_spec::{ArchiveSpec, CacheSpec, OpenSpec, OpenSpecError, ServerSpec, UserSpec};
pub use spec::{SourceSpec, TreeSpec};
