//! Files, commands, environment and HTTP for the crates that find credentials.

use std::collections::HashMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use reqsign_core::{CommandExecute, CommandOutput, Context, Env, Error, FileRead, HttpSend, OsEnv};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::source::http::credentials_client;
use crate::source::{Cause, Options};

/// Timeout of a request to a credential server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout of a connection to a metadata server. Outside of a cloud, its address leads nowhere.
const LOCAL_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of a `credential_process`, which may ask an identity provider.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum size of a file, an answer, or a command's output.
const MAX_INPUT_BYTES: usize = 1 << 20;

/// Maximum size of a command's error text.
const MAX_ERROR_BYTES: usize = 1 << 10;

/// Variables with paths. A mount changes its directory.
const PATHS: [&str; 4] = [
    "AWS_CONFIG_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
];

/// The process's files, commands and environment, and HTTP with the certificates of `options`.
///
/// # Errors
/// If no HTTP client can be made.
pub(super) fn context(options: &Options) -> Result<Context, Cause> {
    let local = Options {
        connect_timeout: LOCAL_CONNECT_TIMEOUT,
        ..options.clone()
    };
    let requests = Requests {
        local: credentials_client(&local, true)?,
        others: credentials_client(options, false)?,
    };
    let directory = std::env::current_dir().unwrap_or_default();
    Ok(Context::new()
        .with_file_read(Files)
        .with_command_execute(Commands(directory.clone()))
        .with_env(Environment(directory))
        .with_http_send(requests))
}

/// The environment without empty variables, and with absolute paths, from this directory.
#[derive(Debug)]
struct Environment(PathBuf);

impl Environment {
    fn value(&self, name: &str, value: String) -> Option<String> {
        let is_relative = PATHS.contains(&name) && !value.starts_with(['/', '~']);
        let value = if is_relative {
            self.0.join(&value).to_str()?.to_owned()
        } else {
            value
        };
        (!value.is_empty()).then_some(value)
    }
}

impl Env for Environment {
    fn var(&self, name: &str) -> Option<String> {
        OsEnv
            .var(name)
            .filter(|value| !value.is_empty())
            .and_then(|value| self.value(name, value))
    }

    fn vars(&self) -> HashMap<String, String> {
        let variables = OsEnv
            .vars()
            .into_iter()
            .filter(|(_, value)| !value.is_empty());
        let variables = variables.filter_map(|(name, value)| {
            let value = self.value(&name, value)?;
            Some((name, value))
        });
        variables.collect()
    }

    fn home_dir(&self) -> Option<PathBuf> {
        OsEnv.home_dir()
    }
}

#[derive(Debug)]
struct Files;

impl FileRead for Files {
    async fn file_read(&self, path: &str) -> Result<Vec<u8>, Error> {
        let path = PathBuf::from(path);
        let reading = tokio::task::spawn_blocking(move || read_file(&path));
        let bytes = match reading.await {
            Ok(read) => read.map_err(|error| Error::unexpected(error.to_string()))?,
            Err(_) => return Err(Error::unexpected("the read was cancelled")),
        };
        within_limit(bytes)
    }
}

/// Reads a regular file. Others may wait for ever.
fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path)?;
    file.take(MAX_INPUT_BYTES as u64 + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Runs commands in this directory.
#[derive(Debug)]
struct Commands(PathBuf);

impl CommandExecute for Commands {
    async fn command_execute(&self, program: &str, args: &[&str]) -> Result<CommandOutput, Error> {
        let failed = |error: io::Error| Error::unexpected(format!("{program}: {error}"));
        let mut child = tokio::process::Command::new(program)
            .args(args)
            .current_dir(&self.0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let running = async {
            let (stdout, stderr) = tokio::join!(
                read_start(stdout, MAX_INPUT_BYTES + 1),
                read_start(stderr, MAX_ERROR_BYTES)
            );
            let stdout = stdout?;
            if stdout.len() > MAX_INPUT_BYTES {
                child.start_kill()?;
            }
            Ok((stdout, stderr?, child.wait().await?))
        };
        let done = tokio::time::timeout(COMMAND_TIMEOUT, running).await;
        let done = done.map_err(|_| Error::unexpected(format!("{program}: no answer in 20 s")))?;
        let (stdout, stderr, status) = done.map_err(failed)?;
        Ok(CommandOutput {
            status: status.code().unwrap_or(-1),
            stdout: within_limit(stdout)?,
            stderr,
        })
    }
}

/// Reads a stream to its end, or its first `len` bytes, after which it is closed.
async fn read_start(stream: Option<impl AsyncRead + Unpin>, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream.take(len as u64).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

#[derive(Debug)]
struct Requests {
    /// For metadata servers, without proxies.
    local: reqwest::Client,
    others: reqwest::Client,
}

impl HttpSend for Requests {
    async fn http_send(
        &self,
        request: http::Request<Bytes>,
    ) -> Result<http::Response<Bytes>, Error> {
        let is_local = request.uri().scheme_str() == Some("http");
        let client = if is_local { &self.local } else { &self.others };
        let exchange = async {
            let request = reqwest::Request::try_from(request)?;
            let mut response = client.execute(request).await?;
            let mut body = Vec::new();
            while body.len() <= MAX_INPUT_BYTES
                && let Some(piece) = response.chunk().await?
            {
                body.extend_from_slice(&piece);
            }
            Ok::<_, reqwest::Error>((response.status(), body))
        };
        let exchanged = tokio::time::timeout(REQUEST_TIMEOUT, exchange).await;
        let (status, body) = match exchanged {
            Err(_) => return Err(Error::unexpected("no answer in 5 s")),
            // The URL may hold a token.
            Ok(Err(error)) => return Err(Error::unexpected(error.without_url().to_string())),
            Ok(Ok(answer)) => answer,
        };
        let mut answer = http::Response::new(Bytes::from(within_limit(body)?));
        *answer.status_mut() = status;
        Ok(answer)
    }
}

fn within_limit(bytes: Vec<u8>) -> Result<Vec<u8>, Error> {
    if bytes.len() > MAX_INPUT_BYTES {
        return Err(Error::unexpected("more than 1 MiB"));
    }
    Ok(bytes)
}
