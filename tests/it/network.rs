//! What the environment says about the network: trusted certificates and proxies, asked of the
//! real program against a real server.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::http::{Resource, Server};

/// How long nginx may take to listen.
const START: Duration = Duration::from_secs(20);

/// nginx on 127.0.0.1 with TLS and a certificate of its own making; ends when dropped.
struct TlsServer {
    nginx: Child,
    directory: tempfile::TempDir,
    port: u16,
}

impl TlsServer {
    fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path();
        certify(path);
        let served = path.join("served");
        fs::create_dir(&served).expect("a directory");
        archive(&served.join("a.tar"));
        let port = free_port();
        fs::write(path.join("nginx.conf"), configuration(path, port)).expect("a file");
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
            assert!(since.elapsed() < START, "nginx listens");
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

fn configuration(path: &Path, port: u16) -> String {
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
             }}
         }}"
    )
}

/// A self-signed certificate for localhost.
fn certify(directory: &Path) {
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
        ])
        .args(["-nodes", "-days", "2", "-subj", "/CN=localhost"])
        .args(["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"])
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .args(["-keyout", "key.pem", "-out", "certificate.pem"])
        .current_dir(directory)
        .output()
        .expect("openssl is installed");
    assert!(made.status.success(), "{made:?}");
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

/// `tarfs ls URL`, with nothing in the environment but `variables`.
fn list(url: &str, variables: &[(&str, &str)]) -> Output {
    let cache = tempfile::tempdir().expect("a directory");
    Command::new(env!("CARGO_BIN_EXE_tarfs"))
        .args(["ls", url])
        .env_clear()
        .env("TARFS_CACHE_DIR", cache.path())
        .envs(variables.iter().copied())
        .output()
        .expect("the program runs")
}

#[test]
fn https_trusts_what_ssl_cert_file_holds_and_nothing_else() {
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

#[test]
fn the_proxy_that_the_environment_names_is_asked() {
    let packed = tempfile::tempdir().expect("a directory");
    archive(&packed.path().join("a.tar"));
    let bytes = fs::read(packed.path().join("a.tar")).expect("an archive");
    // A proxy is asked for the whole URL, and this one answers itself.
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
