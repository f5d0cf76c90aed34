//! Identity of the user for a server: headers, passwords and certificate.

use std::path::PathBuf;
use std::sync::Arc;

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
