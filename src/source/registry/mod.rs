//! Container registries: manifests, blobs and referrers of a repository, over the HTTP API `/v2/`.

mod foreign;
mod hosts;
mod push;
mod reference;
mod referrers;
mod repository;

pub(crate) use foreign::open_foreign;
pub use push::ArtifactLayer;
pub use referrers::{Descriptor, INDEX_ARTIFACT_TYPE, INDEX_BLOB_TYPE, INDEX_LAYER_ANNOTATION};
pub use repository::Repository;
