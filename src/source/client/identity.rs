//! Identity of the user for a server: headers, passwords and certificate.

use std::path::PathBuf;
use std::sync::Arc;

use url::Url;

use super::authorizer::HeaderLoader;
use crate::source::network::ClientCertificate;

/// Identity of the user for the origin of one URL. It never changes.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// Headers sent to the origin of the URL, and to no other.
    pub headers: Vec<(String, String)>,
    /// Loads the headers again when the server refuses them; see [`HeaderLoader`].
    pub reload: Option<HeaderLoader>,
    /// File with the passwords of HTTP servers, in the format of netrc. Each host gets its own.
    pub netrc: Option<PathBuf>,
    /// Certificate for servers that ask for it, sent to the origin of the URL, and to no other.
    pub certificate: Option<ClientCertificate>,
}

impl Identity {
    /// The identity for other origins.
    pub(crate) fn elsewhere(&self) -> Arc<Self> {
        Arc::new(Self {
            netrc: self.netrc.clone(),
            ..Self::default()
        })
    }
}

/// Whether `url` may receive the identity of the user for `original`.
pub(crate) fn may_identify(url: &Url, original: &Url) -> bool {
    url.origin() == original.origin()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: auth-origin, profile-header
    #[test]
    fn credentials_go_to_the_same_origin_only() {
        let original = Url::parse("https://me:secret@host/a").expect("well-formed");
        for (url, expected) in [
            ("https://host/elsewhere?x", true),
            ("https://me:pass@HOST:443/", true),
            ("http://host/a", false),
            ("http://host:443/a", false),
            ("https://host:8443/a", false),
            ("https://host.example.com/a", false),
            ("https://host@other/a", false),
        ] {
            let url = Url::parse(url).expect("well-formed");
            assert_eq!(may_identify(&url, &original), expected, "{url}");
        }
        // The origins of file URLs are never equal.
        let file = Url::parse("file:///a").expect("well-formed");
        assert!(!may_identify(&file, &file));
    }
}
