//! Logins of `docker login` and `podman login`: their files, and credential helpers.
//!
//! Helpers are programs of others, so each is bounded in time and output. The crate `docker_credential` waits
//! for them without a limit.

use std::collections::HashMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_PAD_INDIFFERENT;
use reqsign_core::Context;
use serde::Deserialize;

use super::context::Commands;

/// Names of Docker Hub in files; the first is that of names of images.
const DOCKER_HUB: [&str; 3] = ["docker.io", "index.docker.io", "registry-1.docker.io"];

/// Name of Docker Hub for helpers.
const DOCKER_HUB_SERVER: &str = "https://index.docker.io/v1/";

/// User of a helper's answer that is an identity token.
const TOKEN_USER: &str = "<token>";

/// Answer of a helper without credentials for the server.
const NOT_FOUND: &str = "credentials not found";

/// How to identify oneself to a registry.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Login {
    Password(String, String),
    /// A token that the token server exchanges for others.
    IdentityToken(String),
    /// A token for the registry itself.
    RegistryToken(String),
}

impl Login {
    /// Whether it is a placeholder for none.
    fn is_empty(&self) -> bool {
        matches!(self, Self::Password(user, password) if user.is_empty() && password.is_empty())
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    auths: Option<HashMap<String, Entry>>,
    creds_store: Option<String>,
    cred_helpers: Option<HashMap<String, String>>,
}

#[derive(Deserialize)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperAnswer {
    username: String,
    secret: String,
}

/// Paths of the files, in the order in which they are searched.
pub(super) fn files(context: &Context) -> Vec<String> {
    if let Some(file) = context.env_var("REGISTRY_AUTH_FILE") {
        return vec![file];
    }
    let home = |path: &str| context.expand_home_dir(&format!("~/{path}"));
    let below = |variable: &str, path: &str| {
        let directory = context.env_var(variable)?;
        Some(format!("{directory}/{path}"))
    };
    let docker = below("DOCKER_CONFIG", "config.json").or_else(|| home(".docker/config.json"));
    let podman = "containers/auth.json";
    let user = below("XDG_CONFIG_HOME", podman).or_else(|| home(&format!(".config/{podman}")));
    let files = [docker, below("XDG_RUNTIME_DIR", podman), user];
    files.into_iter().flatten().collect()
}

/// Finds the login for `repository` in `registry`, and names its file and helper. It reads the files each time.
///
/// The login is that of the first file that has one, or why that file cannot be used, without secrets.
pub(super) async fn find(
    context: &Context,
    commands: &Commands,
    registry: &str,
    repository: &str,
) -> Option<(String, Result<Login, String>)> {
    for file in files(context) {
        let config = match read_config(commands, &file).await {
            Ok(Some(config)) => config,
            Ok(None) => continue,
            Err(error) => return Some((file, Err(error))),
        };
        let helper = config.helper(registry);
        let login = config.login(registry, repository);
        if let Some(login) = login.filter(|_| helper.is_none()) {
            return Some((file, login));
        }
        let Some(helper) = helper.or(config.creds_store) else {
            continue;
        };
        let login = ask_helper(commands, &helper, registry).await;
        if let Some(login) = login.transpose() {
            return Some((format!("{file} by docker-credential-{helper}"), login));
        }
    }
    None
}

async fn read_config(commands: &Commands, file: &str) -> Result<Option<Config>, String> {
    let read = commands.read_optional(file).await;
    let Some(bytes) = read.map_err(|error| error.to_string())? else {
        return Ok(None);
    };
    // The error's own text may quote a secret.
    serde_json::from_slice(&bytes).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        format!("it is malformed (line {line}, column {column})")
    })
}

impl Config {
    /// The helper of `registry` alone.
    fn helper(&self, registry: &str) -> Option<String> {
        let helpers = self.cred_helpers.as_ref()?;
        let mut helpers = helpers.iter();
        let found = helpers.find(|(key, name)| registry_key(key) == registry && !name.is_empty());
        found.map(|(_, name)| name.clone())
    }

    /// The login in the file itself: that of the longest prefix of the repository, or of the registry.
    fn login(&self, registry: &str, repository: &str) -> Option<Result<Login, String>> {
        let auths = self.auths.as_ref()?;
        let mut wanted = format!("{registry}/{repository}");
        loop {
            let mut found = auths.iter().filter(|(key, _)| registry_key(key) == wanted);
            if let Some(login) = found.find_map(|(_, auth)| auth.login()) {
                return Some(login);
            }
            let end = wanted.rfind('/')?;
            wanted.truncate(end);
        }
    }
}

impl Entry {
    /// The login; `None` for an entry that only says that a helper has one.
    fn login(&self) -> Option<Result<Login, String>> {
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let registry_token = given(&self.registrytoken).map(Login::RegistryToken);
        let identity_token = given(&self.identitytoken).map(Login::IdentityToken);
        let password = given(&self.username).zip(given(&self.password));
        let password = password.map(|(user, password)| Login::Password(user, password));
        if let Some(login) = registry_token.or(identity_token).or(password) {
            return Some(Ok(login));
        }
        let decoded = decode_auth(&given(&self.auth)?);
        let login = decoded.ok_or_else(|| "an entry of it is malformed".to_owned());
        Some(login).filter(|login| !login.as_ref().is_ok_and(Login::is_empty))
    }
}

fn decode_auth(text: &str) -> Option<Login> {
    let text: String = text
        .chars()
        .filter(|letter| !matches!(letter, '\r' | '\n'))
        .collect();
    let bytes = STANDARD_PAD_INDIFFERENT.decode(text).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (user, password) = text.split_once(':')?;
    // Docker pads passwords with zeros.
    let password = password.trim_end_matches('\0');
    Some(Login::Password(user.to_owned(), password.to_owned()))
}

/// The registry of a key, or its repository as Podman writes it: without scheme and version of the API.
fn registry_key(key: &str) -> String {
    let bare = key.strip_prefix("https://");
    let bare = bare.or_else(|| key.strip_prefix("http://"));
    let (host, path) = match bare {
        // Only old keys have a scheme, and the path is that of the API.
        Some(bare) => (bare.split('/').next().unwrap_or_default(), ""),
        None => key.split_once('/').unwrap_or((key, "")),
    };
    let is_hub = DOCKER_HUB.contains(&host);
    let host = if is_hub { DOCKER_HUB[0] } else { host };
    let slash = if path.is_empty() { "" } else { "/" };
    format!("{host}{slash}{path}")
}

async fn ask_helper(
    commands: &Commands,
    helper: &str,
    registry: &str,
) -> Result<Option<Login>, String> {
    if helper.contains('/') {
        return Err("the name of a helper is not valid".to_owned());
    }
    let is_hub = registry == DOCKER_HUB[0];
    let server = if is_hub { DOCKER_HUB_SERVER } else { registry };
    let program = format!("docker-credential-{helper}");
    let done = commands.run(&program, &["get"], server.as_bytes()).await;
    let done = done.map_err(|error| error.to_string())?;
    if done.status != 0 {
        let text = String::from_utf8_lossy(&done.stdout);
        if text.contains(NOT_FOUND) {
            return Ok(None);
        }
        // Its text may have secrets.
        return Err(format!("{program} ends with status {}", done.status));
    }
    let answer: HelperAnswer = serde_json::from_slice(&done.stdout)
        .map_err(|_| "the helper's answer is malformed".to_owned())?;
    let login = if answer.username == TOKEN_USER {
        Login::IdentityToken(answer.secret)
    } else {
        Login::Password(answer.username, answer.secret)
    };
    Ok(Some(login).filter(|login| !login.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        serde_json::from_str(text).expect("well-formed")
    }

    fn password(user: &str) -> Login {
        Login::Password(user.to_owned(), "pass".to_owned())
    }

    fn login(config: &Config, registry: &str, repository: &str) -> Option<Login> {
        config.login(registry, repository)?.ok()
    }

    // Promises: login-files
    #[test]
    fn login_of_the_longest_prefix_is_found() {
        // "one:pass", "two:pass" and "hub:pass".
        let config = config(
            r#"{"auths":{"localhost:5000":{"auth":"b25lOnBhc3M="},"localhost:5000/me":{"auth":"dHdvOnBhc3M"},
                "https://index.docker.io/v1/":{"auth":"aHViOnBhc3M="},"example.com":{}}}"#,
        );
        assert!(login(&config, "localhost:5000", "a/b") == Some(password("one")));
        assert!(login(&config, "localhost:5000", "me/b") == Some(password("two")));
        assert!(login(&config, "localhost:5000", "men/b") == Some(password("one")));
        assert!(login(&config, "docker.io", "library/debian") == Some(password("hub")));
        assert!(login(&config, "localhost", "me/b").is_none());
        assert!(login(&config, "example.com", "a").is_none());
    }

    // Promises: login-files, login-tokens
    #[test]
    fn every_kind_of_login_is_read() {
        for (entry, expected) in [
            (
                r#"{"auth":"dTpwOnE="}"#,
                Login::Password("u".into(), "p:q".into()),
            ),
            (
                r#"{"auth":"dTpwAAA="}"#,
                Login::Password("u".into(), "p".into()),
            ),
            (
                r#"{"auth":"dTpw\r\nOnE=\n"}"#,
                Login::Password("u".into(), "p:q".into()),
            ),
            (
                r#"{"username":"u","password":"p"}"#,
                Login::Password("u".into(), "p".into()),
            ),
            (
                r#"{"auth":"dTo=","identitytoken":"t"}"#,
                Login::IdentityToken("t".into()),
            ),
            (r#"{"registrytoken":"t"}"#, Login::RegistryToken("t".into())),
        ] {
            let auth: Entry = serde_json::from_str(entry).expect("well-formed");
            assert!(auth.login() == Some(Ok(expected)), "{entry}");
        }
        for entry in [r#"{"auth":"Og=="}"#, r#"{"auth":""}"#, "{}"] {
            let auth: Entry = serde_json::from_str(entry).expect("well-formed");
            assert!(auth.login().is_none(), "{entry}");
        }
        for entry in [r#"{"auth":"?"}"#, r#"{"auth":"dXA="}"#] {
            let auth: Entry = serde_json::from_str(entry).expect("well-formed");
            let login = auth.login();
            assert!(matches!(login, Some(Err(_))), "{entry}");
        }
    }

    // Promises: login-files
    #[test]
    fn helper_of_a_registry_is_found_by_each_of_its_names() {
        let config = config(r#"{"credHelpers":{"index.docker.io":"a","example.com":"b","x":""}}"#);
        assert_eq!(config.helper("docker.io").as_deref(), Some("a"));
        assert_eq!(config.helper("example.com").as_deref(), Some("b"));
        assert_eq!(config.helper("x"), None);
        assert_eq!(config.helper("example.com:5000"), None);
    }
}
