//! Credentials of requests: found as each place's own tools find them, kept, and renewed.

mod cache;
mod challenge;
mod context;
mod docker_config;
mod headers;
mod profile;
mod registry;
mod s3;

pub(super) use context::read_optional;
pub(super) use headers::ReloadedHeaders;
pub(super) use registry::RegistryLogin;
pub(super) use s3::{location as s3_location, target as s3_target};
