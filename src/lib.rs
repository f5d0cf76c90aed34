//! tarfs mounts, lists and extracts remote tarballs without downloading them first.
//!
//! The data path, from the network to the user:
//!
//! ```text
//! source ── fetch ── codec ── tar ── index ─┬─ archive ─┬─ fuse (mount)
//! ranges    chunks   plain    members tree  │  spans    ├─ materialize (writers)
//!           in order bytes +          +     │  + cache  └─ list (ls)
//!                    seek pts         seek  │
//!                                     points┘
//! ```
//!
//! *Cold*: one [`archive::scan`] streams the source once and feeds one sink, the index or the writer.
//! *Warm*: [`archive::Archive::read`] starts at the seek point before the wanted bytes.
//!
//! [`locate::OpenContext::open`] opens any SOURCE of the command line as one tree.
//!
//! The modules below are layers, the lowest first. Each imports only from those above it in this list, and
//! `tests/architecture` checks that. The program's own layer, `cli`, is above them (`src/main.rs`).

pub mod base;

pub mod codec;
pub mod source;
pub mod tar;

pub mod cache;
pub mod fetch;
pub mod index;

pub mod archive;

pub mod layers;

pub mod fuse;
pub mod image;
pub mod list;
pub mod materialize;

pub mod locate;
