//! Answers and settings of other programs in forms that curl, the AWS CLI, skopeo and containerd accept.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::registry::{Registry, blob_file, command, nothing};
use crate::support::fixture::{PROGRAM, TestDir};
use crate::support::http::{Resource, Response, Server};
use crate::support::image::{Files, Image};
use crate::support::program::stderr_text;
use crate::support::raw::Archive;
use crate::support::tree::Tree;

fn archive() -> Vec<u8> {
    Archive::new().file("greeting", "hello\n").end()
}

#[track_caller]
fn lists_greeting(done: &Output, what: &str) {
    assert!(done.status.success(), "{what}: {}", stderr_text(done));
    assert_eq!(
        String::from_utf8_lossy(&done.stdout),
        "greeting\n",
        "{what}"
    );
}

/// Runs `tarfs ls` of `source`, with these variables and no others of clouds and proxies.
fn list(source: &str, variables: &[(&str, &str)]) -> Output {
    let place = TestDir::new(&["cache"]);
    let mut command = Command::new(PROGRAM);
    command
        .args(["ls", "--retries", "0", "--no-published-index", source])
        .env_clear()
        .env("HOME", place.root())
        .env("TARFS_CACHE_DIR", place.path("cache"))
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .envs(variables.iter().copied());
    command.output().expect("it runs")
}

/// A change of a response.
type Change = fn(Response) -> Response;

// Promises: http-encoding
#[test]
fn odd_header_lines_of_a_server_are_ignored() {
    let many = |response: Response| {
        (0..150).fold(response, |response, number| {
            response.with(&format!("X-{number}"), "1")
        })
    };
    let odd: [(&str, Change); 5] = [
        ("a blank before the colon", |all| all.with("X-A ", "1")),
        ("a folded line", |all| all.with("X-A", "one\r\n two")),
        ("a name that is no token", |all| all.with("X-é", "1")),
        ("an empty name", |all| all.with("", "1")),
        ("many lines", many),
    ];
    for (what, change) in odd {
        let server = Server::start();
        let resource = Resource::new(archive()).etag("\"1\"");
        server.route("/a.tar", move |request| change(resource.answer(request)));
        lists_greeting(&list(&server.url("/a.tar"), &[]), what);
    }
}

// Promises: http-encoding
#[test]
fn redirect_with_letters_beyond_ascii_is_followed() {
    let server = Server::start();
    server.serve("/n%C3%A9.tar", Resource::new(archive()).etag("\"1\""));
    server.route("/old.tar", |_| Response::redirect("/né.tar"));
    lists_greeting(&list(&server.url("/old.tar"), &[]), "UTF-8");
}

// Promises: http-encoding
#[test]
fn labels_that_are_no_coding_are_ignored() {
    for label in ["aws-chunked", "none", "utf-8", "binary", "x-tar, utf-8"] {
        let server = Server::start();
        let resource = Resource::new(archive()).etag("\"1\"");
        server.route("/a.tar", move |request| {
            resource.answer(request).with("Content-Encoding", label)
        });
        lists_greeting(&list(&server.url("/a.tar"), &[]), label);
    }
}

// Promises: proxy-environment
#[test]
fn failures_of_a_proxy_name_the_proxy() {
    let proxy = Server::start();
    proxy.route("*", |_| Response::new(407));
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = closed.local_addr().expect("an address").port();
    drop(closed);
    let closed = format!("http://127.0.0.1:{port}");
    for (address, expected) in [
        (&*proxy.url(""), "the proxy refuses access (status 407)"),
        (&*closed, "no connection through the proxy 127.0.0.1"),
    ] {
        let done = list("http://archives.example/a.tar", &[("http_proxy", address)]);
        let error = stderr_text(&done);
        assert!(
            error.contains(expected) && error.contains("http_proxy"),
            "{error}"
        );
    }
}

// Promises: proxy-environment
#[test]
fn no_proxy_of_everything_covers_addresses() {
    let (server, proxy) = (Server::start(), Server::start());
    server.serve("/a.tar", Resource::new(archive()).etag("\"1\""));
    proxy.route("*", |_| Response::new(502));
    let variables = [("http_proxy", &*proxy.url("")), ("no_proxy", "*")];
    lists_greeting(&list(&server.url("/a.tar"), &variables), "no_proxy=*");
}

/// Serves an archive as `s3://bucket/a.tar` to requests with the key `AK` only.
fn store() -> Server {
    let server = Server::start();
    let resource = Resource::new(archive()).etag("\"1\"");
    server.route("/bucket/a.tar", move |request| {
        let sent = request.header("authorization").unwrap_or_default();
        if sent.contains("Credential=AK/") {
            return resource.answer(request);
        }
        Response::new(403).with_body("<Error><Code>InvalidAccessKeyId</Code></Error>")
    });
    server
}

/// Lists `s3://bucket/a.tar` with this configuration of the AWS CLI.
fn list_configured(config: &str, variables: &[(&str, &str)]) -> Output {
    let place = TestDir::new(&[]);
    place.put("config", config);
    let file = place.path("config").display().to_string();
    let variables = [&[("AWS_CONFIG_FILE", &*file)], variables].concat();
    list("s3://bucket/a.tar", &variables)
}

// Promises: s3-credentials
#[test]
fn configuration_of_aws_is_read_as_the_aws_cli_reads_it() {
    let server = store();
    let url = server.url("");
    let keys = "aws_access_key_id=AK\naws_secret_access_key=SK\n";
    for (profile, text) in [
        ("p", format!("[profile p] # comment\n{keys}")),
        ("p", format!("[profile   p]\n{keys}")),
        ("p q", format!("[profile \"p q\"]\n{keys}")),
        (
            "p",
            "[profile p]\nAWS_ACCESS_KEY_ID: AK\nAws_Secret_Access_Key=SK\n".to_owned(),
        ),
        ("", format!("[profile default]\n{keys}")),
        (
            "",
            format!(
                "[default]\naws_access_key_id=NO\naws_secret_access_key=NO\n[profile default]\n{keys}"
            ),
        ),
    ] {
        let variables = [("AWS_ENDPOINT_URL", &*url), ("AWS_PROFILE", profile)];
        lists_greeting(&list_configured(&text, &variables), &text);
    }
}

// Promises: store-endpoint
#[test]
fn endpoint_of_s3_is_that_of_the_profile_or_its_services() {
    let server = store();
    let url = server.url("");
    let keys = "[profile p]\naws_access_key_id=AK\naws_secret_access_key=SK\n";
    let profile = format!("{keys}endpoint_url = {url}\n");
    let services = format!(
        "{keys}endpoint_url = http://127.0.0.1:1\nservices = local\n[services local]\ns3 =\n  endpoint_url = {url}\n"
    );
    for text in [&profile, &services] {
        lists_greeting(&list_configured(text, &[("AWS_PROFILE", "p")]), text);
    }
    let other = [("AWS_PROFILE", "p"), ("AWS_ENDPOINT_URL_S3", &*url)];
    let text = format!("{keys}endpoint_url = http://127.0.0.1:1\n");
    lists_greeting(
        &list_configured(&text, &other),
        "the environment comes first",
    );
}

// Promises: s3-credentials
#[test]
fn credential_process_is_split_as_a_shell_does() {
    let (server, place) = (store(), TestDir::new(&["my tools"]));
    let arguments = place.path("arguments").display().to_string();
    let script = format!(
        "#!/bin/sh\nfor word; do echo \"$word\"; done >'{arguments}'\n\
         echo '{{\"Version\":1,\"AccessKeyId\":\"AK\",\"SecretAccessKey\":\"s\"}}'\n"
    );
    place.put("my tools/keys", script);
    let program = place.path("my tools/keys");
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&program, mode).expect("changed");
    let program = program.display();
    let text =
        format!("[default]\ncredential_process = \"{program}\" one 'two words' three\\ words\n");
    let done = list_configured(&text, &[("AWS_ENDPOINT_URL", &*server.url(""))]);
    lists_greeting(&done, &text);
    let found = std::fs::read_to_string(&arguments).expect("written");
    assert_eq!(found, "one\ntwo words\nthree words\n");
}

const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "AK"), ("AWS_SECRET_ACCESS_KEY", "SK")];

// Promises: s3-credentials
#[test]
fn region_in_the_body_of_a_refusal_is_followed() {
    let server = Server::start();
    let resource = Resource::new(archive()).etag("\"1\"");
    server.route("/bucket/a.tar", move |request| {
        let sent = request.header("authorization").unwrap_or_default();
        if sent.contains("/us-west-2/s3/") {
            return resource.answer(request);
        }
        let code = "<Code>AuthorizationHeaderMalformed</Code><Region>us-west-2</Region>";
        Response::new(400).with_body(format!("<Error>{code}</Error>"))
    });
    let url = server.url("");
    let others = [("AWS_REGION", "eu-west-1"), ("AWS_ENDPOINT_URL", &*url)];
    let variables = [&KEYS[..], &others].concat();
    lists_greeting(&list("s3://bucket/a.tar", &variables), "the region");
}

// Promises: store-errors
#[test]
fn errors_of_stores_are_told_with_their_code_and_advice() {
    for (status, code, message, expected) in [
        (400, "KMS.DisabledException", "", "check that key"),
        (
            400,
            "InvalidRequest",
            "The object was stored using a form of Server Side Encryption.",
            "send that key and its digest by --header",
        ),
        (409, "OperationAborted", "", "try again later"),
        (404, "NoSuchBucket", "", "the bucket or container"),
        (403, "InvalidObjectState", "", "restore it first"),
        (409, "BlobArchived", "", "restore it first"),
        (418, "Teapot", "it is no can", "it is no can"),
    ] {
        let server = Server::start();
        let body = format!("<Error><Code>{code}</Code><Message>{message}</Message></Error>");
        server.route("/bucket/a.tar", move |_| {
            Response::new(status).with_body(body.clone())
        });
        let url = server.url("");
        let variables = [&KEYS[..], &[("AWS_ENDPOINT_URL", &*url)]].concat();
        let error = stderr_text(&list("s3://bucket/a.tar", &variables));
        assert!(
            error.contains(code) && error.contains(expected),
            "{code}: {error}"
        );
        assert!(!error.contains("check the URL"), "{error}");
    }
}

// Promises: store-errors
#[test]
fn transient_codes_of_stores_are_retried_whatever_their_status() {
    for (status, code) in [
        (400, "RequestTimeout"),
        (401, "RequestTimeout"),
        (403, "RequestTimeout"),
        (403, "SlowDown"),
        (404, "SlowDown"),
        (409, "OperationAborted"),
    ] {
        let (place, server) = (TestDir::new(&["cache"]), Server::start());
        let resource = Resource::new(Tree::mixed().tar.clone()).etag("\"1\"");
        let body = format!("<Error><Code>{code}</Code></Error>");
        server.route("/bucket/a.tar", move |request| {
            if request.number <= 2 {
                return Response::new(status).with_body(body.clone());
            }
            resource.answer(request)
        });
        let mut command = place.command(&["ls", "--no-published-index", "s3://bucket/a.tar"]);
        command.envs(KEYS).env("AWS_ENDPOINT_URL", server.url(""));
        let done = command.output().expect("it runs");
        let what = format!("{status} {code}: {}", stderr_text(&done));
        assert!(done.status.success(), "{what}");
        let sent = server.requests("/bucket/a.tar").into_iter().take(3);
        let sent = sent.filter_map(|seen| Some(seen.request.header("authorization")?.to_owned()));
        assert_eq!(sent.count(), 3, "{what}");
    }
}

/// The error of a plain URL has the code of its body, if that is for programs.
// Promises: store-errors
#[test]
fn errors_of_plain_urls_are_told_with_their_code() {
    let xml = "application/xml";
    for (status, kind, code, expected) in [
        (403, xml, "AccessDenied", "status 403 AccessDenied"),
        (404, xml, "NoSuchBucket", "status 404 NoSuchBucket"),
        (
            400,
            "text/xml; charset=utf-8",
            "ExpiredToken",
            "status 400 ExpiredToken",
        ),
        (403, xml, "InvalidObjectState", "restore it first"),
        (403, xml, "RequestTimeTooSkewed", "check the clock"),
        (403, "text/html", "AccessDenied", "status 403"),
    ] {
        let server = Server::start();
        let body = format!("<Error><Code>{code}</Code></Error>");
        server.route("/a.tar", move |_| {
            Response::new(status)
                .with("Content-Type", kind)
                .with_body(body.clone())
        });
        for query in ["", "?X-Amz-Signature=hunter2"] {
            let url = server.url("/a.tar") + query;
            let error = stderr_text(&list(&url, &[]));
            assert!(error.contains(expected), "{expected}: {error}");
            assert_eq!(error.contains(code), kind != "text/html", "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}

/// The type of manifests of Docker.
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";

fn layer(file: &str) -> Vec<u8> {
    Archive::new().file(file, "1").end()
}

/// The manifest of an image in `files`, changed by `change`, with its new descriptor.
fn changed(
    files: &mut Files,
    image: &Image,
    media_type: &str,
    change: impl FnOnce(&mut Value),
) -> Value {
    let descriptor = files.manifest(image);
    let bytes = files.get(&blob_file(&descriptor)).clone();
    let mut manifest: Value = serde_json::from_slice(&bytes).expect("JSON");
    change(&mut manifest);
    files.blob(media_type, manifest.to_string().into_bytes())
}

fn names(registry: &Registry, place: &TestDir, words: &[&str]) -> String {
    let source = registry.name(":1");
    let words = [&["ls"], words, &[&source]].concat();
    let done = command(place, &words).output().expect("started");
    assert!(done.status.success(), "{words:?}: {}", stderr_text(&done));
    String::from_utf8_lossy(&done.stdout).replace('\n', " ")
}

// Promises: image-refused
#[test]
fn configuration_of_an_old_type_is_that_of_an_image() {
    for config_type in [
        "application/octet-stream",
        "application/json",
        "text/html",
        "",
    ] {
        let registry = Registry::new(nothing());
        let upper = Archive::new().file(".wh.a", "").file("c", "3").end();
        let lower = Archive::new().file("a", "1").file("b", "2").end();
        let image = Image::new("", vec![lower, upper]);
        let mut files = Files::default();
        let descriptor = changed(&mut files, &image, DOCKER_MANIFEST, |manifest| {
            manifest["mediaType"] = json!(DOCKER_MANIFEST);
            manifest["config"]["mediaType"] = json!(config_type);
        });
        registry.push(&files);
        registry.tag("1", &files, &descriptor);
        let place = TestDir::new(&["cache"]);
        assert_eq!(names(&registry, &place, &[]), "b c ", "{config_type}");
    }
}

/// A registry with an index of images, each with the platform of its name, as `OS/ARCH[/VARIANT]`.
fn registry_for(platforms: &[&str]) -> Registry {
    let (registry, mut files) = (Registry::new(nothing()), Files::default());
    let manifests = platforms.iter().enumerate().map(|(number, platform)| {
        let mut words = platform.split('/');
        let (os, architecture) = (words.next(), words.next());
        let file = format!("{number}-{}", platform.replace('/', "-"));
        let image = Image::new("", vec![layer(&file)]);
        // The configurations of these have no variant.
        let image = image.on("linux", if number == 0 { "s390x" } else { "amd64" });
        let mut descriptor = files.manifest(&image);
        let platform = json!({ "os": os, "architecture": architecture, "variant": words.next() });
        let members = descriptor.as_object_mut().expect("an object");
        members.insert("platform".to_owned(), platform);
        descriptor
    });
    let manifests: Vec<_> = manifests.collect();
    let index_type = "application/vnd.oci.image.index.v1+json";
    let index = json!({ "schemaVersion": 2, "mediaType": index_type, "manifests": manifests });
    let index = files.blob(index_type, index.to_string().into_bytes());
    registry.push(&files);
    registry.tag("1", &files, &index);
    registry
}

// Promises: image-platform
#[test]
fn first_entry_of_a_platform_is_used() {
    let registry = registry_for(&["linux/s390x", "linux/amd64", "linux/amd64"]);
    let place = TestDir::new(&["cache"]);
    let found = names(&registry, &place, &["--platform", "linux/amd64"]);
    assert_eq!(found, "1-linux-amd64 ");
}

// Promises: login-tokens
#[test]
fn token_answers_have_several_forms() {
    for (challenge, answer) in [
        ("  Bearer   realm=\"URL\",service=\"s\"", r#"{"token":"T"}"#),
        ("Bearer realm=\"URL\"", r#"{"token":"","access_token":"T"}"#),
        ("Bearer realm=\"URL\"", r#"{"token":"T","expires_in":-1}"#),
    ] {
        let tokens = Server::start();
        tokens.route("/token", move |_| Response::new(200).with_body(answer));
        let challenge = challenge.replace("URL", &tokens.url("/token"));
        let registry = Registry::new(Arc::new(move |request| {
            let is_known = request.header("authorization") == Some("Bearer T");
            let refusal = || Response::new(401).with("WWW-Authenticate", challenge.clone());
            (!is_known).then(refusal)
        }));
        let mut files = Files::default();
        let descriptor = files.manifest(&Image::new("", vec![layer("a")]));
        registry.push(&files);
        registry.tag("1", &files, &descriptor);
        let place = TestDir::new(&["cache"]);
        assert_eq!(names(&registry, &place, &[]), "a ", "{answer}");
    }
}
