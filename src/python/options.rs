//! Keyword arguments of `tarfs.open` as settings of the library.

use std::fmt::Display;
use std::fs::File;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyString};

use super::error::{INVALID, exception};
use super::process::{call, resources, runtime};
use crate::archive::scan::MIN_MEMORY;
use crate::archive::{DiskCacheMode, TreeOrigin};
use crate::base::bounded_read::{MAX_SETTINGS_BYTES, read_at_most};
use crate::base::environment::{self, Environment};
use crate::base::size::Size;
use crate::locate::{
    OpenContext, OpenSpec, OpenSpecError, PublishedIndexChoice, SourceSpec, UserSpec,
};
use crate::serve::SocketPeers;
use crate::source::{
    self, CONNECTIONS, HeaderLoader, RETRIES, Revalidation, TIMEOUT_SECONDS, UserHeaders,
};

/// Settings to open `spec` by `options` and the environment, as for the command line. An option that is `None` has no effect.
pub(super) fn context(
    py: Python<'_>,
    spec: &SourceSpec,
    options: &Bound<'_, PyDict>,
) -> PyResult<OpenContext> {
    let mut described = OpenSpec::default();
    // Its headers are read as Python has them, and files of them without the interpreter's lock.
    described.user.environment = Environment::current().without(environment::HEADERS);
    described.user.origin = spec.origin().to_string_lossy().into_owned();
    described.user.netrc = environment::netrc().map(Into::into);
    described.server.revalidation = Revalidation::UnlessUnreachable;
    described.archive.allow_skipping = true;
    let cache = &mut described.cache;
    cache.directory = environment::cache_dir().map(Into::into);
    cache.published_index.least_origin = TreeOrigin::SHOWN;
    cache.published_index.is_searched_early = true;
    let option = |name: &'static str| -> PyResult<_> {
        let value = options.get_item(name)?.filter(|value| !value.is_none());
        Ok(value.map(|value| NamedOption(name, value)))
    };
    if let Some(size) = environment::variable(environment::CACHE_SIZE)
        && option("cache_size")?.is_none_or(|option| option.is_bool(true))
    {
        let size = PyString::new(py, &size.to_string_lossy()).into_any();
        let limit_bytes = Some(NamedOption(environment::CACHE_SIZE, size).size()?);
        cache.enclosing_archives = DiskCacheMode::Enabled { limit_bytes };
    }
    set_certificate(&mut described.user, option("cert")?, option("key")?)?;
    for (name, value) in options {
        if value.is_none() {
            continue;
        }
        let option = NamedOption(&name.extract::<String>()?, value);
        if !option.set_server(&mut described)? && !option.set_archive(&mut described)? {
            return Err(option.invalid("there is no such option"));
        }
    }
    let cache = &mut described.cache;
    if cache.directory.is_none() {
        cache.enclosing_archives = DiskCacheMode::Disabled;
    }
    cache.archives = cache.enclosing_archives;
    let context = described.context(runtime(py)?.clone(), &Arc::default());
    let mut context = context.map_err(|error| {
        let name = match &error {
            OpenSpecError::Headers(_) => "",
            OpenSpecError::Trusted(_) => "cacert: ",
            OpenSpecError::Client(_) => "cert: ",
            OpenSpecError::Via(_) => "via: ",
        };
        exception(py, INVALID, &format!("{name}{error}"))
    })?;
    let start_dir = option("start_dir")?.map(|option| option.1.extract::<PathBuf>());
    let start_dir = start_dir.transpose()?.unwrap_or_default();
    set_headers(&mut context.source, py, option("headers")?, start_dir)?;
    context.archive.resources = Some(resources(py, &context.archive)?);
    context.archive.peers = Some(Arc::new(SocketPeers::of_user()));
    Ok(context)
}

/// Name and value of an option.
struct NamedOption<'a, 'py>(&'a str, Bound<'py, PyAny>);

impl NamedOption<'_, '_> {
    fn set_server(&self, spec: &mut OpenSpec) -> PyResult<bool> {
        let Self(name, value) = self;
        let server = &mut spec.server;
        match *name {
            "netrc" => spec.user.netrc = Some(value.extract()?),
            "endpoint_url" => server.endpoint_url = Some(value.extract()?),
            "mirrors" => server.mirror_urls = value.extract()?,
            "hosts_dir" => server.hosts_dir = value.extract()?,
            "via" => server.via = Some((value.extract()?, false)),
            "allow_insecure_redirects" => server.allow_insecure_redirects = value.extract()?,
            "cacert" => server.trusted = Some(self.read_file()?),
            "connections" => {
                let connections = value.extract().ok();
                let number = |&connections: &usize| connections as u64;
                server.connections = self.in_range(connections, number, &CONNECTIONS)?;
            }
            "timeout" => {
                let timeout = value.extract().ok().map(Duration::try_from_secs_f64);
                let max_timeout = Duration::from_secs(*TIMEOUT_SECONDS.end());
                let timeout = timeout
                    .and_then(Result::ok)
                    .filter(|timeout| *timeout <= max_timeout);
                server.timeout = self.in_range(timeout, Duration::as_secs, &TIMEOUT_SECONDS)?;
            }
            "retries" => {
                let retries =
                    self.in_range(value.extract().ok(), |&n: &u32| u64::from(n), &RETRIES)?;
                server.retries = Some(retries);
            }
            "offline" if value.is_truthy()? => server.revalidation = Revalidation::Never,
            "headers" | "cert" | "key" | "offline" | "start_dir" => {}
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn set_archive(&self, spec: &mut OpenSpec) -> PyResult<bool> {
        let Self(name, value) = self;
        let (archive, cache) = (&mut spec.archive, &mut spec.cache);
        match *name {
            "memory" => {
                archive.memory = self.checked(Size(self.size()?).at_least(MIN_MEMORY))?.0;
            }
            "index_memory" => archive.index_memory = self.size()?,
            "cache_dir" | "cache_size" if self.is_bool(true) => {}
            "cache_dir" if self.is_bool(false) => cache.directory = None,
            "cache_dir" => cache.directory = Some(value.extract()?),
            "cache_size" if self.is_bool(false) => {
                cache.enclosing_archives = DiskCacheMode::Disabled;
            }
            "cache_size" => {
                let limit_bytes = Some(self.size()?);
                cache.enclosing_archives = DiskCacheMode::Enabled { limit_bytes };
            }
            "compression" => archive.compression = Some(self.parsed()?),
            "ignore_zeros" => archive.ignore_zeros = value.extract()?,
            "allow_truncated" => archive.allow_truncated = value.extract()?,
            "max_entries" => archive.max_entries = Some(value.extract()?),
            "sha256" => archive.expected_sha256 = Some(self.parsed()?),
            "platform" => archive.platform = Some(self.parsed()?),
            "index" if value.is_instance_of::<PyBool>() => {
                let is_searched: bool = value.extract()?;
                if !is_searched {
                    cache.published_index.least_origin = TreeOrigin::Archive;
                }
            }
            "index" => {
                let path: PathBuf = value.extract()?;
                let (location, file) = PublishedIndexChoice::place_of(&path);
                cache.published_index = PublishedIndexChoice {
                    is_required: location.is_some(),
                    least_origin: TreeOrigin::User,
                    location,
                    ..PublishedIndexChoice::default()
                };
                cache.index_file = file.map(Into::into);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn is_bool(&self, expected: bool) -> bool {
        let value = self.1.cast::<PyBool>();
        value.is_ok_and(|value| value.is_true() == expected)
    }

    /// A number of bytes, also as the command line takes it.
    fn size(&self) -> PyResult<u64> {
        let value = &self.1;
        let number = value.extract().ok();
        if let Some(bytes) = number.filter(|_| !value.is_instance_of::<PyBool>()) {
            return Ok(bytes);
        }
        let size: Size = self.checked(value.str()?.to_string_lossy().parse())?;
        Ok(size.0)
    }

    /// Returns `value` if its `number` is in `range`.
    fn in_range<T>(
        &self,
        value: Option<T>,
        number: impl Fn(&T) -> u64,
        range: &RangeInclusive<u64>,
    ) -> PyResult<T> {
        let value = value.filter(|value| range.contains(&number(value)));
        let (start, end) = (range.start(), range.end());
        value.ok_or_else(|| self.invalid(&format!("expected a number from {start} to {end}")))
    }

    fn read_file(&self) -> PyResult<Vec<u8>> {
        let path = self.1.extract::<PathBuf>()?;
        let read = move || File::open(path).and_then(|file| read_at_most(file, MAX_SETTINGS_BYTES));
        self.checked(call(self.1.py(), read)?)
    }

    fn parsed<T: FromStr<Err: Display>>(&self) -> PyResult<T> {
        self.checked(self.1.extract::<String>()?.parse())
    }

    fn checked<T, E: Display>(&self, result: Result<T, E>) -> PyResult<T> {
        result.map_err(|error| self.invalid(&error.to_string()))
    }

    fn invalid(&self, text: &str) -> PyErr {
        exception(self.1.py(), INVALID, &format!("{}: {text}", self.0))
    }
}

/// Sets the headers in `value`, a mapping or a function that returns one, and after them those of the environment.
/// They are loaded again when the server refuses them.
fn set_headers(
    source: &mut source::Options,
    py: Python<'_>,
    option: Option<NamedOption<'_, '_>>,
    start_dir: PathBuf,
) -> PyResult<()> {
    let invalid = |text: String| exception(py, INVALID, &text);
    let value = option.map(|NamedOption(_, value)| value.unbind());
    let parse = move |py: Python<'_>| -> Result<_, String> {
        let headers = value.as_ref().map(|value| pairs(value.bind(py)));
        let headers = headers.unwrap_or_else(|| Ok(Vec::new()));
        Ok((headers, environment_headers(py, &start_dir)?))
    };
    let (headers, environment) = parse(py).map_err(invalid)?;
    let own = call(py, move || environment.load())?.map_err(invalid)?;
    // Not shared yet.
    let identity = Arc::make_mut(&mut source.identity);
    identity.headers = [headers?, own.clone()].concat();
    identity.reload = Some(HeaderLoader::new(move || {
        let parsed = Python::try_attach(&parse).transpose()?;
        let (headers, environment) = parsed.ok_or("the interpreter has ended")?;
        let mut headers = headers.map_err(|_| "the function for the headers failed")?;
        let has_pipe = environment.has_pipe();
        headers.extend(if has_pipe {
            own.clone()
        } else {
            environment.load()?
        });
        Ok(headers)
    }));
    Ok(())
}

/// The headers of the environment, as Python has it: other threads may change that of the process meanwhile.
fn environment_headers(py: Python<'_>, start_dir: &Path) -> Result<UserHeaders, String> {
    let variables = py.import("os").and_then(|os| os.getattr("environ"));
    let text = variables.and_then(|it| it.call_method1("get", (environment::HEADERS, "")));
    let text = text.and_then(|text| text.extract::<String>());
    let text = text.map_err(|_| format!("{} is not UTF-8", environment::HEADERS))?;
    UserHeaders::parse(&text, start_dir)
}

/// Sets the client's certificate, with the key of its own file unless `key` names another one.
fn set_certificate(
    user: &mut UserSpec,
    cert: Option<NamedOption<'_, '_>>,
    key: Option<NamedOption<'_, '_>>,
) -> PyResult<()> {
    let Some(cert) = cert else {
        return key.map_or(Ok(()), |key| Err(key.invalid("there is no cert")));
    };
    let pem = cert.read_file()?;
    // A pipe cannot be read twice.
    let key = key.map(|key| key.read_file()).transpose()?;
    let key = key.unwrap_or_else(|| pem.clone());
    user.certificate = Some((pem, key));
    Ok(())
}

/// The names and values of `headers`, a mapping or a function that returns one.
fn pairs(headers: &Bound<'_, PyAny>) -> PyResult<Vec<(String, String)>> {
    let headers = if headers.is_callable() {
        &headers.call0()?
    } else {
        headers
    };
    let items = headers.call_method0("items")?.try_iter()?;
    items.map(|pair| pair?.extract()).collect()
}
