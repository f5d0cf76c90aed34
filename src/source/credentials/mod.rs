//! Credentials of requests: found as each place's own tools find them, kept, and renewed.

mod aws_config;
mod azure;
mod cache;
mod challenge;
mod context;
mod docker_config;
mod google;
mod headers;
mod netrc;
mod object;
mod profile;
mod registry;
mod s3;
mod sign;

use std::sync::Arc;

use self::object::{Endpoint, Object, Store};
use super::{Authorizer, Cause, Location, Options, Target, Transport};

pub(super) use context::{ProviderContext, read_optional};
pub(super) use headers::ReloadedHeaders;
pub(super) use netrc::Netrc;
pub(super) use object::split_bucket;
pub(super) use registry::{PULL, PUSH, RegistryLogin};

/// The anonymous login for `repository` in `registry`, with tokens through `transport`, for simulations.
///
/// # Errors
/// The transport cannot be made.
pub fn registry_login(
    registry: &str,
    repository: &str,
    transport: &dyn Transport,
    options: &Options,
) -> Result<Arc<dyn Authorizer>, Cause> {
    let context = ProviderContext::through(transport, options)?;
    let login = RegistryLogin::new(registry, repository, PULL, true, context);
    Ok(Arc::new(login))
}

/// Returns the target of the object that `spec` names, and the options for it; `None` unless it has the scheme of an
/// object store.
///
/// Those for S3 also trust the certificates of the AWS CLI's configuration. An invalid name, endpoint or setting is
/// [`Cause::Malformed`].
pub(super) async fn object_target(
    spec: &str,
    options: &Options,
) -> Option<Result<(Target, Options), Cause>> {
    Some(match Object::parse(spec)? {
        Ok(object) => target(&object, spec, options).await,
        Err(cause) => Err(cause),
    })
}

async fn target(
    object: &Object<'_>,
    spec: &str,
    options: &Options,
) -> Result<(Target, Options), Cause> {
    let mut options = options.clone();
    if object.store == Store::S3 {
        options.certificates =
            profile::configured_certificates(&options.certificates, &options.environment).await?;
    }
    let endpoint = endpoint(object, &options);
    let context = ProviderContext::new(&options);
    let (url, authorizer) = match object.store {
        Store::S3 => s3::open(object, &endpoint, context).await?,
        Store::Google => google::open(object, &endpoint, context)?,
        Store::Azure => azure::open(object, &endpoint, context)?,
    };
    let is_google = object.store == Store::Google;
    let upload_url = is_google.then(|| google::upload_url(object, &endpoint));
    let target = Target {
        upload_url: upload_url.transpose()?,
        location: object.location(spec, &endpoint),
        authorizer: Some(authorizer),
        ..Target::from(url)
    };
    Ok((target, options))
}

/// Whether `spec` is a valid name of an object.
pub(super) fn is_object(spec: &str) -> bool {
    matches!(Object::parse(spec), Some(Ok(_)))
}

/// Returns the location of the object that `spec` names.
pub(super) fn object_location(spec: &str, options: &Options) -> Option<Location> {
    let object = Object::parse(spec)?.ok()?;
    Some(object.location(spec, &endpoint(&object, options)))
}

fn endpoint(object: &Object<'_>, options: &Options) -> Endpoint {
    Endpoint::new(options.endpoint_url.as_ref(), || match object.store {
        Store::S3 => profile::configured_endpoint(&options.environment),
        Store::Google => google::configured_endpoint(&options.environment),
        Store::Azure => azure::configured_endpoint(object, &options.environment),
    })
}
