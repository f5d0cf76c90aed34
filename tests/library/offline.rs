//! Listings without a server.

use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Server};
use crate::support::program::stderr_text;
use crate::support::tree::Tree;

// Promises: offline-start, offline-reads
#[test]
fn saved_index_is_listed_without_the_server() {
    let (place, server) = (TestDir::new(&["cache"]), Server::start());
    let tar = Tree::mixed().tar.clone();
    server.serve("/a.tar", Resource::new(tar).etag("\"1\""));
    let url = server.url("/a.tar");

    let error = place.error_of(&["ls", "--offline", "-R", &url]);
    assert!(
        error.contains(&url) && error.contains("--offline"),
        "{error}"
    );
    assert!(server.requests("/a.tar").is_empty());

    let listed = place.succeeds(&["ls", "-R", &url]);
    let requests = server.requests("/a.tar").len();
    assert_eq!(place.succeeds(&["ls", "--offline", "-R", &url]), listed);
    assert_eq!(server.requests("/a.tar").len(), requests);

    drop(server);
    let done = place.tarfs(&["ls", "--retries", "0", "-R", &url]);
    let text = stderr_text(&done);
    assert!(done.status.success(), "{text}");
    assert_eq!(String::from_utf8_lossy(&done.stdout), listed);
    assert!(text.contains("only cached data"), "{text}");
}

// Promises: offline-start
#[test]
fn warning_of_a_cached_start_has_its_reason() {
    let (place, server) = (TestDir::new(&["cache"]), Server::start());
    let tar = Tree::mixed().tar.clone();
    server.serve("/a.tar", Resource::new(tar).etag("\"1\""));
    let url = server.url("/a.tar");
    let listed = place.succeeds(&["ls", "-R", &url]);
    let failures = [
        (503, "status 503"),
        (429, "status 429"),
        (522, "status 522"),
    ];
    for (status, reason) in failures {
        server.route("/a.tar", move |_| {
            crate::support::http::Response::new(status)
        });
        let done = place.tarfs(&["ls", "--retries", "0", "-R", &url]);
        let text = stderr_text(&done);
        assert!(text.contains(&url) && text.contains(reason), "{text}");
        assert_eq!(String::from_utf8_lossy(&done.stdout), listed);
    }
}

// Promises: offline-start
#[test]
fn answer_of_a_server_is_no_outage() {
    let (place, server) = (TestDir::new(&["cache"]), Server::start());
    let resource = |etag: &str| Resource::new(Tree::mixed().tar.clone()).etag(etag);
    server.serve("/a.tar", resource("\"1\""));
    let url = server.url("/a.tar");
    place.succeeds(&["ls", &url]);
    for status in [403, 404] {
        server.route("/a.tar", move |_| {
            crate::support::http::Response::new(status)
        });
        let error = place.error_of(&["ls", &url]);
        assert!(!error.contains("only cached data"), "{error}");
    }
}

// Promises: offline-start
#[test]
fn version_without_proof_is_not_used_without_the_server() {
    let (place, server) = (TestDir::new(&["cache"]), Server::start());
    server.serve("/a.tar", Resource::new(Tree::mixed().tar.clone()));
    let url = server.url("/a.tar");
    place.succeeds(&["ls", &url]);
    let error = place.error_of(&["ls", "--offline", &url]);
    assert!(error.contains("--offline"), "{error}");
    drop(server);
    place.error_of(&["ls", "--retries", "0", &url]);
}

// Promises: retry-credentials, offline-start
#[test]
fn wrong_source_of_credentials_is_no_outage() {
    let (place, server) = (TestDir::new(&["cache"]), Server::start());
    let tar = Tree::mixed().tar.clone();
    server.serve("/bucket/a.tar", Resource::new(tar).etag("\"1\""));
    let list = |profile: Option<&str>| {
        let mut command = place.command(&["ls", "s3://bucket/a.tar"]);
        command
            .env("HOME", place.root())
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .env("AWS_ENDPOINT_URL_S3", server.url(""));
        command.envs(profile.map(|profile| ("AWS_PROFILE", profile)));
        command.output().expect("started")
    };
    assert!(list(None).status.success());
    let refused = list(Some("absent"));
    assert_eq!(refused.status.code(), Some(2));
    let error = stderr_text(&refused);
    assert!(error.contains("no such profile: absent"), "{error}");
}

// Promises: nested-join
#[test]
fn joined_urls_are_refused_offline() {
    let (place, server) = (TestDir::new(&["cache"]), Server::start());
    let tar = Tree::mixed().tar.clone();
    let (first, second) = tar.split_at(1000);
    place.put("first", first);
    place.put("second", second);
    server.serve("/second", Resource::new(second.to_vec()).etag("\"1\""));
    let urls = format!("join:first,{}", server.url("/second"));
    let listed = place.succeeds(&["ls", "-R", &urls]);
    let error = place.failure_of(64, &["ls", "--offline", "-R", &urls]);
    assert!(error.contains("leave --offline out"), "{error}");
    let local = ["ls", "--offline", "-R", "join:first,second"];
    assert_eq!(place.succeeds(&local), listed);
}
