//! Credentials: headers that are loaded again, and objects of S3.

use std::fs;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tarfs::Packed;
use tarfs::Stats;
use tarfs::source::{self, Cause, HeaderLoader, Identity, Options, Source};
use tokio::runtime::Runtime;

use crate::support::fixture::{PROGRAM, TestDir};
use crate::support::http::{Request, Resource, Response, Server};
use crate::support::program::stderr_text;
use crate::support::raw::random_bytes;
use crate::support::tree::Tree;

/// The token that a server accepts, and the one that the client's file has.
#[derive(Clone)]
struct Tokens {
    accepted: Arc<Mutex<&'static str>>,
    stored: Arc<Mutex<&'static str>>,
    loads: Arc<AtomicUsize>,
}

impl Tokens {
    fn new() -> Self {
        Self {
            accepted: Arc::new(Mutex::new("one")),
            stored: Arc::new(Mutex::new("one")),
            loads: Arc::default(),
        }
    }

    fn headers(&self) -> Vec<(String, String)> {
        let token = *self.stored.lock().expect("no panic");
        vec![("Authorization".to_owned(), format!("Bearer {token}"))]
    }

    fn options(&self, stats: &Arc<Stats>) -> Options {
        let tokens = self.clone();
        let load = move || {
            tokens.loads.fetch_add(1, Ordering::Relaxed);
            Ok(tokens.headers())
        };
        Options {
            identity: Arc::new(Identity {
                headers: self.headers(),
                reload: Some(HeaderLoader::new(load)),
                ..Identity::default()
            }),
            stats: Arc::clone(stats),
            ..Options::default()
        }
    }

    /// Serves `resource` to requests with the accepted token.
    fn serve(&self, server: &Server, path: &str, resource: Resource) {
        let tokens = self.clone();
        server.route(path, move |request| {
            let accepted = format!("Bearer {}", tokens.accepted.lock().expect("no panic"));
            match request.header("authorization") {
                Some(sent) if sent == accepted => resource.answer(request),
                _ => Response::new(401),
            }
        });
    }
}

fn read(network: &Runtime, source: &Arc<dyn Source>, start: u64) -> Result<Vec<u8>, source::Error> {
    let pool = tarfs::source::BufferPool::new(1 << 20);
    network.block_on(async {
        let buffer = pool.acquire(9).expect("open");
        let bytes = source.read_at(Packed(start), buffer).await?;
        Ok(bytes.to_vec())
    })
}

// Promises: auth-reload
#[test]
fn refused_headers_are_loaded_again() {
    let (server, tokens, stats) = (Server::start(), Tokens::new(), Arc::<Stats>::default());
    let (network, bytes) = (Runtime::new().expect("a runtime"), random_bytes(300_000));
    tokens.serve(&server, "/a", Resource::new(bytes.clone()).etag("\"1\""));
    let url = server.url("/a");
    let opening = source::open(&url, tokens.options(&stats));
    let source = network.block_on(opening);
    let source = source.expect("the first token is accepted");
    for token in ["two", "three"] {
        *tokens.accepted.lock().expect("no panic") = token;
        *tokens.stored.lock().expect("no panic") = token;
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let found = read(&network, &source, 200_000).expect("renewed");
                    assert_eq!(found, bytes[200_000..200_009]);
                });
            }
        });
    }
    assert!(stats.source_renewed_credentials.get() >= 2);
    assert!(tokens.loads.load(Ordering::Relaxed) >= 2);
}

// Promises: auth-reload
#[test]
fn unchanged_headers_are_not_sent_again() {
    let (server, tokens, stats) = (Server::start(), Tokens::new(), Arc::<Stats>::default());
    let network = Runtime::new().expect("a runtime");
    *tokens.accepted.lock().expect("no panic") = "two";
    tokens.serve(&server, "/a", Resource::new(random_bytes(1_000)));
    let url = server.url("/a");
    let opening = source::open(&url, tokens.options(&stats));
    let error = network.block_on(opening).expect_err("refused");
    assert!(matches!(&error.cause, Cause::Denied(denial) if denial.status == 401));
    assert!(
        error.cause.to_string().contains("--header"),
        "{}",
        error.cause
    );
    assert!(!error.cause.to_string().contains("one"), "{}", error.cause);
    assert_eq!(server.requests("/a").len(), 1);
}

// Promises: auth-reload
#[test]
fn loaded_headers_never_reach_another_host() {
    let (server, tokens, stats) = (Server::start(), Tokens::new(), Arc::<Stats>::default());
    let network = Runtime::new().expect("a runtime");
    server.serve("/b", Resource::new(random_bytes(300_000)));
    let elsewhere = server.other_url("/b");
    server.route("/a", move |_| Response::redirect(&elsewhere));
    let url = server.url("/a");
    let opening = source::open(&url, tokens.options(&stats));
    let source = network.block_on(opening).expect("opened");
    read(&network, &source, 200_000).expect("read");
    let sent = |path| {
        let requests = server.requests(path).into_iter();
        let sent = requests.map(|seen| seen.request.header("authorization").map(str::to_owned));
        sent.collect::<Vec<_>>()
    };
    assert_eq!(sent("/a"), [Some("Bearer one".to_owned())]);
    assert_eq!(sent("/b"), [None, None]);
}

/// Serves `resource` to requests with the login `me` and this password.
fn serve_with_password(
    server: &Server,
    path: &str,
    password: &Arc<Mutex<&'static str>>,
    resource: Resource,
) {
    let password = Arc::clone(password);
    server.route(path, move |request| {
        // Base64 of me:one, me:two and me:three.
        let accepted = match *password.lock().expect("no panic") {
            "one" => "Basic bWU6b25l",
            "two" => "Basic bWU6dHdv",
            _ => "Basic bWU6dGhyZWU=",
        };
        match request.header("authorization") {
            Some(sent) if sent == accepted => resource.answer(request),
            _ => Response::new(401),
        }
    });
}

// Promises: auth-netrc
#[test]
fn netrc_is_read_again_when_its_password_is_refused() {
    let (server, place) = (Server::start(), TestDir::new(&[]));
    let (network, stats) = (Runtime::new().expect("a runtime"), Arc::<Stats>::default());
    let (bytes, password) = (random_bytes(300_000), Arc::new(Mutex::new("one")));
    let resource = Resource::new(bytes.clone()).etag("\"1\"");
    serve_with_password(&server, "/a", &password, resource);
    let store = |password: &str| {
        place.put(
            "netrc",
            format!("machine 127.0.0.1 login me password {password}\n"),
        );
    };
    store("one");
    let options = Options {
        identity: Arc::new(Identity {
            netrc: Some(place.path("netrc")),
            headers: vec![("X-More".to_owned(), "more".to_owned())],
            ..Identity::default()
        }),
        stats: Arc::clone(&stats),
        ..Options::default()
    };
    let url = server.url("/a");
    let source = network
        .block_on(source::open(&url, options))
        .expect("opened");
    for other in ["two", "three"] {
        *password.lock().expect("no panic") = other;
        store(other);
        let found = read(&network, &source, 200_000).expect("renewed");
        assert_eq!(found, bytes[200_000..200_009]);
    }
    // One for the first password, which is sent only after a challenge.
    assert_eq!(stats.source_renewed_credentials.get(), 3);
    for seen in server.requests("/a") {
        assert_eq!(seen.request.header("x-more"), Some("more"));
    }
    *password.lock().expect("no panic") = "one";
    let error = read(&network, &source, 100_000).expect_err("refused");
    let text = error.cause.to_string();
    assert!(text.contains("netrc") && !text.contains("three"), "{text}");
}

// Promises: auth-netrc
#[test]
fn netrc_password_never_reaches_another_host() {
    let (server, place) = (Server::start(), TestDir::new(&[]));
    let network = Runtime::new().expect("a runtime");
    let netrc =
        "machine 127.0.0.1 login me password one\nmachine localhost login me password two\n";
    place.put("netrc", netrc);
    server.serve("/b", Resource::new(random_bytes(300_000)));
    let elsewhere = server.other_url("/b");
    server.route("/a", move |request| match request.header("authorization") {
        Some(_) => Response::redirect(&elsewhere),
        None => Response::new(401),
    });
    let options = Options {
        identity: Arc::new(Identity {
            netrc: Some(place.path("netrc")),
            ..Identity::default()
        }),
        ..Options::default()
    };
    let url = server.url("/a");
    let source = network
        .block_on(source::open(&url, options))
        .expect("opened");
    read(&network, &source, 200_000).expect("read");
    let sent = |path| {
        let requests = server.requests(path).into_iter();
        let sent = requests.map(|seen| seen.request.header("authorization").map(str::to_owned));
        sent.collect::<Vec<_>>()
    };
    assert_eq!(sent("/a"), [None, Some("Basic bWU6b25l".to_owned())]);
    assert_eq!(sent("/b"), [None, None]);
}

/// The header Authorization of each request for `path`, while `ls` runs with `flags` and the file `netrc`.
fn sent_authorizations(
    (server, place): (&Server, &TestDir),
    (source, path): (&str, &str),
    flags: &[&str],
    netrc: Option<&str>,
) -> Vec<Option<String>> {
    let before = server.requests(path).len();
    let mut command = place.command(&["ls", "--no-published-index", source]);
    command.args(flags).env("HOME", place.path("home"));
    command
        .env_remove("NETRC")
        .envs(netrc.map(|file| ("NETRC", file)));
    command.output().expect("it runs");
    let requests = server.requests(path).into_iter().skip(before);
    let sent = requests.map(|seen| seen.request.header("authorization").map(str::to_owned));
    let mut sent: Vec<_> = sent.collect();
    sent.dedup();
    sent
}

// Promises: auth-netrc
#[test]
fn netrc_is_used_only_after_a_challenge() {
    let (server, place) = (Server::start(), TestDir::new(&["cache", "home"]));
    let archive = Resource::new(Tree::mixed().tar.clone()).etag("\"1\"");
    server.serve("/open.tar", archive.clone());
    for (path, status) in [("/a.tar", 401), ("/b.tar", 403)] {
        let archive = archive.clone();
        server.route(path, move |request| match request.header("authorization") {
            Some(_) => archive.answer(request),
            None => Response::new(status),
        });
    }
    place.put("home/.netrc", "machine 127.0.0.1 login me password one\n");
    place.put("other", "default login me password two\n");
    place.put("more", "X-More: more\n");
    let more = format!("@{}", place.path("more").display());
    let basic = |text: &str| Some(format!("Basic {text}"));
    let asked = vec![None, basic("bWU6b25l")];
    let token = ["--header", "authorization: Bearer token"];
    let bearer = Some("Bearer token".to_owned());
    for (path, flags, netrc, expected) in [
        ("/open.tar", &[][..], None, vec![None]),
        ("/a.tar", &[], None, asked.clone()),
        ("/a.tar", &["--header", "X-More: more"], None, asked),
        ("/a.tar", &token, None, vec![bearer]),
        ("/a.tar", &[], Some("other"), vec![None]),
        ("/a.tar", &[], Some("missing"), vec![None]),
        ("/a.tar", &[], Some("/dev/null"), vec![None]),
        ("/b.tar", &[], None, vec![None]),
        ("/b.tar", &["--header", &more], None, vec![None]),
    ] {
        let sent = sent_authorizations((&server, &place), (&server.url(path), path), flags, netrc);
        assert_eq!(sent, expected, "{path} {flags:?} {netrc:?}");
    }
    let with_login = server.url("/a.tar").replace("http://", "http://me:three@");
    let sent = sent_authorizations((&server, &place), (&with_login, "/a.tar"), &[], None);
    assert_eq!(sent, [basic("bWU6dGhyZWU=")]);
}

// Promises: tls-client
#[test]
fn client_certificate_error_names_file_and_reason() {
    let place = TestDir::new(&["cache"]);
    for name in ["one", "two"] {
        let (key, certificate) = (format!("{name}.key"), format!("{name}.pem"));
        let words = [
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
        ];
        let mut openssl = place.command_of("openssl");
        openssl.args(words).args(["-nodes", "-subj", "/CN=me"]);
        openssl.args(["-keyout", &key, "-out", &certificate]);
        assert!(openssl.output().expect("openssl").status.success());
    }
    let mut encrypt = place.command_of("openssl");
    encrypt.args(["pkey", "-in", "one.key", "-aes128", "-passout", "pass:x"]);
    encrypt.args(["-out", "encrypted.key"]);
    assert!(encrypt.output().expect("openssl").status.success());
    place.put(
        "broken.pem",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    );
    place.put("empty", "");
    for (flags, words) in [
        (
            &["--cert", "missing"][..],
            ["--cert missing", "No such file"],
        ),
        (&["--cert", "one.pem"], ["--cert one.pem", "no private key"]),
        (&["--cert", "one.key"], ["--cert one.key", "no certificate"]),
        (
            &["--cert", "one.pem", "--key", "two.key"],
            ["--key two.key", "not that of"],
        ),
        (
            &["--cert", "one.pem", "--key", "empty"],
            ["--key empty", "no private key"],
        ),
        (
            &["--cert", "one.pem", "--key", "encrypted.key"],
            ["--key encrypted.key", "passphrase"],
        ),
        (
            &["--cert", "broken.pem", "--key", "one.key"],
            ["--cert broken.pem", "number 1 is malformed"],
        ),
    ] {
        let complaint = place.error_of(&[&["ls", "https://127.0.0.1:1/a"], flags].concat());
        let has_all = words.iter().all(|word| complaint.contains(word));
        assert!(has_all, "{flags:?}: {complaint}");
    }
}

/// Runs `tarfs ls` of an object at `server`, with these variables besides no others of AWS.
fn list(server: &Server, object: &str, variables: &[(&str, &str)]) -> Output {
    let place = TestDir::new(&["cache"]);
    let mut command = Command::new(PROGRAM);
    command
        .args(["ls", "--retries", "0", "--endpoint-url", &server.url("")])
        .arg(object)
        .env_clear()
        .env("HOME", place.root())
        .env("TARFS_CACHE_DIR", place.path("cache"))
        .env("AWS_EC2_METADATA_DISABLED", "true");
    for (name, value) in variables {
        command.env(name, value);
    }
    command.output().expect("it runs")
}

const KEYS: [(&str, &str); 2] = [
    ("AWS_ACCESS_KEY_ID", "AKID"),
    ("AWS_SECRET_ACCESS_KEY", "hunter2"),
];

fn is_signed(request: &Request, region: &str) -> bool {
    let scope = format!("/{region}/s3/aws4_request, SignedHeaders=host;x-amz-");
    let sent = request.header("authorization").unwrap_or_default();
    sent.starts_with("AWS4-HMAC-SHA256 Credential=AKID/") && sent.contains(&scope)
}

// Promises: source-kinds, store-names, store-endpoint, s3-credentials
#[test]
fn objects_of_s3_are_requested_with_signatures() {
    let server = Server::start();
    server.serve(
        "/bucket/a%20b.tar",
        Resource::new(Tree::mixed().tar.clone()).etag("\"1\""),
    );
    let done = list(&server, "s3://bucket/a b.tar", &KEYS);
    assert!(done.status.success(), "{}", stderr_text(&done));
    let requests = server.requests("/bucket/a%20b.tar");
    assert!(!requests.is_empty());
    for seen in &requests {
        assert!(is_signed(&seen.request, "us-east-1"), "{:?}", seen.request);
    }

    let region = [KEYS[0], KEYS[1], ("AWS_REGION", "eu-north-1")];
    let done = list(&server, "s3://bucket/a b.tar", &region);
    assert!(done.status.success(), "{}", stderr_text(&done));
    let later = server.requests("/bucket/a%20b.tar");
    assert!(is_signed(&later[requests.len()].request, "eu-north-1"));
}

// Promises: store-refresh
#[test]
fn objects_of_s3_are_requested_anonymously_without_credentials() {
    let server = Server::start();
    server.serve(
        "/bucket/a.tar",
        Resource::new(Tree::mixed().tar.clone()).etag("\"1\""),
    );
    let done = list(&server, "s3://bucket/a.tar", &[]);
    assert!(done.status.success(), "{}", stderr_text(&done));
    for seen in server.requests("/bucket/a.tar") {
        assert_eq!(seen.request.header("authorization"), None);
    }
}

// Promises: s3-headers, published-requests
#[test]
fn amazon_headers_of_the_user_are_signed() {
    let server = Server::start();
    let tar = Resource::new(Tree::mixed().tar.clone()).etag("\"1\"");
    server.serve("/bucket/a.tar", tar);
    let payer = [
        KEYS[0],
        KEYS[1],
        (
            "TARFS_HEADERS",
            "X-Amz-Request-Payer: requester\nX-Other: 1",
        ),
    ];
    let done = list(&server, "s3://bucket/a.tar", &payer);
    assert!(done.status.success(), "{}", stderr_text(&done));
    let index = server.requests("/bucket/a.tar.tarfs");
    assert!(!index.is_empty());
    for seen in server.requests("/bucket/a.tar").iter().chain(&index) {
        let header = |name| seen.request.header(name).unwrap_or_default().to_owned();
        assert_eq!(header("x-amz-request-payer"), "requester");
        assert_eq!(header("x-other"), "1");
        let signed = header("authorization");
        assert!(signed.contains("x-amz-request-payer"), "{signed}");
        assert!(!signed.contains("x-other"), "{signed}");
    }
}

// Promises: store-errors
#[test]
fn refusal_of_s3_names_credentials_code_and_request() {
    let server = Server::start();
    server.route("/bucket/a.tar", |_| {
        Response::new(403)
            .with("x-amz-request-id", "4442587FB7D0A2F9")
            .with_body("<?xml version=\"1.0\"?><Error><Code>SignatureDoesNotMatch</Code></Error>")
    });
    let done = list(&server, "s3://bucket/a.tar", &KEYS);
    assert_eq!(done.status.code(), Some(2));
    let text = stderr_text(&done);
    for expected in [
        "s3://bucket/a.tar",
        "status 403 SignatureDoesNotMatch, request 4442587FB7D0A2F9",
        "AWS_ACCESS_KEY_ID",
    ] {
        assert!(text.contains(expected), "{text}");
    }
    assert!(
        !text.contains("hunter2") && !text.contains("AKID"),
        "{text}"
    );
    // The same credentials are not sent again.
    assert_eq!(server.requests("/bucket/a.tar").len(), 1);

    let text = stderr_text(&list(&server, "s3://bucket/a.tar", &[]));
    for expected in ["none found in", "AWS_ACCESS_KEY_ID", "AWS profile default"] {
        assert!(text.contains(expected), "{text}");
    }
}

// Promises: s3-credentials
#[test]
fn keys_of_s3_are_taken_from_the_named_profile() {
    let server = Server::start();
    server.serve(
        "/bucket/a.tar",
        Resource::new(Tree::mixed().tar.clone()).etag("\"1\""),
    );
    let place = TestDir::new(&[]);
    let file = place.path("credentials");
    let text = "[other]\naws_access_key_id = AKID\naws_secret_access_key = hunter2\n";
    fs::write(&file, text).expect("space");
    let file = file.to_str().expect("UTF-8");
    let profile = [
        ("AWS_SHARED_CREDENTIALS_FILE", file),
        ("AWS_PROFILE", "other"),
    ];
    let done = list(&server, "s3://bucket/a.tar", &profile);
    assert!(done.status.success(), "{}", stderr_text(&done));
    assert!(is_signed(
        &server.requests("/bucket/a.tar")[0].request,
        "us-east-1"
    ));
}

// Promises: s3-credentials
#[test]
fn profile_that_is_missing_or_not_supported_is_an_error() {
    let server = Server::start();
    server.serve("/bucket/a.tar", Resource::new(Tree::mixed().tar.clone()));
    let place = TestDir::new(&[]);
    let file = place.path("config");
    fs::write(
        &file,
        "[profile role]\nrole_arn = arn:aws:iam::1:role/r\nmfa_serial = m\n",
    )
    .expect("space");
    let file = file.to_str().expect("UTF-8");
    for (profile, expected) in [
        ("role", "mfa_serial is not supported"),
        ("other", "no such profile"),
    ] {
        let variables = [("AWS_CONFIG_FILE", file), ("AWS_PROFILE", profile)];
        let done = list(&server, "s3://bucket/a.tar", &variables);
        let text = stderr_text(&done);
        assert!(text.contains(expected) && text.contains(profile), "{text}");
    }
    assert_eq!(server.requests("/bucket/a.tar").len(), 0);
}

// Promises: store-endpoint, s3-credentials
#[test]
fn version_region_and_endpoint_of_s3_are_taken_from_name_and_settings() {
    let server = Server::start();
    server.serve(
        "/bucket/a.tar",
        Resource::new(Tree::mixed().tar.clone()).etag("\"1\""),
    );
    let place = TestDir::new(&["cache"]);
    fs::write(place.path("config"), "[default]\nregion = sa-east-1\n").expect("space");
    for (variables, region) in [
        (&[("AWS_CONFIG_FILE", "config")][..], "sa-east-1"),
        (
            &[
                ("AWS_CONFIG_FILE", "config"),
                ("AWS_DEFAULT_REGION", "eu-west-3"),
            ],
            "eu-west-3",
        ),
    ] {
        let seen = server.requests("/bucket/a.tar").len();
        let mut command = place.command(&["ls", "s3://bucket/a.tar?versionId=v+1"]);
        command
            .env("AWS_ENDPOINT_URL_S3", server.url(""))
            .env("HOME", place.root());
        command.env("AWS_EC2_METADATA_DISABLED", "true").envs(KEYS);
        let done = command
            .envs(variables.iter().copied())
            .output()
            .expect("it runs");
        assert!(done.status.success(), "{}", stderr_text(&done));
        let requests = server.requests("/bucket/a.tar");
        let request = &requests[seen].request;
        assert!(is_signed(request, region), "{request:?}");
        assert_eq!(request.query, "versionId=v%2B1");
    }
}

// Promises: store-s3
#[test]
fn malformed_names_of_s3_are_refused() {
    let server = Server::start();
    for name in ["s3:///key", "s3://me@bucket/key"] {
        let done = list(&server, name, &KEYS);
        assert_eq!(done.status.code(), Some(2), "{name}");
        let text = stderr_text(&done);
        assert!(text.contains("s3://BUCKET/KEY"), "{text}");
    }
}

// Promises: archives-place, archives-names
#[test]
fn names_of_archives_below_a_prefix_are_listed() {
    let server = Server::start();
    let page = |keys: &[&str], next: &str| {
        let contents = keys
            .iter()
            .map(|key| format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>"));
        let contents: String = contents.collect();
        format!("<ListBucketResult>{contents}{next}</ListBucketResult>")
    };
    let next = "<NextContinuationToken>2</NextContinuationToken>";
    let first = page(&["p/b.tar", "p/../x.tar", "p/readme", "p/a.tgz"], next);
    let second = page(&["p/c/d.tar.zst", "p/a.tgz", "p/b.tar/e.tar"], "");
    server.route("/bucket", move |request| {
        let is_first = request.query == "list-type=2&prefix=p%2F";
        Response::new(200).with_body(if is_first {
            first.clone()
        } else {
            second.clone()
        })
    });
    let done = list(&server, "s3://bucket/p/", &KEYS);
    assert!(done.status.success(), "{}", stderr_text(&done));
    let listed = String::from_utf8(done.stdout.clone()).expect("UTF-8");
    assert_eq!(listed, "a.tgz\nb.tar\nc/d.tar.zst\n");
    assert!(
        stderr_text(&done).contains("3 names are skipped"),
        "{}",
        stderr_text(&done)
    );
    let requests = server.requests("/bucket");
    assert_eq!(requests.len(), 2);
    for seen in &requests {
        assert!(is_signed(&seen.request, "us-east-1"), "{:?}", seen.request);
    }
}

// Promises: archives-listed
#[test]
fn endless_listing_of_a_bucket_ends() {
    let server = Server::start();
    server.route("/bucket", |request| {
        let token = format!(
            "<NextContinuationToken>{}</NextContinuationToken>",
            request.number
        );
        Response::new(200).with_body(format!("<ListBucketResult>{token}</ListBucketResult>"))
    });
    let done = list(&server, "s3://bucket", &KEYS);
    assert!(done.status.success(), "{}", stderr_text(&done));
    assert!(
        stderr_text(&done).contains("the listing is too long"),
        "{}",
        stderr_text(&done)
    );
    assert_eq!(server.requests("/bucket").len(), 1000);
}

// Promises: archives-listed
#[test]
fn listing_that_makes_no_progress_is_an_error() {
    for (content, requests, expected) in [
        (
            "<NextContinuationToken>a</NextContinuationToken>",
            2,
            "same next page",
        ),
        ("<IsTruncated>true</IsTruncated>", 1, "does not say where"),
    ] {
        let server = Server::start();
        server.route("/bucket", move |_| {
            Response::new(200).with_body(format!("<ListBucketResult>{content}</ListBucketResult>"))
        });
        let done = list(&server, "s3://bucket", &KEYS);
        let error = stderr_text(&done);
        assert_eq!(done.status.code(), Some(2), "{error}");
        assert!(error.contains(expected), "{error}");
        assert_eq!(server.requests("/bucket").len(), requests);
    }
}

// Promises: archives-listed
#[test]
fn answer_that_is_no_listing_is_an_error() {
    for body in ["<html>no</html>", "", "<ListBucketResult><Contents>"] {
        let server = Server::start();
        server.route("/bucket", move |_| Response::new(200).with_body(body));
        let done = list(&server, "s3://bucket/p/", &KEYS);
        assert_eq!(done.status.code(), Some(2), "{body}");
        let text = stderr_text(&done);
        assert!(
            text.contains("s3://bucket/p/") && text.contains("no listing"),
            "{text}"
        );
    }
}
