//! Target of an HTTP source.

use std::sync::Arc;

use reqwest::header::HeaderMap;
use url::Url;

use super::authorizer::Authorizer;
use crate::source::Location;

/// The URL of a source, with its location and credentials.
#[derive(Clone, Debug)]
pub struct Target {
    /// URL of the requests.
    pub url: Url,
    /// Location of the source, which may have another form than the URL.
    pub location: Location,
    /// URL that accepts uploads by POST, if the server takes none by PUT at `url`.
    pub upload_url: Option<Url>,
    /// Headers of the requests, instead of those of the user's identity.
    pub headers: Option<HeaderMap>,
    /// Adds credentials for the URL's origin.
    pub authorizer: Option<Arc<dyn Authorizer>>,
}

impl From<Url> for Target {
    fn from(url: Url) -> Self {
        Self {
            location: Location::from_url(&url),
            url,
            upload_url: None,
            headers: None,
            authorizer: None,
        }
    }
}
