//! Sources of this machine: files, pipes and memory.

mod directory;
mod file;
mod memory;
mod pipe;

pub(crate) use directory::SourceDirectory;
pub use file::File;
pub(super) use file::{open, open_beside};
pub use memory::MemorySource;
pub use pipe::Pipe;
