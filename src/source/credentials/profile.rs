//! The profile of the AWS CLI, as far as reqsign does not read it.

use std::collections::HashMap;

use reqsign_aws_v4::Credential;
use reqsign_core::{Context, Error, ProvideCredential};

/// File with settings of profiles: its variable, its default, and the prefix of its sections.
pub(super) const CONFIG: (&str, &str, &str) = ("AWS_CONFIG_FILE", "~/.aws/config", "profile ");

/// File with keys of profiles.
const KEYS: (&str, &str, &str) = ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", "");

/// Settings that name credentials in a way that is not supported.
const UNSUPPORTED: [&str; 3] = ["role_arn", "source_profile", "sso_session"];

/// Name of the profile.
pub(super) fn name(context: &Context) -> String {
    context
        .env_var("AWS_PROFILE")
        .unwrap_or_else(|| "default".to_owned())
}

/// Settings of the profile in `file`; none if it does not exist.
pub(super) async fn load(context: &Context, file: (&str, &str, &str)) -> HashMap<String, String> {
    load_section(context, file).await.unwrap_or_default()
}

async fn load_section(
    context: &Context,
    (variable, default, prefix): (&str, &str, &str),
) -> Option<HashMap<String, String>> {
    let path = context
        .env_var(variable)
        .unwrap_or_else(|| default.to_owned());
    let path = context.expand_home_dir(&path)?;
    let text = context.file_read_as_string(&path).await.ok()?;
    let file = ini::Ini::load_from_str(&text).ok()?;
    let section = match name(context).as_str() {
        "default" => file.section(Some("default")),
        name => file.section(Some(format!("{prefix}{name}"))),
    };
    let settings = section?.iter();
    Some(
        settings
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
    )
}

/// Fails for a profile whose settings are not supported, and for one that is named and missing.
#[derive(Debug)]
pub(super) struct Unsupported;

impl ProvideCredential for Unsupported {
    type Credential = Credential;

    async fn provide_credential(&self, context: &Context) -> Result<Option<Credential>, Error> {
        let (config, keys) = (
            load_section(context, CONFIG).await,
            load_section(context, KEYS).await,
        );
        if config.is_none() && keys.is_none() && context.env_var("AWS_PROFILE").is_some() {
            return Err(Error::config_invalid("there is no such profile"));
        }
        let settings = [config, keys].into_iter().flatten();
        let names = settings.flat_map(HashMap::into_keys);
        let unsupported = names
            .filter(|name| UNSUPPORTED.contains(&name.as_str()))
            .min();
        match unsupported {
            Some(name) => Err(Error::config_invalid(format!(
                "{name} is not supported, but a credential_process is"
            ))),
            None => Ok(None),
        }
    }
}
