//! Objects of Google Cloud Storage and Azure Blob Storage.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output};

use crate::support::fixture::{PROGRAM, TestDir};
use crate::support::http::{Resource, Response, Server};
use crate::support::program::stderr_text;
use crate::support::tree::Tree;

/// Runs `tarfs ls` of an object at `server`, with these variables besides no others of clouds.
fn list(server: &Server, object: &str, variables: &[(&str, &str)]) -> Output {
    list_with(&["--endpoint-url", &server.url("")], object, variables)
}

/// Runs `tarfs ls` of an object with these flags and variables.
fn list_with(flags: &[&str], object: &str, variables: &[(&str, &str)]) -> Output {
    let place = TestDir::new(&["cache"]);
    let mut command = Command::new(PROGRAM);
    command
        .args(["ls", "--retries", "0", "--no-published-index", object])
        .args(flags)
        .env_clear()
        .env("HOME", place.root())
        .env("TARFS_CACHE_DIR", place.path("cache"))
        .env("AWS_EC2_METADATA_DISABLED", "true")
        // No metadata server answers there.
        .env("GCE_METADATA_HOST", "127.0.0.1:1")
        .env("AZURE_IMDS_ENDPOINT", "http://127.0.0.1:1/")
        // Other programs may set what is not UTF-8.
        .env(OsStr::from_bytes(b"OTHER\xff"), OsStr::from_bytes(b"\xfe"));
    for (name, value) in variables {
        command.env(name, value);
    }
    command.output().expect("it runs")
}

// Promises: store-gcs, store-azure
#[test]
fn malformed_names_of_objects_are_refused() {
    let server = Server::start();
    for (name, form) in [
        ("gs://bucket", "gs://BUCKET/OBJECT"),
        ("gs://bucket/", "gs://BUCKET/OBJECT"),
        ("gs://me@bucket/key", "gs://BUCKET/OBJECT"),
        ("az://account/blob", "az://ACCOUNT/CONTAINER/BLOB"),
        ("abfs://data@account/blob", "abfss://CONTAINER@ACCOUNT"),
    ] {
        let done = list(&server, name, &[]);
        assert_eq!(done.status.code(), Some(2), "{name}");
        let text = stderr_text(&done);
        assert!(text.contains(form), "{text}");
    }
}

/// Path of the tokens of a metadata server of Google Cloud.
const METADATA: &str = "/computeMetadata/v1/instance/service-accounts/default/token";

/// The host and port of `server`.
fn host(server: &Server) -> String {
    let url = server.url("");
    url.strip_prefix("http://").expect("HTTP").to_owned()
}

/// Serves an archive as `path` to requests with one of these values of `authorization`.
fn serve_to(server: &Server, path: &str, accepted: &'static [&str]) {
    let resource = Resource::new(Tree::mixed().tar.clone()).etag("\"1\"");
    server.route(path, move |request| match request.header("authorization") {
        Some(sent) if accepted.contains(&sent) => resource.answer(request),
        _ => Response::new(403)
            .with("x-guploader-uploadid", "AHmU0")
            .with_body("<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"),
    });
}

/// Serves tokens as a metadata server: `token-1`, and another one for each request.
fn serve_tokens(server: &Server) {
    server.route(METADATA, |request| {
        assert_eq!(request.header("metadata-flavor"), Some("Google"));
        assert!(request.query.ends_with("/auth/devstorage.read_only"));
        let token = format!("token-{}", request.number);
        let body =
            format!(r#"{{"access_token":"{token}","expires_in":3600,"token_type":"Bearer"}}"#);
        Response::new(200).with_body(body)
    });
}

// Promises: source-kinds, gcs-credentials
#[test]
fn objects_of_google_are_requested_with_tokens_of_metadata() {
    let (server, metadata) = (Server::start(), Server::start());
    serve_tokens(&metadata);
    serve_to(&server, "/bucket/d/a%20b.tar", &["Bearer token-1"]);
    let variables = [("GCE_METADATA_HOST", &*host(&metadata))];
    let done = list(&server, "gs://bucket/d/a b.tar#17", &variables);
    assert!(done.status.success(), "{}", stderr_text(&done));
    let requests = server.requests("/bucket/d/a%20b.tar");
    assert!(!requests.is_empty());
    for seen in &requests {
        assert_eq!(seen.request.query, "generation=17");
        assert_eq!(seen.request.header("accept-encoding"), Some("gzip"));
    }
    assert_eq!(metadata.requests(METADATA).len(), 1);
}

// Promises: store-refresh
#[test]
fn refused_token_of_google_is_loaded_again() {
    let (server, metadata) = (Server::start(), Server::start());
    serve_tokens(&metadata);
    serve_to(&server, "/bucket/a.tar", &["Bearer token-2"]);
    let variables = [("GCE_METADATA_HOST", &*host(&metadata))];
    let done = list(&server, "gs://bucket/a.tar", &variables);
    assert!(done.status.success(), "{}", stderr_text(&done));
    assert_eq!(metadata.requests(METADATA).len(), 2);
}

// Promises: gcs-credentials
#[test]
fn external_account_of_google_exchanges_its_token() {
    let (server, exchange) = (Server::start(), Server::start());
    exchange.route("/v1/token", |request| {
        let body = String::from_utf8_lossy(&request.body);
        let is_expected = body.contains("subject_token=subject-hunter2")
            && body
                .contains("scope=https%3A%2F%2Fwww.googleapis.com%2Fauth%2Fdevstorage.read_only");
        if !is_expected {
            return Response::new(400);
        }
        let token = r#"{"access_token":"exchanged","expires_in":3600,"token_type":"Bearer"}"#;
        Response::new(200).with_body(token)
    });
    serve_to(&server, "/bucket/a.tar", &["Bearer exchanged"]);
    let place = TestDir::new(&["config"]);
    place.put("config/subject", "subject-hunter2\n");
    let account = |subject: &str| {
        let account = serde_json::json!({
            "type": "external_account",
            "audience": "pool",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": exchange.url("/v1/token"),
            "credential_source": { "file": subject, "format": { "type": "text" } },
        });
        account.to_string()
    };
    place.put(
        "config/application_default_credentials.json",
        account("config/subject"),
    );
    // Both are found from the directory in which tarfs starts.
    for variable in [
        (
            "GOOGLE_APPLICATION_CREDENTIALS",
            "config/application_default_credentials.json",
        ),
        ("CLOUDSDK_CONFIG", "config"),
    ] {
        let flags = [
            "ls",
            "--retries",
            "0",
            "--endpoint-url",
            &server.url(""),
            "gs://bucket/a.tar",
        ];
        let mut command = place.command(&flags);
        command
            .env("HOME", place.root())
            .env("GCE_METADATA_HOST", "127.0.0.1:1");
        let done = command
            .env(variable.0, variable.1)
            .output()
            .expect("it runs");
        assert!(done.status.success(), "{}", stderr_text(&done));
    }

    exchange.route("/v1/token", |_| Response::new(403).with_body("hunter2"));
    let subject = place.path("config/subject");
    place.put("absolute", account(subject.to_str().expect("UTF-8")));
    let file = place.path("absolute");
    let file = file.to_str().expect("UTF-8");
    let done = list(
        &server,
        "gs://bucket/a.tar",
        &[("GOOGLE_APPLICATION_CREDENTIALS", file)],
    );
    let text = stderr_text(&done);
    assert!(
        text.contains("no credentials from the file of GOOGLE_APPLICATION_CREDENTIALS"),
        "{text}"
    );
    assert!(!text.contains("hunter2"), "{text}");
}

// Promises: store-errors, gcs-credentials
#[test]
fn service_account_of_google_signs_its_request_for_a_token() {
    let server = Server::start();
    let place = TestDir::new(&[]);
    let words = [
        "genpkey",
        "-algorithm",
        "RSA",
        "-pkeyopt",
        "rsa_keygen_bits:2048",
    ];
    let made = Command::new("openssl")
        .args(words)
        .output()
        .expect("openssl");
    let key = String::from_utf8(made.stdout).expect("PEM");
    let file = place.path("account.json");
    let list_with_key = |key: &str| {
        let account = serde_json::json!({
            "type": "service_account", "client_email": "me@example.com", "private_key": key,
        });
        place.put(&file, account.to_string());
        let variables = [
            (
                "GOOGLE_APPLICATION_CREDENTIALS",
                file.to_str().expect("UTF-8"),
            ),
            // No server answers there.
            ("HTTPS_PROXY", "http://127.0.0.1:1"),
        ];
        stderr_text(&list(&server, "gs://bucket/a.tar", &variables))
    };
    let text = list_with_key(&key);
    assert!(
        text.contains("the file of GOOGLE_APPLICATION_CREDENTIALS"),
        "{text}"
    );
    assert!(
        text.contains("service account OAuth token request failed"),
        "{text}"
    );
    assert!(!text.contains("PRIVATE KEY"), "{text}");
    let text = list_with_key("hunter2");
    assert!(
        !text.contains("token request failed") && !text.contains("hunter2"),
        "{text}"
    );
    assert_eq!(server.requests("/bucket/a.tar").len(), 0);
}

// Promises: store-refresh, store-errors
#[test]
fn refusal_of_google_names_credentials_code_and_request() {
    let server = Server::start();
    serve_to(&server, "/bucket/a.tar", &[]);
    let done = list(&server, "gs://bucket/a.tar", &[]);
    assert_eq!(done.status.code(), Some(2));
    let text = stderr_text(&done);
    for expected in [
        "gs://bucket/a.tar",
        "status 403 AccessDenied, request AHmU0",
        "none found in the file of GOOGLE_APPLICATION_CREDENTIALS",
        "gcloud",
        "metadata server",
    ] {
        assert!(text.contains(expected), "{text}");
    }
}

// Promises: store-endpoint
#[test]
fn emulator_of_google_gets_no_credentials() {
    let (server, metadata) = (Server::start(), Server::start());
    serve_tokens(&metadata);
    server.serve(
        "/bucket/a.tar",
        Resource::new(Tree::mixed().tar.clone()).etag("\"1\""),
    );
    for emulator in [server.url(""), host(&server)] {
        let variables = [
            ("STORAGE_EMULATOR_HOST", &*emulator),
            ("GCE_METADATA_HOST", &host(&metadata)),
        ];
        let done = list_with(&[], "gs://bucket/a.tar", &variables);
        assert!(done.status.success(), "{}", stderr_text(&done));
    }
    assert_eq!(metadata.requests(METADATA).len(), 0);
    for seen in server.requests("/bucket/a.tar") {
        assert_eq!(seen.request.header("authorization"), None);
    }
}

// Promises: store-endpoint
#[test]
fn endpoint_of_one_cloud_is_not_used_for_another() {
    let server = Server::start();
    server.serve("/bucket/a.tar", Resource::new(Tree::mixed().tar.clone()));
    let variables = [
        ("AWS_ENDPOINT_URL", &*server.url("")),
        ("STORAGE_EMULATOR_HOST", "127.0.0.1:1"),
    ];
    let done = list_with(&[], "gs://bucket/a.tar", &variables);
    assert_eq!(done.status.code(), Some(2));
    let variables = [
        ("STORAGE_EMULATOR_HOST", &*server.url("")),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:1"),
    ];
    let done = list_with(&[], "s3://bucket/a.tar", &variables);
    assert_eq!(done.status.code(), Some(2));
    assert_eq!(server.requests("/bucket/a.tar").len(), 0);
}

/// A key of an account of Azure: `hunter2` in base64.
const ACCOUNT_KEY: &str = "aHVudGVyMg==";

/// Serves an archive as a blob, with any credentials.
fn serve_blob(server: &Server) {
    let resource = Resource::new(Tree::mixed().tar.clone()).etag("\"0x8D1\"");
    server.serve("/data/a%20b.tar", resource);
}

/// Values of a header of the requests for the blob, or of the query.
fn sent(server: &Server, header: Option<&str>) -> Vec<String> {
    let requests = server.requests("/data/a%20b.tar").into_iter();
    let sent = requests.map(|seen| match header {
        Some(name) => seen.request.header(name).unwrap_or("none").to_owned(),
        None => seen.request.query,
    });
    sent.collect()
}

// Promises: source-kinds, azure-credentials
#[test]
fn objects_of_azure_are_requested_with_signatures() {
    let server = Server::start();
    serve_blob(&server);
    for name in [
        "az://me/data/a b.tar",
        "abfss://data@me.dfs.core.windows.net/a b.tar",
    ] {
        let done = list(&server, name, &[("AZURE_STORAGE_KEY", ACCOUNT_KEY)]);
        assert!(done.status.success(), "{}", stderr_text(&done));
    }
    let signatures = sent(&server, Some("authorization"));
    assert!(signatures.len() >= 2);
    for signature in signatures {
        assert!(signature.starts_with("SharedKey me:"), "{signature}");
    }
    assert!(
        sent(&server, Some("x-ms-version"))
            .iter()
            .all(|version| version == "2023-11-03")
    );
    assert!(
        sent(&server, Some("x-ms-date"))
            .iter()
            .all(|date| date.ends_with("GMT"))
    );
}

// Promises: azure-credentials, store-endpoint
#[test]
fn connection_string_of_azure_has_key_or_token_and_endpoint() {
    let server = Server::start();
    serve_blob(&server);
    let endpoint = format!("AccountName=me;BlobEndpoint={}", server.url("/"));
    for secret in [
        format!("AccountKey={ACCOUNT_KEY}"),
        "SharedAccessSignature=sv=1&sig=a%3D".to_owned(),
    ] {
        let text = format!("DefaultEndpointsProtocol=http;{endpoint};{secret}");
        let variables = [("AZURE_STORAGE_CONNECTION_STRING", &*text)];
        let done = list_with(&[], "az://me/data/a b.tar", &variables);
        assert!(done.status.success(), "{}", stderr_text(&done));
    }
    let (signatures, queries) = (sent(&server, Some("authorization")), sent(&server, None));
    assert!(
        signatures
            .first()
            .is_some_and(|sent| sent.starts_with("SharedKey me:"))
    );
    assert_eq!(signatures.last().map(String::as_str), Some("none"));
    assert_eq!(queries.last().map(String::as_str), Some("sv=1&sig=a%3D"));
}

// Promises: store-refresh, azure-credentials
#[test]
fn credentials_of_another_account_of_azure_are_not_sent() {
    let server = Server::start();
    serve_blob(&server);
    let other =
        format!("AccountName=other;AccountKey={ACCOUNT_KEY};BlobEndpoint=http://127.0.0.1:1");
    let done = list(
        &server,
        "az://me/data/a b.tar",
        &[
            ("AZURE_STORAGE_ACCOUNT", "other"),
            ("AZURE_STORAGE_KEY", ACCOUNT_KEY),
            ("AZURE_STORAGE_SAS_TOKEN", "sig=hunter2"),
            ("AZURE_STORAGE_CONNECTION_STRING", &other),
        ],
    );
    assert!(done.status.success(), "{}", stderr_text(&done));
    assert!(
        sent(&server, Some("authorization"))
            .iter()
            .all(|sent| sent == "none")
    );
    assert!(sent(&server, None).iter().all(String::is_empty));
}

// Promises: store-refresh, azure-credentials
#[test]
fn refused_sas_token_of_azure_is_read_again() {
    let server = Server::start();
    let place = TestDir::new(&[]);
    place.put("token", "?sv=1&sig=old%3D\n");
    let file = place.path("token");
    let file = file.to_str().expect("UTF-8").to_owned();
    let resource = Resource::new(Tree::mixed().tar.clone()).etag("\"0x8D1\"");
    let renewed = file.clone();
    server.route("/data/a%20b.tar", move |request| {
        if request.query == "sv=1&sig=new%3D" {
            return resource.answer(request);
        }
        std::fs::write(&renewed, "sv=1&sig=new%3D").expect("space");
        Response::new(403)
    });
    let variables = [("AZURE_STORAGE_SAS_TOKEN_FILE", &*file)];
    let done = list(&server, "az://me/data/a b.tar", &variables);
    assert!(done.status.success(), "{}", stderr_text(&done));
    let queries = sent(&server, None);
    let count = |query: &str| queries.iter().filter(|sent| *sent == query).count();
    assert_eq!(count("sv=1&sig=old%3D"), 1);
    assert_eq!(count("sv=1&sig=new%3D"), queries.len() - 1);
}

/// Serves a token of Microsoft Entra to requests whose body or query has all of `words`.
fn serve_entra_token(server: &Server, path: &str, words: &'static [&str]) {
    server.route(path, move |request| {
        let asked = format!(
            "{} {} x-identity-header: {}",
            request.query,
            String::from_utf8_lossy(&request.body),
            request.header("x-identity-header").unwrap_or_default()
        );
        if !words.iter().all(|word| asked.contains(word)) {
            return Response::new(400).with_body(asked);
        }
        let token = r#"{"access_token":"entra","expires_in":3600,"expires_on":"4102444800"}"#;
        Response::new(200).with_body(token)
    });
}

// Promises: azure-credentials
#[test]
fn tokens_of_azure_are_found_as_its_sdks_find_them() {
    let (server, entra) = (Server::start(), Server::start());
    serve_blob(&server);
    let place = TestDir::new(&[]);
    place.put("subject", "subject-token");
    place.put(
        "az",
        "#!/bin/sh\necho '{\"accessToken\":\"entra\",\"expires_on\":4102444800,\"tokenType\":\"Bearer\"}'\n",
    );
    let made = Command::new("chmod")
        .args(["+x", "az"])
        .current_dir(place.root())
        .status();
    assert!(made.expect("chmod").success());
    let subject = place.path("subject");
    serve_entra_token(
        &entra,
        "/secret/oauth2/v2.0/token",
        &["client_secret=hunter2", "client_id=me"],
    );
    serve_entra_token(
        &entra,
        "/federated/oauth2/v2.0/token",
        &["client_assertion=subject-token"],
    );
    serve_entra_token(
        &entra,
        "/identity",
        &["resource=https%3A%2F%2Fstorage.azure.com%2F"],
    );
    serve_entra_token(
        &entra,
        "/app",
        &[
            "api-version=2019-08-01&resource=",
            "client_id=me",
            "x-identity-header: hunter2",
        ],
    );
    let (authority, identity) = (entra.url(""), entra.url("/identity"));
    let app = entra.url("/app");
    let path = format!("{}:/usr/bin:/bin", place.root().display());
    for variables in [
        &[
            ("AZURE_AUTHORITY_HOST", &*authority),
            ("AZURE_TENANT_ID", "secret"),
            ("AZURE_CLIENT_ID", "me"),
            ("AZURE_CLIENT_SECRET", "hunter2"),
        ][..],
        &[
            ("AZURE_AUTHORITY_HOST", &*authority),
            ("AZURE_TENANT_ID", "federated"),
            ("AZURE_CLIENT_ID", "me"),
            (
                "AZURE_FEDERATED_TOKEN_FILE",
                subject.to_str().expect("UTF-8"),
            ),
        ],
        &[
            ("IDENTITY_ENDPOINT", &*app),
            ("IDENTITY_HEADER", "hunter2"),
            ("AZURE_CLIENT_ID", "me"),
        ],
        &[("PATH", &*path)],
        &[("AZURE_IMDS_ENDPOINT", &*identity)],
    ] {
        let before = sent(&server, None).len();
        let done = list(&server, "az://me/data/a b.tar", variables);
        assert!(
            done.status.success(),
            "{variables:?}: {}",
            stderr_text(&done)
        );
        let tokens = sent(&server, Some("authorization"));
        assert_eq!(
            tokens.get(before).map(String::as_str),
            Some("Bearer entra"),
            "{variables:?}"
        );
    }

    // An error of a configured provider ends the search.
    let broken = [
        ("AZURE_AUTHORITY_HOST", &*authority),
        ("AZURE_TENANT_ID", "secret"),
        ("AZURE_CLIENT_ID", "me"),
        ("AZURE_CLIENT_SECRET", "wrong-hunter2"),
    ];
    let text = stderr_text(&list(&server, "az://me/data/a b.tar", &broken));
    assert!(text.contains("the variable AZURE_CLIENT_SECRET"), "{text}");
    assert!(!text.contains("hunter2"), "{text}");
}

// Promises: store-errors, azure-credentials
#[test]
fn refusal_of_azure_names_credentials_code_and_request() {
    let server = Server::start();
    for (status, code) in [
        (403, "AuthenticationFailed"),
        (409, "PublicAccessNotPermitted"),
    ] {
        server.route("/data/a%20b.tar", move |_| {
            let body = format!("\u{feff}<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
            Response::new(status)
                .with("x-ms-request-id", "a1b2")
                .with_body(body)
        });
        let refused = format!("status {status} {code}, request a1b2");
        for (variables, origin) in [
            (
                &[("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=hunter2")][..],
                "AZURE_STORAGE_SAS_TOKEN",
            ),
            (
                &[],
                "none found in the variable AZURE_STORAGE_CONNECTION_STRING",
            ),
        ] {
            let done = list(&server, "az://me/data/a b.tar", variables);
            assert_eq!(done.status.code(), Some(2));
            let text = stderr_text(&done);
            for expected in ["az://me/data/a b.tar", &*refused, origin] {
                assert!(text.contains(expected), "{text}");
            }
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
}
