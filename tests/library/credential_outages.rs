//! Sources of credentials that fail for a while, or for good.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tarfs::locate::{OpenContext, SourceSpec};
use tokio::runtime::Runtime;

use crate::registry::{Tokens, basic, command, guarded, read};
use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Response, Server};
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, random_bytes};
use crate::support::tree::Tree;

/// Statuses of a server that is busy, or whose gateway fails.
const OUTAGES: [u16; 3] = [429, 500, 503];

/// Makes `name` in `place` a program.
fn put_program(place: &TestDir, name: &str, script: &str) {
    place.put(name, format!("#!/bin/sh\n{script}\n"));
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.path(name), mode).expect("changed");
}

/// A script that prints `answer`, after it has failed `failures` times.
fn fails_first(place: &TestDir, failures: usize, answer: &str) -> String {
    let count = place.path("count").display().to_string();
    format!(
        "cat >/dev/null\necho >>{count}\n[ $(wc -l <{count}) -le {failures} ] && exit 1\necho '{answer}'"
    )
}

#[track_caller]
fn succeeds(done: &Output) -> String {
    assert!(done.status.success(), "{}", stderr_text(done));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

// Promises: retry-credentials
#[test]
fn token_server_that_fails_once_is_asked_again() {
    for status in OUTAGES {
        let (place, tokens) = (TestDir::new(&["cache"]), Tokens::default());
        let registry = tokens.registry(None);
        *tokens.failures.lock().expect("no panic") = vec![status];
        let listed = command(&place, &["ls", &registry.name(":1")]).output();
        succeeds(&listed.expect("started"));
        assert_eq!(registry.requests("/token"), 2, "{status}");
    }
}

// Promises: retry-credentials
#[test]
fn token_server_that_fails_is_an_outage_of_a_read() {
    let tokens = Tokens::default();
    let registry = tokens.registry(None);
    let network = Runtime::new().expect("a runtime");
    let context = OpenContext::new(network.handle().clone());
    let image = context.open_image(&SourceSpec::from(&*registry.name(":1")));
    let layer = Arc::clone(&image.expect("opened").layers[0].source);
    let first = read(&network, &layer, 0);
    *tokens.accepted.lock().expect("no panic") = "another".to_owned();
    *tokens.failures.lock().expect("no panic") = vec![503, 500, 429];
    assert_eq!(read(&network, &layer, 0), first);
    assert!(tokens.failures.lock().expect("no panic").is_empty());
}

// Promises: retry-credentials
#[test]
fn outage_of_a_token_server_is_named_instead_of_the_refusal() {
    let (place, tokens) = (TestDir::new(&["cache"]), Tokens::default());
    let registry = tokens.registry(None);
    *tokens.failures.lock().expect("no panic") = vec![503; 9];
    let words = ["ls", "--retries", "1", &registry.name(":1")];
    let done = command(&place, &words).output().expect("started");
    let error = stderr_text(&done);
    assert_eq!(done.status.code(), Some(2), "{error}");
    for expected in [
        "2 attempts",
        "token server",
        "status 503",
        "try again later",
    ] {
        assert!(error.contains(expected), "{expected}: {error}");
    }
    assert!(!error.contains("docker login"), "{error}");
}

// Promises: offline-start
#[test]
fn cached_image_is_listed_while_its_token_server_is_down() {
    let (place, tokens) = (TestDir::new(&["cache"]), Tokens::default());
    let registry = tokens.registry(None);
    let words = ["ls", "--retries", "0", "-R", &registry.name(":1")];
    let listed = command(&place, &words).output().expect("started");
    let listed = succeeds(&listed);
    *tokens.failures.lock().expect("no panic") = vec![503; 99];
    let again = command(&place, &words).output().expect("started");
    assert_eq!(succeeds(&again), listed);
}

/// The answer of a credential helper.
const LOGIN: &str = r#"{"Username":"me","Secret":"pass"}"#;

/// A place whose credential helper is the script that `script` makes, and the `PATH` with it.
fn with_helper(script: impl FnOnce(&TestDir) -> String) -> (TestDir, String) {
    let place = TestDir::new(&["cache", "docker", "bin"]);
    put_program(&place, "bin/docker-credential-test", &script(&place));
    let config = json!({ "credsStore": "test" });
    place.put("docker/config.json", config.to_string());
    let path = format!("{}:/usr/bin:/bin", place.path("bin").display());
    (place, path)
}

// Promises: retry-credentials
#[test]
fn credential_helper_that_fails_once_is_asked_again() {
    let registry = guarded(Arc::new(basic("me:pass")));
    let (place, path) = with_helper(|place| fails_first(place, 1, LOGIN));
    let mut command = command(&place, &["ls", &registry.name(":1")]);
    command.env("PATH", path);
    succeeds(&command.output().expect("started"));
}

/// Headers and hidden arguments are in variables of this program.
// Promises: secret-children
#[test]
fn credential_helper_gets_no_variables_of_this_program() {
    let registry = guarded(Arc::new(basic("me:pass")));
    let (place, path) = with_helper(|place| {
        let seen = place.path("seen").display().to_string();
        format!("cat >/dev/null\nenv >{seen}\necho '{LOGIN}'")
    });
    let mut command = command(&place, &["ls", &registry.name(":1")]);
    command
        .env("PATH", path)
        .env("OTHER", "kept")
        .env("TARFS_HEADERS", "X-Key: s3cret")
        .env("TARFS_ARGUMENT_9", "s3cret");
    succeeds(&command.output().expect("started"));
    let seen = std::fs::read_to_string(place.path("seen")).expect("it ran");
    assert!(seen.contains("OTHER=kept"), "{seen}");
    assert!(!seen.contains("TARFS_"), "{seen}");
}

/// The limit of open files is no fault of the helper or of the user's login.
// Promises: memory-files
#[test]
fn credential_helper_without_descriptors_is_no_wrong_login() {
    let registry = guarded(Arc::new(basic("me:pass")));
    let (place, path) = with_helper(|_| format!("cat >/dev/null\necho '{LOGIN}'"));
    let tarfs = command(&place, &["ls", &registry.name(":1")]);
    let variables = tarfs.get_envs();
    let variables: Vec<_> = variables
        .filter_map(|(name, value)| Some((name, value?)))
        .collect();
    let mut succeeded = 0;
    for limit in 12..48 {
        std::fs::remove_dir_all(place.path("cache")).ok();
        let mut shell = Command::new("bash");
        shell
            .args(["-c", "ulimit -n \"$1\"; shift; exec \"$@\"", "bash"])
            .arg(limit.to_string())
            .arg(tarfs.get_program())
            .args(tarfs.get_args())
            .envs(variables.iter().copied())
            .env("PATH", &path);
        let done = shell.output().expect("bash");
        let error = stderr_text(&done);
        if done.status.success() {
            succeeded += 1;
            continue;
        }
        assert_eq!(done.status.code(), Some(2), "{limit}: {error}");
        assert!(error.contains("`ulimit -n`"), "{limit}: {error}");
        for wrong in ["docker login", "source of credentials", "attempts"] {
            assert!(!error.contains(wrong), "{limit}: {error}");
        }
    }
    assert!(succeeded > 0);
}

/// Runs `tarfs` on objects of `server`, with these variables.
fn run(place: &TestDir, server: &Server, words: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = place.command(words);
    command
        .env("HOME", place.root())
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env("AWS_ENDPOINT_URL_S3", server.url(""))
        .envs(variables.iter().copied());
    command.output().expect("started")
}

/// Answer of an endpoint that gives keys.
const KEYS: &str = r#"{"AccessKeyId":"AK","SecretAccessKey":"SK","Token":"T","Expiration":"2099-01-01T00:00:00Z"}"#;

/// An endpoint of keys that answers `status` to its first `failures` requests.
fn key_server(status: u16, failures: usize) -> (Server, String) {
    let server = Server::start();
    server.route("/keys", move |request| {
        if request.number <= failures {
            return Response::new(status);
        }
        Response::new(200).with_body(KEYS)
    });
    let url = server.url("/keys");
    (server, url)
}

/// Serves an archive as `s3://bucket/a.tar`, to signed requests only.
fn serve_signed(server: &Server) {
    let resource = Resource::new(Tree::mixed().tar.clone()).etag("\"1\"");
    server.route("/bucket/a.tar", move |request| {
        match request.header("authorization") {
            Some(_) => resource.answer(request),
            None => Response::new(403),
        }
    });
}

// Promises: retry-credentials
#[test]
fn endpoint_of_keys_that_fails_once_is_asked_again() {
    for status in OUTAGES {
        let (place, server) = (TestDir::new(&["cache"]), Server::start());
        serve_signed(&server);
        let (keys, url) = key_server(status, 1);
        let variables = [("AWS_CONTAINER_CREDENTIALS_FULL_URI", &*url)];
        let words = ["ls", "--no-published-index", "s3://bucket/a.tar"];
        succeeds(&run(&place, &server, &words, &variables));
        assert_eq!(keys.requests("/keys").len(), 2, "{status}");
    }
}

// Promises: retry-credentials
#[test]
fn refusal_of_an_endpoint_of_keys_is_final() {
    let (place, server) = (TestDir::new(&["cache"]), Server::start());
    serve_signed(&server);
    let (keys, url) = key_server(403, 9);
    let variables = [("AWS_CONTAINER_CREDENTIALS_FULL_URI", &*url)];
    let done = run(&place, &server, &["ls", "s3://bucket/a.tar"], &variables);
    let error = stderr_text(&done);
    assert_eq!(done.status.code(), Some(2), "{error}");
    assert!(
        error.contains("correct this source of credentials"),
        "{error}"
    );
    assert!(!error.contains("attempts"), "{error}");
    drop(keys);
}

// Promises: store-refresh
#[test]
fn metadata_server_that_is_busy_is_not_taken_for_absent() {
    let (place, server) = (TestDir::new(&["cache"]), Server::start());
    serve_signed(&server);
    let metadata = Server::start();
    let token = "/latest/api/token";
    metadata.route(token, |_| Response::new(503));
    let url = metadata.url("");
    let variables = [
        ("AWS_EC2_METADATA_DISABLED", "false"),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", &*url),
    ];
    let words = ["ls", "--retries", "1", "s3://bucket/a.tar"];
    let done = run(&place, &server, &words, &variables);
    let error = stderr_text(&done);
    assert!(
        error.contains("instance metadata") && error.contains("503"),
        "{error}"
    );
    assert!(server.requests("/bucket/a.tar").is_empty());
}

// Promises: retry-credentials
#[test]
fn credential_process_that_fails_is_an_outage_of_a_run() {
    let (place, server) = (
        TestDir::new(&["cache", "bin", ".aws", "out"]),
        Server::start(),
    );
    let content = random_bytes(3_000_000);
    let archive = Archive::new().file("data", &content).end();
    let resource = Resource::new(archive).etag("\"1\"");
    let requests = AtomicUsize::new(0);
    server.route("/bucket/a.tar", move |request| {
        let sent = request.header("authorization").unwrap_or_default();
        let is_first = requests.fetch_add(1, Ordering::Relaxed) == 0;
        if is_first || sent.contains("=KEY2/") {
            return resource.answer(request);
        }
        Response::new(403).with_body("<Error><Code>InvalidAccessKeyId</Code></Error>")
    });
    // It gives the first key once, then fails twice, and then gives the second one.
    let count = place.path("count").display().to_string();
    let script = format!(
        "echo >>{count}\nkey=1\n[ $(wc -l <{count}) -ge 2 ] && key=2\n\
         case $(wc -l <{count}) in 2|3) exit 1;; esac\n\
         echo '{{\"Version\":1,\"AccessKeyId\":\"KEY'$key'\",\"SecretAccessKey\":\"s\"}}'"
    );
    put_program(&place, "bin/keys", &script);
    let process = place.path("bin/keys").display().to_string();
    place.put(
        ".aws/config",
        format!("[default]\ncredential_process = {process}\n"),
    );
    let out = place.path("out").display().to_string();
    let words = [
        "materialize",
        "--no-published-index",
        "s3://bucket/a.tar",
        "-C",
        &out,
    ];
    succeeds(&run(&place, &server, &words, &[]));
    assert!(std::fs::read(place.path("out/data")).expect("read") == content);
}

// Promises: retry-pauses
#[test]
fn pause_of_a_token_server_beyond_the_timeout_is_named_at_once() {
    let (tokens, place) = (Server::start(), TestDir::new(&["cache"]));
    tokens.route("/token", |_| Response::new(429).with("Retry-After", "3600"));
    let challenge = format!("Bearer realm=\"{}\",service=\"s\"", tokens.url("/token"));
    let registry = guarded(Arc::new(move |_: &_| {
        Some(Response::new(401).with("WWW-Authenticate", challenge.clone()))
    }));
    let words = ["ls", &registry.name(":1")];
    let done = command(&place, &words).output().expect("started");
    let error = stderr_text(&done);
    assert_eq!(done.status.code(), Some(2), "{error}");
    // Some of the pause may be over.
    for expected in ["status 429", "asks for a pause of 3", "try again later"] {
        assert!(error.contains(expected), "{expected}: {error}");
    }
    assert_eq!(tokens.requests("/token").len(), 1);
}

/// The end of a failed run cuts off whatever still renews credentials, which is no failure of their source.
// Promises: retry-credentials
#[test]
fn end_of_a_failed_run_is_no_failure_of_credentials() {
    let (place, server) = (TestDir::new(&["cache", "bin", ".aws"]), Server::start());
    server.route("*", |_| {
        Response::new(403).with_body("<Error><Code>InvalidAccessKeyId</Code></Error>")
    });
    let answer = r#"{"Version":1,"AccessKeyId":"K","SecretAccessKey":"s"}"#;
    put_program(&place, "bin/keys", &format!("sleep 0.05; echo '{answer}'"));
    let process = place.path("bin/keys").display().to_string();
    place.put(
        ".aws/config",
        format!("[default]\ncredential_process = {process}\n"),
    );
    for _ in 0..8 {
        let done = run(&place, &server, &["ls", "s3://bucket/a.tar"], &[]);
        let error = stderr_text(&done);
        assert_eq!(done.status.code(), Some(2), "{error}");
        assert!(error.contains("InvalidAccessKeyId"), "{error}");
        assert!(!error.contains("cannot renew"), "{error}");
    }
}
