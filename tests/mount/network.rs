//! Network settings of the environment: trusted certificates and proxies.
//!
//! The real program connects to a real server.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::http::{Resource, Server};
use crate::support::image::Files;
use crate::support::raw::Archive;
use crate::support::sample_images::one;

/// Timeout for the start of nginx.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// nginx on 127.0.0.1 with TLS and its own certificate. Dropping it stops nginx.
struct TlsServer {
    nginx: Child,
    directory: tempfile::TempDir,
    port: u16,
}

impl TlsServer {
    fn start() -> Self {
        Self::with(&Certificate::default())
    }

    fn with(certificate: &Certificate) -> Self {
        Self::with_settings(certificate, "")
    }

    /// As [`TlsServer::with`], with more lines of nginx' configuration.
    fn with_settings(certificate: &Certificate, settings: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path();
        certificate.make(path);
        let served = path.join("served");
        fs::create_dir(&served).expect("a directory");
        archive(&served.join("a.tar"));
        let port = free_port();
        fs::write(path.join("nginx.conf"), configuration(path, port, settings)).expect("a file");
        let nginx = Command::new("nginx")
            .arg("-c")
            .arg(path.join("nginx.conf"))
            .arg("-p")
            .arg(path)
            .stderr(Stdio::null())
            .spawn()
            .expect("nginx is installed");
        let since = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(since.elapsed() < START_TIMEOUT, "nginx listens");
            std::thread::yield_now();
        }
        Self {
            nginx,
            directory,
            port,
        }
    }

    fn url(&self) -> String {
        format!("https://localhost:{}/a.tar", self.port)
    }

    fn certificate(&self) -> PathBuf {
        self.directory.path().join("certificate.pem")
    }
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        self.nginx.kill().expect("nginx was running");
        self.nginx.wait().expect("nginx has ended");
    }
}

fn configuration(path: &Path, port: u16, settings: &str) -> String {
    let path = path.display();
    format!(
        "daemon off; master_process off; user root; pid {path}/pid; error_log {path}/errors;
         events {{}}
         http {{
             access_log off;
             client_body_temp_path {path}; proxy_temp_path {path}; fastcgi_temp_path {path};
             uwsgi_temp_path {path}; scgi_temp_path {path};
             server {{
                 listen 127.0.0.1:{port} ssl;
                 ssl_certificate {path}/certificate.pem;
                 ssl_certificate_key {path}/key.pem;
                 root {path}/served;
                 {settings}
             }}
         }}"
    )
}

/// A self-signed certificate.
struct Certificate {
    /// The host's name.
    name: &'static str,
    /// Its extension basicConstraints.
    constraints: &'static str,
    /// Its extension extendedKeyUsage, if it has one.
    usage: Option<&'static str>,
    /// When its validity begins and ends, as in ASN.1.
    validity: [&'static str; 2],
}

impl Default for Certificate {
    fn default() -> Self {
        Self {
            name: "localhost",
            constraints: "critical,CA:FALSE",
            usage: None,
            validity: ["20200101000000Z", "20991231235959Z"],
        }
    }
}

impl Certificate {
    /// The default of `openssl req -x509`: a certificate authority.
    fn of_authority() -> Self {
        Self {
            constraints: "critical,CA:TRUE",
            ..Self::default()
        }
    }

    /// Writes `certificate.pem` and its key `key.pem` in `directory`.
    fn make(&self, directory: &Path) {
        let [start, end] = self.validity;
        let usage = self
            .usage
            .map(|usage| format!("extendedKeyUsage = {usage}"));
        let configuration = format!(
            "[ca]\ndefault_ca = own\n\
             [own]\nnew_certs_dir = .\ndatabase = issued\nrand_serial = yes\n\
             default_md = sha256\npolicy = names\nx509_extensions = extensions\n\
             [names]\ncommonName = supplied\n\
             [extensions]\nbasicConstraints = {}\nsubjectAltName = DNS:{}\n{}\n",
            self.constraints,
            self.name,
            usage.unwrap_or_default()
        );
        fs::write(directory.join("ca.conf"), configuration).expect("a file");
        fs::write(directory.join("issued"), "").expect("a file");
        let run = |words: &str| {
            let made = Command::new("openssl")
                .args(words.split_whitespace())
                .current_dir(directory)
                .output()
                .expect("openssl is installed");
            assert!(made.status.success(), "{made:?}");
        };
        run(
            "req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=test \
             -keyout key.pem -out request.pem",
        );
        run(&format!(
            "ca -batch -selfsign -config ca.conf -in request.pem -keyfile key.pem -notext \
             -startdate {start} -enddate {end} -out certificate.pem"
        ));
    }
}

fn archive(path: &Path) {
    let content = path.with_file_name("hello");
    fs::write(&content, "hello\n").expect("a file");
    let packed = Command::new("tar")
        .arg("-cf")
        .arg(path)
        .arg("-C")
        .arg(path.parent().expect("a directory"))
        .arg("hello")
        .status()
        .expect("tar is installed");
    assert!(packed.success());
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Runs `tarfs ls URL` with only `variables` in the environment.
fn list(url: &str, variables: &[(&str, &str)]) -> Output {
    run(&["ls", url], variables)
}

/// Runs tarfs with only `variables` in the environment.
fn run(words: &[&str], variables: &[(&str, &str)]) -> Output {
    let cache = tempfile::tempdir().expect("a directory");
    Command::new(env!("CARGO_BIN_EXE_tarfs"))
        .args(words)
        .env_clear()
        .env("TARFS_CACHE_DIR", cache.path())
        .envs(variables.iter().copied())
        .output()
        .expect("the program runs")
}

// Promises: tls-trust
#[test]
fn https_trusts_only_ssl_cert_file() {
    let server = TlsServer::start();
    let certificate = server.certificate();
    let certificate = certificate.to_str().expect("a plain name");

    let trusted = list(&server.url(), &[("SSL_CERT_FILE", certificate)]);
    assert_eq!(
        String::from_utf8_lossy(&trusted.stdout),
        "hello\n",
        "{trusted:?}"
    );

    let distrusted = list(&server.url(), &[]);
    assert_eq!(distrusted.status.code(), Some(2));
    let complaint = String::from_utf8_lossy(&distrusted.stderr);
    assert!(complaint.contains("certificate"), "{complaint}");
}

// Promises: tls-trust
#[test]
fn certificates_are_loaded_only_for_tls() {
    let missing = [("SSL_CERT_FILE", "/nonexistent.pem")];
    let complaint = "trusted certificates cannot be read";
    let server = Server::start();
    server.serve(
        "/a.tar",
        Resource::new(Archive::new().file("hello", "").end()),
    );
    let listed = list(&server.url("/a.tar"), &missing);
    assert!(
        listed.status.success() && listed.stderr.is_empty(),
        "{listed:?}"
    );
    let over_tls = list(&TlsServer::start().url(), &missing);
    let told = String::from_utf8_lossy(&over_tls.stderr);
    assert!(
        !over_tls.status.success() && told.contains(complaint),
        "{told}"
    );
}

/// Objects of S3 are read with the certificates that the AWS CLI trusts. Other URLs are not.
// Promises: s3-credentials
#[test]
fn certificates_of_aws_are_trusted_for_objects_of_s3() {
    let server = TlsServer::start();
    let served = server.directory.path().join("served");
    fs::create_dir(served.join("bucket")).expect("made");
    archive(&served.join("bucket/a.tar"));
    let place = tempfile::tempdir().expect("a directory");
    let put = |name: &str, text: String| {
        let path = place.path().join(name);
        fs::write(&path, text).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let certificate = server.certificate().display().to_string();
    let config = put("config", format!("[default]\nca_bundle = {certificate}\n"));
    let wrong = put("wrong", "[default]\nca_bundle = /missing.pem\n".to_owned());
    let endpoint = format!("https://localhost:{}", server.port);
    let home = place.path().to_str().expect("UTF-8");
    let with = |name, value| {
        vec![
            ("HOME", home),
            ("AWS_EC2_METADATA_DISABLED", "true"),
            ("AWS_ENDPOINT_URL_S3", &*endpoint),
            (name, value),
        ]
    };
    for variables in [
        with("AWS_CA_BUNDLE", &certificate),
        with("AWS_CONFIG_FILE", &config),
    ] {
        let listed = list("s3://bucket/a.tar", &variables);
        assert!(listed.status.success(), "{listed:?}");
        let refused = list(&server.url(), &variables);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    }
    for (variables, expected) in [
        (with("OTHER", ""), "no secure connection"),
        (
            with("AWS_CA_BUNDLE", "/missing.pem"),
            "/missing.pem: not found",
        ),
        (with("AWS_CONFIG_FILE", &wrong), "/missing.pem: not found"),
    ] {
        let refused = list("s3://bucket/a.tar", &variables);
        let complaint = String::from_utf8_lossy(&refused.stderr);
        assert!(complaint.contains(expected), "{complaint}");
    }
}

// Promises: hosts-file
#[test]
fn tls_of_a_registry_follows_hosts_toml() {
    let settings = "ssl_client_certificate certificate.pem; ssl_verify_client optional;
        location /v2/ { if ($ssl_client_verify != SUCCESS) { return 403; } }";
    let server = TlsServer::with_settings(&Certificate::default(), settings);
    let api = server.directory.path().join("served/v2/me/tool");
    for kind in ["blobs", "manifests"] {
        fs::create_dir_all(api.join(kind)).expect("made");
    }
    let mut files = Files::default();
    let manifest = files.manifest(&one());
    for (name, bytes) in &files.0 {
        let digest = name.strip_prefix("blobs/sha256/").expect("a blob");
        fs::write(api.join(format!("blobs/sha256:{digest}")), bytes).expect("space");
        if manifest["digest"] == format!("sha256:{digest}") {
            fs::write(api.join("manifests/1"), bytes).expect("space");
        }
    }
    let hosts = tempfile::tempdir().expect("a directory");
    let registry = format!("localhost:{}", server.port);
    let directory = hosts.path().join(&registry);
    fs::create_dir(&directory).expect("made");
    for name in ["certificate.pem", "key.pem"] {
        fs::copy(server.directory.path().join(name), directory.join(name)).expect("copied");
    }
    let client = r#"client = [["certificate.pem", "key.pem"]]"#;
    for (settings, expected) in [
        ("", Err("no secure connection")),
        (r#"ca = "certificate.pem""#, Err("status 403")),
        (&format!("ca = [\"certificate.pem\"]\n{client}"), Ok(())),
        (client, Err("no secure connection")),
        (&format!("skip_verify = true\n{client}"), Ok(())),
    ] {
        let text = format!("server = \"https://{registry}\"\n{settings}\n");
        fs::write(directory.join("hosts.toml"), text).expect("written");
        let hosts = hosts.path().to_str().expect("UTF-8");
        let name = format!("oci://{registry}/me/tool:1");
        let listed = run(&["ls", "--hosts-dir", hosts, &name], &[]);
        let complaint = String::from_utf8_lossy(&listed.stderr);
        match expected {
            Ok(()) => assert!(listed.status.success(), "{settings}: {complaint}"),
            Err(expected) => assert!(complaint.contains(expected), "{settings}: {complaint}"),
        }
    }
}

// Promises: proxy-environment
#[test]
fn proxy_of_the_environment_is_used() {
    let packed = tempfile::tempdir().expect("a directory");
    archive(&packed.path().join("a.tar"));
    let bytes = fs::read(packed.path().join("a.tar")).expect("an archive");
    // A proxy gets the whole URL. This one answers the request itself.
    let proxy = Server::start();
    proxy.serve("http://nowhere.invalid/a.tar", Resource::new(bytes));
    let url = proxy.url("");
    let proxied = list(
        "http://nowhere.invalid/a.tar",
        &[("http_proxy", url.as_str())],
    );
    assert_eq!(
        String::from_utf8_lossy(&proxied.stdout),
        "hello\n",
        "{proxied:?}"
    );

    let excepted = list(
        "http://nowhere.invalid/a.tar",
        &[
            ("http_proxy", url.as_str()),
            ("no_proxy", "nowhere.invalid"),
        ],
    );
    assert_eq!(excepted.status.code(), Some(2), "{excepted:?}");
}

/// The error of `tarfs ls --cacert FILE` for `server`.
#[track_caller]
fn rejection(server: &TlsServer, file: &Path) -> String {
    let file = file.to_str().expect("UTF-8");
    let refused = run(&["ls", "--cacert", file, &server.url()], &[]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let complaint = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(complaint.contains("no secure connection"), "{complaint}");
    complaint
}

// Promises: tls-trust
#[test]
fn ca_as_server_certificate_is_accepted_if_trusted() {
    let server = TlsServer::with(&Certificate::of_authority());
    let certificate = server.certificate();
    let certificate = certificate.to_str().expect("UTF-8");
    let url = server.url();
    let refused = list(&url, &[]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let complaint = String::from_utf8_lossy(&refused.stderr);
    assert!(
        complaint.contains("certificate") && complaint.contains("--cacert"),
        "{complaint}"
    );
    assert!(!complaint.contains("CaUsedAsEndEntity"), "{complaint}");
    for accepted in [
        run(&["ls", "--cacert", certificate, &url], &[]),
        list(&url, &[("SSL_CERT_FILE", certificate)]),
    ] {
        let listed = String::from_utf8_lossy(&accepted.stdout);
        assert_eq!(listed, "hello\n", "{accepted:?}");
    }
}

// Promises: tls-trust
#[test]
fn trusted_ca_as_server_certificate_keeps_other_checks() {
    let authority = Certificate::of_authority;
    for (certificate, expected) in [
        (
            Certificate {
                name: "other.example",
                ..authority()
            },
            "other.example",
        ),
        (
            Certificate {
                validity: ["20200101000000Z", "20200102030405Z"],
                ..authority()
            },
            "expired on 2020-01-02 03:04:05 UTC",
        ),
        (
            Certificate {
                validity: ["20900101000000Z", "20991231235959Z"],
                ..authority()
            },
            "not valid before 2090-01-01 00:00:00 UTC",
        ),
        (
            Certificate {
                usage: Some("clientAuth"),
                ..authority()
            },
            "certificate",
        ),
    ] {
        let server = TlsServer::with(&certificate);
        let complaint = rejection(&server, &server.certificate());
        assert!(complaint.contains(expected), "'{expected}' in: {complaint}");
    }

    // Another authority with the same names.
    let server = TlsServer::with(&authority());
    let other = tempfile::tempdir().expect("a directory");
    authority().make(other.path());
    let complaint = rejection(&server, &other.path().join("certificate.pem"));
    assert!(complaint.contains("certificate"), "{complaint}");

    // A certificate with the right usage.
    let server = TlsServer::with(&Certificate {
        usage: Some("serverAuth,clientAuth"),
        ..authority()
    });
    let file = server.certificate();
    let file = file.to_str().expect("UTF-8");
    let accepted = run(&["ls", "--cacert", file, &server.url()], &[]);
    assert!(accepted.status.success(), "{accepted:?}");
}

// Promises: tls-trust
#[test]
fn cacert_adds_all_its_certificates_to_the_system_ones() {
    let (one, two) = (
        TlsServer::start(),
        TlsServer::with(&Certificate::of_authority()),
    );
    let place = tempfile::tempdir().expect("a directory");
    let pem = |server: &TlsServer| fs::read_to_string(server.certificate()).expect("readable");
    let both = place.path().join("both.pem");
    fs::write(&both, [pem(&one), pem(&two)].concat()).expect("a file");
    let both = both.to_str().expect("UTF-8");
    let (first, second) = (one.certificate(), two.certificate());
    let first = first.to_str().expect("UTF-8");
    let second = second.to_str().expect("UTF-8");
    for accepted in [
        run(&["ls", "--cacert", both, &one.url()], &[]),
        run(&["ls", "--cacert", both, &two.url()], &[]),
        run(
            &["ls", "--cacert", second, &one.url()],
            &[("SSL_CERT_FILE", first)],
        ),
    ] {
        assert!(accepted.status.success(), "{accepted:?}");
    }

    let none = place.path().join("none.pem");
    fs::write(&none, "no certificate").expect("a file");
    for file in [none.to_str().expect("UTF-8"), "/nonexistent/file.pem"] {
        let refused = run(&["ls", "--cacert", file, &one.url()], &[]);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        let complaint = String::from_utf8_lossy(&refused.stderr);
        assert!(complaint.contains(file), "{complaint}");
        assert!(complaint.contains("--cacert"), "{complaint}");
    }
}

// Promises: tls-client
#[test]
fn client_certificate_is_sent_to_the_host_of_source() {
    let client = tempfile::tempdir().expect("a directory");
    Certificate::of_authority().make(client.path());
    let file = |name: &str| client.path().join(name).display().to_string();
    let (certificate, key) = (file("certificate.pem"), file("key.pem"));
    let settings = format!("ssl_client_certificate {certificate}; ssl_verify_client on;");
    let server = TlsServer::with_settings(&Certificate::default(), &settings);
    let (url, trusted) = (server.url(), server.certificate().display().to_string());

    let identified = [
        "ls",
        "--cacert",
        &trusted,
        "--cert",
        &certificate,
        "--key",
        &key,
    ];
    let accepted = run(&[&identified[..], &[&url]].concat(), &[]);
    assert_eq!(
        String::from_utf8_lossy(&accepted.stdout),
        "hello\n",
        "{accepted:?}"
    );
    let refused = run(&["ls", "--cacert", &trusted, &url], &[]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");

    let redirect = format!("location / {{ return 302 {url}; }}");
    let other = TlsServer::with_settings(&Certificate::default(), &redirect);
    let both = client.path().join("both.pem");
    let pem = |server: &TlsServer| fs::read_to_string(server.certificate()).expect("readable");
    fs::write(&both, [pem(&server), pem(&other)].concat()).expect("a file");
    let both = both.to_str().expect("UTF-8");
    let identified = [
        "ls",
        "--cacert",
        both,
        "--cert",
        &certificate,
        "--key",
        &key,
    ];
    let redirected = run(&[&identified[..], &[&other.url()]].concat(), &[]);
    let complaint = String::from_utf8_lossy(&redirected.stderr);
    assert!(complaint.contains("status 400"), "{complaint}");
}

// Promises: tls-trust
#[test]
fn certificate_errors_print_dates_and_names() {
    for (certificate, expected, hint) in [
        (
            Certificate {
                validity: ["20200101000000Z", "20200102030405Z"],
                ..Certificate::default()
            },
            "expired on 2020-01-02 03:04:05 UTC",
            "clock",
        ),
        (
            Certificate {
                validity: ["20900101000000Z", "20991231235959Z"],
                ..Certificate::default()
            },
            "not valid before 2090-01-01 00:00:00 UTC",
            "clock",
        ),
        (
            Certificate {
                name: "other.example",
                ..Certificate::default()
            },
            "is for other.example, not for localhost",
            "name",
        ),
    ] {
        let server = TlsServer::with(&certificate);
        let file = server.certificate();
        let variable = ("SSL_CERT_FILE", file.to_str().expect("UTF-8"));
        let refused = list(&server.url(), &[variable]);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        let complaint = String::from_utf8_lossy(&refused.stderr);
        assert!(complaint.contains(expected), "'{expected}' in: {complaint}");
        for wrong in ["UnixTime", "UNIX", "DnsName", "seconds"] {
            assert!(!complaint.contains(wrong), "'{wrong}' in: {complaint}");
        }
        let (_, told) = complaint.rsplit_once(" (").expect("a hint");
        assert!(told.contains(hint), "{complaint}");
    }
}
