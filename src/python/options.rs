//! Keyword arguments of `tarfs.open` as settings of the library.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};
use tokio::runtime::Handle;

use super::error::{INVALID, exception};
use crate::archive::DiskCacheMode;
use crate::index::MemoryLimit;
use crate::locate::{OpenContext, PublishedIndexChoice};
use crate::source::{Certificates, ClientCertificate, FirstContact, HeaderLoader, Via};
use crate::tar::Limits;

type Headers = Vec<(String, String)>;

/// Settings to open `url` by `options`, which the Python code has completed from the environment.
pub(super) fn context(
    url: String,
    options: &Bound<'_, PyDict>,
    network: &Handle,
) -> PyResult<OpenContext> {
    let mut context = OpenContext::new(network.clone());
    context.headers_origin = url;
    context.source.first_contact = FirstContact::UnlessUnreachable;
    context.archive.scan.allow_skipping = true;
    context.archive.scan.workers = std::thread::available_parallelism().map_or(1, usize::from);
    context.published_index.is_searched = true;
    context.published_index.is_searched_early = true;
    for (name, value) in options {
        let name: String = name.extract()?;
        if value.is_none() {
            continue;
        }
        let known = set_source(&mut context, &name, &value)?
            || set_archive(&mut context, &name, &value)?
            || set_index(&mut context, &name, &value)?;
        if !known {
            return Err(invalid(value.py(), &name, "there is no such option"));
        }
    }
    context.archive.disk_cache = context.enclosing_disk_cache;
    Ok(context)
}

fn set_source(context: &mut OpenContext, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let source = &mut context.source;
    match name {
        "headers" => set_headers(source, value)?,
        "netrc" => source.netrc = Some(value.extract()?),
        "endpoint_url" => source.endpoint_url = Some(value.extract()?),
        "mirrors" => source.mirror_urls = value.extract()?,
        "hosts_dir" => source.hosts_dir = value.extract()?,
        "via" => {
            let via = Via::new(value.extract()?, false);
            source.via = Some(via.map_err(|error| invalid(value.py(), name, &error))?);
        }
        "allow_insecure_redirects" => source.allow_insecure_redirects = value.extract()?,
        "cacert" => {
            let trusted = Certificates::from_pem(value.extract()?);
            source.certificates = checked(value, name, trusted)?;
        }
        "cert" => {
            let (certificates, key): (Vec<u8>, Vec<u8>) = value.extract()?;
            let loaded = ClientCertificate::from_pem(&certificates, &key);
            source.client_certificate = Some(checked(value, name, loaded)?);
        }
        "connections" => {
            source.connections = value.extract::<usize>()?.clamp(1, 256);
            context.archive.scan.connections = source.connections;
        }
        "timeout" => source.timeout = duration(value, name)?,
        "retries" => {
            source.retry.attempts = value.extract::<u32>()?.saturating_add(1);
            source.retry.retries_outages = false;
        }
        "offline" => {
            if value.extract()? {
                source.first_contact = FirstContact::Never;
            }
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn set_archive(context: &mut OpenContext, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let archive = &mut context.archive;
    match name {
        "memory" => {
            archive.scan.memory = value.extract()?;
            archive.scan.tar.limits.metadata_bytes =
                Limits::metadata_bytes_for(archive.scan.memory);
        }
        "index_memory" => archive.index_memory = MemoryLimit::new(value.extract()?),
        "cache_dir" => archive.cache_dir = Some(value.extract()?),
        "cache_size" if value.is_instance_of::<PyBool>() => {
            context.enclosing_disk_cache = DiskCacheMode::Disabled;
        }
        "cache_size" => {
            context.enclosing_disk_cache = DiskCacheMode::Enabled {
                limit_bytes: Some(value.extract()?),
            };
        }
        "compression" => archive.scan.compression = Some(parsed(value, name)?),
        "ignore_zeros" => archive.scan.tar.ignore_zeros = value.extract()?,
        "allow_truncated" => archive.scan.allow_truncated = value.extract()?,
        "max_entries" => archive.scan.tar.limits.entries = value.extract()?,
        "sha256" => context.expected_sha256 = Some(parsed(value, name)?),
        "platform" => context.platform = Some(parsed(value, name)?),
        _ => return Ok(false),
    }
    Ok(true)
}

fn set_index(context: &mut OpenContext, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let published = &mut context.published_index;
    match name {
        "index" if value.is_instance_of::<PyBool>() => published.is_searched = value.extract()?,
        "index" => {
            let path: PathBuf = value.extract()?;
            let url = path.to_str().filter(|path| path.contains("://"));
            *published = PublishedIndexChoice {
                is_required: url.is_some(),
                location: url.map(str::to_owned),
                is_searched_early: true,
                ..PublishedIndexChoice::default()
            };
            context.archive.index_file = url.is_none().then_some(path);
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Sets the headers that the function `value` returns. They are loaded again when the server refuses them.
fn set_headers(source: &mut crate::source::Options, value: &Bound<'_, PyAny>) -> PyResult<()> {
    source.headers = value.call0()?.extract()?;
    let function = Arc::new(value.clone().unbind());
    source.reload_headers = Some(HeaderLoader::new(move || {
        let load = |py: Python<'_>| -> PyResult<Headers> { function.call0(py)?.extract(py) };
        match Python::try_attach(load) {
            Some(headers) => headers.map_err(|_| "the function for the headers failed".to_owned()),
            None => Err("Python is about to exit".to_owned()),
        }
    }));
    Ok(())
}

fn parsed<T: FromStr<Err: std::fmt::Display>>(value: &Bound<'_, PyAny>, name: &str) -> PyResult<T> {
    let text: String = value.extract()?;
    let error = |error: T::Err| invalid(value.py(), name, &error.to_string());
    text.parse().map_err(error)
}

fn checked<T, E: std::fmt::Display>(
    value: &Bound<'_, PyAny>,
    name: &str,
    result: Result<T, E>,
) -> PyResult<T> {
    result.map_err(|error| invalid(value.py(), name, &error.to_string()))
}

fn duration(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Duration> {
    let duration = Duration::try_from_secs_f64(value.extract()?);
    checked(value, name, duration)
}

fn invalid(py: Python<'_>, name: &str, text: &str) -> PyErr {
    exception(py, INVALID, &format!("{name}: {text}"))
}
