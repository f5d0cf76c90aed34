//! Registries: passwords, and tokens that a server gives for them.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use reqsign_core::time::Timestamp;
use reqsign_core::{Context, Error, ProvideCredential, SigningCredential};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Method, StatusCode};
use serde::Deserialize;
use url::{Url, form_urlencoded};

use super::cache::{CredentialCache, Provider};
use super::challenge::{Challenge, TokenServer};
use super::context::{Commands, ProviderContext};
use super::docker_config::{self, Login};
use crate::base::sync::Mutex;
use crate::source::Cause;
use crate::source::client::ServerError;
use crate::source::client::authorizer::{Authorizer, ErrorResponse, Request};

/// Lifetime of a token whose answer names none, or a shorter one, as other clients assume.
const MIN_TOKEN_LIFETIME: Duration = Duration::from_mins(1);

/// Maximum lifetime of a token that is believed.
const MAX_TOKEN_LIFETIME: u64 = 366 * 24 * 3600;

/// Actions of a token to read.
pub(crate) const PULL: &str = "pull";

/// Actions of a token to read and upload.
pub(crate) const PUSH: &str = "pull,push";

/// Name of this program for servers of tokens.
const CLIENT: &str = "tarfs";

/// Credentials for one repository of a registry.
#[derive(Debug)]
pub(crate) struct RegistryLogin {
    shared: Arc<Shared>,
    cache: CredentialCache<Authorization>,
}

#[derive(Debug)]
struct Shared {
    /// The registry's name in files of logins.
    registry: String,
    repository: String,
    /// Actions in the scope of a token: [`PULL`] or [`PUSH`].
    actions: &'static str,
    /// Whether the registry is reached without TLS.
    is_plain_http: bool,
    /// Whether files are searched for a login.
    has_login: bool,
    commands: Commands,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The registry's last challenge. Without one, requests carry no credentials.
    challenge: Option<Challenge>,
    /// Where the last load found a login; `None` for nowhere.
    origin: Option<String>,
    /// Why the last load failed.
    failure: Option<String>,
}

impl Shared {
    /// Scope of the token that answers `challenge`.
    fn scope(&self, challenge: &Challenge) -> String {
        match challenge {
            Challenge::Bearer(server) if self.actions == PULL => server.scope.clone(),
            _ => None,
        }
        .unwrap_or_else(|| format!("repository:{}:{}", self.repository, self.actions))
    }
}

/// The value of the header `Authorization`, which is marked as sensitive.
#[derive(Clone, Debug)]
struct Authorization {
    value: HeaderValue,
    /// `None` for a password.
    expires: Option<Timestamp>,
}

impl SigningCredential for Authorization {
    fn is_valid(&self) -> bool {
        self.is_valid_at(Timestamp::now())
    }

    fn is_valid_at(&self, time: Timestamp) -> bool {
        self.expires.is_none_or(|expires| expires > time)
    }
}

impl RegistryLogin {
    /// Credentials for `repository` in `registry`, the name of a host with its port.
    pub(crate) fn new(
        registry: &str,
        repository: &str,
        actions: &'static str,
        is_plain_http: bool,
        context: ProviderContext,
    ) -> Self {
        let shared = Arc::new(Shared {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            actions,
            is_plain_http,
            has_login: true,
            commands: context.commands.clone(),
            state: Mutex::default(),
        });
        Self::with(shared, context)
    }

    fn with(shared: Arc<Shared>, context: ProviderContext) -> Self {
        let registry = &shared.registry;
        let name = format!("the login for {registry}");
        let provider = Provider::new(name, Arc::clone(&shared));
        let cache = CredentialCache::new(vec![provider], context, |found: &Authorization| {
            String::from_utf8_lossy(found.value.as_bytes()).into_owned()
        });
        Self { shared, cache }
    }

    /// Remembers the challenge of `response`. Returns whether there is one to answer.
    fn note_challenge(&self, response: &ErrorResponse) -> bool {
        let challenge = Challenge::parse(&response.headers, self.shared.is_plain_http);
        let mut state = self.shared.state.lock();
        state.challenge = challenge.or_else(|| state.challenge.take());
        state.challenge.is_some()
    }
}

impl Authorizer for RegistryLogin {
    fn authorize<'a>(&'a self, request: &'a mut Request) -> BoxFuture<'a, Result<(), Cause>> {
        async move {
            let is_asked = self.shared.state.lock().challenge.is_some();
            if is_asked && !request.headers.contains_key(AUTHORIZATION) {
                let (found, generation) = self.cache.get().await?;
                request.generation = generation;
                let header = found.map(|found| (AUTHORIZATION, found.value));
                request.headers.extend(header);
            }
            Ok(())
        }
        .boxed()
    }

    /// Loads other credentials than those of `request`.
    fn should_resend(
        &self,
        request: &Request,
        response: &ErrorResponse,
    ) -> BoxFuture<'_, Result<bool, Cause>> {
        let is_asked = response.status == StatusCode::UNAUTHORIZED && self.note_challenge(response);
        let generation = request.generation;
        async move {
            if !is_asked {
                return Ok(false);
            }
            self.cache.renew(generation).await
        }
        .boxed()
    }

    /// Another registry, which gives tokens to everybody.
    fn for_redirect(
        &self,
        request: &Request,
        response: &ErrorResponse,
    ) -> Option<Arc<dyn Authorizer>> {
        let url = &request.url;
        let is_plain_http = self.shared.is_plain_http && url.scheme() == "http";
        let challenge = Challenge::parse(&response.headers, is_plain_http);
        let challenge = challenge.filter(|challenge| matches!(challenge, Challenge::Bearer(_)))?;
        let path = url.path().strip_prefix("/v2/").unwrap_or_default();
        let mut kinds = ["/blobs/", "/manifests/"].into_iter();
        let (repository, _) = kinds
            .find_map(|kind| path.rsplit_once(kind))
            .unwrap_or_default();
        let shared = Arc::new(Shared {
            registry: url.host_str()?.to_owned(),
            repository: repository.to_owned(),
            actions: PULL,
            is_plain_http,
            has_login: false,
            commands: self.shared.commands.clone(),
            state: Mutex::new(State {
                challenge: Some(challenge),
                ..State::default()
            }),
        });
        Some(Arc::new(Self::with(
            shared,
            self.cache.provider_context().clone(),
        )))
    }

    fn credentials_origin(&self) -> String {
        let state = self.shared.state.lock();
        let origin = state.origin.clone().unwrap_or_else(|| {
            let files = docker_config::files(self.cache.context());
            format!("none (none found in {})", files.join(", "))
        });
        match &state.failure {
            Some(failure) => format!("{origin}; {failure}"),
            None => origin,
        }
    }

    fn advice(&self) -> Option<String> {
        let registry = &self.shared.registry;
        let action = match self.shared.actions {
            PUSH => "push to it",
            _ => "read it",
        };
        Some(format!(
            "log in with `docker login {registry}`, and check the name and who may {action}"
        ))
    }
}

impl ProvideCredential for Shared {
    type Credential = Authorization;

    /// Loads the login from files, and exchanges it for a token if the registry wants one.
    async fn provide_credential(&self, context: &Context) -> Result<Option<Authorization>, Error> {
        let Some(challenge) = self.state.lock().challenge.clone() else {
            return Ok(None);
        };
        let (registry, repository) = (&self.registry, &self.repository);
        let found = if self.has_login {
            docker_config::find(context, &self.commands, registry, repository).await
        } else {
            None
        };
        let (origin, login) = found.unzip();
        let loaded = match login.transpose() {
            Ok(login) => {
                let scope = self.scope(&challenge);
                authorization(context, &challenge, login, &scope).await
            }
            Err(failure) => Err(failure),
        };
        let mut state = self.state.lock();
        state.origin = origin;
        state.failure = loaded.as_ref().err().cloned();
        loaded.map_err(|failure| {
            let origin = state.origin.as_deref().unwrap_or("no login");
            Error::unexpected(format!("{origin}; {failure}"))
        })
    }
}

/// Answers `challenge` for `login`; `None` if only a password would answer it.
async fn authorization(
    context: &Context,
    challenge: &Challenge,
    login: Option<Login>,
    scope: &str,
) -> Result<Option<Authorization>, String> {
    let value = match (challenge, login) {
        (_, Some(Login::RegistryToken(token))) => header("Bearer", &token)?,
        (Challenge::Basic, Some(Login::Password(user, password))) => {
            basic_header(&user, &password)?
        }
        (Challenge::Basic, Some(Login::IdentityToken(_))) => {
            let text = "the registry wants a password, and there is only an identity token";
            return Err(text.to_owned());
        }
        (Challenge::Basic, None) => return Ok(None),
        (Challenge::Bearer(server), login) => {
            let token = request_token(context, server, login, scope).await;
            return token.map(Some);
        }
    };
    let expires = None;
    Ok(Some(Authorization { value, expires }))
}

fn header(scheme: &str, secret: &str) -> Result<HeaderValue, String> {
    let value = HeaderValue::from_str(&format!("{scheme} {secret}"));
    let mut value = value.map_err(|_| "its text cannot be sent in a header".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

fn basic_header(user: &str, password: &str) -> Result<HeaderValue, String> {
    header("Basic", &STANDARD.encode(format!("{user}:{password}")))
}

/// Answer of a token server. Its other fields are secrets that are not used.
#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<i64>,
}

async fn request_token(
    context: &Context,
    server: &TokenServer,
    login: Option<Login>,
    scope: &str,
) -> Result<Authorization, String> {
    let request = token_request(server, login, scope)?;
    let host = server.realm.host_str().unwrap_or_default();
    let requested = Timestamp::now();
    let answer = context.http_send(request).await;
    let answer = answer.map_err(|error| format!("the token server {host} fails: {error}"))?;
    if answer.status() != StatusCode::OK {
        let ServerError { code, message, .. } = ServerError::parse(answer.body());
        let status = answer.status().as_u16().to_string();
        let words = [Some(status), code, message].into_iter().flatten();
        let words = words.collect::<Vec<_>>().join(" ");
        return Err(format!(
            "the token server {host} answers with status {words}"
        ));
    }
    let malformed = || format!("the answer of the token server {host} is malformed");
    let answer: TokenAnswer = serde_json::from_slice(answer.body()).map_err(|_| malformed())?;
    let tokens = [answer.token, answer.access_token].into_iter().flatten();
    let token = tokens.into_iter().find(|token| !token.is_empty());
    let token = token.ok_or_else(malformed)?;
    let lifetime = answer.expires_in.unwrap_or_default();
    let lifetime = u64::try_from(lifetime).unwrap_or_default();
    let lifetime = Duration::from_secs(lifetime.min(MAX_TOKEN_LIFETIME)).max(MIN_TOKEN_LIFETIME);
    Ok(Authorization {
        value: header("Bearer", &token)?,
        expires: Some(requested + lifetime),
    })
}

/// The request for a token with `scope`: a GET, or a POST that exchanges an identity token.
fn token_request(
    server: &TokenServer,
    login: Option<Login>,
    scope: &str,
) -> Result<http::Request<Bytes>, String> {
    let mut params = vec![("scope", scope.to_owned())];
    params.extend(server.service.clone().map(|service| ("service", service)));
    let mut url: Url = server.realm.clone();
    let mut request = http::Request::builder();
    let mut body = Bytes::new();
    if let Some(Login::IdentityToken(token)) = &login {
        params.push(("grant_type", "refresh_token".to_owned()));
        params.push(("client_id", CLIENT.to_owned()));
        params.push(("refresh_token", token.clone()));
        let mut form = form_urlencoded::Serializer::new(String::new());
        body = form.extend_pairs(params).finish().into();
        request = request
            .method(Method::POST)
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded");
    } else {
        url.query_pairs_mut().extend_pairs(params);
    }
    if let Some(Login::Password(user, password)) = login {
        request = request.header(AUTHORIZATION, basic_header(&user, &password)?);
    }
    let request = request.uri(url.as_str()).body(body);
    request.map_err(|_| "the address of the token server is not valid".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> TokenServer {
        TokenServer {
            realm: Url::parse("https://auth.example.com/token?a=b").expect("valid"),
            service: Some("a registry".to_owned()),
            scope: None,
        }
    }

    // Promises: login-tokens
    #[test]
    fn token_request_has_scope_service_and_password() {
        let login = Login::Password("me".to_owned(), "pass".to_owned());
        let request = token_request(&server(), Some(login), "repository:a/b:pull").expect("valid");
        assert_eq!(
            request.uri(),
            "https://auth.example.com/token?a=b&scope=repository%3Aa%2Fb%3Apull&service=a+registry"
        );
        assert_eq!(request.headers()[AUTHORIZATION], "Basic bWU6cGFzcw==");
        assert!(request.headers()[AUTHORIZATION].is_sensitive());

        let request = token_request(&server(), None, "x").expect("valid");
        assert!(!request.headers().contains_key(AUTHORIZATION));
    }

    #[test]
    fn only_a_login_to_pull_takes_the_scope_of_the_registry() {
        let scoped = |scope: &str| {
            let scope = Some(scope.to_owned());
            Challenge::Bearer(TokenServer { scope, ..server() })
        };
        let scope = |actions, challenge: &Challenge| {
            let login = RegistryLogin::new("x", "a/b", actions, false, Context::new().into());
            login.shared.scope(challenge)
        };
        let cache = scoped("repository:cache/a/b:pull");
        assert_eq!(scope(PULL, &cache), "repository:cache/a/b:pull");
        assert_eq!(scope(PUSH, &cache), "repository:a/b:pull,push");
        let plain = Challenge::Bearer(server());
        assert_eq!(scope(PULL, &plain), "repository:a/b:pull");
    }

    /// An environment of one variable.
    #[derive(Debug)]
    struct Variable(&'static str, String);

    impl reqsign_core::Env for Variable {
        fn var(&self, name: &str) -> Option<String> {
            (name == self.0).then(|| self.1.clone())
        }

        fn vars(&self) -> std::collections::HashMap<String, String> {
            std::collections::HashMap::new()
        }

        fn home_dir(&self) -> Option<std::path::PathBuf> {
            None
        }
    }

    // Promises: login-reload
    #[tokio::test]
    async fn login_is_read_again_at_each_refusal() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("auth.json");
        let name = file.display().to_string();
        let context = Context::new().with_env(Variable("REGISTRY_AUTH_FILE", name.clone()));
        let login = RegistryLogin::new("example.com", "a", PULL, false, context.into());
        let mut headers = reqwest::header::HeaderMap::new();
        let challenge = HeaderValue::from_static("Basic realm=\"x\"");
        headers.insert(reqwest::header::WWW_AUTHENTICATE, challenge);
        let response = ErrorResponse {
            status: StatusCode::UNAUTHORIZED,
            headers,
            error: ServerError::default(),
        };
        let sent = async || {
            let mut request = Request {
                method: Method::GET,
                content_sha256: None,
                url: Url::parse("https://example.com/v2/a").expect("valid"),
                headers: reqwest::header::HeaderMap::new(),
                generation: 0,
            };
            login.authorize(&mut request).await.expect("no failure");
            request
        };
        let should_resend = async |response: &ErrorResponse| {
            let should_resend = login.should_resend(&sent().await, response).await;
            should_resend.expect("no outage")
        };
        assert!(!should_resend(&response).await);
        assert!(login.credentials_origin().contains("none found in"));
        for (password, is_other) in [("one", true), ("two", true), ("two", false)] {
            let entry = serde_json::json!({ "username": "me", "password": password });
            let config = serde_json::json!({ "auths": { "example.com": entry } });
            std::fs::write(&file, config.to_string()).expect("written");
            assert_eq!(should_resend(&response).await, is_other);
            let request = sent().await;
            let expected = basic_header("me", password).expect("valid");
            assert_eq!(request.headers.get(AUTHORIZATION), Some(&expected));
            assert_eq!(login.credentials_origin(), name);
        }
        let forbidden = ErrorResponse {
            status: StatusCode::FORBIDDEN,
            ..response
        };
        assert!(!should_resend(&forbidden).await);
    }

    // Promises: login-tokens
    #[test]
    fn identity_token_is_sent_in_the_body() {
        let login = Login::IdentityToken("s&cret".to_owned());
        let request = token_request(&server(), Some(login), "repository:a:pull").expect("valid");
        assert_eq!(request.method(), Method::POST);
        assert_eq!(request.uri(), "https://auth.example.com/token?a=b");
        let body = std::str::from_utf8(request.body()).expect("UTF-8");
        assert!(body.ends_with("refresh_token=s%26cret"), "{body}");
        assert!(body.contains("grant_type=refresh_token&client_id=tarfs"));
    }
}
