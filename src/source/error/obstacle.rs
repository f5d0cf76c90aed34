//! Obstacles on the way to a server.

/// Obstacles between this process and a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Obstacle {
    /// The host name does not resolve.
    #[error("the host's name cannot be resolved")]
    Dns,
    /// The host refuses the connection.
    #[error("the host refuses the connection")]
    Refused,
    /// The TLS handshake fails.
    #[error("no secure connection")]
    Tls,
    /// The server's certificate is not trusted.
    #[error("no secure connection")]
    Certificate,
    /// The server's certificate has expired, or is not valid yet.
    #[error("no secure connection")]
    CertificateDates,
    /// The server's certificate is for other names, or not for servers.
    #[error("no secure connection")]
    CertificateUse,
    /// The server does not answer.
    #[error("the server does not answer")]
    Timeout,
    /// Bytes arrive too slowly.
    #[error("data arrives too slowly")]
    TooSlow,
    /// A proxy does not connect to the server.
    #[error("no connection through the proxy")]
    Proxy,
    /// The connection broke or could not be established.
    #[error("the connection broke")]
    Connection,
}

impl Obstacle {
    /// Whether TLS causes it, so that the same request fails again.
    pub(super) fn is_tls_error(self) -> bool {
        matches!(
            self,
            Self::Tls | Self::Certificate | Self::CertificateDates | Self::CertificateUse
        )
    }

    pub(super) fn hint(self) -> &'static str {
        match self {
            Self::Dns => "check the host's name, and whether this machine has a name server",
            Self::Refused => "check host and port, and whether the server runs",
            Self::Tls => "check that this port speaks TLS",
            Self::Certificate => {
                "if you trust it, name a PEM file with this certificate or its authority's by --cacert"
            }
            Self::CertificateDates => {
                "check the clock of this machine; the server may need a new certificate"
            }
            Self::CertificateUse => {
                "use a host name of the certificate; the server may need another certificate"
            }
            Self::Timeout | Self::Connection => "check the network, or try again later",
            Self::Proxy => "check the proxy of http_proxy or https_proxy, and whether it runs",
            Self::TooSlow => "check the network, or wait longer with --timeout",
        }
    }
}

/// Describes `obstacle`, with the error text of the system if that says more.
pub(super) fn describe_obstacle(obstacle: Obstacle, detail: &str) -> String {
    match obstacle {
        Obstacle::Refused | Obstacle::Timeout | Obstacle::TooSlow => obstacle.to_string(),
        Obstacle::Dns => {
            let prefix = "failed to lookup address information: ";
            let detail = detail.strip_prefix(prefix).unwrap_or(detail);
            format!("{obstacle}: {detail}")
        }
        Obstacle::Proxy => format!("{obstacle} {detail}"),
        _ => format!("{obstacle}: {detail}"),
    }
}
