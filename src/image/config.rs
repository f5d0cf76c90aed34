//! An image's configuration: command, user, and digests of its layers; pure.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::error::Cause;
use crate::base::sha256::Sha256;
use crate::source::documents::{
    MAX_LAYERS, Platform, bounded_keys, bounded_map, bounded_vec, json_error, null_as_default,
    parse_digest,
};

/// Maximum number of words or variables, of each kind. Linux allows a program 2 MiB of them.
const MAX_WORDS: usize = 65_536;

/// Maximum number of volumes. Each takes much more in a runtime's configuration.
const MAX_VOLUMES: usize = 1000;

/// An image's configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// The platform of its programs.
    pub platform: Platform,
    /// The command, its user and its environment.
    pub execution: Execution,
    /// Digests of the unpacked layers, the lowest first.
    pub diff_ids: Vec<Sha256>,
    /// Time of creation, RFC 3339.
    pub created: Option<String>,
    /// The author.
    pub author: Option<String>,
    /// The whole document, unchanged.
    pub document: Box<RawValue>,
}

/// How to run an image.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Execution {
    /// `user`, `uid`, `user:group` and so on; empty for root.
    #[serde(default, deserialize_with = "null_as_default")]
    pub user: String,
    /// `NAME=value`.
    #[serde(default, deserialize_with = "bounded_vec::<_, _, MAX_WORDS>")]
    pub env: Vec<String>,
    /// The first words of the command.
    #[serde(default, deserialize_with = "bounded_vec::<_, _, MAX_WORDS>")]
    pub entrypoint: Vec<String>,
    /// Default arguments.
    #[serde(default, deserialize_with = "bounded_vec::<_, _, MAX_WORDS>")]
    pub cmd: Vec<String>,
    /// Initial working directory; empty for the root.
    #[serde(default, deserialize_with = "null_as_default")]
    pub working_dir: String,
    /// Labels by name.
    #[serde(default, deserialize_with = "bounded_map::<_, _, MAX_WORDS>")]
    pub labels: BTreeMap<String, String>,
    /// Signal that stops the program, for example `SIGTERM`.
    #[serde(default, deserialize_with = "null_as_default")]
    pub stop_signal: String,
    /// Host name.
    #[serde(default, deserialize_with = "null_as_default")]
    pub hostname: String,
    /// Ports on which it listens, for example `80/tcp`.
    #[serde(default, deserialize_with = "bounded_keys::<_, MAX_WORDS>")]
    pub exposed_ports: BTreeSet<String>,
    /// Directories for data outside of the tree.
    #[serde(default, deserialize_with = "bounded_keys::<_, MAX_VOLUMES>")]
    pub volumes: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Raw {
    // Not flattened, because serde would buffer all unknown fields.
    #[serde(default, deserialize_with = "null_as_default")]
    os: String,
    #[serde(default, deserialize_with = "null_as_default")]
    architecture: String,
    variant: Option<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    config: Execution,
    #[serde(default, deserialize_with = "null_as_default")]
    rootfs: RawRootfs,
    created: Option<String>,
    author: Option<String>,
}

#[derive(Default, Deserialize)]
struct RawRootfs {
    #[serde(default, deserialize_with = "bounded_vec::<_, _, MAX_LAYERS>")]
    diff_ids: Vec<String>,
}

impl Config {
    /// Parses the document `bytes`.
    ///
    /// # Errors
    /// When they are no configuration.
    pub fn parse(bytes: &[u8]) -> Result<Self, Cause> {
        let raw: Raw = serde_json::from_slice(bytes).map_err(|error| json_error(&error))?;
        let document = serde_json::from_slice(bytes).map_err(|error| json_error(&error))?;
        let execution = &raw.config;
        let lists = [&execution.env, &execution.entrypoint, &execution.cmd].map(Vec::len);
        let names = [execution.labels.len(), execution.exposed_ports.len()];
        if lists.iter().chain(&names).any(|&len| len > MAX_WORDS) {
            let what = "it has too many variables, words of a command, labels or ports";
            return Err(Cause::Malformed(what.to_owned()));
        }
        if execution.volumes.len() > MAX_VOLUMES {
            return Err(Cause::Malformed("it has too many volumes".to_owned()));
        }
        let diff_ids = raw.rootfs.diff_ids;
        if diff_ids.len() > MAX_LAYERS {
            return Err(Cause::Malformed("it has too many layers".to_owned()));
        }
        let diff_ids = diff_ids.iter().map(|text| parse_digest(text));
        Ok(Self {
            platform: Platform {
                os: raw.os,
                architecture: raw.architecture,
                variant: raw.variant,
            },
            execution: raw.config,
            diff_ids: diff_ids.collect::<Result<_, _>>()?,
            created: raw.created,
            author: raw.author,
            document,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: image-refused
    #[test]
    fn missing_or_null_config_fields_are_empty() {
        let empty = Config::parse(b"{}").expect("a config");
        let nulls = br#"{"os":"","architecture":"","config":{"User":null,"Env":null,"Cmd":null,
            "Entrypoint":null,"Labels":null,"ExposedPorts":null},"rootfs":{"diff_ids":null}}"#;
        let nulls = Config::parse(nulls).expect("a config");
        assert_eq!(empty.execution, nulls.execution);
        assert_eq!(empty.diff_ids, nulls.diff_ids);
        let inner = br#"{"os":null,"architecture":null,"config":{"Env":["A=b",null],"Cmd":[null],
            "Labels":{"a":null},"Volumes":{"/v":null}}}"#;
        let inner = Config::parse(inner).expect("a config").execution;
        assert_eq!(inner.env, ["A=b", ""]);
        assert_eq!(inner.cmd, [""]);
        assert_eq!(inner.labels.get("a").map(String::as_str), Some(""));
        assert!(inner.volumes.contains("/v"));
    }

    #[test]
    fn config_execution_is_parsed() {
        let text =
            br#"{"architecture":"arm64","os":"linux","variant":"v8","config":{"User":"www:80",
            "Env":["A=b"],"Entrypoint":["/e"],"Cmd":["c"],"WorkingDir":"/w","StopSignal":"SIGQUIT",
            "Labels":{"l":"m"},"ExposedPorts":{"80/tcp":{}}},"unknown":[1]}"#;
        let config = Config::parse(text).expect("a config");
        assert_eq!(config.platform.to_string(), "linux/arm64/v8");
        let execution = config.execution;
        assert_eq!(execution.user, "www:80");
        assert_eq!(
            (execution.env, execution.cmd),
            (vec!["A=b".to_owned()], vec!["c".to_owned()])
        );
        assert_eq!(execution.entrypoint, ["/e"]);
        assert_eq!(
            (execution.working_dir, execution.stop_signal),
            ("/w".into(), "SIGQUIT".into())
        );
        assert_eq!(execution.labels.get("l").map(String::as_str), Some("m"));
        assert!(execution.exposed_ports.contains("80/tcp"));
        assert_eq!(config.document.get().as_bytes(), text);
    }

    #[test]
    fn config_with_too_many_words_is_rejected() {
        let words = |count: usize| vec!["\"\""; count].join(",");
        let text = |count| format!(r#"{{"config":{{"Cmd":[{}]}}}}"#, words(count));
        let config = Config::parse(text(MAX_WORDS).as_bytes()).expect("a config");
        assert_eq!(config.execution.cmd.len(), MAX_WORDS);
        let refused = Config::parse(text(MAX_WORDS + 1).as_bytes());
        assert!(matches!(refused, Err(Cause::Malformed(_))), "{refused:?}");
        let layers = format!(r#"{{"rootfs":{{"diff_ids":[{}]}}}}"#, words(MAX_LAYERS + 1));
        let refused = Config::parse(layers.as_bytes()).expect_err("none has so many");
        assert!(refused.to_string().contains("too many layers"), "{refused}");
    }
}
