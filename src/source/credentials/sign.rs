//! Signatures of requests by the crates that know each object store.

use std::fmt::Display;

use futures_util::future::{BoxFuture, FutureExt};
use reqsign_core::{ErrorKind, SignRequest, SigningCredential};
use reqwest::Method;
use reqwest::header::{HOST, HeaderValue};

use super::cache::CredentialCache;
use crate::source::Cause;
use crate::source::client::authorizer::{Authorizer, ErrorResponse, Request};

/// Signs `request` with `credential` of `cache`, and with those of its headers that `is_signed` selects. A request that
/// cannot be signed is [`Cause::Malformed`]. Credentials that have just expired are [`Cause::Credentials`].
pub(super) async fn sign<S: SignRequest<Credential: SigningCredential>>(
    signer: &S,
    cache: &CredentialCache<S::Credential>,
    credential: &S::Credential,
    request: &mut Request,
    is_signed: fn(&str) -> bool,
) -> Result<(), Cause> {
    let unsignable =
        |detail: &dyn Display| Cause::Malformed(format!("the request cannot be signed: {detail}"));
    let mut parts = http::Request::builder()
        .method(request.method.clone())
        .uri(request.url.as_str())
        .body(())
        .map_err(|error| unsignable(&error))?
        .into_parts()
        .0;
    let signed = request.headers.iter();
    let signed = signed.filter(|(name, _)| is_signed(name.as_str()));
    parts
        .headers
        .extend(signed.map(|(name, value)| (name.clone(), value.clone())));
    signer
        .sign_request(cache.context(), &mut parts, Some(credential), None)
        .await
        .map_err(|error| match error.kind() {
            ErrorKind::CredentialInvalid => {
                Cause::Credentials(format!("{}: {error}", cache.origin()))
            }
            _ => unsignable(&error),
        })?;
    // A signature may be part of the query.
    request.url.set_query(parts.uri.query());
    parts.headers.remove(HOST);
    for value in parts.headers.values_mut() {
        value.set_sensitive(true);
    }
    request.headers.extend(parts.headers);
    Ok(())
}

/// Authorizes the requests to a store without regions.
#[derive(Debug)]
pub(super) struct SignedRequests<S: SignRequest> {
    pub(super) signer: S,
    pub(super) cache: CredentialCache<S::Credential>,
    pub(super) headers: &'static [(&'static str, &'static str)],
    pub(super) upload_headers: &'static [(&'static str, &'static str)],
}

impl<S: SignRequest<Credential: SigningCredential>> Authorizer for SignedRequests<S> {
    fn authorize<'a>(&'a self, request: &'a mut Request) -> BoxFuture<'a, Result<(), Cause>> {
        async move {
            let is_upload = request.method == Method::PUT;
            let upload_headers = self.upload_headers.iter().filter(|_| is_upload);
            for &(name, value) in self.headers.iter().chain(upload_headers) {
                request
                    .headers
                    .insert(name, HeaderValue::from_static(value));
            }
            let (credential, generation) = self.cache.get().await?;
            request.generation = generation;
            match credential {
                Some(credential) => {
                    sign(&self.signer, &self.cache, &credential, request, |_| true).await
                }
                None => Ok(()),
            }
        }
        .boxed()
    }

    fn should_resend(
        &self,
        request: &Request,
        response: &ErrorResponse,
    ) -> BoxFuture<'_, Result<bool, Cause>> {
        let (may_renew, generation) = (response.allows_other_credentials(), request.generation);
        async move {
            if !may_renew {
                return Ok(false);
            }
            self.cache.renew(generation).await
        }
        .boxed()
    }

    fn credentials_origin(&self) -> String {
        self.cache.origin()
    }
}
