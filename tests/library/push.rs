//! Artifacts that refer to an image in a registry: their upload, and how they are found.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tarfs::source::{
    ArtifactLayer, BufferPool, Cause, Descriptor, Error, INDEX_ARTIFACT_TYPE, INDEX_BLOB_TYPE,
    INDEX_LAYER_ANNOTATION, Options, Repository, Retry, UploadContent,
};
use tarfs::{Packed, Sha256};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::support::http::{Request, Resource, Response, Server};
use crate::support::sha256::sha256;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const ROOT: &str = "/v2/me/tool/";

/// Abilities of a registry besides storing blobs and manifests.
#[derive(Clone, Copy, Default)]
struct Behaviour {
    has_referrers: bool,
    /// Whether addresses of uploads are relative.
    has_relative_addresses: bool,
    /// Number of uploads of blobs that fail.
    failures: usize,
    /// Status of each upload, if it is refused.
    refusal: Option<u16>,
    has_tokens: bool,
}

#[derive(Default)]
struct State {
    /// Blobs by digest.
    blobs: BTreeMap<String, Vec<u8>>,
    /// Manifests by digest or tag.
    manifests: BTreeMap<String, Vec<u8>>,
    failures: usize,
}

/// A server with the repository `me/tool`.
struct Registry {
    server: Arc<Server>,
    state: Arc<Mutex<State>>,
    hosts: TempDir,
    network: Runtime,
}

impl Registry {
    fn new(behaviour: Behaviour) -> Self {
        let server = Arc::new(Server::start());
        let state = Arc::<Mutex<State>>::default();
        let (kept, base) = (Arc::clone(&state), server.url(""));
        server.route(&format!("{ROOT}*"), move |request| {
            let mut state = kept.lock().expect("no panic");
            answer(request, &mut state, behaviour, &base)
        });
        Self {
            server,
            state,
            hosts: tempfile::tempdir().expect("a directory"),
            network: Runtime::new().expect("a runtime"),
        }
    }

    fn repository(&self) -> Repository {
        let url = self.server.url("");
        let host = url.strip_prefix("http://").expect("a host");
        let options = Options {
            hosts_dir: self.hosts.path().to_owned(),
            retry: Retry {
                initial_pause: Duration::ZERO,
                ..Retry::default()
            },
            ..Options::default()
        };
        let name = format!("oci://{host}/me/tool:1");
        let opening = Repository::open(&name, options);
        self.network.block_on(opening).expect("a name")
    }

    fn push(&self, texts: &[&str]) -> Result<Descriptor, Error> {
        let layers: Vec<_> = texts.iter().map(|text| layer(text)).collect();
        let (repository, subject) = (self.repository(), subject());
        let pushing = repository.push_artifact(&subject, INDEX_ARTIFACT_TYPE, &layers);
        self.network.block_on(pushing)
    }

    /// Asks the server at `url` before this one.
    fn ask_first(&self, url: &str) {
        let host = self.server.url("").replace("http://", "");
        let directory = self.hosts.path().join(host);
        std::fs::create_dir_all(&directory).expect("made");
        let text = format!("[host.\"{url}\"]\ncapabilities = [\"pull\", \"resolve\"]\n");
        std::fs::write(directory.join("hosts.toml"), text).expect("written");
    }

    fn referrers(&self) -> Result<Vec<Descriptor>, Error> {
        let repository = self.repository();
        let asking = repository.referrers(subject().digest, INDEX_ARTIFACT_TYPE);
        self.network.block_on(asking)
    }

    fn store(&self, name: &str, text: &str) {
        let mut state = self.state.lock().expect("no panic");
        state.manifests.insert(name.to_owned(), text.into());
    }

    fn manifest(&self, name: &str) -> Option<String> {
        let state = self.state.lock().expect("no panic");
        let bytes = state.manifests.get(name).cloned();
        bytes.map(|bytes| String::from_utf8(bytes).expect("UTF-8"))
    }

    /// Number of blobs that were sent.
    fn uploads(&self) -> usize {
        let requests = self.server.requests(&format!("{ROOT}blobs/uploads/7"));
        requests.len()
    }
}

fn answer(request: &Request, state: &mut State, behaviour: Behaviour, base: &str) -> Response {
    let is_read = request.method == "GET" || request.method == "HEAD";
    if let Some(refusal) = behaviour.refusal.filter(|_| !is_read) {
        let body = r#"{"errors":[{"code":"DENIED","message":"requested access is denied"}]}"#;
        return Response::new(refusal).with_body(body);
    }
    if behaviour.has_tokens && request.header("authorization") != Some("Bearer pull,push") {
        let challenge = format!(
            "Bearer realm=\"{base}/token\",service=\"x\",scope=\"repository:me/tool:pull\""
        );
        return Response::new(401).with("WWW-Authenticate", challenge);
    }
    let (kind, id) = request.path[ROOT.len()..].split_once('/').expect("a kind");
    match (&*request.method, kind) {
        ("POST", "blobs") => {
            let address = format!("{ROOT}blobs/uploads/7?state=a%2Fb");
            let base = if behaviour.has_relative_addresses {
                ""
            } else {
                base
            };
            Response::new(202).with("Location", format!("{base}{address}"))
        }
        ("PUT", "blobs") if state.failures < behaviour.failures => {
            state.failures += 1;
            Response::new(500)
        }
        ("PUT", "blobs") => {
            let expected = format!("state=a%2Fb&digest=sha256%3A{}", sha256(&request.body));
            if request.query != expected {
                return Response::new(400);
            }
            let digest = format!("sha256:{}", sha256(&request.body));
            state.blobs.insert(digest, request.body.clone());
            Response::new(201)
        }
        ("GET" | "HEAD", "blobs") => match state.blobs.get(id) {
            Some(_) if request.method == "HEAD" => Response::new(200),
            Some(bytes) => Resource::new(bytes.clone()).answer(request),
            None => Response::new(404),
        },
        ("PUT", "manifests") => {
            state.manifests.insert(id.to_owned(), request.body.clone());
            let stored = Response::new(201);
            if behaviour.has_referrers && id.starts_with("sha256:") {
                return stored.with("OCI-Subject", format!("sha256:{}", subject().digest));
            }
            stored
        }
        ("GET", "manifests") => match state.manifests.get(id) {
            Some(bytes) => Response::new(200).with_body(bytes.clone()),
            None => Response::new(404),
        },
        ("GET", "referrers") if behaviour.has_referrers => list(request, state),
        _ => Response::new(404),
    }
}

/// A page with one of the artifacts, as of a registry that ignores the wanted type. The first page is empty.
fn list(request: &Request, state: &State) -> Response {
    let artifacts = state.manifests.iter().filter_map(|(name, bytes)| {
        let manifest: Value = serde_json::from_slice(bytes).ok()?;
        let artifact_type = manifest.get("artifactType")?.as_str()?;
        Some(
            json!({ "mediaType": MANIFEST, "digest": name, "size": bytes.len(),
                     "artifactType": artifact_type }),
        )
    });
    let artifacts: Vec<_> = artifacts.collect();
    let page = request.query.strip_prefix("page=").unwrap_or("0");
    let page: usize = page.parse().expect("a number");
    let shown = page.checked_sub(1).and_then(|number| artifacts.get(number));
    let shown: Vec<_> = shown.into_iter().collect();
    let list = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": shown });
    let response = Response::new(200).with_body(list.to_string());
    if page < artifacts.len() {
        let next = format!("<{}?page={}>; rel=\"next\"", request.path, page + 1);
        return response.with("Link", next);
    }
    response
}

fn subject() -> Descriptor {
    Descriptor::new(MANIFEST, Sha256([0xab; 32]), 123)
}

fn layer(text: &str) -> ArtifactLayer {
    let digest = format!("sha256:{}", "1".repeat(64));
    ArtifactLayer {
        content: UploadContent::from(Bytes::from(text.to_owned())),
        media_type: INDEX_BLOB_TYPE.to_owned(),
        annotations: [(INDEX_LAYER_ANNOTATION.to_owned(), digest)].into(),
    }
}

fn tag() -> String {
    format!("sha256-{}", subject().digest)
}

fn hint(error: &Error) -> String {
    error.cause.hint().unwrap_or_default().into_owned()
}

#[test]
fn pushed_artifact_is_found_with_its_blobs() {
    for has_referrers in [false, true] {
        let registry = Registry::new(Behaviour {
            has_referrers,
            has_relative_addresses: has_referrers,
            ..Behaviour::default()
        });
        assert_eq!(registry.referrers().expect("none"), []);
        let pushed = registry.push(&["one", "two"]).expect("pushed");
        let found = registry.referrers().expect("found");
        assert_eq!(found, [pushed]);
        assert_eq!(registry.manifest(&tag()).is_none(), has_referrers);

        let repository = registry.repository();
        let reading = repository.manifest(Some(found[0].digest), 1 << 20);
        let bytes = registry.network.block_on(reading).expect("there");
        assert_eq!(found[0].digest.to_string(), sha256(&bytes));
        assert_eq!(found[0].size, bytes.len() as u64);
        let manifest: Value = serde_json::from_slice(&bytes).expect("JSON");
        assert_eq!(manifest["artifactType"], INDEX_ARTIFACT_TYPE);
        let digest = format!("sha256:{}", subject().digest);
        let expected = json!({ "mediaType": MANIFEST, "digest": digest, "size": 123 });
        assert_eq!(manifest["subject"], expected);
        assert_eq!(
            manifest["config"]["mediaType"],
            "application/vnd.oci.empty.v1+json"
        );
        let layers = manifest["layers"].as_array().expect("a list");
        assert_eq!(layers.len(), 2);
        for (layer, text) in layers.iter().zip(["one", "two"]) {
            assert_eq!(layer["mediaType"], INDEX_BLOB_TYPE);
            let digest = layer["annotations"][INDEX_LAYER_ANNOTATION].as_str();
            assert_eq!(digest.map(str::len), Some(71));
            let digest = layer["digest"].as_str().expect("a digest").parse();
            let blob = repository
                .blob(digest.expect("a digest"), 3, &[])
                .expect("a server");
            let buffer = BufferPool::new(1 << 20).acquire(3).expect("open");
            let read = registry.network.block_on(blob.read_at(Packed(0), buffer));
            assert_eq!(read.expect("there"), text);
        }
    }
}

#[test]
fn second_push_sends_new_blobs_and_replaces_its_referrer() {
    let registry = Registry::new(Behaviour::default());
    let other = json!({ "mediaType": MANIFEST, "digest": "sha512:0", "size": 1,
                        "artifactType": "application/x-other" });
    let list = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [other] });
    registry.store(&tag(), &list.to_string());
    registry.push(&["one", "two"]).expect("pushed");
    assert_eq!(registry.uploads(), 3, "two blobs and the configuration");
    let pushed = registry.push(&["one", "three"]).expect("pushed");
    assert_eq!(registry.uploads(), 4);
    assert_eq!(registry.referrers().expect("found").first(), Some(&pushed));
    assert_eq!(registry.referrers().expect("found").len(), 1);
    let again = registry.push(&["one", "three"]).expect("pushed");
    assert_eq!(again, pushed);
    let list = registry.manifest(&tag()).expect("there");
    let list: Value = serde_json::from_str(&list).expect("JSON");
    assert_eq!(list["manifests"].as_array().map(Vec::len), Some(2));
    assert_eq!(list["manifests"][0], other);
}

#[test]
fn failed_upload_of_a_blob_begins_again() {
    let registry = Registry::new(Behaviour {
        failures: 2,
        ..Behaviour::default()
    });
    registry.push(&["one"]).expect("pushed");
    let begun = registry.server.requests(&format!("{ROOT}blobs/uploads/"));
    assert_eq!((begun.len(), registry.uploads()), (4, 4));
}

#[test]
fn refused_push_names_registry_and_permission() {
    for (status, expected) in [
        (401, "status 401 DENIED: requested access is denied"),
        (403, "status 403 DENIED: requested access is denied"),
        (405, "permits no uploads"),
    ] {
        let registry = Registry::new(Behaviour {
            refusal: Some(status),
            ..Behaviour::default()
        });
        let error = registry.push(&["one"]).expect_err("refused");
        let text = format!("{error}: {}; {}", error.cause, hint(&error));
        assert!(
            text.starts_with("cannot upload to oci://127.0.0.1:"),
            "{text}"
        );
        assert!(text.contains(expected), "{text}");
        if status != 405 {
            assert!(text.contains("docker login 127.0.0.1:"), "{text}");
            assert!(text.contains("who may push to it"), "{text}");
        }
    }
}

#[test]
fn push_asks_for_a_token_to_pull_and_push() {
    let registry = Registry::new(Behaviour {
        has_tokens: true,
        ..Behaviour::default()
    });
    registry.server.route("/token", |request| {
        let push = "scope=repository%3Ame%2Ftool%3Apull%2Cpush&";
        let token = if request.query.starts_with(push) {
            "pull,push"
        } else {
            "pull"
        };
        Response::new(200).with_body(json!({ "token": token }).to_string())
    });
    registry.push(&["one"]).expect("pushed");
    let error = registry.referrers().expect_err("a token to pull");
    assert!(
        error.to_string().starts_with("cannot read oci://"),
        "{error}"
    );
}

#[test]
fn unusable_lists_of_referrers_are_ignored_and_not_replaced() {
    let registry = Registry::new(Behaviour::default());
    let list = format!("{ROOT}referrers/sha256:{}", subject().digest);
    let long = "1,".repeat(4 << 20);
    for body in [
        "<html>",
        &format!("{{\"schemaVersion\":2,\"manifests\":[{long}1]}}"),
    ] {
        let answer = Response::new(200).with_body(body.to_owned());
        registry.server.route(&list, move |_| answer.clone());
        assert_eq!(registry.referrers().expect("none"), []);
    }
    registry.server.route(&list, |_| Response::new(404));
    registry.store(&tag(), "{}");
    assert_eq!(registry.referrers().expect("none"), []);
    let error = registry.push(&["one"]).expect_err("no list");
    assert!(matches!(error.cause, Cause::Damaged(_)), "{error:?}");
    assert!(error.to_string().starts_with("cannot upload to"), "{error}");
    assert_eq!(registry.manifest(&tag()).as_deref(), Some("{}"));
    registry.server.route(&list, |_| Response::new(403));
    let error = registry.referrers().expect_err("refused");
    assert!(matches!(error.cause, Cause::Denied(_)), "{error:?}");
}

// Promises: published-requests
#[test]
fn pages_of_referrers_end_although_the_registry_names_more() {
    let registry = Registry::new(Behaviour::default());
    let list = format!("{ROOT}referrers/sha256:{}", subject().digest);
    let body = r#"{"schemaVersion":2,"manifests":[]}"#;
    for (link, pages) in [("?again", 16), ("http://example.com/", 1)] {
        let link = format!("<{link}>; rel=\"next\"");
        let answer = Response::new(200).with_body(body).with("Link", link);
        registry.server.route(&list, move |_| answer.clone());
        let before = registry.server.requests(&list).len();
        assert_eq!(registry.referrers().expect("none"), []);
        assert_eq!(registry.server.requests(&list).len() - before, pages);
    }
}

#[test]
fn push_goes_to_the_first_host_that_permits_it() {
    let (registry, other) = (
        Registry::new(Behaviour::default()),
        Registry::new(Behaviour::default()),
    );
    let url = registry.server.url("");
    let directory = url.strip_prefix("http://").expect("a host");
    let directory = registry.hosts.path().join(directory);
    std::fs::create_dir(&directory).expect("made");
    let hosts = |capabilities: &str, own: &str| {
        let (mirror, url) = (other.server.url(""), registry.server.url(""));
        let text = format!(
            "server = \"{url}\"\n{own}[host.\"{mirror}\"]\ncapabilities = [{capabilities}]\n"
        );
        std::fs::write(directory.join("hosts.toml"), text).expect("written");
    };
    hosts("\"pull\", \"resolve\"", "");
    registry.push(&["one"]).expect("pushed");
    assert_eq!((registry.uploads(), other.uploads()), (2, 0));
    hosts("\"push\"", "");
    registry.push(&["one"]).expect("pushed");
    assert_eq!((registry.uploads(), other.uploads()), (2, 2));
    hosts("\"pull\"", "capabilities = [\"pull\"]\n");
    let error = registry.push(&["one"]).expect_err("no host");
    assert!(error.cause.to_string().contains("\"push\""), "{error:?}");
}

/// Mirrors fail, or have no list of referrers. A list that is empty is an answer.
// Promises: hosts-same
#[test]
fn referrers_are_asked_of_the_next_server() {
    for (status, body, is_answer) in [
        (404, "", false),
        (400, "", false),
        (503, "", false),
        (403, "", false),
        (200, r#"{"schemaVersion":2,"manifests":[]}"#, true),
    ] {
        let registry = Registry::new(Behaviour {
            has_referrers: true,
            ..Behaviour::default()
        });
        registry.push(&["1"]).expect("pushed");
        let (mirror, asked) = (Server::start(), Arc::<Mutex<usize>>::default());
        let count = Arc::clone(&asked);
        mirror.route("/v2/*", move |request| {
            *count.lock().expect("no panic") += usize::from(request.path.contains("/referrers/"));
            if request.path.ends_with("/manifests/1") {
                return Response::new(200).with_body(r#"{"schemaVersion":2}"#);
            }
            Response::new(status).with_body(body)
        });
        registry.ask_first(&mirror.url(""));
        let repository = registry.repository();
        let tag = registry.network.block_on(repository.manifest(None, 1000));
        tag.expect("of the mirror");
        let asking = repository.referrers(subject().digest, INDEX_ARTIFACT_TYPE);
        let found = registry.network.block_on(asking).expect("asked");
        assert_eq!(found.len(), usize::from(!is_answer), "{status}");
        assert!(*asked.lock().expect("no panic") > 0, "{status}");
    }
}
