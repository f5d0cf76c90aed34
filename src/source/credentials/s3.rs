//! Amazon S3, and servers with its protocol.

use std::fmt;
use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqsign_aws_v4::{
    AssumeRoleWithWebIdentityCredentialProvider, Credential, ECSCredentialProvider,
    EnvCredentialProvider, IMDSv2CredentialProvider, RequestSigner,
};
use reqsign_core::{Context, ProvideCredential, SignRequest};
use reqwest::header::{AUTHORIZATION, HOST};
use url::Url;

use super::cache::{CredentialCache, Provider};
use super::{context, profile};
use crate::base::sync::Mutex;
use crate::source::authorizer::{Authorizer, Refusal, Request};
use crate::source::http::Target;
use crate::source::location::redact;
use crate::source::{Cause, Location, Options};

/// Header in which S3 names the bucket's region.
const BUCKET_REGION: &str = "x-amz-bucket-region";

/// Length of the hash of an object's name in hexadecimal digits: 128 bits.
const HASH_DIGITS: usize = 32;

/// Bytes of a key that S3 encodes in a URL, and in what it signs.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/');

/// Credentials for one object.
pub(crate) struct S3 {
    cache: CredentialCache<Credential>,
    bucket: String,
    /// The user's endpoint, instead of Amazon's.
    endpoint: Option<Url>,
    variant: Variant,
    region: Mutex<String>,
}

/// Amazon's endpoints of a region.
#[derive(Clone, Copy)]
struct Variant {
    is_dual_stack: bool,
    is_fips: bool,
}

impl fmt::Debug for S3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3")
            .field("bucket", &self.bucket)
            .finish_non_exhaustive()
    }
}

/// `s3://BUCKET/KEY[?versionId=ID]`, taken apart. As in the AWS CLI, KEY is not percent-encoded.
#[derive(PartialEq, Eq, Debug)]
struct Object<'a> {
    bucket: &'a str,
    key: &'a str,
    version: Option<&'a str>,
}

impl<'a> Object<'a> {
    fn parse(spec: &'a str) -> Option<Self> {
        let (bucket, key) = spec.strip_prefix("s3://")?.split_once('/')?;
        let (key, version) = match key.rsplit_once("?versionId=") {
            Some((key, version)) => (key, Some(version)),
            None => (key, None),
        };
        let is_bucket_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        // URLs cannot name these segments.
        let is_dots = |segment: &str| matches!(segment, "." | "..");
        let is_valid = !bucket.is_empty()
            && bucket.bytes().all(is_bucket_byte)
            && !key.is_empty()
            && !is_dots(bucket)
            && !key.split('/').any(is_dots);
        is_valid.then_some(Self {
            bucket,
            key,
            version,
        })
    }
}

/// Location of the object `spec` at the endpoint of `options`; `None` unless it is an object of S3.
///
/// A query-like part of the key may be a secret, so saved state and texts have only a hash of it.
pub(crate) fn location(spec: &str, options: &Options) -> Option<Location> {
    Object::parse(spec)?;
    let shown = redact(spec);
    let hash = blake3::hash(spec.as_bytes()).to_hex();
    let hash = hash.get(..HASH_DIGITS).unwrap_or_default();
    let endpoint = options.endpoint_url.as_deref().unwrap_or_default();
    let locator = format!("{shown}@{}#{hash}", redact(endpoint));
    Some(Location::with_locator(&shown, locator))
}

/// Target of the object `spec`: `s3://BUCKET/KEY[?versionId=ID]`.
///
/// # Errors
/// [`Cause::Malformed`] for an invalid name or endpoint.
pub(crate) async fn target(spec: &str, options: &Options) -> Result<Target, Cause> {
    let malformed = |text: &str| Cause::Malformed(text.to_owned());
    let object = Object::parse(spec).ok_or_else(|| {
        malformed("an object of S3 is s3://BUCKET/KEY or s3://BUCKET/KEY?versionId=ID")
    })?;
    let is_http = |url: &Url| {
        matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.username().is_empty()
            && url.query().is_none()
            && url.fragment().is_none()
    };
    let endpoint = match &options.endpoint_url {
        Some(text) => {
            let url = Url::parse(text).ok().filter(is_http);
            Some(url.ok_or_else(|| {
                malformed("the endpoint of S3 must be an http:// or https:// URL")
            })?)
        }
        None => None,
    };
    let context = context::context(options);
    let flag = |name: &str| context.env_var(name).is_some_and(|value| value == "true");
    let s3 = S3 {
        bucket: object.bucket.to_owned(),
        endpoint,
        variant: Variant {
            is_dual_stack: flag("AWS_USE_DUALSTACK_ENDPOINT"),
            is_fips: flag("AWS_USE_FIPS_ENDPOINT"),
        },
        region: Mutex::new(region(&context).await?),
        cache: CredentialCache::new(providers(&context), context, is_same),
    };
    let mut url = s3.bucket_url(&s3.region.lock())?;
    let path = format!(
        "{}/{}",
        url.path().trim_end_matches('/'),
        utf8_percent_encode(object.key, ENCODED)
    );
    url.set_path(&path);
    if let Some(version) = object.version {
        url.query_pairs_mut().append_pair("versionId", version);
    }
    let location = location(spec, options).unwrap_or_else(|| Location::from_name(&redact(spec)));
    Ok(Target {
        url,
        location,
        authorizer: Some(Arc::new(s3)),
    })
}

fn is_same(one: &Credential, other: &Credential) -> bool {
    one.access_key_id == other.access_key_id
        && one.secret_access_key == other.secret_access_key
        && one.session_token == other.session_token
}

/// Region of the environment or of the profile.
async fn region(context: &Context) -> Result<String, Cause> {
    let settings = profile::load(context, &profile::name(context)).await;
    let region = profile::region(context, &settings.unwrap_or_default());
    if is_region(&region) {
        return Ok(region);
    }
    Err(Cause::Malformed(format!(
        "{region:?} is not a region of AWS"
    )))
}

fn is_region(text: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(is_valid)
}

/// Providers of credentials in the order of the AWS SDKs.
fn providers(context: &Context) -> Vec<Provider<Credential>> {
    fn provider(
        name: impl Into<String>,
        provider: impl ProvideCredential<Credential = Credential>,
    ) -> Provider<Credential> {
        Provider {
            name: name.into(),
            is_optional: false,
            finder: Box::new(provider),
        }
    }
    let profile = profile::name(context);
    let metadata = Provider {
        is_optional: true,
        ..provider(
            "the instance metadata of EC2",
            IMDSv2CredentialProvider::new(),
        )
    };
    vec![
        provider(
            "the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            EnvCredentialProvider::new(),
        ),
        provider(
            "the variable AWS_WEB_IDENTITY_TOKEN_FILE",
            AssumeRoleWithWebIdentityCredentialProvider::new(),
        ),
        provider(
            format!("the AWS profile {profile}"),
            profile::ProfileProvider,
        ),
        provider(
            "the container credentials of ECS or EKS",
            ECSCredentialProvider::new(),
        ),
        metadata,
    ]
}

impl S3 {
    /// URL of the bucket at Amazon's endpoint of `region`, or at the user's.
    fn bucket_url(&self, region: &str) -> Result<Url, Cause> {
        let bucket = &self.bucket;
        if let Some(endpoint) = &self.endpoint {
            let mut url = endpoint.clone();
            url.set_path(&format!(
                "{}/{bucket}",
                endpoint.path().trim_end_matches('/')
            ));
            return Ok(url);
        }
        let Variant {
            is_dual_stack,
            is_fips,
        } = self.variant;
        let service = if is_fips { "s3-fips" } else { "s3" };
        let stack = if is_dual_stack { ".dualstack" } else { "" };
        let suffix = if region.starts_with("cn-") { ".cn" } else { "" };
        let host = format!("{service}{stack}.{region}.amazonaws.com{suffix}");
        // Host names have no capitals, and the certificate is for one label before the service's.
        let url = if is_region(bucket) {
            format!("https://{bucket}.{host}/")
        } else {
            format!("https://{host}/{bucket}")
        };
        let malformed = || Cause::Malformed("the name of the bucket is not valid".to_owned());
        Url::parse(&url).map_err(|_| malformed())
    }

    /// Takes the region that the server names. Returns whether `request` was for another one.
    fn follow_region(&self, request: &Request, refusal: &Refusal) -> bool {
        let region = refusal.headers.get(BUCKET_REGION);
        let Some(region) = region.and_then(|region| region.to_str().ok()) else {
            return false;
        };
        let signature = request.headers.get(AUTHORIZATION);
        let signature = signature.and_then(|signature| signature.to_str().ok());
        let is_other = if let Some(signature) = signature {
            !signature.contains(&format!("/{region}/s3/"))
        } else {
            let asked = self.bucket_url(region);
            self.endpoint.is_none()
                && asked.is_ok_and(|asked| asked.host_str() != request.url.host_str())
        };
        let is_other = is_other && is_region(region);
        if is_other {
            region.clone_into(&mut self.region.lock());
        }
        is_other
    }

    async fn sign(&self, request: &mut Request) -> Result<(), Cause> {
        let (credential, generation) = self.cache.get().await?;
        let region = self.region.lock().clone();
        if self.endpoint.is_none() {
            // It fails only for URLs without a host.
            request
                .url
                .set_host(self.bucket_url(&region)?.host_str())
                .ok();
        }
        request.generation = generation;
        let Some(credential) = credential else {
            return Ok(());
        };
        let unsignable =
            |detail: &str| Cause::Malformed(format!("the request cannot be signed: {detail}"));
        let mut parts = http::Request::builder()
            .uri(request.url.as_str())
            .body(())
            .map_err(|error| unsignable(&error.to_string()))?
            .into_parts()
            .0;
        // Proxies may change other headers, so these are not signed.
        let amazon = request.headers.iter();
        let amazon = amazon.filter(|(name, _)| name.as_str().starts_with("x-amz-"));
        parts
            .headers
            .extend(amazon.map(|(name, value)| (name.clone(), value.clone())));
        RequestSigner::new("s3", &region)
            .sign_request(self.cache.context(), &mut parts, Some(&credential), None)
            .await
            .map_err(|error| unsignable(&error.to_string()))?;
        parts.headers.remove(HOST);
        for (name, value) in &mut parts.headers {
            value.set_sensitive(true);
            request.headers.insert(name.clone(), value.clone());
        }
        Ok(())
    }
}

impl Authorizer for S3 {
    fn authorize<'a>(&'a self, request: &'a mut Request) -> BoxFuture<'a, Result<(), Cause>> {
        self.sign(request).boxed()
    }

    fn should_resend<'a>(
        &'a self,
        request: &'a Request,
        refusal: &'a Refusal,
    ) -> BoxFuture<'a, bool> {
        async move {
            self.follow_region(request, refusal)
                || (refusal.is_unauthorized() && self.cache.renew(request.generation).await)
        }
        .boxed()
    }

    fn credentials_origin(&self) -> String {
        self.cache.origin()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_names_are_taken_literally() {
        let parse = |spec| {
            let object = Object::parse(spec)?;
            Some((object.bucket, object.key, object.version))
        };
        assert_eq!(parse("s3://b/a/k.tar"), Some(("b", "a/k.tar", None)));
        assert_eq!(parse("s3://b/k?x=1"), Some(("b", "k?x=1", None)));
        assert_eq!(
            parse("s3://b/k%20?versionId=V"),
            Some(("b", "k%20", Some("V")))
        );
        assert_eq!(parse("s3://b/"), None);
        assert_eq!(parse("s3:///k"), None);
        assert_eq!(parse("s3://user@b/k"), None);
        for name in ["s3://b/a/../k", "s3://b/./k", "s3://b/..", "s3://../b/k"] {
            assert_eq!(parse(name), None, "{name}");
        }
    }

    fn s3(bucket: &str, region: &str, variant: Variant, endpoint: Option<&str>) -> S3 {
        S3 {
            cache: CredentialCache::new(Vec::new(), Context::new(), is_same),
            bucket: bucket.to_owned(),
            endpoint: endpoint.map(|url| Url::parse(url).expect("well-formed")),
            variant,
            region: Mutex::new(region.to_owned()),
        }
    }

    const PLAIN: Variant = Variant {
        is_dual_stack: false,
        is_fips: false,
    };

    #[test]
    fn endpoints_of_s3_follow_region_and_settings() {
        let special = Variant {
            is_dual_stack: true,
            is_fips: true,
        };
        for (bucket, region, variant, endpoint, expected) in [
            (
                "b",
                "us-east-1",
                PLAIN,
                None,
                "https://b.s3.us-east-1.amazonaws.com/",
            ),
            (
                "b.c",
                "eu-west-1",
                PLAIN,
                None,
                "https://s3.eu-west-1.amazonaws.com/b.c",
            ),
            (
                "Old",
                "us-east-1",
                PLAIN,
                None,
                "https://s3.us-east-1.amazonaws.com/Old",
            ),
            (
                "b",
                "cn-north-1",
                PLAIN,
                None,
                "https://b.s3.cn-north-1.amazonaws.com.cn/",
            ),
            (
                "b",
                "us-east-2",
                special,
                None,
                "https://b.s3-fips.dualstack.us-east-2.amazonaws.com/",
            ),
            (
                "b",
                "x",
                PLAIN,
                Some("http://host:9000"),
                "http://host:9000/b",
            ),
            (
                "b",
                "x",
                PLAIN,
                Some("https://host/s3/"),
                "https://host/s3/b",
            ),
        ] {
            let url = s3(bucket, region, variant, endpoint).bucket_url(region);
            assert_eq!(url.expect("valid").as_str(), expected);
        }
    }

    #[tokio::test]
    async fn region_that_the_server_names_is_followed_once() {
        for endpoint in [None, Some("http://host:9000")] {
            let key = Credential {
                access_key_id: "AKID".to_owned(),
                secret_access_key: "secret".to_owned(),
                ..Credential::default()
            };
            let provider = Provider {
                name: "a key".to_owned(),
                is_optional: false,
                finder: Box::new(reqsign_aws_v4::StaticCredentialProvider::new(
                    &key.access_key_id,
                    &key.secret_access_key,
                )),
            };
            // The bucket is called like a region.
            let mut s3 = s3("eu-central-1", "us-east-1", PLAIN, endpoint);
            s3.cache = CredentialCache::new(vec![provider], Context::new(), is_same);
            let mut headers = reqwest::header::HeaderMap::new();
            headers.insert(BUCKET_REGION, "eu-central-1".parse().expect("valid"));
            let refusal = Refusal {
                status: reqwest::StatusCode::BAD_REQUEST,
                headers,
                error: crate::source::http::ServerError::default(),
            };
            for is_followed in [true, false] {
                let mut request = Request {
                    url: s3.bucket_url("us-east-1").expect("valid"),
                    headers: reqwest::header::HeaderMap::new(),
                    generation: 0,
                };
                s3.authorize(&mut request).await.expect("signed");
                assert_eq!(s3.should_resend(&request, &refusal).await, is_followed);
            }
            assert_eq!(*s3.region.lock(), "eu-central-1");
        }
    }
}
