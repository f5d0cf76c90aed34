//! Indexes that exist before an archive is scanned: saved, published, or made by other programs.

pub(super) mod estargz_toc;
pub(super) mod published_index;
pub(super) mod saved_index;
pub(super) mod tree_origin;
