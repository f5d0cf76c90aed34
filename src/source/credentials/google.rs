//! Google Cloud Storage, by its XML interface.

use std::sync::Arc;

use reqsign_core::{Context, Error, ProvideCredential};
use reqsign_google::{
    Credential, RequestSigner, ServiceAccountTokenCredentialProvider, StaticCredentialProvider,
    VmMetadataCredentialProvider,
};
use url::Url;

use super::cache::{CredentialCache, Provider};
use super::context::ProviderContext;
use super::object::{Endpoint, Object, url_below};
use super::sign::SignedRequests;
use crate::base::environment::Environment;
use crate::source::Cause;
use crate::source::client::authorizer::Authorizer;

/// Google's own endpoint.
const ENDPOINT: &str = "https://storage.googleapis.com";

/// The permission that tokens have, if they can be limited.
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_only";

/// The endpoint in the variable of Google's libraries, which may have no scheme.
pub(super) fn configured_endpoint(environment: &Environment) -> Option<String> {
    let emulator = environment.text("STORAGE_EMULATOR_HOST")?;
    let scheme = if emulator.contains("://") {
        ""
    } else {
        "http://"
    };
    Some(format!("{scheme}{emulator}"))
}

/// URL that accepts uploads of `object`, because an emulator takes none at the URL of the object.
pub(super) fn upload_url(object: &Object<'_>, endpoint: &Endpoint) -> Result<Url, Cause> {
    let path = format!("upload/storage/v1/b/{}/o", object.bucket);
    let mut url = url_below(&endpoint.url_or(ENDPOINT)?, &path);
    url.query_pairs_mut()
        .append_pair("uploadType", "media")
        .append_pair("name", object.key);
    Ok(url)
}

/// URL of `object`, and the authorizer of its requests. An invalid endpoint is [`Cause::Malformed`].
pub(super) fn open(
    object: &Object<'_>,
    endpoint: &Endpoint,
    context: ProviderContext,
) -> Result<(Url, Arc<dyn Authorizer>), Cause> {
    // Google's own tools send no credentials to an emulator.
    let is_emulator = endpoint.url()?.is_some() && endpoint.is_of_environment;
    let providers = if is_emulator { Vec::new() } else { providers() };
    let url = object.url(&url_below(&endpoint.url_or(ENDPOINT)?, object.bucket));
    let authorizer = SignedRequests {
        signer: RequestSigner::new("storage"),
        cache: CredentialCache::new(providers, context, secret_of),
        // Otherwise the server decompresses an object with Content-Encoding: gzip, and ignores ranges.
        headers: &[("accept-encoding", "gzip")],
        upload_headers: &[],
    };
    Ok((url, Arc::new(authorizer)))
}

fn secret_of(credential: &Credential) -> String {
    let token = credential.token.as_ref();
    token.map_or_else(String::new, |token| token.access_token.clone())
}

/// Providers of application default credentials, in the order of Google's libraries.
fn providers() -> Vec<Provider<Credential>> {
    let named = "the file of GOOGLE_APPLICATION_CREDENTIALS";
    let well_known = "the application default credentials of gcloud";
    let metadata = VmMetadataCredentialProvider::new().with_scope(SCOPE);
    vec![
        Provider::new(named, CredentialFile::Named),
        Provider::new(well_known, CredentialFile::WellKnown),
        Provider::new("the metadata server of Google Cloud", metadata).optional(),
    ]
}

/// A file with a user, a service account, or an external account.
#[derive(Clone, Copy, Debug)]
enum CredentialFile {
    /// It is named by a variable.
    Named,
    /// It is written by `gcloud auth application-default login`, and may be missing.
    WellKnown,
}

impl CredentialFile {
    async fn load(self, context: &Context) -> Result<Option<String>, Error> {
        match self {
            Self::Named => match context.env_var("GOOGLE_APPLICATION_CREDENTIALS") {
                Some(path) => context.file_read_as_string(&path).await.map(Some),
                None => Ok(None),
            },
            Self::WellKnown => {
                let directory = context.env_var("CLOUDSDK_CONFIG");
                let directory = directory.or_else(|| context.expand_home_dir("~/.config/gcloud"));
                let Some(directory) = directory else {
                    return Ok(None);
                };
                let path = format!("{directory}/application_default_credentials.json");
                Ok(context.file_read_as_string(&path).await.ok())
            }
        }
    }
}

impl ProvideCredential for CredentialFile {
    type Credential = Credential;

    async fn provide_credential(&self, context: &Context) -> Result<Option<Credential>, Error> {
        let Some(text) = self.load(context).await? else {
            return Ok(None);
        };
        let file = StaticCredentialProvider::new(text).with_scope(SCOPE);
        let Some(credential) = file.provide_credential(context).await? else {
            return Ok(None);
        };
        match credential.service_account {
            // The signer would ask for a token at each request.
            Some(account) => {
                let token = ServiceAccountTokenCredentialProvider::new(account).with_scope(SCOPE);
                token.provide_credential(context).await
            }
            None => Ok(Some(credential)),
        }
    }
}
