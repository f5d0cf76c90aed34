//! Azure Blob Storage.

use std::sync::Arc;

use bytes::Bytes;
use reqsign_azure_storage::{
    AzureCliCredentialProvider, ClientCertificateCredentialProvider,
    ClientSecretCredentialProvider, Credential, ImdsCredentialProvider, RequestSigner,
    WorkloadIdentityCredentialProvider,
};
use reqsign_core::time::Timestamp;
use reqsign_core::{Context, Error, ProvideCredential};
use serde::Deserialize;
use url::Url;

use super::cache::{CredentialCache, Provider};
use super::context::ProviderContext;
use super::object::{Endpoint, Object, url_below};
use super::sign::SignedRequests;
use crate::base::environment::Environment;
use crate::source::Cause;
use crate::source::client::authorizer::Authorizer;

/// Version of the protocol, which signatures and tokens need.
const VERSION: (&str, &str) = ("x-ms-version", "2023-11-03");

/// Variable with the account, its endpoint, and a key or token.
const CONNECTION_STRING: &str = "AZURE_STORAGE_CONNECTION_STRING";

/// Account, key and endpoint of the emulator on this machine, which are the same everywhere.
const EMULATOR: &str = "AccountName=devstoreaccount1;\
    AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;\
    BlobEndpoint=http://127.0.0.1:10000/devstoreaccount1";

/// Variable with the account of the other variables of the Azure CLI.
const ACCOUNT: &str = "AZURE_STORAGE_ACCOUNT";

/// End of the names of variables that name a file.
const FILE_SUFFIX: &str = "_FILE";

/// The endpoint of `object` in the variables of the Azure CLI.
pub(super) fn configured_endpoint(
    object: &Object<'_>,
    environment: &Environment,
) -> Option<String> {
    let account = object.account?;
    let variable = |name: &str| environment.text(name);
    let connected = variable(CONNECTION_STRING).and_then(|text| {
        let suffixed = |suffix| format!("https://{account}.blob.{suffix}");
        let endpoint = setting(&text, account, "BlobEndpoint").map(str::to_owned);
        endpoint.or_else(|| setting(&text, account, "EndpointSuffix").map(suffixed))
    });
    connected.or_else(|| {
        let is_other = variable(ACCOUNT).is_some_and(|name| name != account);
        variable("AZURE_STORAGE_SERVICE_ENDPOINT").filter(|_| !is_other)
    })
}

/// URL of `object`, and the authorizer of its requests. An invalid endpoint is [`Cause::Malformed`].
pub(super) fn open(
    object: &Object<'_>,
    endpoint: &Endpoint,
    context: ProviderContext,
) -> Result<(Url, Arc<dyn Authorizer>), Cause> {
    let account = object.account.unwrap_or_default();
    let base = endpoint.url_or(&format!("https://{account}.blob.{}", object.cloud))?;
    let url = object.url(&url_below(&base, object.bucket));
    let authorizer = SignedRequests {
        signer: RequestSigner::new(),
        cache: CredentialCache::new(providers(account), context, secret_of),
        headers: &[VERSION],
        upload_headers: &[("x-ms-blob-type", "BlockBlob")],
    };
    Ok((url, Arc::new(authorizer)))
}

fn secret_of(credential: &Credential) -> String {
    match credential {
        Credential::SharedKey { account_key, .. } => account_key.clone(),
        Credential::SasToken { token, .. } | Credential::BearerToken { token, .. } => token.clone(),
    }
}

/// Providers of credentials: those of the Azure CLI, and then those of the Azure SDKs.
fn providers(account: &str) -> Vec<Provider<Credential>> {
    let variable = |name: &'static str, parse| {
        let account = account.to_owned();
        let secret = Variable {
            name,
            account,
            parse,
        };
        let is_file = name.ends_with(FILE_SUFFIX);
        let kind = if is_file { "file of" } else { "variable" };
        Provider::new(format!("the {kind} {name}"), secret)
    };
    let secret = "the variable AZURE_CLIENT_SECRET";
    let certificate = "the file of AZURE_CLIENT_CERTIFICATE_PATH";
    let token = "the file of AZURE_FEDERATED_TOKEN_FILE";
    let identity = "the managed identity of Azure";
    vec![
        variable(CONNECTION_STRING, parse_connection_string),
        variable("AZURE_STORAGE_KEY", parse_key),
        variable("AZURE_STORAGE_SAS_TOKEN", parse_sas_token),
        variable("AZURE_STORAGE_SAS_TOKEN_FILE", parse_sas_token),
        Provider::new(secret, ClientSecretCredentialProvider::new()),
        Provider::new(certificate, ClientCertificateCredentialProvider::new()),
        Provider::new(token, WorkloadIdentityCredentialProvider::new()),
        Provider::new("the variable IDENTITY_ENDPOINT", AppService),
        Provider::new("the Azure CLI", AzureCliCredentialProvider::new()).optional(),
        Provider::new(identity, ImdsCredentialProvider::new()).optional(),
    ]
}

/// A key or token for one account, in a variable or in the file that it names.
#[derive(Debug)]
struct Variable {
    name: &'static str,
    account: String,
    parse: ParseSecret,
}

/// Returns the credential in a text for the account, if it has one.
type ParseSecret = fn(&str, &str) -> Option<Credential>;

impl ProvideCredential for Variable {
    type Credential = Credential;

    async fn provide_credential(&self, context: &Context) -> Result<Option<Credential>, Error> {
        let Some(value) = context.env_var(self.name) else {
            return Ok(None);
        };
        let account = context.env_var(ACCOUNT);
        if account.is_some_and(|account| account != self.account) {
            return Ok(None);
        }
        let text = if self.name.ends_with(FILE_SUFFIX) {
            context.file_read_as_string(&value).await?
        } else {
            value
        };
        Ok((self.parse)(&self.account, text.trim()))
    }
}

fn parse_key(account: &str, key: &str) -> Option<Credential> {
    (!key.is_empty()).then(|| Credential::with_shared_key(account, key))
}

/// Its expiry is not read from it, because the server checks that by its own clock.
fn parse_sas_token(_account: &str, token: &str) -> Option<Credential> {
    let token = token.strip_prefix('?').unwrap_or(token);
    (!token.is_empty()).then(|| Credential::with_sas_token(token))
}

fn parse_connection_string(account: &str, text: &str) -> Option<Credential> {
    match setting(text, account, "AccountKey") {
        Some(key) => parse_key(account, key),
        None => parse_sas_token(account, setting(text, account, "SharedAccessSignature")?),
    }
}

/// The managed identity of App Service, Functions and Container Apps.
#[derive(Debug)]
struct AppService;

impl ProvideCredential for AppService {
    type Credential = Credential;

    async fn provide_credential(&self, context: &Context) -> Result<Option<Credential>, Error> {
        let endpoint = context.env_var("IDENTITY_ENDPOINT");
        let Some((endpoint, secret)) = endpoint.zip(context.env_var("IDENTITY_HEADER")) else {
            return Ok(None);
        };
        let failed = |detail: &str| Error::unexpected(detail);
        let mut url = Url::parse(&endpoint).map_err(|_| failed("it is no URL"))?;
        let client = context.env_var("AZURE_CLIENT_ID");
        url.query_pairs_mut()
            .append_pair("api-version", "2019-08-01")
            .append_pair("resource", "https://storage.azure.com/")
            .extend_pairs(client.map(|id| ("client_id", id)));
        let request = http::Request::get(url.as_str()).header("x-identity-header", secret);
        let request = request.body(Bytes::new());
        let request = request.map_err(|_| failed("IDENTITY_HEADER is malformed"))?;
        let answer = context.http_send(request).await?;
        if !answer.status().is_success() {
            let status = answer.status().as_u16();
            return Err(Error::unexpected(format!("status {status}")));
        }
        let token = serde_json::from_slice(answer.body());
        let token: IdentityToken = token.map_err(|_| failed("the answer has no token"))?;
        let expiry = token.expires_on.parse().ok();
        let expiry = expiry.and_then(|seconds| Timestamp::from_second(seconds).ok());
        let expiry = expiry.ok_or_else(|| failed("the answer has no time of expiry"))?;
        let token = Credential::with_bearer_token(&token.access_token, Some(expiry));
        Ok(Some(token))
    }
}

#[derive(Deserialize)]
struct IdentityToken {
    access_token: String,
    /// Seconds since 1970.
    expires_on: String,
}

/// The setting `name` of a connection string, `NAME=VALUE;NAME=VALUE`, unless that is of another account.
fn setting<'a>(text: &'a str, account: &str, name: &str) -> Option<&'a str> {
    let is_emulator = |setting: &str| {
        setting
            .trim()
            .eq_ignore_ascii_case("UseDevelopmentStorage=true")
    };
    let text = if text.split(';').any(is_emulator) {
        EMULATOR
    } else {
        text
    };
    let find = |name: &str| {
        let mut settings = text.split(';').filter_map(|text| text.split_once('='));
        let found = settings.find(|(known, _)| known.trim().eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.trim())
    };
    let is_other = find("AccountName").is_some_and(|name| name != account);
    find(name).filter(|_| !is_other)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: store-endpoint
    #[test]
    fn emulator_of_azure_has_a_short_connection_string() {
        let text = "UseDevelopmentStorage=true";
        let get = |name: &str| setting(text, "devstoreaccount1", name);
        assert_eq!(
            get("BlobEndpoint"),
            Some("http://127.0.0.1:10000/devstoreaccount1")
        );
        assert!(get("AccountKey").is_some_and(|key| key.ends_with("==")));
        assert_eq!(setting(text, "other", "AccountKey"), None);
    }
}
