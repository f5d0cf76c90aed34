//! Certificates trusted for TLS, and reasons to reject one.

use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{self, CryptoProvider};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::sign::SingleCertAndKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use rustls_native_certs::{CertificateResult, load_certs_from_paths, load_native_certs};

use crate::base::descriptor_limit::is_descriptor_limit;
use crate::base::environment::Environment;
use crate::base::sync::Mutex;
use crate::base::time::Civil;
use crate::source::{Cause, Obstacle};

/// Certificates trusted besides the system's.
#[derive(Clone, Debug, Default)]
pub struct Certificates {
    trusted: Vec<CertificateDer<'static>>,
    is_unverified: bool,
}

/// A file of certificates is unusable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CertificatesError {
    /// The file contains no certificate.
    #[error("it has no certificate (a PEM file has lines `-----BEGIN CERTIFICATE-----`)")]
    Missing,
    /// A certificate is malformed.
    #[error("its certificate number {number} is malformed")]
    Malformed {
        /// Its number, counted from 1.
        number: usize,
    },
}

impl Certificates {
    /// Parses the certificates in `pem`, and ignores anything else in it.
    ///
    /// # Errors
    /// If there is none, or one is malformed.
    pub fn from_pem(pem: &[u8]) -> Result<Self, CertificatesError> {
        let trusted = parse_certificates(pem)?;
        let mut scratch = RootCertStore::empty();
        for (index, certificate) in trusted.iter().enumerate() {
            let malformed = CertificatesError::Malformed { number: index + 1 };
            scratch.add(certificate.clone()).map_err(|_| malformed)?;
        }
        Ok(Self {
            trusted,
            ..Self::default()
        })
    }

    /// Also trusts the certificates in `pem`.
    pub(crate) fn with_trusted(&self, pem: &[u8]) -> Result<Self, CertificatesError> {
        let mut certificates = self.clone();
        certificates.trusted.extend(Self::from_pem(pem)?.trusted);
        Ok(certificates)
    }

    /// Trusts any server.
    pub(crate) fn unverified(&self) -> Self {
        Self {
            is_unverified: true,
            ..self.clone()
        }
    }
}

/// Decodes the certificates in `pem`, and ignores anything else in it. There is at least one.
pub(super) fn parse_certificates(
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, CertificatesError> {
    let mut certificates = Vec::new();
    for (index, certificate) in CertificateDer::pem_slice_iter(pem).enumerate() {
        let malformed = CertificatesError::Malformed { number: index + 1 };
        certificates.push(certificate.map_err(|_| malformed)?);
    }
    if certificates.is_empty() {
        return Err(CertificatesError::Missing);
    }
    Ok(certificates)
}

/// TLS with `more` and the `system` certificates. Without any, it trusts no server.
///
/// A server that asks for a certificate gets that of `client`.
pub(super) fn client_config(
    more: &Certificates,
    system: SystemCertificates,
    client: Option<Arc<SingleCertAndKey>>,
) -> Result<ClientConfig, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Verifier {
        provider: Arc::clone(&provider),
        more: more.clone(),
        system,
        trust: Mutex::default(),
    };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match client {
        Some(client) => builder.with_client_cert_resolver(client),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Certificates that a server may have, or be signed by.
#[derive(Debug)]
struct Trust {
    /// `None` if there are none.
    webpki: Option<Arc<WebPkiServerVerifier>>,
    hashes: HashSet<blake3::Hash>,
}

/// The system's trusted certificates, or those of the files that an environment names in their place.
#[derive(Debug, Default)]
pub(super) struct SystemCertificates {
    file: Option<PathBuf>,
    directories: Vec<PathBuf>,
}

impl SystemCertificates {
    /// Those of the variables `SSL_CERT_FILE` and `SSL_CERT_DIR`, where `:` separates directories, if one is set.
    pub(super) fn of(environment: &Environment) -> Self {
        let absolute = |path: PathBuf| environment.directory().join(path);
        let file = environment.variable("SSL_CERT_FILE").map(PathBuf::from);
        let directories = environment.variable("SSL_CERT_DIR").unwrap_or_default();
        let directories = std::env::split_paths(directories);
        Self {
            file: file.map(absolute),
            directories: directories
                .filter(|path| !path.as_os_str().is_empty())
                .map(absolute)
                .collect(),
        }
    }

    fn load(&self) -> CertificateResult {
        if self.file.is_none() && self.directories.is_empty() {
            return load_native_certs();
        }
        let mut loaded = load_certs_from_paths(self.file.as_deref(), None);
        for directory in &self.directories {
            let more = load_certs_from_paths(None, Some(directory));
            loaded.certs.extend(more.certs);
            loaded.errors.extend(more.errors);
        }
        loaded
    }
}

impl Trust {
    /// `more` and the `system`'s certificates. Fails if some were not read for want of a descriptor.
    fn new(
        more: &Certificates,
        system: &CertificateResult,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, Error> {
        for error in &system.errors {
            if let rustls_native_certs::ErrorKind::Io { inner, .. } = &error.kind
                && is_descriptor_limit(inner)
            {
                let cause = Cause::DescriptorLimit(error.to_string());
                return Err(Error::Other(OtherError(Arc::new(cause))));
            }
            tracing::warn!(%error, "some of the system's trusted certificates cannot be read");
        }
        let trusted = [system.certs.as_slice(), &more.trusted].concat();
        let hashes = trusted.iter().map(|one| blake3::hash(one)).collect();
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(trusted);
        let webpki = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
        let webpki = webpki.build().ok();
        Ok(Self { webpki, hashes })
    }
}

/// Verifier that also accepts a self-signed CA certificate (`openssl req -x509`) that is itself trusted.
///
/// It loads the trusted certificates at the first handshake, because that takes longer than a request over plain HTTP.
#[derive(Debug)]
struct Verifier {
    provider: Arc<CryptoProvider>,
    more: Certificates,
    system: SystemCertificates,
    /// `None` before the first load that found certificates.
    trust: Mutex<Option<Arc<Trust>>>,
}

impl Verifier {
    fn trust(&self) -> Result<Arc<Trust>, Error> {
        let mut kept = self.trust.lock();
        if let Some(trust) = &*kept {
            return Ok(Arc::clone(trust));
        }
        let provider = Arc::clone(&self.provider);
        let trust = Arc::new(Trust::new(&self.more, &self.system.load(), provider)?);
        if trust.webpki.is_some() {
            *kept = Some(Arc::clone(&trust));
        }
        Ok(trust)
    }

    /// Completes the checks of a trusted CA certificate, at which webpki stops after it checked the dates.
    fn verify_authority(
        certificate: &CertificateDer<'_>,
        name: &ServerName<'_>,
    ) -> Result<(), Error> {
        if !allows_server_auth(certificate) {
            return Err(CertificateError::InvalidPurpose.into());
        }
        verify_server_name(&ParsedCertificate::try_from(certificate)?, name)
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.more.is_unverified {
            return Ok(ServerCertVerified::assertion());
        }
        let trust = self.trust()?;
        let Some(webpki) = &trust.webpki else {
            return Err(CertificateError::UnknownIssuer.into());
        };
        let verified =
            webpki.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        match verified {
            Err(error)
                if is_ca_certificate_error(&error)
                    && trust.hashes.contains(&blake3::hash(end_entity)) =>
            {
                Self::verify_authority(end_entity, server_name)?;
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let algorithms = &self.provider.signature_verification_algorithms;
        algorithms.supported_schemes()
    }
}

fn is_ca_certificate_error(error: &Error) -> bool {
    let Error::InvalidCertificate(CertificateError::Other(error)) = error else {
        return false;
    };
    matches!(
        error.0.downcast_ref(),
        Some(webpki::Error::CaUsedAsEndEntity)
    )
}

/// Whether `certificate` has no extended key usage, or one that allows servers.
fn allows_server_auth(certificate: &[u8]) -> bool {
    // Object identifiers in DER: 2.5.29.37 and 1.3.6.1.5.5.7.3.1.
    const EXTENDED_KEY_USAGE: &[u8] = b"\x06\x03\x55\x1d\x25";
    const SERVER_AUTH: &[u8] = b"\x06\x08\x2b\x06\x01\x05\x05\x07\x03\x01";
    let has = |id: &[u8]| certificate.windows(id.len()).any(|window| window == id);
    !has(EXTENDED_KEY_USAGE) || has(SERVER_AUTH)
}

pub(super) fn describe(error: &CertificateError) -> (Obstacle, String) {
    match error {
        CertificateError::ExpiredContext { not_after, .. } => (
            Obstacle::CertificateDates,
            format!("the certificate expired on {}", date(*not_after)),
        ),
        CertificateError::NotValidYetContext { not_before, .. } => (
            Obstacle::CertificateDates,
            format!("the certificate is not valid before {}", date(*not_before)),
        ),
        CertificateError::NotValidForNameContext {
            expected,
            presented,
        } => {
            let names: Vec<_> = presented.iter().map(|name| bare_name(name)).collect();
            let names = match names.as_slice() {
                [] => "no name".to_owned(),
                names => names.join(", "),
            };
            let expected = expected.to_str();
            (
                Obstacle::CertificateUse,
                format!("the certificate is for {names}, not for {expected}"),
            )
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => (
            Obstacle::CertificateUse,
            "the certificate is not for servers".to_owned(),
        ),
        CertificateError::UnknownIssuer => (
            Obstacle::Certificate,
            "the certificate is not signed by a trusted authority".to_owned(),
        ),
        error if is_ca_certificate_error(&error.clone().into()) => (
            Obstacle::Certificate,
            "the certificate is that of an authority, and not itself trusted".to_owned(),
        ),
        error => (
            Obstacle::Certificate,
            format!("the certificate is refused: {error}"),
        ),
    }
}

fn date(time: UnixTime) -> impl fmt::Display {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    let date = Civil::new(seconds, 0);
    fmt::from_fn(move |f| write!(f, "{} UTC", date.to_date_and_time()))
}

/// Strips the kind from a certificate's name: `host` from `DnsName("host")`.
fn bare_name(name: &str) -> &str {
    let inner = name
        .split_once('(')
        .and_then(|(_, rest)| rest.strip_suffix(')'));
    inner.unwrap_or(name).trim_matches('"')
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    // Promises: tls-trust
    #[test]
    fn unusable_certificates_are_rejected() {
        let read = |pem: &[u8]| Certificates::from_pem(pem).map(|_| ());
        assert_eq!(read(b""), Err(CertificatesError::Missing));
        let key = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
        assert_eq!(read(key), Err(CertificatesError::Missing));
        let malformed = Err(CertificatesError::Malformed { number: 1 });
        let short = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert_eq!(read(short), malformed);
        assert_eq!(read(b"-----BEGIN CERTIFICATE-----\nAAAA\n"), malformed);
    }

    // Promises: tls-trust
    #[test]
    fn certificates_that_lack_a_descriptor_are_not_taken_for_missing() {
        let load = |number| {
            let mut system = CertificateResult::default();
            system.errors.push(rustls_native_certs::Error {
                context: "failed to open file",
                kind: rustls_native_certs::ErrorKind::Io {
                    inner: io::Error::from_raw_os_error(number),
                    path: "/etc/ssl/one.pem".into(),
                },
            });
            let provider = Arc::new(crypto::ring::default_provider());
            Trust::new(&Certificates::default(), &system, provider)
        };
        let missing = load(rustix::io::Errno::NOENT.raw_os_error());
        assert!(missing.is_ok_and(|trust| trust.webpki.is_none()));
        let Err(Error::Other(OtherError(error))) = load(rustix::io::Errno::MFILE.raw_os_error())
        else {
            panic!("an error");
        };
        let text = "failed to open file: Too many open files (os error 24) at '/etc/ssl/one.pem'";
        assert!(
            matches!(error.downcast_ref(), Some(Cause::DescriptorLimit(limit)) if limit == text)
        );
    }

    // Promises: tls-trust
    #[test]
    fn relative_paths_of_certificates_stay_in_the_first_directory() {
        let variables = [("SSL_CERT_FILE", "a.pem"), ("SSL_CERT_DIR", "b::/c")];
        let variables = variables.map(|(name, value)| (name.into(), value.into()));
        let named = SystemCertificates::of(&Environment::new(variables, "/d".into()));
        assert_eq!(named.file, Some("/d/a.pem".into()));
        assert_eq!(named.directories, ["/d/b", "/c"].map(PathBuf::from));
    }

    // Promises: tls-trust
    #[test]
    fn certificate_names_lose_their_type() {
        for (name, expected) in [
            ("DnsName(\"host.example\")", "host.example"),
            ("IpAddress(127.0.0.1)", "127.0.0.1"),
            ("other", "other"),
        ] {
            assert_eq!(bare_name(name), expected);
        }
    }
}
