//! Profiles of the AWS CLI. reqsign reads each kind of credentials, and this file chooses one.

use std::collections::HashMap;

use reqsign_aws_v4::{
    AssumeRoleCredentialProvider, AssumeRoleWithWebIdentityCredentialProvider, Credential,
    ECSCredentialProvider, EnvCredentialProvider, IMDSv2CredentialProvider,
    ProcessCredentialProvider, ProfileCredentialProvider, RequestSigner, SSOCredentialProvider,
    StaticCredentialProvider,
};
use reqsign_core::{Context, Error, ProvideCredential, ProvideCredentialDyn, Signer};

/// Files with profiles: their variable, their default, and the prefix of their sections.
const FILES: [(&str, &str, &str); 2] = [
    ("AWS_CONFIG_FILE", "~/.aws/config", "profile "),
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", ""),
];

/// Region if neither the environment nor the profile has one.
pub(super) const DEFAULT_REGION: &str = "us-east-1";

/// Maximum number of roles of which each is assumed with the next. Profiles may name each other.
const MAX_ROLES: usize = 8;

/// Settings of a section.
type Settings = HashMap<String, String>;

/// Name of the profile.
pub(super) fn name(context: &Context) -> String {
    context
        .env_var("AWS_PROFILE")
        .unwrap_or_else(|| "default".to_owned())
}

/// Region of the environment or of these settings.
pub(super) fn region(context: &Context, settings: &Settings) -> String {
    let variable = |name: &str| context.env_var(name);
    variable("AWS_REGION")
        .or_else(|| variable("AWS_DEFAULT_REGION"))
        .or_else(|| settings.get("region").cloned())
        .unwrap_or_else(|| DEFAULT_REGION.to_owned())
}

/// Settings of the profile `name` in both files; `None` if neither has it.
pub(super) async fn load(context: &Context, name: &str) -> Option<Settings> {
    let mut settings = None;
    for file in &FILES {
        let prefix = if name == "default" { "" } else { file.2 };
        if let Some(found) = load_section(context, file, &format!("{prefix}{name}")).await {
            settings.get_or_insert_with(Settings::new).extend(found);
        }
    }
    settings
}

async fn load_section(
    context: &Context,
    (variable, default, _): &(&str, &str, &str),
    section: &str,
) -> Option<Settings> {
    let path = context.env_var(variable);
    let path = context.expand_home_dir(path.as_deref().unwrap_or(default))?;
    let text = context.file_read_as_string(&path).await.ok()?;
    let mut file = ini::Ini::load_from_str(&text).ok()?;
    Some(file.delete(Some(section))?.into_iter().collect())
}

/// Credentials of the profile that the environment names.
#[derive(Debug)]
pub(super) struct ProfileProvider;

impl ProvideCredential for ProfileProvider {
    type Credential = Credential;

    async fn provide_credential(&self, context: &Context) -> Result<Option<Credential>, Error> {
        let mut name = name(context);
        let Some(mut settings) = load(context, &name).await else {
            let is_named = context.env_var("AWS_PROFILE").is_some();
            return is_named.then(|| Err(missing(&name))).transpose();
        };
        let mut roles = Vec::new();
        let base = loop {
            let setting = |name: &str| settings.get(name).cloned();
            if setting("role_arn").is_none() || setting("web_identity_token_file").is_some() {
                break credentials_of(context, &name, &settings).await?;
            }
            if setting("mfa_serial").is_some() {
                let text = "mfa_serial is not supported, but a credential_process is";
                return Err(Error::config_invalid(text));
            }
            let sources = (setting("source_profile"), setting("credential_source"));
            roles.push(settings);
            if roles.len() > MAX_ROLES {
                return Err(Error::config_invalid("its source_profiles form a cycle"));
            }
            match sources {
                (Some(source), _) if source == name => break keys(context, &name).await?,
                (Some(source), _) => {
                    let found = load(context, &source).await;
                    settings = found.ok_or_else(|| missing(&source))?;
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

/// Returns the credentials of the profile `name`, which has no role, or a token for it.
async fn credentials_of(
    context: &Context,
    name: &str,
    settings: &Settings,
) -> Result<Option<Credential>, Error> {
    let (role, file) = ("role_arn", "web_identity_token_file");
    if let (Some(role), Some(file)) = (settings.get(role), settings.get(file)) {
        let (role, file) = (role.clone(), file.into());
        let provider = AssumeRoleWithWebIdentityCredentialProvider::with_config(role, file);
        return provider.provide_credential(context).await;
    }
    if let Some(found) = keys(context, name).await? {
        return Ok(Some(found));
    }
    if settings.contains_key("sso_account_id") {
        let provider = single_sign_on(context, name, settings).await?;
        return provider.provide_credential(context).await;
    }
    let provider = ProcessCredentialProvider::new().with_profile(name);
    provider.provide_credential(context).await
}

async fn keys(context: &Context, name: &str) -> Result<Option<Credential>, Error> {
    let provider = ProfileCredentialProvider::new().with_profile(name);
    provider.provide_credential(context).await
}

async fn single_sign_on(
    context: &Context,
    name: &str,
    settings: &Settings,
) -> Result<SSOCredentialProvider, Error> {
    let provider = SSOCredentialProvider::new().with_profile(name);
    let Some(session) = settings.get("sso_session") else {
        return Ok(provider);
    };
    let section = load_section(context, &FILES[0], &format!("sso-session {session}")).await;
    let section = section.unwrap_or_default();
    let (Some(region), Some(account), Some(role)) = (
        section.get("sso_region"),
        settings.get("sso_account_id"),
        settings.get("sso_role_name"),
    ) else {
        let text = "its sso_session needs sso_region, sso_account_id and sso_role_name";
        return Err(Error::config_invalid(text));
    };
    // reqsign uses the start URL only to find the cached token, which is that of the session's name.
    Ok(provider
        .with_region(region)
        .with_account_id(account)
        .with_role_name(role)
        .with_start_url(session))
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
    roles: &[Settings],
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
    role: &Settings,
    credential: &Credential,
) -> Result<Credential, Error> {
    let setting = |name: &str| role.get(name).cloned();
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
                _ => Err(Error::unexpected(format!("no {path}"))),
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
