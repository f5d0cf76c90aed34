//! Container registries: manifests, blobs and referrers of a repository, over the HTTP API `/v2/`.

mod bounded_serde;
pub(crate) mod documents;
mod foreign;
mod hosts;
mod platform;
mod push;
mod reference;
mod referrers;
mod repository;

pub use documents::{Annotations, Descriptor, DocumentError, INDEX_LAYER_ANNOTATION};
pub(crate) use foreign::open_foreign;
pub use push::ArtifactLayer;
pub use referrers::{INDEX_ARTIFACT_TYPE, INDEX_BLOB_TYPE};
pub use repository::Repository;
