//! Profiles of the AWS CLI. reqsign reads most kinds of credentials, and this file chooses one.

use std::sync::Arc;

use reqsign_aws_v4::{
    AssumeRoleCredentialProvider, AssumeRoleWithWebIdentityCredentialProvider, Credential,
    ECSCredentialProvider, EnvCredentialProvider, IMDSv2CredentialProvider, RequestSigner,
    SSOCredentialProvider, StaticCredentialProvider,
};
use reqsign_core::{Context, Error, ErrorKind, ProvideCredential, ProvideCredentialDyn, Signer};
use serde::Deserialize;

use super::aws_config::{Sections, Settings, split_words};
use super::context::{Variables, read_file, read_optional};
use crate::base::environment::Environment;
use crate::source::{Cause, Certificates};

/// Files with profiles: their variable, and their default.
const CONFIG: (&str, &str) = ("AWS_CONFIG_FILE", "~/.aws/config");
const CREDENTIALS: (&str, &str) = ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials");

/// Region if neither the environment nor the profile has one.
pub(super) const DEFAULT_REGION: &str = "us-east-1";

/// Maximum number of roles of which each is assumed with the next. Profiles may name each other.
const MAX_ROLES: usize = 8;

pub(super) fn name(context: &Context) -> String {
    selected(|name| context.env_var(name)).unwrap_or_else(|| "default".to_owned())
}

/// Name of the profile that these variables select.
fn selected(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    variable("AWS_PROFILE").or_else(|| variable("AWS_DEFAULT_PROFILE"))
}

/// Region of the environment or of this profile.
pub(super) fn region(context: &Context, profile: &Profile) -> String {
    let variable = |name: &str| context.env_var(name);
    variable("AWS_REGION")
        .or_else(|| variable("AWS_DEFAULT_REGION"))
        .or_else(|| profile.get("region"))
        .unwrap_or_else(|| DEFAULT_REGION.to_owned())
}

/// A profile: its settings in both files.
#[derive(Clone, Debug, Default)]
pub(super) struct Profile {
    config: Settings,
    credentials: Settings,
}

impl Profile {
    /// The setting `name`. That of the file of credentials comes first.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        let found = self.credentials.get(name).or_else(|| self.config.get(name));
        found.filter(|value| !value.is_empty()).cloned()
    }
}

/// Both files.
#[derive(Clone, Debug, Default)]
pub(super) struct Files {
    config: Sections,
    credentials: Sections,
}

impl Files {
    /// Loads the files of `context`. A missing one, or another user's, is empty.
    pub(super) async fn load(context: &Context) -> Result<Self, Error> {
        let load = async |(variable, default): (&str, &str)| {
            let path = context.env_var(variable);
            let Some(path) = context.expand_home_dir(path.as_deref().unwrap_or(default)) else {
                return Ok(Sections::default());
            };
            match context.file_read(&path).await {
                Ok(bytes) => Ok(Sections::parse(&String::from_utf8_lossy(&bytes))),
                Err(error) => match error.kind() {
                    ErrorKind::ConfigInvalid | ErrorKind::PermissionDenied => {
                        Ok(Sections::default())
                    }
                    _ => Err(error),
                },
            }
        };
        Ok(Self {
            config: load(CONFIG).await?,
            credentials: load(CREDENTIALS).await?,
        })
    }

    /// The profile `name`; `None` if neither file has it.
    pub(super) fn profile(&self, name: &str) -> Option<Profile> {
        let mut config = self.config.of_kind("profile", name);
        if name == "default" {
            config = config.or_else(|| self.config.named(name));
        }
        let credentials = self.credentials.named(name);
        (config.is_some() || credentials.is_some()).then(|| Profile {
            config: config.cloned().unwrap_or_default(),
            credentials: credentials.cloned().unwrap_or_default(),
        })
    }

    /// The endpoint of S3 for `profile`.
    fn endpoint(&self, profile: &Profile) -> Option<String> {
        let services = profile.get("services");
        let services = services.and_then(|name| self.config.of_kind("services", &name));
        let of_service = services.and_then(|services| services.get("s3.endpoint_url").cloned());
        of_service.or_else(|| profile.get("endpoint_url"))
    }
}

/// The endpoint of S3 in the environment, or in the configuration of its profile.
pub(super) fn configured_endpoint(environment: &Arc<Environment>) -> Option<String> {
    let is_true = |text: String| text.eq_ignore_ascii_case("true");
    let variable = |name: &str| environment.text(name);
    if variable("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS").is_some_and(is_true) {
        return None;
    }
    variable("AWS_ENDPOINT_URL_S3")
        .or_else(|| variable("AWS_ENDPOINT_URL"))
        .or_else(|| {
            let (files, profile) = local_profile(environment)?;
            let is_ignored = profile.get("ignore_configured_endpoint_urls");
            files
                .endpoint(&profile)
                .filter(|_| !is_ignored.is_some_and(is_true))
        })
}

/// `trusted`, and the certificates that `AWS_CA_BUNDLE` names, or the setting `ca_bundle` of the profile.
pub(super) async fn configured_certificates(
    trusted: &Certificates,
    environment: &Arc<Environment>,
) -> Result<Certificates, Cause> {
    let of_profile = || local_profile(environment)?.1.get("ca_bundle");
    let Some(path) = environment.text("AWS_CA_BUNDLE").or_else(of_profile) else {
        return Ok(trusted.clone());
    };
    let failed =
        |detail: String| Cause::Malformed(format!("the CA bundle of AWS {path}: {detail}"));
    let read = read_optional(environment.directory().join(&path))
        .await
        .map_err(|error| failed(error.to_string()))?;
    let pem = read.ok_or_else(|| failed("not found".to_owned()))?;
    let trusted = trusted.with_trusted(&pem);
    trusted.map_err(|error| failed(error.to_string()))
}

/// The profile of the environment, read at once.
fn local_profile(environment: &Arc<Environment>) -> Option<(Files, Profile)> {
    let context = Context::new().with_env(Variables(Arc::clone(environment)));
    let load = |(name, default): (&str, &str)| {
        let path = environment.text(name).unwrap_or_else(|| default.to_owned());
        let path = context.expand_home_dir(&path)?;
        let bytes = read_file(&environment.directory().join(path)).ok()?;
        Some(Sections::parse(&String::from_utf8_lossy(&bytes)))
    };
    let files = Files {
        config: load(CONFIG).unwrap_or_default(),
        credentials: load(CREDENTIALS).unwrap_or_default(),
    };
    let profile = files.profile(&name(&context))?;
    Some((files, profile))
}

/// Credentials of the profile that the environment names.
#[derive(Debug)]
pub(super) struct ProfileProvider;

impl ProvideCredential for ProfileProvider {
    type Credential = Credential;

    async fn provide_credential(&self, context: &Context) -> Result<Option<Credential>, Error> {
        let mut name = name(context);
        let files = Files::load(context).await?;
        let Some(mut profile) = files.profile(&name) else {
            let is_named = selected(|name| context.env_var(name)).is_some();
            return is_named.then(|| Err(missing(&name))).transpose();
        };
        let mut roles = Vec::new();
        let base = loop {
            if profile.get("role_arn").is_none() || profile.get("web_identity_token_file").is_some()
            {
                break credentials_of(context, &files, &profile).await?;
            }
            if profile.get("mfa_serial").is_some() {
                let text = "mfa_serial is not supported, but a credential_process is";
                return Err(Error::config_invalid(text));
            }
            let sources = (
                profile.get("source_profile"),
                profile.get("credential_source"),
            );
            roles.push(profile.clone());
            if roles.len() > MAX_ROLES {
                return Err(Error::config_invalid("its source_profiles form a cycle"));
            }
            match sources {
                (Some(source), _) if source == name => break all_keys(&profile),
                (Some(source), _) => {
                    profile = files.profile(&source).ok_or_else(|| missing(&source))?;
                    name = source;
                }
                (None, Some(source)) => break credentials_of_source(context, &source).await?,
                (None, None) => {
                    let text = "its role_arn needs a source_profile, credential_source or web_identity_token_file";
                    return Err(Error::config_invalid(text));
                }
            }
        };
        assume_all(context, &roles, base).await
    }
}

/// Returns the credentials of `profile`, which has no role, or a token for it, in the order of the AWS CLI.
async fn credentials_of(
    context: &Context,
    files: &Files,
    profile: &Profile,
) -> Result<Option<Credential>, Error> {
    let web_identity = profile
        .get("role_arn")
        .zip(profile.get("web_identity_token_file"));
    if let Some((role, file)) = web_identity {
        let provider = AssumeRoleWithWebIdentityCredentialProvider::with_config(role, file.into());
        return provider.provide_credential(context).await;
    }
    if profile.get("sso_account_id").is_some() {
        let provider = single_sign_on(files, profile)?;
        return provider.provide_credential(context).await;
    }
    if let Some(found) = keys(&profile.credentials) {
        return Ok(Some(found));
    }
    match profile.get("credential_process") {
        Some(command) => run_process(context, &command).await.map(Some),
        None => Ok(keys(&profile.config)),
    }
}

/// The keys in either file.
fn all_keys(profile: &Profile) -> Option<Credential> {
    keys(&profile.credentials).or_else(|| keys(&profile.config))
}

fn keys(settings: &Settings) -> Option<Credential> {
    let setting = |name: &str| {
        settings
            .get(name)
            .filter(|value| !value.is_empty())
            .cloned()
    };
    Some(Credential {
        access_key_id: setting("aws_access_key_id")?,
        secret_access_key: setting("aws_secret_access_key")?,
        session_token: setting("aws_session_token").or_else(|| setting("aws_security_token")),
        expires_in: None,
    })
}

/// Answer of a `credential_process`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ProcessAnswer {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

async fn run_process(context: &Context, command: &str) -> Result<Credential, Error> {
    let malformed = || Error::config_invalid("its credential_process is malformed");
    let words = split_words(command).ok_or_else(malformed)?;
    let (program, arguments) = words.split_first().ok_or_else(malformed)?;
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = context.command_execute(program, &arguments).await?;
    if !done.success() {
        let text = format!("{program} ends with status {}", done.status);
        return Err(Error::unexpected(text));
    }
    // The error's own text may quote a secret.
    let answer = serde_json::from_slice(&done.stdout).ok();
    let answer = answer.filter(|answer: &ProcessAnswer| answer.version == 1);
    let unusable = || Error::unexpected(format!("the answer of {program} is malformed"));
    let answer = answer.ok_or_else(unusable)?;
    Ok(Credential {
        access_key_id: answer.access_key_id,
        secret_access_key: answer.secret_access_key,
        session_token: answer.session_token,
        expires_in: answer.expiration.and_then(|time| time.parse().ok()),
    })
}

fn single_sign_on(files: &Files, profile: &Profile) -> Result<SSOCredentialProvider, Error> {
    let session = profile.get("sso_session");
    let section = session
        .as_ref()
        .map(|name| files.config.of_kind("sso-session", name));
    let setting = |name: &str| match section {
        Some(section) => section?.get(name).cloned(),
        None => profile.get(name),
    };
    // reqsign uses the start URL only to find the cached token, which is that of the session's name.
    let token = session.clone().or_else(|| setting("sso_start_url"));
    let (Some(region), Some(account), Some(role), Some(token)) = (
        setting("sso_region"),
        profile.get("sso_account_id"),
        profile.get("sso_role_name"),
        token,
    ) else {
        let text = "single sign-on needs sso_region, sso_account_id, sso_role_name, and a sso_session or sso_start_url";
        return Err(Error::config_invalid(text));
    };
    Ok(SSOCredentialProvider::new()
        .with_region(region)
        .with_account_id(account)
        .with_role_name(role)
        .with_start_url(token))
}

async fn credentials_of_source(
    context: &Context,
    source: &str,
) -> Result<Option<Credential>, Error> {
    let provider: Box<dyn ProvideCredentialDyn<Credential = Credential>> = match source {
        "Environment" => Box::new(EnvCredentialProvider::new()),
        "Ec2InstanceMetadata" => Box::new(IMDSv2CredentialProvider::new()),
        "EcsContainer" => Box::new(ECSCredentialProvider::new()),
        _ => return Err(Error::config_invalid("its credential_source is not known")),
    };
    provider.provide_credential_dyn(context).await
}

/// Assumes each of `roles`, the last first, with the credentials of the one before.
async fn assume_all(
    context: &Context,
    roles: &[Profile],
    mut credential: Option<Credential>,
) -> Result<Option<Credential>, Error> {
    for role in roles.iter().rev() {
        let text = "it has no credentials with which to assume its role";
        let found = credential.ok_or_else(|| Error::config_invalid(text))?;
        credential = Some(assume(context, role, &found).await?);
    }
    Ok(credential)
}

async fn assume(
    context: &Context,
    role: &Profile,
    credential: &Credential,
) -> Result<Credential, Error> {
    let setting = |name: &str| role.get(name);
    let region = region(context, role);
    let (key, secret) = (&credential.access_key_id, &credential.secret_access_key);
    let mut source = StaticCredentialProvider::new(key, secret);
    if let Some(token) = &credential.session_token {
        source = source.with_session_token(token);
    }
    let signer = RequestSigner::new("sts", &region);
    let signer = Signer::new(context.clone(), source, signer);
    let session = setting("role_session_name").unwrap_or_else(|| "tarfs".to_owned());
    let mut provider =
        AssumeRoleCredentialProvider::new(setting("role_arn").unwrap_or_default(), signer)
            .with_role_session_name(session)
            .with_region(region)
            .with_regional_sts_endpoint();
    if let Some(id) = setting("external_id") {
        provider = provider.with_external_id(id);
    }
    if let Some(seconds) = setting("duration_seconds").and_then(|text| text.parse().ok()) {
        provider = provider.with_duration_seconds(seconds);
    }
    let assumed = provider.provide_credential(context).await?;
    assumed.ok_or_else(|| Error::unexpected("STS sends no credentials"))
}

fn missing(name: &str) -> Error {
    Error::config_invalid(format!("there is no such profile: {name}"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use reqsign_core::{FileRead, HttpSend, StaticEnv};

    use super::*;
    use crate::base::sync::Mutex;

    const CONFIG: &str = "
[default]
region = eu-west-1
[profile base]
aws_access_key_id = BASE
aws_secret_access_key = secret
[profile inner]
role_arn = arn:aws:iam::123456789012:role/inner
source_profile = base
[profile outer]
role_arn = arn:aws:iam::123456789012:role/outer
source_profile = inner
external_id = outside
[profile own]
role_arn = arn:aws:iam::123456789012:role/own
source_profile = own
aws_access_key_id = OWN
aws_secret_access_key = secret
[profile env]
role_arn = arn:aws:iam::123456789012:role/env
credential_source = Environment
[profile cycle]
role_arn = arn:aws:iam::123456789012:role/cycle
source_profile = round
[profile round]
role_arn = arn:aws:iam::123456789012:role/round
source_profile = cycle
[profile mfa]
role_arn = arn:aws:iam::123456789012:role/mfa
source_profile = base
mfa_serial = arn:aws:iam::123456789012:mfa/me
[profile alone]
role_arn = arn:aws:iam::123456789012:role/alone
[profile absent]
role_arn = arn:aws:iam::123456789012:role/absent
source_profile = nobody
[sso-session work]
sso_region = eu-north-1
sso_start_url = https://example.com/start
[profile sso]
sso_session = work
sso_account_id = 123456789012
sso_role_name = reader
";

    /// SHA-1 of `work`, by which the AWS CLI names the token of that session.
    const TOKEN_FILE: &str = "/home/.aws/sso/cache/e274eeff768c6396088ec6eb091f4bf4d47ab1e0.json";

    #[derive(Debug)]
    struct Files;

    impl FileRead for Files {
        async fn file_read(&self, path: &str) -> Result<Vec<u8>, Error> {
            match path {
                "/home/.aws/config" => Ok(CONFIG.into()),
                TOKEN_FILE => {
                    Ok(br#"{"accessToken":"token","expiresAt":"2999-01-01T00:00:00Z"}"#.into())
                }
                _ => Err(Error::config_invalid(format!("no {path}"))),
            }
        }
    }

    /// Answers of STS, which hands out keys with increasing numbers, and of the portal of single sign-on.
    #[derive(Clone, Debug, Default)]
    struct Servers(Arc<Mutex<Vec<http::Request<Bytes>>>>);

    impl HttpSend for Servers {
        async fn http_send(
            &self,
            request: http::Request<Bytes>,
        ) -> Result<http::Response<Bytes>, Error> {
            let mut requests = self.0.lock();
            requests.push(request.clone());
            let key = format!("ASIAEXAMPLEROLE{}", requests.len());
            let answer = if request.uri().path() == "/federation/credentials" {
                format!(
                    r#"{{"roleCredentials":{{"accessKeyId":"{key}","secretAccessKey":"s",
                        "sessionToken":"t","expiration":32472144000000}}}}"#
                )
            } else {
                format!(
                    "<AssumeRoleResponse><AssumeRoleResult><Credentials>\
                     <AccessKeyId>{key}</AccessKeyId><SecretAccessKey>s</SecretAccessKey>\
                     <SessionToken>t</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration>\
                     </Credentials></AssumeRoleResult></AssumeRoleResponse>"
                )
            };
            Ok(http::Response::new(answer.into()))
        }
    }

    /// The key ID that `profile` leads to, or its error, and the requests for it.
    async fn key_of(profile: &str) -> (Result<String, String>, Vec<http::Request<Bytes>>) {
        let servers = Servers::default();
        let variables = [
            ("AWS_PROFILE", profile),
            ("AWS_ACCESS_KEY_ID", "ENV"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
        ];
        let context = Context::new()
            .with_file_read(Files)
            .with_http_send(servers.clone())
            .with_env(StaticEnv {
                home_dir: Some("/home".into()),
                envs: variables
                    .map(|(name, value)| (name.to_owned(), value.to_owned()))
                    .into(),
            });
        let found = ProfileProvider.provide_credential(&context).await;
        let found = found
            .map(|found| found.expect("credentials").access_key_id)
            .map_err(|error| error.to_string());
        let requests = servers.0.lock().clone();
        (found, requests)
    }

    fn signer_of(request: &http::Request<Bytes>) -> String {
        let header = request.headers()["authorization"].to_str().expect("text");
        let (_, credential) = header.split_once("Credential=").expect("signed");
        credential.split('/').next().unwrap_or_default().to_owned()
    }

    // Promises: s3-credentials
    #[tokio::test]
    async fn roles_are_assumed_with_credentials_of_their_sources() {
        for (profile, signers) in [
            ("base", &[][..]),
            ("inner", &["BASE"]),
            ("outer", &["BASE", "ASIAEXAMPLEROLE1"]),
            ("own", &["OWN"]),
            ("env", &["ENV"]),
        ] {
            let (found, requests) = key_of(profile).await;
            let expected = match signers.len() {
                0 => "BASE".to_owned(),
                roles => format!("ASIAEXAMPLEROLE{roles}"),
            };
            assert_eq!(found, Ok(expected), "{profile}");
            let sent: Vec<_> = requests.iter().map(signer_of).collect();
            assert_eq!(sent, signers, "{profile}");
            if let Some(last) = requests.last() {
                let last = format!("{} {:?}", last.uri(), last.body());
                assert!(last.contains(&format!("role%2F{profile}")), "{last}");
                assert_eq!(last.contains("ExternalId=outside"), profile == "outer");
            }
        }
    }

    // Promises: s3-credentials
    #[tokio::test]
    async fn single_sign_on_uses_the_token_of_its_session() {
        let (found, requests) = key_of("sso").await;
        assert_eq!(found, Ok("ASIAEXAMPLEROLE1".to_owned()));
        let [request] = &requests[..] else {
            panic!("{requests:?}");
        };
        assert_eq!(
            request.uri().host(),
            Some("portal.sso.eu-north-1.amazonaws.com")
        );
        assert_eq!(request.headers()["x-amz-sso_bearer_token"], "token");
    }

    // Promises: s3-credentials
    #[tokio::test]
    async fn profile_that_cannot_be_used_says_why() {
        for (profile, expected) in [
            ("cycle", "form a cycle"),
            ("mfa", "mfa_serial"),
            ("alone", "needs a source_profile"),
            ("absent", "no such profile: nobody"),
            ("other", "no such profile: other"),
        ] {
            let (found, requests) = key_of(profile).await;
            let error = found.expect_err(profile);
            assert!(error.contains(expected), "{error}");
            assert!(requests.is_empty(), "{profile}");
        }
    }
}
