//! Images and artifacts in container registries.

use std::fs;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tarfs::locate::{Error, OpenContext, SourceSpec};
use tarfs::source::{BufferPool, Options, Repository, Source};
use tarfs::{Packed, Sha256, Stats, fetch};
use tokio::runtime::Runtime;

use crate::support::fixture::TestDir;
use crate::support::http::{Request, Resource, Response, Server};
use crate::support::image::{self, Files, Image};
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::Archive;
use crate::support::rng::Rng;
use crate::support::sample_images::{names_in, one, two};

/// Refuses a request, or lets it pass.
pub(crate) type Guard = Arc<dyn Fn(&Request) -> Option<Response> + Send + Sync>;

pub(crate) fn nothing() -> Guard {
    Arc::new(|_| None)
}

/// A server with the repository `me/tool`.
pub(crate) struct Registry {
    server: Arc<Server>,
    guard: Guard,
}

impl Registry {
    pub(crate) fn new(guard: Guard) -> Self {
        let server = Arc::new(Server::start());
        Self { server, guard }
    }

    /// A registry with the image `image` as `me/tool:1`.
    fn with(image: &Image) -> Self {
        let registry = Self::new(nothing());
        let mut files = Files::default();
        let manifest = files.manifest(image);
        registry.push(&files);
        registry.tag("1", &files, &manifest);
        registry
    }

    pub(crate) fn serve(&self, path: &str, resource: Resource) {
        let guard = Arc::clone(&self.guard);
        let answer =
            move |request: &Request| guard(request).unwrap_or_else(|| resource.answer(request));
        self.server.route(path, answer);
    }

    /// Stores all blobs, which may be manifests.
    pub(crate) fn push(&self, files: &Files) {
        for (name, bytes) in &files.0 {
            let digest = name.strip_prefix("blobs/sha256/").expect("a blob");
            let resource = Resource::new(bytes.clone()).etag(&format!("\"{digest}\""));
            self.serve(&blob(digest), resource.clone());
            let path = format!("/v2/me/tool/manifests/sha256:{digest}");
            self.serve(&path, resource.without_ranges());
        }
    }

    /// Makes `tag` mean the manifest or index with this descriptor.
    pub(crate) fn tag(&self, tag: &str, files: &Files, descriptor: &Value) {
        let bytes = files.clone().get(&blob_file(descriptor)).clone();
        self.serve(&manifest(tag), Resource::new(bytes).without_ranges());
    }

    /// The name of `me/tool` with this tag or digest.
    pub(crate) fn name(&self, version: &str) -> String {
        let url = self.server.url("");
        let host = url.strip_prefix("http://").expect("a host");
        format!("oci://{host}/me/tool{version}")
    }

    /// Number of requests for `path`.
    pub(crate) fn requests(&self, path: &str) -> usize {
        self.server.requests(path).len()
    }
}

fn manifest(tag: &str) -> String {
    format!("/v2/me/tool/manifests/{tag}")
}

pub(crate) fn blob(digest: &str) -> String {
    format!("/v2/me/tool/blobs/sha256:{digest}")
}

pub(crate) fn digest_of(descriptor: &Value) -> &str {
    let digest = descriptor["digest"].as_str().expect("a digest");
    digest.strip_prefix("sha256:").expect("SHA-256")
}

pub(crate) fn blob_file(descriptor: &Value) -> String {
    format!("blobs/sha256/{}", digest_of(descriptor))
}

/// A command without the logins of the user that runs the tests.
pub(crate) fn command(place: &TestDir, words: &[&str]) -> Command {
    let mut command = place.command(words);
    command
        .env("HOME", place.root())
        .env("DOCKER_CONFIG", place.path("docker"))
        .env_remove("XDG_CONFIG_HOME")
        .env_remove("REGISTRY_AUTH_FILE");
    command
}

fn run(place: &TestDir, words: &[&str]) -> Output {
    command(place, words).output().expect("started")
}

#[track_caller]
fn succeeds(place: &TestDir, words: &[&str]) -> String {
    let done = run(place, words);
    assert!(done.status.success(), "{words:?}: {}", stderr_text(&done));
    String::from_utf8(done.stdout).expect("UTF-8")
}

#[track_caller]
fn error_of(place: &TestDir, words: &[&str]) -> String {
    let done = run(place, words);
    let text = stderr_text(&done);
    assert_eq!(done.status.code(), Some(2), "{words:?}: {text}");
    text
}

// Promises: registry-name
#[test]
fn image_in_a_registry_is_a_source_of_every_verb() {
    for packing in [Packing::Gzip, Packing::Plain] {
        let registry = Registry::with(&two().packed(packing));
        let (place, source) = (TestDir::new(&["out"]), registry.name(":1"));
        let listed = succeeds(&place, &["ls", "-R", &source]);
        assert_eq!(listed, "d\nd/noise\nd/text\nlink\nlow\n");
        succeeds(&place, &["materialize", "-q", &source, "-C", "out"]);
        assert_eq!(names_in(&place.path("out/d")), ["noise", "text"]);
        succeeds(&place, &["verify", "-q", &source]);
        succeeds(&place, &["index", "-q", &source]);
        let shown = succeeds(&place, &["image", &source.replace("oci://", "docker://")]);
        assert!(shown.contains("2, "), "{shown}");
        let refused = run(&place, &["materialize", &source, "d/text"]);
        assert_eq!(refused.status.code(), Some(64));
        let refused = stderr_text(&refused);
        assert!(refused.contains("PATH cannot be used"), "{refused}");
    }
    let registry = Registry::with(&one());
    let place = TestDir::new(&[]);
    succeeds(&place, &["bundle", "-q", &registry.name(":1"), "bundle"]);
    assert_eq!(names_in(&place.path("bundle")), ["config.json", "rootfs"]);
}

/// Registries need not support ranges (distribution specification, "Pulling blobs").
// Promises: http-no-ranges
#[test]
fn image_of_a_registry_without_ranges_is_read() {
    let ways: [fn(&Resource, &Request) -> Response; 3] = [
        |resource, request| resource.clone().without_ranges().answer(request),
        |resource, request| match request.range() {
            Some(_) => Response::new(416),
            None => resource.answer(request),
        },
        // A cache that has it from the third request on.
        |resource, request| match request.number {
            1 | 2 => resource.clone().without_ranges().answer(request),
            _ => resource.answer(request),
        },
    ];
    for way in ways {
        let registry = Registry::with(&two().packed(Packing::Gzip));
        let mut files = Files::default();
        files.manifest(&two().packed(Packing::Gzip));
        for (name, bytes) in files.0 {
            let digest = name.strip_prefix("blobs/sha256/").expect("a blob");
            let resource = Resource::new(bytes);
            let answer = move |request: &Request| way(&resource, request);
            registry.server.route(&blob(digest), answer);
        }
        let (place, source) = (TestDir::new(&["out"]), registry.name(":1"));
        let listed = succeeds(&place, &["ls", "-R", &source]);
        assert_eq!(listed, "d\nd/noise\nd/text\nlink\nlow\n");
        succeeds(&place, &["materialize", "-q", &source, "-C", "out"]);
        assert_eq!(names_in(&place.path("out/d")), ["noise", "text"]);
        succeeds(&place, &["verify", "-q", &source]);
    }
}

/// A read behind the others of a server without ranges continues their response.
// Promises: http-no-ranges
#[test]
fn blob_without_ranges_is_read_in_one_request() {
    let registry = Registry::with(&one());
    let bytes = Rng::new(1).bytes(8 << 20);
    // The readers compare it.
    let digest = Sha256([1; 32]);
    let resource = Resource::new(bytes.clone()).without_ranges();
    registry.serve(&blob(&digest.to_string()), resource);
    let network = Runtime::new().expect("a runtime");
    let name = registry.name(":1");
    let opening = Repository::open(&name, Options::default());
    let repository = network.block_on(opening).expect("opened");
    let source = repository
        .blob(digest, bytes.len() as u64, &[])
        .expect("a blob");
    let config = fetch::Config {
        chunk_len: 1 << 20,
        ..fetch::Config::new(BufferPool::new(32 << 20), Arc::default())
    };
    // A first short read tells that there are no ranges.
    read(&network, &source, 0);
    let handle = network.handle();
    let mut stream = fetch::Stream::start(handle, Arc::clone(&source), Packed(0), config);
    let mut all = Vec::new();
    while let Some(chunk) = stream.next().expect("read") {
        all.extend_from_slice(&chunk);
    }
    assert!(all == bytes);
    assert_eq!(registry.requests(&blob(&digest.to_string())), 2);
}

// Promises: publish-verb
#[test]
fn index_is_not_published_for_a_tag_that_was_moved() {
    let registry = Registry::with(&one());
    let network = Runtime::new().expect("a runtime");
    let context = OpenContext::new(network.handle().clone());
    let spec = SourceSpec::from(&*registry.name(":1"));
    let volume = context.open(&spec.clone().into()).expect("opened");
    let mut files = Files::default();
    let manifest = files.manifest(&two());
    registry.push(&files);
    registry.tag("1", &files, &manifest);
    let refused = context.publish_index(&spec, &*volume);
    assert!(matches!(refused, Err(Error::ImageChanged(_))));
}

// Promises: layer-scan, registry-ranges
#[test]
fn layers_with_saved_indexes_are_not_requested() {
    let registry = Registry::with(&two());
    let (place, source) = (TestDir::new(&[]), registry.name(":1"));
    let mut files = Files::default();
    let descriptor = files.manifest(&two());
    let text = files.get(&blob_file(&descriptor)).clone();
    let text: Value = serde_json::from_slice(&text).expect("JSON");
    let layers = [0, 1].map(|layer| digest_of(&text["layers"][layer]));
    let config = digest_of(&text["config"]);
    succeeds(&place, &["ls", &source]);
    let before = layers.map(|layer| registry.requests(&blob(layer)));
    assert!(before.iter().all(|&requests| requests > 0));
    succeeds(&place, &["ls", &source]);
    assert_eq!(layers.map(|layer| registry.requests(&blob(layer))), before);
    assert_eq!(registry.requests(&blob(config)), 1, "it is saved");
    assert_eq!(registry.requests(&manifest("1")), 2, "one a run");
}

// Promises: registry-offline
#[test]
fn image_of_the_last_use_is_listed_without_the_registry() {
    let registry = Registry::with(&two());
    let (place, source) = (TestDir::new(&["cache"]), registry.name(":1"));
    let refused = error_of(&place, &["ls", "--offline", &source]);
    assert!(refused.contains("--offline"), "{refused}");
    let listed = succeeds(&place, &["ls", "-R", &source]);
    let requests = registry.requests(&manifest("1"));
    let offline = ["ls", "-R", "--offline", &source];
    assert_eq!(succeeds(&place, &offline), listed);
    assert_eq!(registry.requests(&manifest("1")), requests);
    registry.serve(&manifest("1"), Resource::new("").without_ranges());
    let changed = error_of(&place, &["ls", &source]);
    assert!(!changed.contains("the last use"), "{changed}");
    drop(registry);
    let done = run(&place, &["ls", "-R", "--retries", "0", &source]);
    let text = stderr_text(&done);
    assert_eq!(String::from_utf8_lossy(&done.stdout), listed, "{text}");
    assert!(text.contains("the manifest of the last use"), "{text}");
    let cached = succeeds(&place, &["cache", "list"]);
    assert_eq!(cached.matches("document").count(), 2, "{cached}");
    succeeds(&place, &["cache", "clear"]);
    error_of(&place, &offline);
}

// Promises: registry-offline
#[test]
fn saved_documents_of_an_image_are_compared_with_their_digests() {
    let registry = Registry::with(&two());
    let (place, source) = (TestDir::new(&["cache"]), registry.name(":1"));
    let listed = succeeds(&place, &["ls", "-R", &source]);
    for file in fs::read_dir(place.path("cache/index")).expect("a directory") {
        let path = file.expect("readable").path();
        if path.extension().is_some_and(|suffix| suffix == "json") {
            fs::write(path, b"{}").expect("written");
        }
    }
    assert_eq!(succeeds(&place, &["ls", "-R", &source]), listed);
}

// Promises: registry-manifest
#[test]
fn manifest_of_the_platform_is_chosen_from_an_index() {
    let registry = Registry::new(nothing());
    let image = |file: &str, architecture| {
        let layer = Archive::new().file(file, "").end();
        Image::new("", vec![layer]).on("linux", architecture)
    };
    let mut files = image::oci_for_all(&[image("arm", "arm64"), image("z", "s390x")]);
    let index = files.get("index.json").clone();
    let index: Value = serde_json::from_slice(&index).expect("JSON");
    let index = &index["manifests"][0];
    files.0.retain(|(name, _)| name.starts_with("blobs/"));
    registry.push(&files);
    registry.tag("all", &files, index);
    let place = TestDir::new(&[]);
    let by_digest = registry.name(&format!("@sha256:{}", digest_of(index)));
    for source in [registry.name(":all"), by_digest] {
        for (platform, file) in [("linux/arm64", "arm\n"), ("linux/s390x", "z\n")] {
            let listed = succeeds(&place, &["ls", "--platform", platform, &source]);
            assert_eq!(listed, file);
        }
        let refused = error_of(&place, &["ls", "--platform", "linux/riscv64", &source]);
        assert!(
            refused.contains("'linux/arm64', 'linux/s390x'"),
            "{refused}"
        );
    }
}

// Promises: registry-manifest, registry-ranges
#[test]
fn digests_of_registry_documents_and_layers_are_compared() {
    let registry = Registry::new(nothing());
    let mut files = Files::default();
    let descriptor = files.manifest(&one());
    let text = files.get(&blob_file(&descriptor)).clone();
    let text: Value = serde_json::from_slice(&text).expect("JSON");
    registry.push(&files);
    registry.tag("1", &files, &descriptor);
    let (place, source) = (TestDir::new(&["out"]), registry.name(":1"));
    let digest = digest_of(&descriptor);
    succeeds(&place, &["image", "--expect-sha256", digest, &source]);
    let other = "0".repeat(64);
    let refused = error_of(&place, &["ls", "--expect-sha256", &other, &source]);
    assert!(refused.contains(digest), "{refused}");

    // The server has other bytes than the digest of the name.
    let resource = Resource::new(files.get(&blob_file(&descriptor)).clone());
    registry.serve(
        &manifest(&format!("sha256:{other}")),
        resource.without_ranges(),
    );
    let refused = error_of(&place, &["ls", &registry.name(&format!("@sha256:{other}"))]);
    assert!(refused.contains("its SHA-256 is"), "{refused}");

    let layer = &text["layers"][0];
    let mut bytes = files.get(&blob_file(layer)).clone();
    *bytes.last_mut().expect("not empty") ^= 1;
    registry.serve(&blob(digest_of(layer)), Resource::new(bytes.clone()));
    let refused = error_of(&place, &["materialize", "-q", &source, "-C", "out"]);
    assert!(refused.contains("layer 1 of 1"), "{refused}");
    bytes.push(0);
    registry.serve(&blob(digest_of(layer)), Resource::new(bytes));
    let refused = error_of(&place, &["ls", &source]);
    assert!(refused.contains("its length is not that"), "{refused}");

    let config = &text["config"];
    registry.serve(&blob(digest_of(config)), Resource::new("{}"));
    let refused = error_of(&place, &["ls", &source]);
    assert!(refused.contains("its length is not that"), "{refused}");
}

// Promises: registry-manifest
#[test]
fn hostile_manifests_are_refused_within_limits() {
    let registry = Registry::new(nothing());
    let (place, source) = (TestDir::new(&[]), registry.name(":1"));
    let digest = "0".repeat(64);
    let huge = |size: u64| {
        let config = "application/vnd.oci.image.config.v1+json";
        json!({ "schemaVersion": 2, "layers": [],
                "config": { "mediaType": config, "digest": format!("sha256:{digest}"), "size": size } })
        .to_string()
    };
    let long = || format!("[{}1]", "1,".repeat(4 << 20));
    for (body, expected) in [
        (String::new(), "it ends too early"),
        ("no".to_owned(), "it is no JSON"),
        ("[]".to_owned(), "it is not what belongs there"),
        (r#"{"schemaVersion":1}"#.to_owned(), "schema 1"),
        (r#"{"schemaVersion":2}"#.to_owned(), "names no config"),
        (huge(u64::MAX), "bytes, and 4194304 are allowed"),
        (huge(5 << 20), "bytes, and 4194304 are allowed"),
        (long(), "bytes, and 4194304 are allowed"),
    ] {
        for is_chunked in [false, true] {
            let body = body.clone();
            registry.server.route(&manifest("1"), move |_| {
                let answer = Response::new(200).with_body(body.clone());
                if is_chunked { answer.chunked() } else { answer }
            });
            let refused = error_of(&place, &["ls", &source]);
            assert!(refused.contains(expected), "{expected}: {refused}");
            assert!(refused.contains(&source), "{refused}");
        }
    }
    // Lengths of layers are only claimed.
    let mut files = Files::default();
    let mut image = files.manifest(&one());
    let mut text: Value = serde_json::from_slice(files.get(&blob_file(&image))).expect("JSON");
    text["layers"][0]["size"] = json!(u64::MAX);
    image = files.blob(image::MANIFEST, text.to_string().into_bytes());
    registry.push(&files);
    registry.tag("1", &files, &image);
    let refused = error_of(&place, &["ls", &source]);
    assert!(refused.contains("are allowed"), "{refused}");
}

// Promises: login-files
#[test]
fn redirects_of_blobs_carry_no_credentials() {
    let registry = Registry::new(Arc::new(basic("me:pass")));
    let mut files = Files::default();
    let descriptor = files.manifest(&one());
    registry.push(&files);
    registry.tag("1", &files, &descriptor);
    for (name, bytes) in &files.0 {
        let digest = name
            .strip_prefix("blobs/sha256/")
            .expect("a blob")
            .to_owned();
        let path = format!("/cdn/{digest}");
        registry.server.serve(&path, Resource::new(bytes.clone()));
        let to = registry.server.other_url(&path);
        let guard = Arc::clone(&registry.guard);
        registry.server.route(&blob(&digest), move |request| {
            guard(request).unwrap_or_else(|| Response::redirect(&to))
        });
    }
    let place = TestDir::new(&["docker"]);
    log_in(&place, &registry, "me:pass");
    succeeds(&place, &["ls", &registry.name(":1")]);
    let mut redirected = 0;
    for (name, _) in &files.0 {
        let digest = name.strip_prefix("blobs/sha256/").expect("a blob");
        for seen in registry.server.requests(&format!("/cdn/{digest}")) {
            redirected += 1;
            assert_eq!(seen.request.header("authorization"), None);
        }
    }
    assert!(redirected >= 2, "the configuration and the layer");
}

/// Blobs are redirected to another registry, which gives tokens to everybody.
// Promises: login-files
#[test]
fn redirected_blob_is_read_with_a_token_of_its_registry() {
    let (registry, tokens) = (Registry::new(Arc::new(basic("me:pass"))), Tokens::default());
    let other = tokens.registry(None);
    let mut files = Files::default();
    let descriptor = files.manifest(&one());
    registry.push(&files);
    registry.tag("1", &files, &descriptor);
    other.push(&files);
    for name in files.0.iter().map(|(name, _)| name) {
        let digest = name
            .strip_prefix("blobs/sha256/")
            .expect("a blob")
            .to_owned();
        let to = other.server.other_url(&blob(&digest));
        let guard = Arc::clone(&registry.guard);
        registry.server.route(&blob(&digest), move |request| {
            guard(request).unwrap_or_else(|| Response::redirect(&to))
        });
    }
    let place = TestDir::new(&["docker", "out"]);
    log_in(&place, &registry, "me:pass");
    let source = registry.name(":1");
    succeeds(&place, &["materialize", "-q", &source, "-C", "out"]);
    assert!(!names_in(&place.path("out")).is_empty());
    let asked = other.server.requests("/token");
    assert!(!asked.is_empty());
    for seen in asked {
        assert_eq!(seen.request.header("authorization"), None);
        assert!(
            seen.request
                .query
                .contains("scope=repository%3Ame%2Ftool%3Apull")
        );
    }
    let blobs = files
        .0
        .iter()
        .map(|(name, _)| name.replace("blobs/sha256/", ""));
    for seen in blobs.flat_map(|digest| other.server.requests(&blob(&digest))) {
        let sent = seen.request.header("authorization").unwrap_or("Bearer");
        assert!(sent.starts_with("Bearer"), "{sent}");
    }
}

/// An image whose only layer is elsewhere, at these URLs, and the descriptor of its manifest.
fn files_with_foreign_layer(urls: &[String]) -> (Files, Value) {
    let mut files = Files::default();
    let descriptor = files.manifest(&one().packed(Packing::Gzip));
    let mut manifest: Value =
        serde_json::from_slice(files.get(&blob_file(&descriptor))).expect("JSON");
    let foreign = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip";
    let layer = manifest.pointer_mut("/layers/0").expect("a layer");
    let digest = digest_of(layer).to_owned();
    let members = layer.as_object_mut().expect("an object");
    members.insert("mediaType".to_owned(), json!(foreign));
    members.insert("urls".to_owned(), json!(urls));
    files.0.retain(|(name, _)| !name.contains(&digest));
    let descriptor = files.blob(image::MANIFEST, manifest.to_string().into_bytes());
    (files, descriptor)
}

/// Pushes an image whose only layer is elsewhere, at these URLs.
fn push_with_foreign_layer(registry: &Registry, urls: &[String]) {
    let (files, descriptor) = files_with_foreign_layer(urls);
    registry.push(&files);
    registry.tag("1", &files, &descriptor);
}

/// The server that is in this machine's network, and a proxy for all others.
struct Servers {
    own: Server,
    proxy: Server,
}

const PUBLIC_URL: &str = "http://layers.example/layer";

impl Servers {
    /// Servers of the foreign layer, to which the public URL redirects if there is a redirect.
    fn start() -> Self {
        let (own, proxy) = (Server::start(), Server::start());
        let image = one();
        let layer = image.layers.first().expect("a layer");
        let layer = Resource::new(image::packed(Packing::Gzip, layer)).etag("\"1\"");
        own.serve("/layer", layer.clone());
        proxy.serve(PUBLIC_URL, layer);
        Self { own, proxy }
    }

    fn redirect(&self) {
        let to = self.own.url("/layer");
        self.proxy
            .route(PUBLIC_URL, move |_| Response::redirect(&to));
    }

    fn run(&self, place: &TestDir, words: &[&str]) -> Output {
        let mut command = command(place, words);
        command.env("http_proxy", self.proxy.url(""));
        command.env("no_proxy", "127.0.0.1");
        command.output().expect("started")
    }

    #[track_caller]
    fn assert_refused(&self, done: &Output) {
        let error = stderr_text(done);
        assert!(!done.status.success(), "{error}");
        assert!(error.contains("in its network"), "{error}");
        assert!(self.own.requests("/layer").is_empty());
    }
}

// Promises: registry-foreign
#[test]
fn foreign_layer_is_never_read_from_the_own_network() {
    let (servers, registry) = (Servers::start(), Registry::new(nothing()));
    let place = TestDir::new(&["docker", "hosts", "hosts/registry.example"]);
    // The registry is a public one, although its only server is a mirror on this machine.
    let hosts = format!("server = \"{}\"\n", registry.server.url(""));
    place.put("hosts/registry.example/hosts.toml", hosts);
    let name = "oci://registry.example/me/tool:1";
    let list = || servers.run(&place, &["ls", "--hosts-dir", "hosts", name]);
    push_with_foreign_layer(&registry, &[servers.own.url("/layer")]);
    servers.assert_refused(&list());
    push_with_foreign_layer(&registry, &[PUBLIC_URL.to_owned()]);
    let listed = list();
    assert!(listed.status.success(), "{}", stderr_text(&listed));
    place.succeeds(&["cache", "clear"]);
    servers.redirect();
    servers.assert_refused(&list());
}

// Promises: registry-foreign
#[test]
fn layer_that_a_layout_lacks_is_read_from_its_url() {
    let servers = Servers::start();
    let place = TestDir::new(&["docker", "layout", "out0", "out1"]);
    let store = |url: &str| {
        let (mut files, descriptor) = files_with_foreign_layer(&[url.to_owned()]);
        files.index(&[descriptor]);
        files.write(&place.path("layout"));
        place.put("layout.tar", files.tar());
    };
    for (number, source) in ["oci:layout", "oci-archive:layout.tar"].iter().enumerate() {
        store(PUBLIC_URL);
        let out = place.path(format!("out{number}")).display().to_string();
        let done = servers.run(&place, &["materialize", "-q", source, "-C", &out]);
        assert!(done.status.success(), "{}", stderr_text(&done));
        assert!(!names_in(out.as_ref()).is_empty(), "{source}");
        store(&servers.own.url("/layer"));
        servers.assert_refused(&servers.run(&place, &["ls", source]));
        store("file:///layer");
        let error = stderr_text(&servers.run(&place, &["ls", source]));
        assert!(error.contains("no http:// or https:// URL"), "{error}");
    }
}

// Promises: registry-foreign
#[test]
fn foreign_layer_is_read_from_its_url() {
    let image = one();
    let packed = image::packed(Packing::Gzip, &image.layers[0]);
    let mut wrong = packed.clone();
    *wrong.last_mut().expect("bytes") ^= 1;
    for (bytes, is_right) in [(&packed, true), (&wrong, false)] {
        let elsewhere = Server::start();
        elsewhere.serve("/layer", Resource::new(bytes.clone()).etag("\"1\""));
        let registry = Registry::new(Arc::new(basic("me:pass")));
        let place = TestDir::new(&["docker", "out"]);
        place.put("layer", packed.clone());
        let urls = [
            format!("file://{}", place.path("layer").display()),
            elsewhere.other_url("/layer"),
        ];
        push_with_foreign_layer(&registry, &urls);
        log_in(&place, &registry, "me:pass");
        let words = [
            "materialize",
            "-q",
            "--header",
            "X-Key: hunter2",
            &registry.name(":1"),
        ];
        let done = run(&place, &[&words[..], &["-C", "out"]].concat());
        assert_eq!(done.status.success(), is_right, "{}", stderr_text(&done));
        let seen = elsewhere.requests("/layer");
        assert!(!seen.is_empty());
        for seen in seen {
            assert_eq!(seen.request.header("authorization"), None);
            assert_eq!(seen.request.header("x-key"), None);
        }
    }
    // Only the file has it.
    let registry = Registry::new(nothing());
    let place = TestDir::new(&["docker"]);
    place.put("layer", packed.clone());
    let url = format!("file://{}", place.path("layer").display());
    push_with_foreign_layer(&registry, &[url]);
    let refused = error_of(&place, &["ls", &registry.name(":1")]);
    assert!(refused.contains("not found"), "{refused}");
}

/// Accepts this user and password, and asks for one.
pub(crate) fn basic(login: &str) -> impl Fn(&Request) -> Option<Response> + Send + Sync + use<> {
    let accepted = format!("Basic {}", base64(login));
    move |request| {
        if request.header("authorization") == Some(&accepted) {
            return None;
        }
        let refused = Response::new(401).with("WWW-Authenticate", "Basic realm=\"x\"");
        let body = r#"{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}"#;
        Some(refused.with_body(body))
    }
}

fn base64(text: &str) -> String {
    STANDARD.encode(text)
}

/// Stores a login as `docker login` does.
fn log_in(place: &TestDir, registry: &Registry, login: &str) {
    let url = registry.server.url("");
    let host = url.strip_prefix("http://").expect("a host");
    let config = json!({ "auths": { host: { "auth": base64(login) } } });
    place.put("docker/config.json", config.to_string());
}

/// An image behind `guard`, as `me/tool:1`.
pub(crate) fn guarded(guard: Guard) -> Registry {
    let registry = Registry::new(guard);
    let mut files = Files::default();
    let descriptor = files.manifest(&one());
    registry.push(&files);
    registry.tag("1", &files, &descriptor);
    registry
}

// Promises: login-files
#[test]
fn password_is_taken_from_each_file_of_logins() {
    let registry = guarded(Arc::new(basic("me:pass")));
    let place = TestDir::new(&["docker", "containers", ".config", ".config/containers"]);
    let source = registry.name(":1");
    log_in(&place, &registry, "me:pass");
    succeeds(&place, &["ls", &source]);
    let config = place.path("docker/config.json");
    // TestDir's root is XDG_RUNTIME_DIR.
    for path in ["containers/auth.json", ".config/containers/auth.json"] {
        fs::copy(&config, place.path(path)).expect("copied");
    }
    fs::remove_file(&config).expect("there");
    for path in ["containers/auth.json", ".config/containers/auth.json"] {
        succeeds(&place, &["ls", &source]);
        fs::rename(place.path(path), place.path("named.json")).expect("there");
    }
    error_of(&place, &["ls", &source]);
    let mut named = command(&place, &["ls", &source]);
    let done = named.env("REGISTRY_AUTH_FILE", "named.json").output();
    assert!(done.expect("started").status.success());
}

// Promises: login-files, login-reload, login-errors
#[test]
fn refusal_of_a_registry_names_file_code_and_login() {
    let registry = guarded(Arc::new(basic("me:pass")));
    let (place, source) = (TestDir::new(&["docker"]), registry.name(":1"));
    let host = registry.server.url("").replace("http://", "");
    let login = format!("docker login {host}");
    let refused = error_of(&place, &["ls", &source]);
    for expected in [
        "none found in",
        "docker/config.json",
        "auth.json",
        &login,
        &source,
    ] {
        assert!(refused.contains(expected), "{expected}: {refused}");
    }
    log_in(&place, &registry, "me:hunter2");
    let before = registry.requests(&manifest("1"));
    let refused = error_of(&place, &["ls", &source]);
    let file = place.path("docker/config.json").display().to_string();
    for expected in ["401 UNAUTHORIZED: authentication required", &file, &login] {
        assert!(refused.contains(expected), "{expected}: {refused}");
    }
    for secret in ["hunter2", &base64("me:hunter2")] {
        assert!(!refused.contains(secret), "{refused}");
    }
    assert_eq!(
        registry.requests(&manifest("1")) - before,
        2,
        "the same password is not sent twice"
    );
    place.put("docker/config.json", "{\"auths\": hunter2}");
    let refused = error_of(&place, &["ls", &source]);
    assert!(refused.contains("malformed (line 1"), "{refused}");
    assert!(!refused.contains("hunter2"), "{refused}");
}

// Promises: login-files, login-helper
#[test]
fn credential_helper_is_asked_for_the_login() {
    let registry = guarded(Arc::new(basic("me:pass")));
    let (place, source) = (TestDir::new(&["docker", "bin"]), registry.name(":1"));
    let host = registry.server.url("").replace("http://", "");
    let list = |config: Value, helper: &str| {
        place.put("docker/config.json", config.to_string());
        let path = place.path("bin/docker-credential-test");
        fs::write(&path, format!("#!/bin/sh\n{helper}\n")).expect("written");
        let mut chmod = Command::new("chmod");
        assert!(
            chmod
                .arg("+x")
                .arg(&path)
                .status()
                .expect("started")
                .success()
        );
        let mut command = command(&place, &["ls", &source]);
        let path = format!("{}:/usr/bin:/bin", place.path("bin").display());
        command.env("PATH", path).output().expect("started")
    };
    let answers =
        format!(r#"[ "$1 $(cat)" = "get {host}" ] && echo '{{"Username":"me","Secret":"pass"}}'"#);
    let configs = [
        json!({ "credsStore": "test", "auths": { &host: {} } }),
        json!({ "credHelpers": { &host: "test" }, "auths": { &host: { "auth": "eDp5" } } }),
    ];
    for config in &configs {
        let done = list(config.clone(), &answers);
        assert!(done.status.success(), "{}", stderr_text(&done));
    }
    for (helper, expected) in [
        ("echo '{\"hunter2\"'", "answer is malformed"),
        (
            "echo credentials not found in native keychain; exit 1",
            "none found in",
        ),
        (
            "while :; do echo hunter2hunter2hunter2; done",
            "more than 1 MiB",
        ),
    ] {
        let done = list(configs[0].clone(), helper);
        let text = stderr_text(&done);
        assert_eq!(done.status.code(), Some(2), "{text}");
        assert!(text.contains(expected), "{text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
    // Documents of the last use replace the registry in an outage, and a failing helper is one.
    let helper = "echo hunter2; echo hunter2 >&2; exit 3";
    let text = stderr_text(&list(configs[0].clone(), helper));
    for expected in ["ends with status 3", "the manifest of the last use"] {
        assert!(text.contains(expected), "{text}");
    }
    assert!(!text.contains("hunter2"), "{text}");
}

/// A server of tokens, and what it accepts.
#[derive(Clone, Default)]
pub(crate) struct Tokens {
    /// The token that the registry accepts.
    pub(crate) accepted: Arc<Mutex<String>>,
    given: Arc<AtomicUsize>,
    /// Statuses of the next answers of the token server.
    pub(crate) failures: Arc<Mutex<Vec<u16>>>,
}

impl Tokens {
    /// A registry that accepts only tokens, which its server gives to `login`, or to any client.
    pub(crate) fn registry(&self, login: Option<&'static str>) -> Registry {
        let realm = Arc::new(Mutex::new(String::new()));
        let guard = {
            let (tokens, realm) = (self.clone(), Arc::clone(&realm));
            move |request: &Request| {
                let accepted = tokens.accepted.lock().expect("no panic").clone();
                if request.header("authorization") == Some(&format!("Bearer {accepted}")) {
                    return None;
                }
                let realm = realm.lock().expect("no panic").clone();
                let challenge = format!(
                    r#"Bearer realm="{realm}",service="a registry",scope="repository:me/tool:pull""#
                );
                Some(Response::new(401).with("WWW-Authenticate", challenge))
            }
        };
        let registry = guarded(Arc::new(guard));
        *realm.lock().expect("no panic") = registry.server.other_url("/token");
        let tokens = self.clone();
        registry.server.route("/token", move |request| {
            if let Some(status) = tokens.failures.lock().expect("no panic").pop() {
                return Response::new(status);
            }
            let expected = login.map(|login| format!("Basic {}", base64(login)));
            if request.header("authorization") != expected.as_deref() {
                let body = r#"{"details":"incorrect username or password"}"#;
                return Response::new(401).with_body(body);
            }
            let number = tokens.given.fetch_add(1, Ordering::Relaxed);
            let token = format!("token-{number}");
            tokens.accepted.lock().expect("no panic").clone_from(&token);
            let answer = json!({ "token": token, "expires_in": 300 });
            Response::new(200).with_body(answer.to_string())
        });
        registry
    }
}

// Promises: login-files, login-tokens, login-errors
#[test]
fn token_is_requested_once_for_all_of_an_image() {
    let tokens = Tokens::default();
    let registry = tokens.registry(Some("me:pass"));
    let (place, source) = (TestDir::new(&["docker"]), registry.name(":1"));
    log_in(&place, &registry, "me:pass");
    succeeds(&place, &["ls", &source]);
    assert_eq!(tokens.given.load(Ordering::Relaxed), 1);
    let asked = registry.server.requests("/token");
    assert_eq!(
        asked[0].request.query,
        "scope=repository%3Ame%2Ftool%3Apull&service=a+registry"
    );
    assert_eq!(
        registry.requests(&manifest("1")),
        2,
        "without and with a token"
    );

    log_in(&place, &registry, "me:hunter2");
    let refused = error_of(&place, &["ls", &source]);
    let file = place.path("docker/config.json").display().to_string();
    for expected in [&*file, "incorrect username or password", "docker login"] {
        assert!(refused.contains(expected), "{expected}: {refused}");
    }
    assert!(!refused.contains("hunter2"), "{refused}");
}

// Promises: login-reload
#[test]
fn refused_token_is_renewed_without_a_failed_read() {
    let tokens = Tokens::default();
    let registry = tokens.registry(None);
    let network = Runtime::new().expect("a runtime");
    let stats = Arc::<Stats>::default();
    let mut context = OpenContext::new(network.handle().clone());
    context.source.stats = Arc::clone(&stats);
    let image = context.open_image(&SourceSpec::from(&*registry.name(":1")));
    let layer = Arc::clone(&image.expect("opened").layers[0].source);
    let first = read(&network, &layer, 0);
    *tokens.accepted.lock().expect("no panic") = "another".to_owned();
    let renewed = stats.source_renewed_credentials.get();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(read(&network, &layer, 0), first));
        }
    });
    assert!(stats.source_renewed_credentials.get() > renewed);
    assert_eq!(tokens.given.load(Ordering::Relaxed), 2, "one token for all");
}

pub(crate) fn read(network: &Runtime, source: &Arc<dyn Source>, start: u64) -> Vec<u8> {
    let pool = BufferPool::new(1 << 20);
    network.block_on(async {
        let buffer = pool.acquire(1000).expect("open");
        let bytes = source.read_at(Packed(start), buffer).await;
        bytes.expect("read").to_vec()
    })
}

// Promises: registry-artifact
#[test]
fn artifact_of_one_file_is_that_archive() {
    let registry = Registry::new(nothing());
    let mut files = Files::default();
    let tar = Archive::new()
        .file("a", "text")
        .file(".wh.a", "no whiteout")
        .file("inner.tar", Archive::new().file("b", "").end())
        .end();
    let config = files.blob("application/vnd.oci.empty.v1+json", b"{}".to_vec());
    let layer = files.blob("application/x-anything", image::packed(Packing::Gzip, &tar));
    let artifact = |layers: &[&Value]| json!({ "schemaVersion": 2, "mediaType": image::MANIFEST, "config": config, "layers": layers });
    let (single, double) = (artifact(&[&layer]), artifact(&[&layer, &layer]));
    let mut push = |tag: &str, document: Value| {
        let document = files.blob(image::MANIFEST, document.to_string().into_bytes());
        registry.push(&files);
        registry.tag(tag, &files, &document);
    };
    push("1", single);
    push("2", double);
    let (place, source) = (TestDir::new(&["out"]), registry.name(":1"));
    let listed = succeeds(&place, &["ls", "-A", &source]);
    assert_eq!(listed, ".wh.a\na\ninner.tar\n");
    succeeds(
        &place,
        &["materialize", "-q", &source, "-C", "out", ".wh.a"],
    );
    assert_eq!(names_in(&place.path("out")), [".wh.a"]);
    let inner = format!("tar:{source}!/inner.tar");
    assert_eq!(succeeds(&place, &["ls", &inner]), "b\n");
    succeeds(&place, &["verify", "-q", &source]);
    let layered = ["ls", "--layer", &source, &source];
    assert_eq!(succeeds(&place, &layered), "a\ninner.tar\n");
    let refused = error_of(&place, &["image", &source]);
    assert!(refused.contains("an archive, not an image"), "{refused}");
    let refused = error_of(&place, &["ls", &registry.name(":2")]);
    assert!(refused.contains("an artifact of 2 files"), "{refused}");
}

#[test]
fn missing_and_malformed_names_in_a_registry_are_reported() {
    let registry = Registry::with(&one());
    let place = TestDir::new(&[]);
    let refused = error_of(&place, &["ls", &registry.name(":absent")]);
    assert!(refused.contains("not found"), "{refused}");
    let refused = error_of(&place, &["ls", "oci://localhost/UPPER"]);
    assert!(refused.contains("oci://REGISTRY/REPOSITORY"), "{refused}");
    let secret = "oci://me:hunter2@localhost/a";
    let refused = error_of(&place, &["ls", secret]);
    assert!(!refused.contains("hunter2"), "{refused}");
}

/// Configures the servers of the registry.
fn configure(place: &TestDir, registry: &Registry, text: &str) {
    let host = registry.server.url("").replace("http://", "");
    let directory = place.path("hosts").join(host);
    fs::create_dir_all(&directory).expect("made");
    fs::write(directory.join("hosts.toml"), text).expect("written");
}

// Promises: hosts-file, hosts-order, hosts-same
#[test]
fn mirror_is_asked_before_the_registry() {
    let image = one();
    let (registry, mirror) = (Registry::with(&image), Registry::with(&image));
    let (place, source) = (TestDir::new(&[]), registry.name(":1"));
    let list = ["ls", "--hosts-dir", "hosts", &source];
    let closed = "http://127.0.0.1:1";
    let url = mirror.server.url("");
    configure(
        &place,
        &registry,
        &format!("[host.\"{closed}\"]\n[host.\"{url}\".header]\nX-Key = \"1\"\n"),
    );
    succeeds(&place, &list);
    assert_eq!(registry.requests(&manifest("1")), 0);
    let seen = mirror.server.requests(&manifest("1"));
    let request = &seen.first().expect("asked").request;
    assert_eq!(request.header("x-key"), Some("1"));
    let host = registry
        .server
        .url("")
        .replace("http://127.0.0.1:", "ns=127.0.0.1%3A");
    assert_eq!(request.query, host);

    for text in [
        format!("[host.\"{closed}\"]\n"),
        format!("[host.\"{url}\"]\ncapabilities = [\"pull\"]\n"),
    ] {
        configure(&place, &registry, &text);
        let (before, at_mirror) = (
            registry.requests(&manifest("1")),
            mirror.requests(&manifest("1")),
        );
        succeeds(&place, &list);
        assert_eq!(registry.requests(&manifest("1")) - before, 1, "{text}");
        assert_eq!(mirror.requests(&manifest("1")), at_mirror, "{text}");
    }
    configure(&place, &registry, "x = ");
    let refused = error_of(&place, &list);
    assert!(refused.contains("hosts.toml: line 1"), "{refused}");
}

// Promises: hosts-same
#[test]
fn layer_that_a_mirror_lacks_is_read_from_the_registry() {
    let has_no_layers = |request: &Request| {
        let is_blob = request.path.contains("/blobs/");
        is_blob.then(|| Response::new(404))
    };
    let (registry, mirror) = (Registry::with(&one()), guarded(Arc::new(has_no_layers)));
    let (place, source) = (TestDir::new(&["out"]), registry.name(":1"));
    let url = mirror.server.url("");
    configure(&place, &registry, &format!("[host.\"{url}\"]\n"));
    let words = ["materialize", "-q", "--hosts-dir", "hosts", &source];
    succeeds(&place, &[&words[..], &["-C", "out"]].concat());
    assert!(!names_in(&place.path("out")).is_empty());
    assert_eq!(registry.requests(&manifest("1")), 0, "the mirror has it");
}

// Promises: hosts-same
#[test]
fn headers_and_logins_of_a_registry_do_not_reach_its_mirror() {
    let image = one();
    let (registry, mirror) = (
        Registry::with(&image),
        guarded(Arc::new(basic("other:pass"))),
    );
    let (place, source) = (TestDir::new(&["docker"]), registry.name(":1"));
    configure(
        &place,
        &registry,
        &format!("[host.\"{}\"]\n", mirror.server.url("")),
    );
    log_in(&place, &registry, "me:hunter2");
    let header = "X-Secret: hunter2";
    let list = ["ls", "--hosts-dir", "hosts", "--header", header, &source];
    succeeds(&place, &list);
    let seen = mirror.server.requests(&manifest("1"));
    assert_eq!(seen.len(), 1);
    for seen in seen {
        assert_eq!(seen.request.header("authorization"), None);
        assert_eq!(seen.request.header("x-secret"), None);
    }
    let seen = registry.server.requests(&manifest("1"));
    assert_eq!(seen[0].request.header("x-secret"), Some("hunter2"));
}

#[test]
fn redirected_manifest_is_read_from_its_target() {
    let registry = Registry::with(&one());
    let to = registry.server.other_url("/stored");
    let mut files = Files::default();
    let descriptor = files.manifest(&one());
    let bytes = files.get(&blob_file(&descriptor)).clone();
    registry.server.serve("/stored", Resource::new(bytes));
    registry
        .server
        .route(&manifest("1"), move |_| Response::redirect(&to));
    let place = TestDir::new(&[]);
    succeeds(&place, &["ls", &registry.name(":1")]);
}
