//! Uploads of local files.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tarfs::internal::thread::Thread;
use tarfs::source::{
    self, Cause, Error, HeaderLoader, Identity, Options, Retry, Revalidation, UploadContent,
};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::support::http::{Response, Server};
use crate::support::raw::random_bytes;

/// A file to upload, and a directory.
struct Upload {
    directory: TempDir,
    bytes: Vec<u8>,
}

impl Upload {
    fn new(len: usize) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let bytes = random_bytes(len);
        fs::write(directory.path().join("file"), &bytes).expect("space");
        Self { directory, bytes }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn content(&self) -> UploadContent {
        UploadContent::open(&self.path("file")).expect("there")
    }

    fn put(&self, spec: &str, options: Options) -> Result<(), Error> {
        put(spec, self.content(), options)
    }
}

fn put(spec: &str, content: UploadContent, options: Options) -> Result<(), Error> {
    let network = Runtime::new().expect("a runtime");
    network.block_on(source::put(spec, content, options))
}

/// Without pauses.
fn options() -> Options {
    Options {
        retry: Retry {
            initial_pause: Duration::ZERO,
            ..Retry::default()
        },
        ..Options::default()
    }
}

fn with_header(name: &str, value: &str) -> Options {
    Options {
        identity: Arc::new(Identity {
            headers: vec![(name.to_owned(), value.to_owned())],
            ..Identity::default()
        }),
        ..options()
    }
}

fn hint(error: &Error) -> String {
    error.cause.hint().unwrap_or_default().into_owned()
}

#[test]
fn file_is_uploaded_by_one_request_with_its_length() {
    for len in [0, 1, 700_000] {
        for status in [200, 201, 204] {
            let (server, upload) = (Server::start(), Upload::new(len));
            server.route("/a", move |_| Response::new(status));
            upload
                .put(&server.url("/a?b=c"), with_header("X-One", "1"))
                .expect("stored");
            let requests = server.requests("/a");
            assert_eq!(requests.len(), 1);
            let request = &requests[0].request;
            assert_eq!((&*request.method, &*request.query), ("PUT", "b=c"));
            assert_eq!(request.header("content-length"), Some(&*len.to_string()));
            assert_eq!(request.header("x-one"), Some("1"));
            assert_eq!(request.header("x-amz-content-sha256"), None);
            assert!(request.body == upload.bytes, "other bytes");
        }
    }
}

#[test]
fn failed_upload_is_sent_again_from_its_start() {
    let (server, upload) = (Server::start(), Upload::new(700_000));
    server.route("/a", |request| match request.number {
        1 => Response::new(503),
        2 => Response::hang_up(),
        3 => Response::new(500),
        _ => Response::new(201),
    });
    upload.put(&server.url("/a"), options()).expect("stored");
    let requests = server.requests("/a");
    assert_eq!(requests.len(), 4);
    for seen in requests {
        assert!(seen.request.body == upload.bytes, "other bytes");
    }
}

#[test]
fn upload_that_fails_each_time_ends_with_the_number_of_attempts() {
    let (server, upload) = (Server::start(), Upload::new(1_000));
    server.route("/a", |_| Response::new(500));
    let error = upload
        .put(&server.url("/a"), options())
        .expect_err("refused");
    assert!(matches!(error.cause, Cause::Http(500)), "{error:?}");
    let text = error.to_string();
    let expected = format!("cannot upload to {} (5 attempts", server.url("/a"));
    assert!(text.starts_with(&expected), "{text}");
    assert_eq!(server.requests("/a").len(), 5);
}

#[test]
fn refused_upload_names_credentials_and_permission() {
    let (server, upload) = (Server::start(), Upload::new(1_000));
    server.route("/a", |_| Response::new(403).with("x-amz-request-id", "R17"));
    let with_user = server.url("/a").replace("//", "//me:hunter2@");
    for (url, options) in [
        (server.url("/a?sig=hunter2"), options()),
        (with_user, options()),
        (
            server.url("/a"),
            with_header("Authorization", "Bearer hunter2"),
        ),
    ] {
        let error = upload.put(&url, options).expect_err("refused");
        let text = format!("{error}: {}; {}", error.cause, hint(&error));
        for expected in [
            "status 403, request R17",
            "those in the URL and in --header",
            "permit uploads",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        assert!(!text.contains("hunter2"), "{text}");
    }
    assert_eq!(server.requests("/a").len(), 3);
}

#[test]
fn server_without_uploads_is_named_as_such() {
    let (server, upload) = (Server::start(), Upload::new(1_000));
    for status in [405, 501] {
        server.route("/a", move |_| Response::new(status));
        let error = upload
            .put(&server.url("/a"), options())
            .expect_err("refused");
        assert!(
            matches!(error.cause, Cause::NoUploads(found) if found == status),
            "{error:?}"
        );
    }
    assert_eq!(server.requests("/a").len(), 2);
}

#[test]
fn refused_headers_of_an_upload_are_loaded_again() {
    let (server, upload) = (Server::start(), Upload::new(300_000));
    server.route("/a", |request| match request.header("authorization") {
        Some("Bearer two") => Response::new(201),
        _ => Response::new(401),
    });
    let header = |token: &str| vec![("Authorization".to_owned(), format!("Bearer {token}"))];
    let options = Options {
        identity: Arc::new(Identity {
            headers: header("one"),
            reload: Some(HeaderLoader::new(move || Ok(header("two")))),
            ..Identity::default()
        }),
        ..options()
    };
    let stats = Arc::clone(&options.stats);
    upload.put(&server.url("/a"), options).expect("stored");
    assert_eq!(stats.source_renewed_credentials.get(), 1);
    let last = server.requests("/a").pop().expect("sent");
    assert!(last.request.body == upload.bytes, "other bytes");
}

#[test]
fn upload_follows_redirects_within_its_host_only() {
    let (server, upload) = (Server::start(), Upload::new(300_000));
    let redirect = |status, to: String| move |_: &_| Response::new(status).with("Location", &*to);
    server.route("/b", |_| Response::new(201));
    for status in [307, 308] {
        server.route("/a", redirect(status, "/b".to_owned()));
        upload.put(&server.url("/a"), options()).expect("stored");
    }
    for seen in server.requests("/b") {
        assert_eq!(seen.request.method, "PUT");
        assert!(seen.request.body == upload.bytes, "other bytes");
    }
    assert_eq!(server.requests("/b").len(), 2);
    server.route("/a", redirect(307, server.other_url("/b")));
    let error = upload
        .put(&server.url("/a"), options())
        .expect_err("another host");
    assert!(
        error.cause.to_string().contains("another host"),
        "{error:?}"
    );
    server.route("/a", redirect(302, "/b".to_owned()));
    let error = upload
        .put(&server.url("/a"), options())
        .expect_err("not for PUT");
    assert!(matches!(error.cause, Cause::Http(302)), "{error:?}");
    server.route("/a", redirect(307, "/a".to_owned()));
    let error = upload
        .put(&server.url("/a"), options())
        .expect_err("endless");
    assert!(error.cause.to_string().contains("redirects"), "{error:?}");
    assert_eq!(server.requests("/b").len(), 2);
}

/// A server that reads the head of each request and then answers `answer`, if any, without reading the body.
fn impatient_server(answer: Option<&'static str>) -> (String, Thread<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}/a", listener.local_addr().expect("bound"));
    let serve = move || {
        let mut open = Vec::new();
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.expect("connected"));
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|len| len > 2) {
                line.clear();
            }
            if line.is_empty() {
                return;
            }
            match answer {
                Some(answer) => reader.get_mut().write_all(answer.as_bytes()).expect("sent"),
                None => open.push(reader),
            }
        }
    };
    (url, Thread::spawn("impatient", serve).expect("a thread"))
}

fn stop(url: &str, server: Thread<()>) {
    let address = url.trim_start_matches("http://").trim_end_matches("/a");
    drop(std::net::TcpStream::connect(address));
    server.join();
}

#[test]
fn refusal_before_the_body_is_read_is_reported() {
    let upload = Upload::new(30_000_000);
    let answer = "HTTP/1.1 403 -\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    let (url, server) = impatient_server(Some(answer));
    let error = upload.put(&url, options()).expect_err("refused");
    assert!(
        matches!(&error.cause, Cause::Denied(denial) if denial.status == 403),
        "{error:?}"
    );
    stop(&url, server);
}

#[test]
fn upload_that_the_server_stops_reading_times_out() {
    let upload = Upload::new(30_000_000);
    let (url, server) = impatient_server(None);
    let mut options = Options {
        idle_timeout: Duration::from_millis(500),
        ..options()
    };
    options.retry.attempts = 2;
    let error = upload.put(&url, options).expect_err("no answer");
    assert!(
        matches!(error.cause, Cause::Unreachable { .. }),
        "{error:?}"
    );
    assert_eq!(error.attempts, 2);
    stop(&url, server);
}

#[test]
fn file_that_shrinks_during_the_upload_is_an_error() {
    let (server, upload) = (Server::start(), Upload::new(700_000));
    server.route("/a", |_| Response::new(201));
    let content = upload.content();
    fs::File::options()
        .write(true)
        .open(upload.path("file"))
        .and_then(|file| file.set_len(300_000))
        .expect("shortened");
    for spec in [server.url("/a"), upload.path("copy").display().to_string()] {
        let error = put(&spec, content.clone(), options()).expect_err("shorter");
        assert!(matches!(error.cause, Cause::Io(_)), "{error:?}");
        assert!(error.cause.to_string().contains("became shorter"));
    }
    assert!(!upload.path("copy").exists());
}

#[test]
fn local_upload_replaces_a_regular_file() {
    let upload = Upload::new(700_000);
    let path = upload.path("copy");
    let url = format!("file://{}", path.display());
    for spec in [path.display().to_string(), url] {
        fs::write(&path, "old").expect("space");
        upload.put(&spec, options()).expect("stored");
        assert!(
            fs::read(&path).expect("there") == upload.bytes,
            "other bytes"
        );
    }
    fs::create_dir(upload.path("directory")).expect("made");
    symlink("copy", upload.path("link")).expect("made");
    for name in ["directory", "link"] {
        let path = upload.path(name).display().to_string();
        let error = upload.put(&path, options()).expect_err("not a file");
        let text = format!("{error}: {}", error.cause);
        assert!(
            text.starts_with(&format!("cannot upload to {path}: an upload")),
            "{text}"
        );
    }
    let none = upload.path("none/file").display().to_string();
    let error = upload.put(&none, options()).expect_err("no directory");
    assert!(matches!(error.cause, Cause::NotFound), "{error:?}");
    let names = fs::read_dir(upload.directory.path())
        .expect("there")
        .count();
    assert_eq!(names, 4, "no temporary file is left");
}

#[test]
fn places_that_take_no_upload_are_refused_without_a_request() {
    let (server, upload) = (Server::start(), Upload::new(1_000));
    let endpoint = Options {
        endpoint_url: Some(server.url("")),
        ..options()
    };
    let text = |spec: &str, options: Options| {
        let error = upload.put(spec, options).expect_err("refused");
        format!("{error}: {}", error.cause)
    };
    let version = text("s3://bucket/key?versionId=1", endpoint);
    assert!(version.contains("cannot name one"), "{version}");
    assert!(text("ftp://host/a", options()).contains("not a known scheme"));
    assert!(text("file://host/a", options()).contains("no other host"));
    let offline = Options {
        revalidation: Revalidation::Never,
        ..options()
    };
    assert!(text(&server.url("/a"), offline).contains("--offline"));
    assert_eq!(server.requests("/a").len(), 0);
    assert_eq!(server.requests("/bucket/key").len(), 0);
    let directory = UploadContent::open(upload.directory.path());
    assert!(directory.is_err());
}
