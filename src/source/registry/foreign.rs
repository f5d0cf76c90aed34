//! Contents that a manifest places on other servers.
//!
//! The author of a manifest may not make this machine ask servers of its own network. So the address is checked in the
//! URL, in each redirect, and after a name is resolved (`Options::is_public_only`).

use std::sync::Arc;

use url::Url;

use crate::base::sha256::Sha256;
use crate::source::location::is_in_own_network;
use crate::source::network::NetworkTransport;
use crate::source::{Cause, Error, Fingerprint, Http, Options, Source, Validator, mirrors, redact};

/// The servers of `urls`, which should have the bytes of `version`. They get no credentials. Users see `name`.
pub(super) fn servers(
    version: &Fingerprint,
    urls: &[String],
    name: &str,
    options: &Options,
) -> impl Iterator<Item = Result<Http, Error>> {
    let urls = urls.iter().filter_map(move |url| {
        let usable = usable_url(url, options);
        let refused = |cause: &Cause| tracing::warn!("{name}: {}: {cause}", redact(url));
        usable.inspect_err(refused).ok()
    });
    urls.map(move |url| {
        let failed = |cause| Error::new(name, cause);
        let options = Options {
            identity: Arc::default(),
            ..options.clone()
        };
        let transport = NetworkTransport::new(&url, &options).map_err(failed)?;
        Http::open_known(version.clone(), Box::new(transport), url.into(), options)
    })
}

/// Opens the content with `digest` and `len` bytes at `urls`, without a request. Users see `name`. Its readers compare the
/// digest. It fails if none of the URLs may be asked.
pub(crate) fn open_foreign(
    (digest, len): (Sha256, u64),
    urls: &[String],
    name: &str,
    mut options: Options,
) -> Result<Arc<dyn Source>, Error> {
    options.is_public_only = true;
    let version = Fingerprint {
        len: Some(len),
        validator: Validator::Digest(digest),
    };
    let opened: Vec<Http> = servers(&version, urls, name, &options).collect::<Result<_, _>>()?;
    let mut opened = opened.into_iter();
    let Some(first) = opened.next() else {
        let refused = urls.iter().find_map(|url| usable_url(url, &options).err());
        return Err(Error::new(name, refused.unwrap_or(Cause::NotFound)));
    };
    Ok(mirrors::in_order(first, opened.collect()))
}

/// Parses `url` of a manifest, which must be one of a server, without user and password.
fn usable_url(url: &str, options: &Options) -> Result<Url, Cause> {
    let is_web_url = |url: &Url| {
        let is_anonymous = url.username().is_empty() && url.password().is_none();
        matches!(url.scheme(), "http" | "https") && is_anonymous
    };
    let parsed = Url::parse(url).ok().filter(is_web_url);
    let parsed = parsed.ok_or_else(|| {
        let malformed = "a URL in the manifest is no http:// or https:// URL without a user";
        Cause::Malformed(malformed.to_owned())
    })?;
    if options.is_public_only && is_in_own_network(&parsed) {
        let host = parsed.host_str().unwrap_or_default();
        return Err(Cause::OwnNetwork(host.to_owned()));
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: registry-foreign
    #[test]
    fn hosts_of_the_own_network_are_recognised() {
        let options = Options {
            is_public_only: true,
            ..Options::default()
        };
        for (url, is_refused) in [
            ("http://169.254.169.254/latest", true),
            ("http://127.1/", true),
            ("http://10.0.0.1:8080/", true),
            ("http://100.100.100.200/", true),
            ("http://0.1.2.3/", true),
            ("http://198.19.255.1/", true),
            ("http://250.1.2.3/", true),
            ("http://255.255.255.255/", true),
            ("http://168.63.129.16/", true),
            ("http://[::1]/", true),
            ("http://[fd00:ec2::254]/", true),
            ("http://[::ffff:10.0.0.1]/", true),
            ("http://[64:ff9b::a9fe:a9fe]/", true),
            ("http://[2002:7f00:1::]/", true),
            ("http://[64:ff9b:1::808:808]/", true),
            ("http://[fec0::1]/", true),
            ("http://metadata.google.internal./", true),
            ("http://localhost/", true),
            ("http://router/", true),
            ("https://go.microsoft.com/fwlink", false),
            ("http://8.8.8.8/", false),
            ("http://[64:ff9b::808:808]/", false),
            ("http://[2606:4700::1111]/", false),
        ] {
            let usable = usable_url(url, &options);
            let is_own = matches!(usable, Err(Cause::OwnNetwork(_)));
            assert_eq!(is_own, is_refused, "{url}");
            let own = usable_url(url, &Options::default());
            assert!(own.is_ok(), "{url} for a registry of that network");
        }
        for refused in ["file:///etc/passwd", "ftp://a.b/c", "https://me:pass@a.b/c"] {
            let usable = usable_url(refused, &Options::default());
            assert!(matches!(usable, Err(Cause::Malformed(_))), "{refused}");
        }
    }
}
