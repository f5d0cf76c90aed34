//! Names of images in registries; pure.

use url::Url;

use crate::base::sha256::Sha256;
use crate::source::Cause;

/// Registry of names without one.
const DEFAULT_REGISTRY: &str = "docker.io";

/// Another name of the default registry.
const OLD_DEFAULT_REGISTRY: &str = "index.docker.io";

/// Host that serves the default registry.
const DEFAULT_REGISTRY_HOST: &str = "registry-1.docker.io";

/// Prefix of repositories without one in the default registry.
const DEFAULT_PREFIX: &str = "library/";

const DEFAULT_TAG: &str = "latest";

/// Maximum length of a repository's name.
const MAX_REPOSITORY_LEN: usize = 255;

/// Maximum length of a tag.
const MAX_TAG_LEN: usize = 128;

/// Name of an image: `oci://REGISTRY/REPOSITORY[:TAG|@DIGEST]`, or the same with `docker://`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Reference {
    /// Host of the registry in the name, with its port if it is given.
    pub(super) registry: String,
    pub(super) repository: String,
    /// Which of its images.
    pub(super) version: Version,
}

/// Selects one image of a repository.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Version {
    /// A name that the registry can give to another image.
    Tag(String),
    /// Digest of a manifest or an index.
    Digest(Sha256),
}

impl Version {
    /// Last part of the path of its manifest.
    pub(super) fn path(&self) -> String {
        match self {
            Self::Tag(tag) => tag.clone(),
            Self::Digest(digest) => format!("sha256:{digest}"),
        }
    }
}

impl Reference {
    /// Parses `spec` as Docker does: a first part without a dot, a colon or `localhost` is no registry. The error
    /// leaves out the text, which may have secrets.
    pub(super) fn parse(spec: &str) -> Result<Self, Cause> {
        let malformed = "a name in a registry is oci://REGISTRY/REPOSITORY[:TAG|@sha256:DIGEST]";
        Self::try_parse(spec).ok_or_else(|| Cause::Malformed(malformed.to_owned()))
    }

    fn try_parse(spec: &str) -> Option<Self> {
        let (_, name) = spec.split_once("://")?;
        let (name, digest) = match name.split_once('@') {
            Some((name, digest)) => (name, Some(Sha256::from_oci(digest)?)),
            None => (name, None),
        };
        let (name, tag) = match name.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, tag),
            _ => (name, DEFAULT_TAG),
        };
        let (registry, repository) = match name.split_once('/') {
            Some((first, rest)) if is_registry(first) => (first, rest),
            _ => (DEFAULT_REGISTRY, name),
        };
        let is_default = [DEFAULT_REGISTRY, OLD_DEFAULT_REGISTRY].contains(&registry);
        let (registry, prefix) = match (is_default, repository.contains('/')) {
            (true, true) => (DEFAULT_REGISTRY, ""),
            (true, false) => (DEFAULT_REGISTRY, DEFAULT_PREFIX),
            (false, _) => (registry, ""),
        };
        let repository = format!("{prefix}{repository}");
        let is_valid = is_host(registry) && is_repository(&repository) && is_tag(tag);
        is_valid.then(|| Self {
            registry: registry.to_owned(),
            repository,
            version: digest.map_or_else(|| Version::Tag(tag.to_owned()), Version::Digest),
        })
    }

    /// URL of the registry's server, without a path. A server on this machine is reached without TLS.
    pub(super) fn server(&self) -> Option<Url> {
        let host = match self.registry.as_str() {
            DEFAULT_REGISTRY => DEFAULT_REGISTRY_HOST,
            registry => registry,
        };
        let url = Url::parse(&format!("https://{host}")).ok()?;
        let is_local = match url.host()? {
            url::Host::Domain(name) => name == "localhost",
            url::Host::Ipv4(address) => address.is_loopback(),
            url::Host::Ipv6(address) => address.is_loopback(),
        };
        if is_local && !host.ends_with(":443") {
            return Url::parse(&format!("http://{host}")).ok();
        }
        Some(url)
    }
}

/// Whether the first part of a name is a registry.
fn is_registry(first: &str) -> bool {
    first.contains(['.', ':']) || first == "localhost"
}

fn is_host(registry: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte);
    let url = Url::parse(&format!("https://{registry}"));
    registry.bytes().all(is_letter) && url.is_ok_and(|url| url.path() == "/")
}

fn is_repository(repository: &str) -> bool {
    let is_alphanumeric = |byte: Option<&u8>| {
        byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    };
    let is_valid = |byte: u8| is_alphanumeric(Some(&byte)) || b"._-".contains(&byte);
    let is_part = |part: &str| {
        let bytes = part.as_bytes();
        part.bytes().all(is_valid)
            && is_alphanumeric(bytes.first())
            && is_alphanumeric(bytes.last())
            && !part.contains("..")
    };
    repository.len() <= MAX_REPOSITORY_LEN && repository.split('/').all(is_part)
}

fn is_tag(tag: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !tag.is_empty()
        && tag.len() <= MAX_TAG_LEN
        && tag.bytes().all(is_valid)
        && !tag.starts_with(['.', '-'])
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "01091119212931394149515961697179818991a9b1b9c1c9d1d9e1e9f1f90109";

    // Promises: registry-name
    #[test]
    fn short_names_are_those_of_docker_hub() {
        for (spec, registry, repository, version) in [
            ("docker://debian", "docker.io", "library/debian", "latest"),
            ("oci://debian:12", "docker.io", "library/debian", "12"),
            ("docker://me/tool:v1.0_a", "docker.io", "me/tool", "v1.0_a"),
            (
                "docker://index.docker.io/debian",
                "docker.io",
                "library/debian",
                "latest",
            ),
            ("oci://localhost/a", "localhost", "a", "latest"),
            ("oci://localhost:5000/a:b", "localhost:5000", "a", "b"),
            ("oci://[::1]:5000/a/b", "[::1]:5000", "a/b", "latest"),
            (
                "oci://registry.example.com/a/b__c-d/e.f:1",
                "registry.example.com",
                "a/b__c-d/e.f",
                "1",
            ),
        ] {
            let found = Reference::parse(spec).expect(spec);
            let expected = Reference {
                registry: registry.to_owned(),
                repository: repository.to_owned(),
                version: Version::Tag(version.to_owned()),
            };
            assert_eq!(found, expected);
        }
    }

    // Promises: registry-manifest
    #[test]
    fn digest_in_a_name_takes_precedence_over_its_tag() {
        for tag in ["", ":v1"] {
            let spec = format!("oci://example.com/a{tag}@sha256:{HEX}");
            let found = Reference::parse(&spec).expect("valid");
            assert_eq!(found.version.path(), format!("sha256:{HEX}"));
        }
    }

    #[test]
    fn malformed_registry_names_are_rejected_without_their_text() {
        let upper = HEX.to_uppercase();
        for spec in [
            "oci://example.com/",
            "oci:///a",
            "oci://hunter2:pass@example.com/a",
            "oci://example.com/A",
            "oci://example.com/a//b",
            "oci://example.com/a/../b",
            "oci://example.com/..",
            "oci://example.com/a?token=hunter2",
            "oci://example.com/a:",
            "oci://example.com/a:.x",
            "oci://example.com/a:b:c",
            "oci://exa mple.com/a",
            "oci://example.com:port/a",
            "oci://example.com/a@md5:00",
            &format!("oci://example.com/a@sha256:{upper}"),
            &format!("oci://example.com/{}", "a".repeat(256)),
            &format!("oci://example.com/a:{}", "a".repeat(129)),
        ] {
            let refused = Reference::parse(spec).expect_err(spec).to_string();
            assert!(!refused.contains("hunter2"), "{refused}");
        }
    }

    // Promises: registry-name
    #[test]
    fn only_servers_on_this_machine_are_reached_without_tls() {
        for (spec, server) in [
            ("docker://debian", "https://registry-1.docker.io/"),
            ("oci://example.com:5000/a", "https://example.com:5000/"),
            ("oci://localhost/a", "http://localhost/"),
            ("oci://127.0.0.2:5000/a", "http://127.0.0.2:5000/"),
            ("oci://[::1]:5000/a", "http://[::1]:5000/"),
            ("oci://localhost:443/a", "https://localhost/"),
            (
                "oci://localhost.example.com/a",
                "https://localhost.example.com/",
            ),
        ] {
            let reference = Reference::parse(spec).expect(spec);
            let found = reference.server().expect("valid");
            assert_eq!(found.as_str(), server);
        }
    }
}
