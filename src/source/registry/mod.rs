//! Container registries: manifests and blobs of a repository, over the HTTP API `/v2/`.

mod hosts;
mod reference;
mod repository;

pub(crate) use repository::Repository;
