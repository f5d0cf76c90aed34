//! Files, commands, environment and HTTP for the crates that find credentials.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use reqsign_core::{CommandExecute, CommandOutput, Context, Env, Error, FileRead, HttpSend};
use reqwest::header::CONTENT_LENGTH;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use url::Url;

use crate::base::bounded_read::{MAX_SETTINGS_BYTES, read_at_most};
use crate::base::descriptor_limit::is_descriptor_limit;
use crate::base::environment::Environment;
use crate::base::foreign_command::user_command;
use crate::base::sync::Mutex;
use crate::source::client::response::ResponseHead;
use crate::source::client::{ServerError, unix_time};
use crate::source::network::NetworkTransport;
use crate::source::retry::Failure;
use crate::source::{Cause, Content, Options, Transport};

/// Timeout of a request to a credential server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout of a connection to a metadata server. Outside of a cloud, its address leads nowhere.
const LOCAL_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of a `credential_process`, which may ask an identity provider.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum size of an answer, or a command's output.
const MAX_INPUT_BYTES: usize = 1 << 20;

/// Maximum size of a command's error text.
const MAX_ERROR_BYTES: usize = 1 << 10;

/// Files, commands, environment and HTTP of the providers of one cache.
#[derive(Clone, Debug)]
pub(crate) struct ProviderContext {
    pub(super) context: Context,
    pub(super) commands: Commands,
    exchange: LastExchange,
}

impl ProviderContext {
    /// The process's files, commands and environment, and HTTP with the certificates of `options`.
    pub(crate) fn new(options: &Options) -> Self {
        Self::with_transports(options, OnceLock::new(), OnceLock::new())
    }

    /// As [`new`](Self::new), with requests through `transport`.
    pub(super) fn through(transport: &dyn Transport, options: &Options) -> Result<Self, Cause> {
        let url = Url::parse("http://localhost").map_err(|_| Cause::silent_server())?;
        let made = || transport.reconnect(&url, options).map(OnceLock::from);
        Ok(Self::with_transports(options, made()?, made()?))
    }

    fn with_transports(
        options: &Options,
        local: OnceLock<Box<dyn Transport>>,
        others: OnceLock<Box<dyn Transport>>,
    ) -> Self {
        let exchange = LastExchange::default();
        let requests = Requests {
            options: options.clone(),
            local,
            others,
            exchange: exchange.clone(),
        };
        let environment = &options.environment;
        let commands = Commands::new(environment, exchange.clone());
        let context = Context::new()
            .with_file_read(commands.clone())
            .with_command_execute(commands.clone())
            .with_env(Variables(Arc::clone(environment)))
            .with_http_send(requests);
        Self {
            context,
            commands,
            exchange,
        }
    }

    /// Forgets earlier exchanges, and returns the failure of the last one.
    pub(super) fn take_failure(&self) -> Option<FailedExchange> {
        self.exchange.0.lock().take()
    }
}

#[cfg(test)]
impl From<Context> for ProviderContext {
    fn from(context: Context) -> Self {
        let exchange = LastExchange::default();
        Self {
            context,
            commands: Commands::new(&Arc::default(), exchange.clone()),
            exchange,
        }
    }
}

/// A request, command or file of a provider that did not succeed.
#[derive(Debug)]
pub(super) struct FailedExchange {
    /// The server, program or file and its failure, without secrets.
    pub(super) detail: String,
    /// The failure, as that of a server of data.
    pub(super) failure: Failure,
    /// Whether a server was there at all.
    pub(super) is_answered: bool,
}

/// Failure of the last exchange; `None` if it succeeded. The crates that find credentials lose its status.
#[derive(Clone, Debug, Default)]
struct LastExchange(Arc<Mutex<Option<FailedExchange>>>);

impl LastExchange {
    fn succeed(&self) {
        self.0.lock().take();
    }

    /// Records a failure, and returns it as an error.
    fn fail(&self, detail: String, failure: impl Into<Failure>, is_answered: bool) -> Error {
        *self.0.lock() = Some(FailedExchange {
            detail: detail.clone(),
            failure: failure.into(),
            is_answered,
        });
        Error::unexpected(detail)
    }

    /// Records an answer of `host` that is no success.
    fn fail_answer(&self, host: &str, head: &ResponseHead) {
        let detail = format!("{host} answers with status {}", head.status);
        drop(self.fail(detail, Failure::from(head), true));
    }

    /// Records that a file or program named `name` cannot be opened, if there is no descriptor for it.
    fn note_limit(&self, name: &str, error: &io::Error) {
        if is_descriptor_limit(error) {
            let cause = Cause::DescriptorLimit(error.to_string());
            drop(self.fail(format!("{name}: {error}"), cause, false));
        }
    }

    /// Records a request to `host` that got no whole answer.
    fn fail_request(&self, host: &str, cause: Cause, is_connected: bool) -> Error {
        let cause = if is_connected {
            cause.after_open()
        } else {
            cause
        };
        self.fail(format!("{host}: {cause}"), cause, is_connected)
    }
}

/// The variables and the home directory of an environment.
#[derive(Debug)]
pub(super) struct Variables(pub(super) Arc<Environment>);

impl Env for Variables {
    fn var(&self, name: &str) -> Option<String> {
        self.0.text(name)
    }

    fn vars(&self) -> HashMap<String, String> {
        let text = |text: &OsStr| text.to_str().map(str::to_owned);
        let utf8 = self.0.variables();
        utf8.filter(|(_, value)| !value.is_empty())
            .filter_map(|(name, value)| Some((text(name)?, text(value)?)))
            .collect()
    }

    fn home_dir(&self) -> Option<PathBuf> {
        self.0.home()
    }
}

/// Reads a regular file of at most [`MAX_SETTINGS_BYTES`]; `None` if it does not exist.
pub(crate) async fn read_optional(path: impl Into<PathBuf>) -> io::Result<Option<Vec<u8>>> {
    let path = path.into();
    let reading = tokio::task::spawn_blocking(move || read_file(&path));
    let read = reading.await.map_err(io::Error::other)?;
    let is_missing = |kind| matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
    match read {
        Err(error) if is_missing(error.kind()) => Ok(None),
        read => read.map(Some),
    }
}

/// Reads a regular file. Opening a named pipe could block without limit.
pub(super) fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    read_at_most(std::fs::File::open(path)?, MAX_SETTINGS_BYTES)
}

/// Runs commands in the environment of the user, and reads files relative to its directory. A mount changes its own.
#[derive(Clone, Debug)]
pub(super) struct Commands {
    environment: Arc<Environment>,
    exchange: LastExchange,
}

impl FileRead for Commands {
    async fn file_read(&self, path: &str) -> Result<Vec<u8>, Error> {
        let read = self.read_optional(path).await;
        Ok(read.and_then(|bytes| bytes.ok_or_else(|| io::ErrorKind::NotFound.into()))?)
    }
}

impl CommandExecute for Commands {
    async fn command_execute(&self, program: &str, args: &[&str]) -> Result<CommandOutput, Error> {
        self.run(program, args, b"").await
    }
}

impl Commands {
    fn new(environment: &Arc<Environment>, exchange: LastExchange) -> Self {
        Self {
            environment: Arc::clone(environment),
            exchange,
        }
    }

    /// As [`read_optional`], from this directory.
    pub(super) async fn read_optional(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        let read = read_optional(self.environment.directory().join(path)).await;
        read.inspect_err(|error| self.exchange.note_limit(path, error))
    }

    /// Runs `program` with `input` as its standard input, with limits on time and output.
    pub(super) async fn run(
        &self,
        program: &str,
        args: &[&str],
        input: &[u8],
    ) -> Result<CommandOutput, Error> {
        let failed = |error: io::Error| Error::unexpected(format!("{program}: {error}"));
        self.exchange.succeed();
        let mut child = tokio::process::Command::from(user_command(program, &self.environment))
            .args(args)
            .current_dir(self.environment.directory())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .inspect_err(|error| self.exchange.note_limit(program, error))
            .map_err(failed)?;
        let (stdin, stdout, stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let running = async {
            let ((), stdout, stderr) = tokio::join!(
                write_all(stdin, input),
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
        let timed_out = || format!("{program}: no answer in {} s", COMMAND_TIMEOUT.as_secs());
        let done = done.map_err(|_| {
            self.exchange
                .fail(timed_out(), Cause::silent_server(), false)
        })?;
        let (stdout, stderr, status) = done.map_err(failed)?;
        let (stdout, status) = (within_limit(stdout)?, status.code().unwrap_or(-1));
        if status != 0 {
            let detail = format!("{program} ends with status {status}");
            drop(self.exchange.fail(detail, Cause::silent_server(), false));
        }
        Ok(CommandOutput {
            status,
            stdout,
            stderr,
        })
    }
}

/// Writes `input` and closes the stream. A program that ends without reading it is no error.
async fn write_all(stream: Option<impl AsyncWrite + Unpin>, input: &[u8]) {
    if let Some(mut stream) = stream {
        stream.write_all(input).await.ok();
        stream.shutdown().await.ok();
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

/// Connections that are made when they are needed, because their certificates take a while to load.
#[derive(Debug)]
struct Requests {
    options: Options,
    /// To metadata servers, without proxies.
    local: OnceLock<Box<dyn Transport>>,
    others: OnceLock<Box<dyn Transport>>,
    exchange: LastExchange,
}

impl Requests {
    fn transport(&self, is_local: bool) -> Result<&dyn Transport, Error> {
        let made = if is_local { &self.local } else { &self.others };
        if let Some(made) = made.get() {
            return Ok(&**made);
        }
        let mut options = self.options.clone();
        if is_local {
            options.connect_timeout = LOCAL_CONNECT_TIMEOUT;
        }
        let network = NetworkTransport::for_credentials(&options, is_local);
        let network = network.map_err(|cause| Error::unexpected(cause.to_string()))?;
        Ok(&**made.get_or_init(|| Box::new(network)))
    }
}

impl HttpSend for Requests {
    async fn http_send(
        &self,
        request: http::Request<Bytes>,
    ) -> Result<http::Response<Bytes>, Error> {
        let is_local = request.uri().scheme_str() == Some("http");
        let host = request.uri().host().unwrap_or_default().to_owned();
        self.exchange.succeed();
        let transport = self.transport(is_local)?;
        let url = Url::parse(&request.uri().to_string());
        let url = url.map_err(|error| Error::unexpected(error.to_string()))?;
        let (parts, sent) = request.into_parts();
        let mut headers = parts.headers;
        let content = (!sent.is_empty()).then(|| {
            headers.insert(CONTENT_LENGTH, sent.len().into());
            Content::new(stream::iter([Ok(sent)]))
        });
        let exchange = async {
            let sent = transport.send(parts.method, url, headers, content).await;
            let mut response = sent.map_err(|cause| {
                let is_connected = !transport.connect_time().is_zero();
                (is_connected, cause)
            })?;
            let mut body = Vec::new();
            while body.len() <= MAX_INPUT_BYTES
                && let Some(piece) = response
                    .content
                    .next()
                    .await
                    .map_err(|cause| (true, cause))?
            {
                body.extend_from_slice(&piece);
            }
            Ok((response.status, response.headers, body))
        };
        let exchanged = tokio::time::timeout(REQUEST_TIMEOUT, exchange).await;
        // A connection to a metadata server takes less.
        let exchanged = exchanged.unwrap_or_else(|_| Err((true, Cause::silent_server())));
        let (status, headers, body) = exchanged.map_err(|(is_connected, cause)| {
            self.exchange.fail_request(&host, cause, is_connected)
        })?;
        if !status.is_success() {
            let mut head = ResponseHead::new(status, &headers, unix_time());
            let ServerError { code, message, .. } = ServerError::parse(&body);
            head.error = (code, message);
            self.exchange.fail_answer(&host, &head);
        }
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
