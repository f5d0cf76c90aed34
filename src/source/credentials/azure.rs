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
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;
use url::Url;

use super::cache::{CredentialCache, Provider};
use super::context::variable;
use super::object::{Endpoint, Object, url_below};
use super::sign::SignedRequests;
use crate::source::Cause;
use crate::source::authorizer::Authorizer;

/// Version of the protocol, which signatures and tokens need.
const VERSION: (&str, &str) = ("x-ms-version", "2023-11-03");

/// Variable with the account, its endpoint, and a key or token.
const CONNECTION_STRING: &str = "AZURE_STORAGE_CONNECTION_STRING";

/// Variable with the account of the other variables of the Azure CLI.
const ACCOUNT: &str = "AZURE_STORAGE_ACCOUNT";

/// The endpoint of `object` in the variables of the Azure CLI.
pub(super) fn configured_endpoint(object: &Object<'_>) -> Option<String> {
    let account = object.account?;
    let connected = variable(CONNECTION_STRING).and_then(|text| {
        let settings = ConnectionString::parse(&text, account)?;
        let suffixed = |suffix| format!("https://{account}.blob.{suffix}");
        let endpoint = settings.get("BlobEndpoint").map(str::to_owned);
        endpoint.or_else(|| settings.get("EndpointSuffix").map(suffixed))
    });
    connected.or_else(|| {
        let is_other = variable(ACCOUNT).is_some_and(|name| name != account);
        variable("AZURE_STORAGE_SERVICE_ENDPOINT").filter(|_| !is_other)
    })
}

/// URL of `object`, and the authorizer of its requests.
///
/// # Errors
/// [`Cause::Malformed`] for an invalid endpoint.
pub(super) fn open(
    object: &Object<'_>,
    endpoint: &Endpoint,
    context: Context,
) -> Result<(Url, Arc<dyn Authorizer>), Cause> {
    let account = object.account.unwrap_or_default();
    let base = match endpoint.url()? {
        Some(url) => url,
        None => Url::parse(&format!("https://{account}.blob.core.windows.net"))
            .map_err(|error| Cause::Malformed(error.to_string()))?,
    };
    let url = object.url(&url_below(&base, object.bucket));
    let version = (
        HeaderName::from_static(VERSION.0),
        HeaderValue::from_static(VERSION.1),
    );
    let kind = (
        HeaderName::from_static("x-ms-blob-type"),
        HeaderValue::from_static("BlockBlob"),
    );
    let authorizer = SignedRequests {
        signer: RequestSigner::new(),
        cache: CredentialCache::new(providers(account), context, is_same),
        headers: HeaderMap::from_iter([version]),
        upload_headers: HeaderMap::from_iter([kind]),
    };
    Ok((url, Arc::new(authorizer)))
}

fn is_same(one: &Credential, other: &Credential) -> bool {
    fn secret(credential: &Credential) -> &str {
        match credential {
            Credential::SharedKey { account_key, .. } => account_key,
            Credential::SasToken { token, .. } | Credential::BearerToken { token, .. } => token,
        }
    }
    secret(one) == secret(other)
}

/// Providers of credentials: those of the Azure CLI, and then those of the Azure SDKs.
fn providers(account: &str) -> Vec<Provider<Credential>> {
    fn provider(
        name: &str,
        provider: impl ProvideCredential<Credential = Credential>,
    ) -> Provider<Credential> {
        Provider {
            name: name.to_owned(),
            is_optional: false,
            finder: Box::new(provider),
        }
    }
    let optional = |provider| Provider {
        is_optional: true,
        ..provider
    };
    let variables = Variable::ALL.map(|(name, is_file, parse)| {
        let account = account.to_owned();
        let variable = Variable {
            name,
            account,
            is_file,
            parse,
        };
        let kind = if is_file {
            "the file of"
        } else {
            "the variable"
        };
        provider(&format!("{kind} {name}"), variable)
    });
    let others = [
        provider(
            "the variable AZURE_CLIENT_SECRET",
            ClientSecretCredentialProvider::new(),
        ),
        provider(
            "the file of AZURE_CLIENT_CERTIFICATE_PATH",
            ClientCertificateCredentialProvider::new(),
        ),
        provider(
            "the file of AZURE_FEDERATED_TOKEN_FILE",
            WorkloadIdentityCredentialProvider::new(),
        ),
        provider("the variable IDENTITY_ENDPOINT", AppService),
        optional(provider("the Azure CLI", AzureCliCredentialProvider::new())),
        optional(provider(
            "the managed identity of Azure",
            ImdsCredentialProvider::new(),
        )),
    ];
    variables.into_iter().chain(others).collect()
}

/// A key or token for one account, in a variable or in the file that it names.
#[derive(Debug)]
struct Variable {
    name: &'static str,
    account: String,
    is_file: bool,
    parse: ParseSecret,
}

/// Returns the credential in a text for the account, if it has one.
type ParseSecret = fn(&str, &str) -> Option<Credential>;

impl Variable {
    const ALL: [(&'static str, bool, ParseSecret); 4] = [
        (CONNECTION_STRING, false, parse_connection_string),
        ("AZURE_STORAGE_KEY", false, parse_key),
        ("AZURE_STORAGE_SAS_TOKEN", false, parse_sas_token),
        ("AZURE_STORAGE_SAS_TOKEN_FILE", true, parse_sas_token),
    ];
}

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
        let text = if self.is_file {
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
    let settings = ConnectionString::parse(text, account)?;
    match settings.get("AccountKey") {
        Some(key) => parse_key(account, key),
        None => parse_sas_token(account, settings.get("SharedAccessSignature")?),
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
        let failed = |detail: &str| Error::unexpected(detail.to_owned());
        let mut url = Url::parse(&endpoint).map_err(|_| failed("it is no URL"))?;
        url.query_pairs_mut()
            .append_pair("api-version", "2019-08-01")
            .append_pair("resource", "https://storage.azure.com/")
            .extend_pairs(
                context
                    .env_var("AZURE_CLIENT_ID")
                    .map(|id| ("client_id", id)),
            );
        let request = http::Request::get(url.as_str()).header("x-identity-header", secret);
        let request = request.body(Bytes::new());
        let answer = context
            .http_send(request.map_err(|_| failed("IDENTITY_HEADER is malformed"))?)
            .await?;
        if !answer.status().is_success() {
            return Err(failed(&format!("status {}", answer.status().as_u16())));
        }
        let token: IdentityToken =
            serde_json::from_slice(answer.body()).map_err(|_| failed("the answer has no token"))?;
        let expiry = token.expires_on.parse().ok();
        let expiry = expiry.and_then(|seconds| Timestamp::from_second(seconds).ok());
        let expiry = expiry.ok_or_else(|| failed("the answer has no time of expiry"))?;
        Ok(Some(Credential::with_bearer_token(
            &token.access_token,
            Some(expiry),
        )))
    }
}

#[derive(Deserialize)]
struct IdentityToken {
    access_token: String,
    /// Seconds since 1970.
    expires_on: String,
}

/// Settings of one account: `NAME=VALUE;NAME=VALUE`.
struct ConnectionString<'a>(&'a str);

impl<'a> ConnectionString<'a> {
    /// Returns the settings in `text` unless they are of another account.
    fn parse(text: &'a str, account: &str) -> Option<Self> {
        let settings = Self(text);
        let is_other = settings
            .get("AccountName")
            .is_some_and(|name| name != account);
        (!is_other).then_some(settings)
    }

    fn get(&self, name: &str) -> Option<&'a str> {
        let mut settings = self
            .0
            .split(';')
            .filter_map(|setting| setting.split_once('='));
        let found = settings.find(|(known, _)| known.trim().eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.trim())
    }
}
