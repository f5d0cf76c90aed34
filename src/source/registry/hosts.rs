//! Servers of a registry, as containerd's `certs.d/HOST/hosts.toml` configures them.

use std::path::Path;

use toml_edit::{Document, Item, TableLike, Value};
use url::Url;

use super::reference::Reference;
use crate::source::credentials::read_optional;
use crate::source::location::is_server_url;
use crate::source::{Cause, Certificates, ClientCertificate};

/// Path of the API below a server.
const API_PATH: &str = "/v2";

/// Directory of registries without one of their own.
const DEFAULT_DIRECTORY: &str = "_default";

/// Maximum number of servers of one registry.
const MAX_HOSTS: usize = 32;

/// A server that has a registry's images.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a property of its own"
)]
pub(super) struct Host {
    /// URL of its API, without a slash at the end.
    pub(super) api: Url,
    /// Whether it is the registry's own server, and no mirror. Only that gets the registry's login.
    pub(super) is_origin: bool,
    /// Whether it may be asked for manifests and blobs by their digests.
    pub(super) can_pull: bool,
    /// Whether it may be asked which digest a tag means.
    pub(super) can_resolve: bool,
    /// Whether images and artifacts may be uploaded to it.
    pub(super) can_push: bool,
    pub(super) headers: Vec<(String, String)>,
    /// How TLS trusts it.
    pub(super) certificates: Certificates,
    /// How this client identifies to it.
    pub(super) client_certificate: Option<ClientCertificate>,
}

/// Loads the servers of `reference` from `directory`: the mirrors in their order, and then the registry itself.
/// TLS trusts `certificates`, too. A file that cannot be used is [`Cause::Malformed`], with its path.
pub(super) async fn load(
    reference: &Reference,
    directory: &Path,
    certificates: &Certificates,
) -> Result<Vec<Host>, Cause> {
    let server = reference.server();
    let server = server.ok_or_else(|| Cause::Malformed("the host is not valid".to_owned()))?;
    let origin = Host {
        api: with_api_path(server, false),
        is_origin: true,
        can_pull: true,
        can_resolve: true,
        can_push: true,
        headers: Vec::new(),
        certificates: certificates.clone(),
        client_certificate: None,
    };
    let registry = &reference.registry;
    let with_port = registry.replace(':', "_") + "_";
    let names = [registry.as_str(), with_port.as_str(), DEFAULT_DIRECTORY];
    for name in names {
        let path = directory.join(name).join("hosts.toml");
        let shown = path.display().to_string();
        let failed = |detail: String| Cause::Malformed(format!("{shown}: {detail}"));
        let read = read_optional(path).await;
        let Some(bytes) = read.map_err(|error| failed(error.to_string()))? else {
            continue;
        };
        let hosts = parse(&bytes, &origin, &directory.join(name)).await;
        return hosts.map_err(failed);
    }
    Ok(vec![origin])
}

async fn parse(bytes: &[u8], origin: &Host, directory: &Path) -> Result<Vec<Host>, String> {
    let text = str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())?;
    // The error quotes the line, which may have a secret header.
    let document = Document::parse(text).map_err(|error| match error.span() {
        Some(span) => {
            let before = text.get(..span.start).unwrap_or_default();
            format!("line {} is malformed", before.matches('\n').count() + 1)
        }
        None => "it is malformed".to_owned(),
    })?;
    let root = document.as_table();
    let mut hosts = Vec::new();
    let tables = root.get("host").and_then(Item::as_table_like);
    for (name, table) in tables.into_iter().flat_map(TableLike::iter) {
        let table = table.as_table_like();
        let table = table.ok_or_else(|| "a host in it is no table".to_owned())?;
        hosts.push(host(name, table, origin.clone(), directory).await?);
        if hosts.len() > MAX_HOSTS {
            return Err(format!("more than {MAX_HOSTS} hosts"));
        }
    }
    let server = root.get("server").and_then(Item::as_str);
    let server = server.filter(|server| !server.is_empty());
    let last = match server {
        Some(server) => host(server, root, origin.clone(), directory).await?,
        None => apply(root, origin.clone(), directory).await?,
    };
    if hosts.iter().all(|host: &Host| host.api != last.api) {
        hosts.push(last);
    }
    Ok(hosts)
}

/// The server `name`, a URL or a host, with the settings of `table`. Others are those of the registry, `origin`.
async fn host(
    name: &str,
    table: &dyn TableLike,
    origin: Host,
    directory: &Path,
) -> Result<Host, String> {
    let scheme = if name.contains("://") { "" } else { "https://" };
    let url = Url::parse(&format!("{scheme}{name}")).ok();
    let url = url.filter(is_server_url);
    let url = url.ok_or_else(|| "the URL of a host in it is not valid".to_owned())?;
    let overrides_path = boolean(table, "override_path")?;
    // The file may change the scheme and the path of the registry itself.
    let is_same = |one: &Url, other: &Url| (one.host(), one.port()) == (other.host(), other.port());
    let host = Host {
        is_origin: is_same(&url, &origin.api),
        api: with_api_path(url, overrides_path),
        ..origin
    };
    apply(table, host, directory).await
}

/// Sets what `table` says of `host`. Relative paths are below `directory`.
async fn apply(table: &dyn TableLike, mut host: Host, directory: &Path) -> Result<Host, String> {
    if table.contains_key("capabilities") {
        let capabilities = strings(table, "capabilities")?;
        let has = |wanted: &str| capabilities.iter().any(|capability| capability == wanted);
        (host.can_pull, host.can_resolve) = (has("pull"), has("resolve"));
        host.can_push = has("push");
    }
    if let Some(headers) = table.get("header") {
        let headers = headers.as_table_like();
        let headers = headers.ok_or_else(|| "header is no table".to_owned())?;
        for (name, _) in headers.iter() {
            let values = strings(headers, name)?.into_iter();
            host.headers
                .extend(values.map(|value| (name.to_owned(), value)));
        }
    }
    for path in strings(table, "ca")? {
        let pem = read_pem(directory, &path).await?;
        let trusted = host.certificates.with_trusted(&pem);
        host.certificates = trusted.map_err(|error| format!("{path}: {error}"))?;
    }
    if let Some((certificate, key)) = client(table)? {
        let pem = read_pem(directory, &certificate).await?;
        let key_pem = match &key {
            Some(key) => read_pem(directory, key).await?,
            None => pem.clone(),
        };
        let client = ClientCertificate::from_pem(&pem, &key_pem);
        let client = client.map_err(|error| format!("{certificate}: {error}"))?;
        host.client_certificate = Some(client);
    }
    if boolean(table, "skip_verify")? {
        host.certificates = host.certificates.unverified();
    }
    Ok(host)
}

fn with_api_path(mut url: Url, overrides_path: bool) -> Url {
    let path = url.path().trim_end_matches('/');
    let is_api = overrides_path || path.ends_with(API_PATH);
    let suffix = if is_api { "" } else { API_PATH };
    let api = format!("{path}{suffix}");
    url.set_path(&api);
    url
}

fn boolean(table: &dyn TableLike, name: &str) -> Result<bool, String> {
    let value = table.get(name).map(Item::as_bool);
    value
        .unwrap_or(Some(false))
        .ok_or_else(|| format!("{name} is neither true nor false"))
}

/// The texts of `name`: one, or a list of them; none if it is missing.
fn strings(table: &dyn TableLike, name: &str) -> Result<Vec<String>, String> {
    let wrong = || format!("{name} is no text or list of texts");
    match table.get(name) {
        None => Ok(Vec::new()),
        Some(item) => {
            if let Some(text) = item.as_str() {
                return Ok(vec![text.to_owned()]);
            }
            let list = item.as_array().ok_or_else(wrong)?;
            let texts = list.iter().map(|text| text.as_str().map(str::to_owned));
            texts.collect::<Option<_>>().ok_or_else(wrong)
        }
    }
}

/// Paths of a client certificate and of its key, which may be in one file.
fn client(table: &dyn TableLike) -> Result<Option<(String, Option<String>)>, String> {
    let wrong = || "client is no certificate, or pair of a certificate and its key".to_owned();
    let Some(item) = table.get("client") else {
        return Ok(None);
    };
    // A list has files, or pairs of them. Servers get the first.
    let first = item.as_array().map_or(item.as_value(), |list| list.get(0));
    let (file, key) = match first.and_then(Value::as_array) {
        Some(pair) => (pair.get(0), pair.get(1)),
        None => (first, None),
    };
    let text = |value: Option<&Value>| Some(value?.as_str()?.to_owned());
    let file = text(file).ok_or_else(wrong)?;
    Ok(Some((file, text(key).filter(|key| !key.is_empty()))))
}

async fn read_pem(directory: &Path, path: &str) -> Result<Vec<u8>, String> {
    let path = directory.join(path).display().to_string();
    let read = read_optional(&path).await;
    let read = read.map_err(|error| format!("{path}: {error}"))?;
    read.ok_or_else(|| format!("{path}: not found"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The hosts of `spec` with this `hosts.toml` in the directory `name`.
    async fn load_hosts(spec: &str, name: &str, text: &str) -> Result<Vec<Host>, String> {
        let directory = tempfile::tempdir().expect("a directory");
        fs::create_dir(directory.path().join(name)).expect("made");
        fs::write(directory.path().join(name).join("hosts.toml"), text).expect("written");
        let reference = Reference::parse(spec).expect("valid");
        let hosts = load(&reference, directory.path(), &Certificates::default()).await;
        hosts.map_err(|cause| cause.to_string())
    }

    fn apis(hosts: &[Host]) -> Vec<(&str, bool)> {
        let apis = hosts.iter().map(|host| (host.api.as_str(), host.is_origin));
        apis.collect()
    }

    const MIRRORS: &str = r#"
        server = "https://registry-1.docker.io"
        [host."https://z.example.com"]
          capabilities = ["pull", "resolve"]
        [host."http://a.example.com:5000/v2/cache"]
          capabilities = ["pull"]
          override_path = true
        [host."b.example.com/sub"]
          header.x-one = "1"
          [host."b.example.com/sub".header]
          x-many = ["2", "3"]
        "#;

    // Promises: hosts-order, hosts-file
    #[tokio::test]
    async fn mirrors_are_tried_in_order_before_the_registry() {
        // A table must not be defined twice.
        let text = MIRRORS.replace("header.x-one = \"1\"\n", "");
        let hosts = load_hosts("docker://debian", "docker.io", &text)
            .await
            .expect("valid");
        assert_eq!(
            apis(&hosts),
            [
                ("https://z.example.com/v2", false),
                ("http://a.example.com:5000/v2/cache", false),
                ("https://b.example.com/sub/v2", false),
                ("https://registry-1.docker.io/v2", true),
            ]
        );
        let rights = hosts.iter().map(|host| (host.can_pull, host.can_resolve));
        let rights: Vec<_> = rights.collect();
        assert_eq!(
            rights,
            [(true, true), (true, false), (true, true), (true, true)]
        );
        let headers = [("x-many", "2"), ("x-many", "3")];
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(hosts[2].headers, headers);
    }

    // Promises: hosts-file
    #[tokio::test]
    async fn directory_of_a_registry_is_found_by_each_of_its_names() {
        let text = "server = \"http://other.example.com\"";
        let spec = "oci://registry.example.com:5000/a";
        for name in [
            "registry.example.com:5000",
            "registry.example.com_5000_",
            "_default",
        ] {
            let hosts = load_hosts(spec, name, text).await.expect("valid");
            assert_eq!(
                apis(&hosts),
                [("http://other.example.com/v2", false)],
                "{name}"
            );
        }
        let own = "[host.\"http://registry.example.com:5000\"]";
        let hosts = load_hosts(spec, "_default", own).await.expect("valid");
        assert_eq!(
            apis(&hosts),
            [
                ("http://registry.example.com:5000/v2", true),
                ("https://registry.example.com:5000/v2", true),
            ]
        );
        let hosts = load_hosts(spec, "registry.example.com", text).await;
        let hosts = hosts.expect("valid");
        assert_eq!(
            apis(&hosts),
            [("https://registry.example.com:5000/v2", true)]
        );
    }

    // Promises: hosts-file
    #[tokio::test]
    async fn malformed_hosts_files_are_named_without_their_text() {
        let spec = "oci://example.com/a";
        for (text, detail) in [
            ("x = 1\nhunter2 = ", "line 2"),
            (
                "[host.\"https://hunter2:pass@example.com\"]",
                "URL of a host",
            ),
            ("[host]\n\"https://hunter2\" = 1", "no table"),
            ("skip_verify = \"hunter2\"", "skip_verify"),
            ("capabilities = [\"pull\", 2]", "capabilities"),
            ("ca = \"missing.pem\"", "missing.pem: not found"),
            ("client = [[]]", "client"),
            ("server = \"ftp://example.com\"", "URL of a host"),
        ] {
            let refused = load_hosts(spec, "example.com", text).await;
            let refused = refused.expect_err("malformed");
            assert!(refused.contains(detail), "{refused}");
            assert!(refused.contains("example.com/hosts.toml"), "{refused}");
            assert!(!refused.contains("hunter2"), "{refused}");
        }
    }
}
