//! The certificate by which a server recognizes its client.

use std::fmt;
use std::sync::Arc;

use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, Error};

use super::certificates::{CertificatesError, parse_certificates};

/// Begins a key in PEM that has a passphrase: as PKCS #8, and in the older form.
const ENCRYPTED_KEY_MARKS: [&[u8]; 2] = [
    b"-----BEGIN ENCRYPTED PRIVATE KEY-----",
    b"Proc-Type: 4,ENCRYPTED",
];

/// Certificate and private key that prove the user's identity to a server.
#[derive(Clone)]
pub struct ClientCertificate(Arc<CertifiedKey>);

impl fmt::Debug for ClientCertificate {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCertificate").finish_non_exhaustive()
    }
}

/// A client certificate or its key is unusable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ClientCertificateError {
    /// The certificate is missing or malformed.
    #[error(transparent)]
    Certificate(#[from] CertificatesError),
    /// The file contains no key.
    #[error("it has no private key (a PEM file has lines `-----BEGIN PRIVATE KEY-----`)")]
    MissingKey,
    /// The key has a passphrase.
    #[error("its private key has a passphrase (remove it with `openssl pkey -in FILE -out FILE`)")]
    EncryptedKey,
    /// The key is malformed, or of an unsupported kind.
    #[error("its private key is malformed, or neither RSA, ECDSA (P-256, P-384) nor Ed25519")]
    UnusableKey,
    /// The key belongs to another certificate.
    #[error("its private key is not that of the certificate")]
    OtherKey,
}

impl ClientCertificate {
    /// Parses a certificate, which its intermediate ones follow, and its private key.
    ///
    /// # Errors
    /// If either is missing or unusable, or they do not belong together.
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Self, ClientCertificateError> {
        let chain = parse_certificates(certificates)?;
        let is_encrypted = |mark: &&[u8]| key.windows(mark.len()).any(|window| window == *mark);
        if ENCRYPTED_KEY_MARKS.iter().any(is_encrypted) {
            return Err(ClientCertificateError::EncryptedKey);
        }
        let key = PrivateKeyDer::pem_slice_iter(key).next();
        let key = key.ok_or(ClientCertificateError::MissingKey)?;
        let key = key.map_err(|_| ClientCertificateError::UnusableKey)?;
        let key = rustls::crypto::ring::sign::any_supported_type(&key);
        let key = key.map_err(|_| ClientCertificateError::UnusableKey)?;
        let pair = CertifiedKey::new(chain, key);
        match pair.keys_match() {
            Err(Error::InconsistentKeys(_)) => Err(ClientCertificateError::OtherKey),
            Err(Error::InvalidCertificate(CertificateError::BadEncoding)) => {
                Err(CertificatesError::Malformed { number: 1 }.into())
            }
            // A certificate of version 1, which `openssl x509 -req` makes, is an error that the server accepts.
            Ok(()) | Err(_) => Ok(Self(Arc::new(pair))),
        }
    }

    pub(super) fn resolver(&self) -> Arc<SingleCertAndKey> {
        Arc::new(SingleCertAndKey::from(Arc::clone(&self.0)))
    }
}
