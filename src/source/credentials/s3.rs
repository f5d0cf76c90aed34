//! Amazon S3, and servers with its protocol.

use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt};
use reqsign_aws_v4::{
    AssumeRoleWithWebIdentityCredentialProvider, Credential, ECSCredentialProvider,
    EnvCredentialProvider, IMDSv2CredentialProvider, RequestSigner,
};
use reqsign_core::Context;
use reqwest::header::{AUTHORIZATION, AsHeaderName, HeaderMap, HeaderName, HeaderValue};
use url::Url;

use super::cache::{CredentialCache, Provider};
use super::context::ProviderContext;
use super::object::{AccessPoint, Endpoint, Object, url_below};
use super::profile;
use super::sign::sign;
use crate::base::sync::Mutex;
use crate::source::Cause;
use crate::source::client::authorizer::{Authorizer, ErrorResponse, Request};

/// Header in which S3 names the bucket's region.
const BUCKET_REGION: &str = "x-amz-bucket-region";

/// Header with the digest of what is uploaded, which S3 compares.
const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");

/// Credentials for one object.
#[derive(Debug)]
struct S3 {
    cache: CredentialCache<Credential>,
    bucket: String,
    /// Access point in place of a bucket.
    access_point: Option<AccessPoint>,
    /// Whether the bucket has a host of its own at the user's endpoint, too.
    has_own_host: bool,
    /// The user's endpoint, instead of Amazon's.
    endpoint: Option<Url>,
    /// First labels of Amazon's endpoints.
    service: String,
    region: Mutex<String>,
}

/// URL of `object`, and the authorizer of its requests. An invalid endpoint or region is [`Cause::Malformed`].
pub(super) async fn open(
    object: &Object<'_>,
    endpoint: &Endpoint,
    context: ProviderContext,
) -> Result<(Url, Arc<dyn Authorizer>), Cause> {
    let variable = |name: &str| context.context.env_var(name);
    let flag = |name: &str| variable(name).is_some_and(|value| value == "true");
    // The provider of credentials reports files that cannot be read.
    let files = profile::Files::load(&context.context).await;
    let name = profile::name(&context.context);
    let profile = files.unwrap_or_default().profile(&name).unwrap_or_default();
    let style = profile.get("s3.addressing_style");
    let access_point = object.access_point();
    let region = match &access_point {
        Some(point) => point.region.clone(),
        None => region(&context.context, &profile)?,
    };
    let s3 = S3 {
        bucket: object.bucket.to_owned(),
        access_point,
        has_own_host: style.as_deref() == Some("virtual"),
        endpoint: endpoint.url()?,
        service: service(
            flag("AWS_USE_FIPS_ENDPOINT"),
            flag("AWS_USE_DUALSTACK_ENDPOINT"),
        ),
        region: Mutex::new(region),
        cache: CredentialCache::new(providers(&context.context), context, secret_of),
    };
    let url = object.url(&s3.bucket_url(&s3.region.lock())?);
    Ok((url, Arc::new(s3)))
}

fn secret_of(credential: &Credential) -> String {
    let (key, secret) = (&credential.access_key_id, &credential.secret_access_key);
    let token = credential.session_token.as_deref().unwrap_or_default();
    format!("{key} {secret} {token}")
}

fn service(is_fips: bool, is_dual_stack: bool) -> String {
    let service = if is_fips { "s3-fips" } else { "s3" };
    let stack = if is_dual_stack { ".dualstack" } else { "" };
    format!("{service}{stack}")
}

/// Region of the environment or of `profile`.
fn region(context: &Context, profile: &profile::Profile) -> Result<String, Cause> {
    let region = profile::region(context, profile);
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
    let keys = "the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
    let token = "the variable AWS_WEB_IDENTITY_TOKEN_FILE";
    let profile = format!("the AWS profile {}", profile::name(context));
    let container = "the container credentials of ECS or EKS";
    let metadata = "the instance metadata of EC2";
    vec![
        Provider::new(keys, EnvCredentialProvider::new()),
        Provider::new(token, AssumeRoleWithWebIdentityCredentialProvider::new()),
        Provider::new(profile, profile::ProfileProvider),
        Provider::new(container, ECSCredentialProvider::new()),
        Provider::new(metadata, IMDSv2CredentialProvider::new()).optional(),
    ]
}

impl S3 {
    /// URL of the bucket at Amazon's endpoint of `region`, or at the user's.
    fn bucket_url(&self, region: &str) -> Result<Url, Cause> {
        let (bucket, point) = (&self.bucket, self.access_point.as_ref());
        let malformed = || Cause::Malformed("the name of the bucket is not valid".to_owned());
        if let Some(endpoint) = &self.endpoint {
            let label = point.map(|point| &point.label);
            let Some(label) = label.or(self.has_own_host.then_some(bucket)) else {
                return Ok(url_below(endpoint, bucket));
            };
            let mut url = endpoint.clone();
            let host = format!("{label}.{}", url.host_str().unwrap_or_default());
            let changed = url.set_host(Some(&host));
            return changed.map(|()| url).map_err(|_| malformed());
        }
        let suffix = if region.starts_with("cn-") { ".cn" } else { "" };
        let host = format!("{}.{region}.amazonaws.com{suffix}", self.service);
        // Host names have no capitals, and the certificate is for one label before the service's.
        let url = if let Some(point) = point {
            let host = host.replacen("s3", "s3-accesspoint", 1);
            format!("https://{}.{host}/", point.label)
        } else if is_region(bucket) {
            format!("https://{bucket}.{host}/")
        } else {
            format!("https://{host}/{bucket}")
        };
        Url::parse(&url).map_err(|_| malformed())
    }

    /// Takes the region that the server names. Returns whether `request` was for another one.
    fn follow_region(&self, request: &Request, response: &ErrorResponse) -> bool {
        fn text(headers: &HeaderMap, name: impl AsHeaderName) -> Option<&str> {
            headers.get(name)?.to_str().ok()
        }
        let region = text(&response.headers, BUCKET_REGION).or(response.error.region.as_deref());
        let region = region.filter(|region| is_region(region));
        let Some(region) = region else {
            return false;
        };
        let is_other = if let Some(signature) = text(&request.headers, AUTHORIZATION) {
            !signature.contains(&format!("/{region}/s3/"))
        } else {
            let moved = self.bucket_url(region);
            self.endpoint.is_none()
                && moved.is_ok_and(|moved| moved.host_str() != request.url.host_str())
        };
        if is_other {
            region.clone_into(&mut self.region.lock());
        }
        is_other
    }

    async fn sign(&self, request: &mut Request) -> Result<(), Cause> {
        let (credential, generation) = self.cache.get().await?;
        let region = self.region.lock().clone();
        if self.endpoint.is_none() {
            let url = self.bucket_url(&region)?;
            // It fails only for URLs without a host.
            request.url.set_host(url.host_str()).ok();
        }
        request.generation = generation;
        let Some(credential) = credential else {
            return Ok(());
        };
        if let Some(digest) = request.content_sha256
            && let Ok(digest) = HeaderValue::from_str(&digest.to_string())
        {
            request.headers.insert(CONTENT_SHA256, digest);
        }
        // Proxies may change other headers, so these are not signed.
        let is_signed = |name: &str| name.starts_with("x-amz-");
        let signer = RequestSigner::new("s3", &region);
        sign(&signer, &self.cache, &credential, request, is_signed).await
    }
}

impl Authorizer for S3 {
    fn authorize<'a>(&'a self, request: &'a mut Request) -> BoxFuture<'a, Result<(), Cause>> {
        self.sign(request).boxed()
    }

    fn should_resend(
        &self,
        request: &Request,
        response: &ErrorResponse,
    ) -> BoxFuture<'_, Result<bool, Cause>> {
        let is_moved = self.follow_region(request, response);
        let (may_renew, generation) = (response.allows_other_credentials(), request.generation);
        async move {
            if is_moved || !may_renew {
                return Ok(is_moved);
            }
            self.cache.renew(generation).await
        }
        .boxed()
    }

    fn credentials_origin(&self) -> String {
        self.cache.origin()
    }

    fn upload_advice(&self) -> Option<String> {
        let advice =
            "check that they are valid and have the permission s3:PutObject for the object";
        Some(advice.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::sha256::Sha256;

    fn s3(bucket: &str, region: &str, service: &str, endpoint: Option<&str>) -> S3 {
        S3 {
            cache: CredentialCache::new(Vec::new(), Context::new().into(), secret_of),
            bucket: bucket.to_owned(),
            access_point: None,
            has_own_host: false,
            endpoint: endpoint.map(|url| Url::parse(url).expect("well-formed")),
            service: service.to_owned(),
            region: Mutex::new(region.to_owned()),
        }
    }

    const PLAIN: &str = "s3";

    // Promises: s3-credentials
    #[test]
    fn endpoints_of_s3_follow_region_and_settings() {
        let special = service(true, true);
        let special = special.as_str();
        for (bucket, region, service, endpoint, expected) in [
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
            let url = s3(bucket, region, service, endpoint).bucket_url(region);
            assert_eq!(url.expect("valid").as_str(), expected);
        }
    }

    // Promises: store-endpoint
    #[test]
    fn buckets_have_hosts_of_their_own_if_the_profile_says_so() {
        let mut s3 = s3("b", "x", PLAIN, Some("https://oss.example.com/"));
        s3.has_own_host = true;
        let url = s3.bucket_url("x").expect("valid");
        assert_eq!(url.as_str(), "https://b.oss.example.com/");
    }

    // Promises: store-arn
    #[test]
    fn access_points_of_s3_have_hosts_of_their_own() {
        let special = service(true, true);
        for (region, service, endpoint, expected) in [
            (
                "eu-west-1",
                PLAIN,
                None,
                "https://p-1.s3-accesspoint.eu-west-1.amazonaws.com/",
            ),
            (
                "cn-north-1",
                PLAIN,
                None,
                "https://p-1.s3-accesspoint.cn-north-1.amazonaws.com.cn/",
            ),
            (
                "us-east-2",
                &*special,
                None,
                "https://p-1.s3-accesspoint-fips.dualstack.us-east-2.amazonaws.com/",
            ),
            (
                "x",
                PLAIN,
                Some("http://host:9000"),
                "http://p-1.host:9000/",
            ),
        ] {
            let mut s3 = s3("arn", region, service, endpoint);
            s3.access_point = Some(AccessPoint {
                label: "p-1".to_owned(),
                region: region.to_owned(),
            });
            assert_eq!(s3.bucket_url(region).expect("valid").as_str(), expected);
        }
    }

    #[tokio::test]
    async fn upload_is_signed_with_the_digest_of_its_body() {
        let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];
        let env = reqsign_core::StaticEnv {
            home_dir: None,
            envs: keys
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
        };
        let context = Context::new().with_env(env);
        let mut s3 = s3("b", "us-east-1", PLAIN, None);
        let providers = providers(&context);
        s3.cache = CredentialCache::new(providers, context.into(), secret_of);
        let digest = Sha256([0xab; 32]);
        for content_sha256 in [None, Some(digest)] {
            let mut request = Request {
                method: reqwest::Method::PUT,
                url: s3.bucket_url("us-east-1").expect("valid"),
                headers: reqwest::header::HeaderMap::new(),
                content_sha256,
                generation: 0,
            };
            s3.authorize(&mut request).await.expect("signed");
            let header = |name| request.headers[name].to_str().expect("text").to_owned();
            let expected = content_sha256.map(|digest| digest.to_string());
            let expected = expected.unwrap_or_else(|| "UNSIGNED-PAYLOAD".to_owned());
            assert_eq!(header("x-amz-content-sha256"), expected);
            assert!(header("authorization").contains(";x-amz-content-sha256;"));
        }
        let advice = s3.upload_advice().unwrap_or_default();
        assert!(advice.contains("s3:PutObject"), "{advice}");
    }

    // Promises: s3-credentials
    #[tokio::test]
    async fn region_that_the_server_names_is_followed_once() {
        for endpoint in [None, Some("http://host:9000")] {
            let key = Credential {
                access_key_id: "AKID".to_owned(),
                secret_access_key: "secret".to_owned(),
                ..Credential::default()
            };
            let keys = reqsign_aws_v4::StaticCredentialProvider::new(
                &key.access_key_id,
                &key.secret_access_key,
            );
            let provider = Provider::new("a key", keys);
            // The bucket is called like a region.
            let mut s3 = s3("eu-central-1", "us-east-1", PLAIN, endpoint);
            s3.cache = CredentialCache::new(vec![provider], Context::new().into(), secret_of);
            let mut headers = reqwest::header::HeaderMap::new();
            headers.insert(BUCKET_REGION, "eu-central-1".parse().expect("valid"));
            let response = ErrorResponse {
                status: reqwest::StatusCode::BAD_REQUEST,
                headers,
                error: crate::source::client::ServerError::default(),
            };
            for is_followed in [true, false] {
                let mut request = Request {
                    method: reqwest::Method::GET,
                    content_sha256: None,
                    url: s3.bucket_url("us-east-1").expect("valid"),
                    headers: reqwest::header::HeaderMap::new(),
                    generation: 0,
                };
                s3.authorize(&mut request).await.expect("signed");
                let should_resend = s3.should_resend(&request, &response).await;
                assert_eq!(should_resend.ok(), Some(is_followed));
            }
            assert_eq!(*s3.region.lock(), "eu-central-1");
        }
    }
}
