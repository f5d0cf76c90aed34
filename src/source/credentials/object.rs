//! Names and URLs of objects in the object stores of clouds.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use url::Url;

use crate::base::redact::redact;
use crate::source::location::is_server_url;
use crate::source::{Cause, Location};

/// Length of the hash of an object's name in hexadecimal digits: 128 bits.
const HASH_DIGITS: usize = 32;

/// The public cloud of Azure.
const AZURE_CLOUD: &str = "core.windows.net";

/// Ends of the hosts of Azure's clouds, behind the account and the service. The last is Fabric's.
const AZURE_CLOUDS: [&str; 4] = [
    AZURE_CLOUD,
    "core.chinacloudapi.cn",
    "core.usgovcloudapi.net",
    "fabric.microsoft.com",
];

/// Azure's services of blobs and of data lakes, which have the same objects.
const AZURE_SERVICES: [&str; 2] = ["blob", "dfs"];

/// Bytes of a key that object stores encode in a URL, and in what they sign.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/');

/// An object store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Store {
    /// Amazon S3, and servers with its protocol.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage.
    Azure,
}

impl Store {
    fn from_scheme(scheme: &str) -> Option<Self> {
        match scheme {
            "s3" => Some(Self::S3),
            "gs" => Some(Self::Google),
            "az" | "abfs" | "abfss" => Some(Self::Azure),
            _ => None,
        }
    }

    /// Splits a version off the path of an object: the parameter of the URL and its value.
    fn split_version(self, path: &str) -> (&str, Option<(&'static str, &str)>) {
        let forms: &[(&str, &'static str)] = match self {
            Self::S3 => &[("?versionId=", "versionId")],
            Self::Google => &[("#", "generation")],
            Self::Azure => &[("?snapshot=", "snapshot"), ("?versionid=", "versionid")],
        };
        let split = forms.iter().find_map(|&(separator, parameter)| {
            let (key, version) = path.rsplit_once(separator)?;
            let is_version = self != Self::Google || is_number(version);
            is_version.then_some((key, Some((parameter, version))))
        });
        split.unwrap_or((path, None))
    }

    /// Form of the names of its objects.
    fn form(self) -> &'static str {
        match self {
            Self::S3 => {
                "an object of S3 is s3://BUCKET/KEY or s3://BUCKET/KEY?versionId=ID, and BUCKET may be \
                 arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME"
            }
            Self::Google => {
                "an object of Google Cloud Storage is gs://BUCKET/OBJECT or gs://BUCKET/OBJECT#GENERATION"
            }
            Self::Azure => {
                "an object of Azure is az://ACCOUNT/CONTAINER/BLOB or \
                 abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/BLOB, with ?snapshot=TIME or ?versionid=TIME"
            }
        }
    }
}

/// The name of an object, taken apart. As in the clouds' own tools, KEY is not percent-encoded.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Object<'a> {
    pub(super) store: Store,
    /// Account, in Azure.
    pub(super) account: Option<&'a str>,
    /// End of the host of the account, in Azure.
    pub(super) cloud: &'a str,
    /// Bucket, access point or container.
    pub(super) bucket: &'a str,
    pub(super) key: &'a str,
    /// Parameter of the URL that selects a version, and its value.
    version: Option<(&'static str, &'a str)>,
}

impl<'a> Object<'a> {
    /// Parses `spec`; `None` unless it has the scheme of an object store. An invalid name is [`Cause::Malformed`].
    pub(super) fn parse(spec: &'a str) -> Option<Result<Self, Cause>> {
        let (scheme, name) = spec.split_once("://")?;
        let store = Store::from_scheme(scheme)?;
        let parsed = Self::parse_name(store, scheme, name);
        let malformed = || Cause::Malformed(store.form().to_owned());
        Some(parsed.filter(Self::is_valid).ok_or_else(malformed))
    }

    fn parse_name(store: Store, scheme: &str, name: &'a str) -> Option<Self> {
        let (authority, path) = split_bucket(name)?;
        let (account, cloud, bucket, path) = match scheme {
            "az" => {
                let (bucket, path) = path.split_once('/')?;
                (Some(authority), AZURE_CLOUD, bucket, path)
            }
            "abfs" | "abfss" => {
                let (bucket, host) = authority.split_once('@')?;
                let mut words = host.splitn(3, '.');
                let (account, service, cloud) = (words.next()?, words.next()?, words.next()?);
                if !AZURE_SERVICES.contains(&service) || !AZURE_CLOUDS.contains(&cloud) {
                    return None;
                }
                (Some(account), cloud, bucket, path)
            }
            _ => (None, "", authority, path),
        };
        let (key, version) = store.split_version(path);
        Some(Self {
            store,
            account,
            cloud,
            bucket,
            key,
            version,
        })
    }

    /// The access point that its bucket names, if it is none itself.
    pub(super) fn access_point(&self) -> Option<AccessPoint> {
        AccessPoint::parse(self.bucket).filter(|_| self.store == Store::S3)
    }

    /// URL of the object, whose bucket has the URL `bucket`.
    pub(super) fn url(&self, bucket: &Url) -> Url {
        let mut url = url_below(bucket, self.key);
        if let Some((parameter, version)) = self.version {
            url.query_pairs_mut().append_pair(parameter, version);
        }
        url
    }

    fn is_valid(&self) -> bool {
        // A container of Azure may be called `$root` or `$web`.
        let is_bucket_byte = |byte: u8| {
            let is_dollar = byte == b'$' && self.account.is_some();
            byte.is_ascii_alphanumeric() || b"-._".contains(&byte) || is_dollar
        };
        let is_account = |account: &str| {
            let is_byte = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
            !account.is_empty() && account.bytes().all(is_byte)
        };
        // URLs cannot name these segments.
        let is_dots = |segment: &str| matches!(segment, "." | "..");
        self.account.is_none_or(is_account)
            && !self.bucket.is_empty()
            && (self.bucket.bytes().all(is_bucket_byte) || self.access_point().is_some())
            && !self.key.is_empty()
            && !is_dots(self.bucket)
            && !self.key.split('/').any(is_dots)
    }

    /// Location of the object, which the user calls `spec`, at `endpoint`.
    ///
    /// A query-like part of the key may be a secret, so saved state and texts have only a hash of it.
    pub(super) fn location(&self, spec: &str, endpoint: &Endpoint) -> Location {
        // Azure has two forms of names.
        let name = match self.account {
            Some(account) if self.cloud == AZURE_CLOUD => {
                let version = self.version.map(|(name, value)| format!("?{name}={value}"));
                let version = version.unwrap_or_default();
                format!("az://{account}/{}/{}{version}", self.bucket, self.key)
            }
            _ => spec.to_owned(),
        };
        let hash = blake3::hash(name.as_bytes()).to_hex();
        let hash = hash.get(..HASH_DIGITS).unwrap_or_default();
        let endpoint = endpoint.text.as_deref().unwrap_or_default();
        let canonical = format!("{}@{}#{hash}", redact(&name), redact(endpoint));
        Location::with_canonical(&redact(spec), canonical)
    }
}

/// Splits the name of an object behind its scheme into the bucket and the key. `None` if there is no key, not even an
/// empty one.
pub(crate) fn split_bucket(name: &str) -> Option<(&str, &str)> {
    let (bucket, key) = name.split_once('/')?;
    if !bucket.starts_with("arn:") || !bucket.ends_with(":accesspoint") {
        return Some((bucket, key));
    }
    let (point, key) = key.split_once('/')?;
    Some((name.get(..bucket.len() + 1 + point.len())?, key))
}

/// An access point of S3, which has a host of its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct AccessPoint {
    /// Its name and account, as the first label of its host.
    pub(super) label: String,
    pub(super) region: String,
}

impl AccessPoint {
    /// Parses `arn:PARTITION:s3:REGION:ACCOUNT:accesspoint/NAME`. One of several regions has no region, and needs other
    /// signatures.
    fn parse(arn: &str) -> Option<Self> {
        let mut words = arn.split([':', '/']);
        let is_s3 = words.next() == Some("arn")
            && words.next()?.starts_with("aws")
            && words.next() == Some("s3");
        let (region, account) = (words.next()?, words.next()?);
        let is_point = words.next() == Some("accesspoint");
        let (name, rest) = (words.next()?, words.next());
        let is_label = |text: &str| {
            let is_byte =
                |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            !text.is_empty() && text.bytes().all(is_byte)
        };
        let is_valid = is_s3 && is_point && rest.is_none();
        let is_valid = is_valid && is_label(region) && is_number(account) && is_label(name);
        is_valid.then(|| Self {
            label: format!("{name}-{account}"),
            region: region.to_owned(),
        })
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Address of an object store.
pub(super) struct Endpoint {
    /// URL that the user gives, in place of the cloud's endpoint.
    text: Option<String>,
    /// Whether a variable of the cloud's own tools names it, and not the user's option.
    pub(super) is_of_environment: bool,
}

impl Endpoint {
    /// The endpoint that the user's `option` names, or one of the variables, which `configured` reads.
    pub(super) fn new(
        option: Option<&String>,
        configured: impl FnOnce() -> Option<String>,
    ) -> Self {
        Self {
            text: option.cloned().or_else(configured),
            is_of_environment: option.is_none(),
        }
    }

    /// The user's URL, if there is one. A URL that is not HTTP, or that has secrets, is [`Cause::Malformed`].
    pub(super) fn url(&self) -> Result<Option<Url>, Cause> {
        let is_valid = |url: &Url| is_server_url(url) && url.fragment().is_none();
        let text = "the endpoint of an object store must be an http:// or https:// URL";
        let malformed = || Cause::Malformed(text.to_owned());
        let parse = |text: &String| Url::parse(text).ok().filter(is_valid).ok_or_else(malformed);
        self.text.as_ref().map(parse).transpose()
    }

    /// The user's URL, or else `default`.
    pub(super) fn url_or(&self, default: &str) -> Result<Url, Cause> {
        let default = || Url::parse(default).map_err(|error| Cause::Malformed(error.to_string()));
        self.url()?.map_or_else(default, Ok)
    }
}

/// URL of the path `name`, which is not percent-encoded, below `base`.
pub(super) fn url_below(base: &Url, name: &str) -> Url {
    let base_path = base.path().trim_end_matches('/');
    let path = format!("{base_path}/{}", utf8_percent_encode(name, ENCODED));
    let mut url = base.clone();
    url.set_path(&path);
    url
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(spec: &str) -> Option<(&str, &str, Option<&str>)> {
        let object = Object::parse(spec)?.ok()?;
        let (_, version) = object.version.unzip();
        Some((object.bucket, object.key, version))
    }

    // Promises: store-s3, store-gcs, store-names
    #[test]
    fn object_names_are_taken_literally() {
        assert_eq!(parse("s3://b/a/k.tar"), Some(("b", "a/k.tar", None)));
        assert_eq!(parse("s3://b/k?x=1"), Some(("b", "k?x=1", None)));
        assert_eq!(
            parse("s3://b/k%20?versionId=V"),
            Some(("b", "k%20", Some("V")))
        );
        assert_eq!(parse("gs://b/a/k#17"), Some(("b", "a/k", Some("17"))));
        assert_eq!(parse("gs://b/k#a?b"), Some(("b", "k#a?b", None)));
        for scheme in ["s3", "gs"] {
            for name in [
                "b/", "/k", "user@b/k", "b/a/../k", "b/./k", "b/..", "../b/k",
            ] {
                assert_eq!(parse(&format!("{scheme}://{name}")), None, "{name}");
            }
        }
        assert!(Object::parse("http://b/k").is_none());
    }

    // Promises: store-arn
    #[test]
    fn access_points_are_buckets() {
        let arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint/p";
        let key = format!("s3://{arn}/a/k.tar?versionId=V");
        assert_eq!(parse(&key), Some((arn, "a/k.tar", Some("V"))));
        let colon = "arn:aws:s3:eu-west-1:123456789012:accesspoint:p";
        assert_eq!(parse(&format!("s3://{colon}/k")), Some((colon, "k", None)));
        for arn in [arn, colon] {
            let point = AccessPoint::parse(arn).expect("valid");
            assert_eq!(
                (&*point.label, &*point.region),
                ("p-123456789012", "eu-west-1")
            );
        }
        for other in [
            "arn:aws:s3::123456789012:accesspoint/m.mrap",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/p.evil",
            "arn:aws:s3:eu-west-1:me:accesspoint/p",
            "arn:aws:s3-outposts:eu-west-1:123456789012:accesspoint/p",
            "arn:aws:s3:eu-west-1:123456789012:bucket/p",
        ] {
            assert_eq!(parse(&format!("s3://{other}/k")), None, "{other}");
        }
        assert_eq!(parse(&format!("gs://{arn}/k")), None);
        assert_eq!(split_bucket(arn), None);
    }

    // Promises: store-azure, store-hadoop
    #[test]
    fn both_names_of_a_blob_are_one_object() {
        let canonical = |spec: &str| {
            let object = Object::parse(spec)?.ok()?;
            let endpoint = Endpoint::new(None, || None);
            Some(object.location(spec, &endpoint).canonical().to_owned())
        };
        let canonical_of_blob = canonical("az://me/data/a/b.tar");
        assert!(canonical_of_blob.is_some());
        for scheme in ["abfs", "abfss"] {
            let name = format!("{scheme}://data@me.dfs.core.windows.net/a/b.tar");
            assert_eq!(canonical(&name), canonical_of_blob);
        }
        for name in [
            "az://me/data",
            "az://me/data/",
            "az://Me.evil/data/a",
            "az://me/da@ta/a",
            "az://me/../a",
            "abfss://data@me.dfs.example.com/a",
            "abfss://me.dfs.core.windows.net/a",
            "abfss://a:b@me.dfs.core.windows.net/a",
        ] {
            assert_eq!(canonical(name), None, "{name}");
        }
        assert_ne!(canonical("az://me/$web/a/b.tar"), None);
        let blob = "abfss://data@me.blob.core.windows.net/a/b.tar";
        assert_eq!(canonical(blob), canonical_of_blob);
        for cloud in AZURE_CLOUDS.iter().skip(1) {
            let other = canonical(&format!("abfss://data@me.dfs.{cloud}/a/b.tar"));
            assert!(other.is_some() && other != canonical_of_blob, "{cloud}");
        }
        let version = canonical("az://me/data/a/b.tar?versionid=1");
        assert!(version.is_some_and(|version| Some(version) != canonical_of_blob));
    }

    // Promises: store-azure
    #[test]
    fn versions_are_parameters_of_urls() {
        for (spec, expected) in [
            ("s3://b/k?versionId=1+2", "http://h/b/k?versionId=1%2B2"),
            ("gs://b/k#17", "http://h/b/k?generation=17"),
            (
                "az://a/b/k?snapshot=2024-05-01T00:00:00.1Z",
                "http://h/b/k?snapshot=2024-05-01T00%3A00%3A00.1Z",
            ),
            (
                "abfss://b@a.dfs.core.windows.net/k?versionid=1",
                "http://h/b/k?versionid=1",
            ),
            ("az://a/b/k?other=1", "http://h/b/k%3Fother%3D1"),
        ] {
            let object = Object::parse(spec).and_then(Result::ok).expect("valid");
            let bucket = Url::parse("http://h/b").expect("well-formed");
            assert_eq!(object.url(&bucket).as_str(), expected);
        }
    }

    // Promises: store-names
    #[test]
    fn object_names_are_encoded_in_urls() {
        for (base, expected) in [
            ("http://h:9000", "http://h:9000/b/a%20%23%3F%25/%C3%A9"),
            ("https://h/base/", "https://h/base/b/a%20%23%3F%25/%C3%A9"),
        ] {
            let base = Url::parse(base).expect("well-formed");
            assert_eq!(url_below(&base, "b/a #?%/é").as_str(), expected);
        }
    }
}
