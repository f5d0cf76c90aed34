//! The native module of the Python package `tarfs`, a thin layer over the library.
//!
//! Only the Python code beside it uses the module, so `src/python/tarfs/_native.pyi` is its whole interface. Every
//! call that may wait for the network or a decoder releases the interpreter's lock.

mod archive;
mod error;
mod members;
mod opened;
mod options;
mod process;
mod row;

/// The native part of tarfs; not a stable interface.
#[pyo3::pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::archive::Archive;
    #[pymodule_export]
    use super::archive::{absolute_source, list_archives, local_path, own_name};
    #[pymodule_export]
    use super::members::Members;
    #[pymodule_export]
    const MAX_SHARDS: u32 = crate::index::MAX_SHARDS;
}
