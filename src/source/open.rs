//! Opening of a source by URL or path.

use std::ffi::OsStr;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use reqwest::header::{AUTHORIZATION, HeaderMap};
use url::Url;

use super::client::authorizer::parse_headers;
use super::credentials::{self, Netrc, ReloadedHeaders};
use super::location::{canonical_name, is_url, location_text, shown_path};
use super::mirrors::UnopenedMirror;
use super::{
    Cause, Error, HeaderLoader, Http, Identity, Location, Options, Pipe, Revalidation, Source,
    Target, local, mirrors,
};
use crate::base::redact::{host_of_path, redact};
use crate::base::stats::Stats;

/// Opens `spec`: a URL (`http://`, `https://`, `file://`), an object (`s3://`, `gs://`, `az://`, `abfss://`), a path,
/// or `-` for standard input.
///
/// A name with a scheme and `://`, or with `file:/`, is a URL. The path of such a file is `./name`.
///
/// # Errors
/// If it is malformed, missing, unreachable, or not supported as a source.
pub async fn open(spec: &str, options: Options) -> Result<Arc<dyn Source>, Error> {
    if !options.mirror_urls.is_empty() && options.revalidation != Revalidation::Never {
        return Box::pin(open_mirrors(spec, &options)).await;
    }
    if spec == "-" {
        return Ok(Arc::new(Pipe::stdin(options.stats)));
    }
    if let Some((target, options)) = http_target(spec, &options).await? {
        let opening = Box::pin(Http::open(target, options));
        return Ok(Arc::new(opening.await?));
    }
    open_path(file_path(spec)?, options.stats).await
}

/// As [`open`], for an index beside `archive`. A local file is opened only if no user can write it but root, this user
/// and the owner of `archive`.
pub(crate) async fn open_beside(
    archive: &str,
    spec: &str,
    options: Options,
) -> Result<Arc<dyn Source>, Error> {
    let (Ok(path), Ok(archive)) = (file_path(spec), file_path(archive)) else {
        return open(spec, options).await;
    };
    let shown = shown_path(&path);
    let opening = move || local::open_beside(&path, &archive, options.stats);
    // The task fails only if the runtime ends.
    let done = tokio::task::spawn_blocking(opening).await;
    done.unwrap_or(Err(Cause::Cancelled))
        .map_err(|cause| Error::new(shown, cause))
}

/// Returns the path of the local file that `place` names, a path or a URL; `None` if it is no local file.
pub fn local_path(place: &OsStr) -> Option<PathBuf> {
    let other = || Some(PathBuf::from(place));
    place
        .to_str()
        .map_or_else(other, |spec| file_path(spec).ok())
}

/// Returns the canonical name of `spec` if it is one of a server or an object that this crate reads.
pub fn own_name(spec: &str) -> Option<String> {
    let name = canonical_name(spec);
    let (scheme, _) = name.split_once("://")?;
    let is_server = matches!(scheme, "http" | "https" | "oci" | "docker");
    (is_server || credentials::is_object(&name)).then(|| name.into_owned())
}

/// Returns the path of the local file `spec`, which is a path or a URL. An unknown scheme or another host is an error.
pub(super) fn file_path(spec: &str) -> Result<PathBuf, Error> {
    let spec = &*canonical_name(spec);
    if !is_url(spec) {
        return Ok(PathBuf::from(spec));
    }
    let url = parse_url(spec)?;
    let is_cut = url.query().is_some() || url.fragment().is_some();
    let cause = match (url.scheme(), url.to_file_path()) {
        ("file", _) if is_cut => Cause::Malformed("a file URL has %3F for ? and %23 for #".into()),
        ("file", Ok(path)) => return Ok(path),
        ("file", Err(())) => Cause::Malformed("a file URL names no other host".to_owned()),
        (scheme, _) => Cause::UnknownScheme(scheme.to_owned()),
    };
    Err(Error::new(Location::from_url(&url).as_str(), cause))
}

/// Opens the URL `spec` with its mirrors. Headers and client certificate are only for its own origin.
async fn open_mirrors(spec: &str, options: &Options) -> Result<Arc<dyn Source>, Error> {
    let mut places = Vec::new();
    let mirror_urls = options.mirror_urls.iter().map(String::as_str);
    for place in std::iter::once(spec).chain(mirror_urls) {
        let own = if place == spec {
            options.clone()
        } else {
            Options {
                known_version: None,
                ..options.for_other(place, spec)
            }
        };
        let no_url = || Error::new(redact(place), Cause::NotMirrored);
        let (target, options) = http_target(place, &own).await?.ok_or_else(no_url)?;
        places.push(UnopenedMirror {
            target,
            options,
            transport: None,
        });
    }
    mirrors::open(places).await
}

fn parse_url(spec: &str) -> Result<Url, Error> {
    Url::parse(spec).map_err(|error| {
        let malformed = Cause::Malformed(error.to_string());
        Error::new(redact(spec), malformed)
    })
}

/// Returns the target of a URL of a server, and the options for it; `None` for files.
pub(super) async fn http_target(
    spec: &str,
    options: &Options,
) -> Result<Option<(Target, Options)>, Error> {
    let spec = &*canonical_name(spec);
    let failed = |cause| Error::new(redact(spec), cause);
    if !is_url(spec) {
        return Ok(None);
    }
    if let Some(target) = credentials::object_target(spec, options).await {
        return target.map(Some).map_err(failed);
    }
    let url = parse_url(spec)?;
    if !matches!(url.scheme(), "http" | "https") {
        return Ok(None);
    }
    let target = authorized_target(url, &options.identity).await;
    let target = target.map_err(failed)?;
    Ok(Some((target, options.clone())))
}

/// Returns the target of `url`, whose authorizer sends the headers of `identity` if they can be loaded again.
///
/// Without a password in the URL and the header Authorization, it adds that of the netrc file after a challenge.
async fn authorized_target(url: Url, identity: &Identity) -> Result<Target, Cause> {
    let mut target = Target::from(url);
    let headers = parse_headers(&identity.headers)?;
    let netrc = identity.netrc.clone();
    let netrc = netrc.filter(|_| !headers.contains_key(AUTHORIZATION));
    let netrc = netrc.and_then(|path| Netrc::new(path, &target.url));
    let fixed = identity.headers.clone();
    let fixed = || HeaderLoader::new(move || Ok(fixed.clone()));
    let load = identity.reload.clone().unwrap_or_else(fixed);
    let mut load_with_login = None;
    let mut origin = "the headers of --header and TARFS_HEADERS".to_owned();
    if let Some((netrc, file)) = netrc.map(|netrc| (netrc.clone(), netrc))
        && let Ok(Some(_)) = tokio::task::spawn_blocking(move || file.authorization()).await
    {
        origin = netrc.file();
        load_with_login = Some(netrc.loader(load.clone()));
    }
    if identity.reload.is_some() || load_with_login.is_some() {
        target.headers = Some(HeaderMap::new());
        let authorizer = ReloadedHeaders::new(headers, load, load_with_login, origin);
        target.authorizer = Some(Arc::new(authorizer));
    }
    Ok(target)
}

/// Returns the canonical location of the URL `spec` (see [`Source::canonical_location`]); `None` for a path.
pub fn canonical_location(spec: &str, options: &Options) -> Option<String> {
    let spec = &*canonical_name(spec);
    if let Some(location) = credentials::object_location(spec, options) {
        return Some(location.canonical().to_owned());
    }
    let url = Url::parse(spec).ok()?;
    let is_remote = matches!(url.scheme(), "http" | "https");
    is_remote.then(|| Location::from_url(&url).canonical().to_owned())
}

async fn open_path(path: PathBuf, stats: Arc<Stats>) -> Result<Arc<dyn Source>, Error> {
    let opening = move || match (local::open(&path, stats), location_text(path.as_os_str())) {
        (Err(Cause::NotFound), name) if let Some(url) = with_scheme(&name) => {
            let url = Location::from_url(&url).to_string();
            let (_, place) = url.split_once("://").unwrap_or_default();
            Err(Error::new(place, Cause::MissingScheme { url: url.clone() }))
        }
        (opened, _) => opened.map_err(|cause| Error::new(shown_path(&path), cause)),
    };
    // The task fails only if the runtime ends.
    let done = tokio::task::spawn_blocking(opening).await;
    done.unwrap_or_else(|_| Err(Error::new("the file", Cause::Cancelled)))
}

/// Whether `spec` is probably a URL without a scheme: it names a host, and no local file.
pub(crate) fn lacks_scheme(spec: &str) -> bool {
    with_scheme(spec).is_some()
}

/// Returns the URL that `name` probably means, if it looks like a host and a path.
fn with_scheme(name: &str) -> Option<Url> {
    let (authority, host) = host_of_path(name)?;
    if Path::new(authority).exists() {
        return None;
    }
    let is_here = host == "localhost" || host.parse::<Ipv4Addr>().is_ok();
    let scheme = if is_here { "http" } else { "https" };
    Url::parse(&format!("{scheme}://{name}")).ok()
}
