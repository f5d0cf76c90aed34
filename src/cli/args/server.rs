//! Servers of the archive besides its own, and TLS.

use std::path::PathBuf;

use clap::Args;

use super::heading;

/// Servers of the archive besides its own, and TLS.
#[derive(Args, Clone, Debug)]
pub(crate) struct ServerArgs {
    /// Also trust the certificates in this PEM file, for example a self-signed one
    #[arg(long, value_name = "FILE", help_heading = heading::NETWORK, hide_short_help = true)]
    pub cacert: Option<PathBuf>,

    /// Identify to SOURCE's host by the certificate in this PEM file
    ///
    /// Intermediate certificates follow it in the file. Other hosts do not see it.
    #[arg(long, value_name = "FILE", help_heading = heading::NETWORK, hide_short_help = true)]
    pub cert: Option<PathBuf>,

    /// PEM file with the private key of --cert [default: the file of --cert]
    #[arg(long, value_name = "FILE", requires = "cert",
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub key: Option<PathBuf>,

    /// Also read this URL of the same bytes; may be repeated
    ///
    /// Each request goes to the URL that will probably answer it first, and to another one if that fails or
    /// is slow. SOURCE must be a URL. A URL whose bytes differ from those of SOURCE is not used.
    #[arg(id = "mirror_url", long = "mirror-url", value_name = "URL",
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub mirror_urls: Vec<String>,

    /// Ask the caching proxy at this URL first
    ///
    /// It serves `https://HOST/PATH` as `PREFIX/https/HOST/PATH`. When it fails or has another version, the server
    /// itself is asked. The first request always goes to the server. Without --via-credentials the proxy gets no headers,
    /// passwords and signatures.
    #[arg(long, value_name = "PREFIX", help_heading = heading::NETWORK, hide_short_help = true)]
    pub via: Option<String>,

    /// Also send credentials for SOURCE's host to the proxy of --via
    #[arg(long, requires = "via", help_heading = heading::NETWORK, hide_short_help = true)]
    pub via_credentials: bool,
}
