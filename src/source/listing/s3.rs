//! The objects of a bucket of S3 below a prefix (`ListObjectsV2`).

use futures_util::stream::StreamExt;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqsign_core::time::Timestamp;
use serde::Deserialize;

use super::page::{ListedArchive, Listing};
use crate::source::credentials::{object_target, split_bucket};
use crate::source::network::NetworkTransport;
use crate::source::{Cause, Http, Location, Options, Source, Target, redact};

/// Maximum number of pages of a listing, of 1,000 objects each.
const MAX_PAGES: usize = 1000;

/// Maximum length of a page. 1,000 keys of 1,024 bytes, each escaped, and their properties.
const MAX_PAGE_BYTES: usize = 8 << 20;

/// Bytes that are encoded in a value of the query, and in what is signed.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

#[derive(Debug)]
pub(super) struct S3Place {
    bucket: Target,
    /// Location of the place, with a slash at its end.
    spec: String,
    prefix: String,
    transport: NetworkTransport,
    options: Options,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListBucketResult {
    #[serde(default)]
    contents: Vec<Object>,
    is_truncated: Option<bool>,
    next_continuation_token: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Object {
    key: String,
    last_modified: String,
}

impl S3Place {
    pub(super) async fn open(spec: &str, options: &Options) -> Result<Self, Cause> {
        let slash = if spec.ends_with('/') { "" } else { "/" };
        let spec = format!("{spec}{slash}");
        let name = spec.trim_start_matches("s3://");
        let prefix = split_bucket(name).unwrap_or_default().1.to_owned();
        // The URL of an object of the place has that of the bucket before its key.
        let malformed = || Cause::Malformed("a prefix of S3 is s3://BUCKET/PREFIX/".to_owned());
        let target = object_target(&format!("{spec}-"), options).await;
        let (mut bucket, options) = target.ok_or_else(malformed)??;
        if let Ok(mut segments) = bucket.url.path_segments_mut() {
            for _ in prefix.split('/') {
                segments.pop();
            }
        }
        bucket.location = Location::from_name(&redact(&spec));
        Ok(Self {
            transport: NetworkTransport::new(&bucket.url, &options)?,
            bucket,
            spec,
            prefix,
            options,
        })
    }

    pub(super) fn location(&self, path: &str) -> String {
        format!("{}{path}", self.spec)
    }

    pub(super) async fn list(&self, listing: &mut Listing) -> Result<(), Cause> {
        let mut token = String::new();
        for _ in 0..MAX_PAGES {
            let body = self.page(&token).await?;
            match parse(&body, &self.prefix, listing)? {
                // Such a listing has no end.
                Some(next) if next == token => {
                    let text = "the listing names the same next page again";
                    return Err(Cause::Protocol(text.to_owned()));
                }
                Some(next) if !listing.is_full() => token = next,
                None if !listing.is_full() => return Ok(()),
                _ => break,
            }
        }
        listing.note_limit();
        Ok(())
    }

    /// Fetches the page that `token` names, or the first one if it is empty.
    async fn page(&self, token: &str) -> Result<Vec<u8>, Cause> {
        let encode = |text: &str| utf8_percent_encode(text, ENCODED).to_string();
        let mut query = format!("list-type=2&prefix={}", encode(&self.prefix));
        if !token.is_empty() {
            query = format!("{query}&continuation-token={}", encode(token));
        }
        let mut target = self.bucket.clone();
        target.url.set_query(Some(&query));
        let transport = Box::new(self.transport.clone());
        let opening = Http::open_through(transport, target, self.options.clone());
        let source = opening.await.map_err(|error| error.cause)?;
        let (mut pieces, mut body) = (source.stream(), Vec::new());
        while let Some(piece) = pieces.next().await {
            body.extend_from_slice(&piece.map_err(|error| error.cause)?);
            if body.len() > MAX_PAGE_BYTES {
                return Err(Cause::Protocol("the listing is too long".to_owned()));
            }
        }
        Ok(body)
    }
}

/// Adds the objects of the page `body` to `listing`, and returns the token of the next page.
pub(super) fn parse(
    body: &[u8],
    prefix: &str,
    listing: &mut Listing,
) -> Result<Option<String>, Cause> {
    let text = String::from_utf8_lossy(body);
    let invalid = || Cause::Protocol("the answer is no listing of a bucket".to_owned());
    // The deserializer accepts any name of the root.
    if !text.contains("<ListBucketResult") {
        return Err(invalid());
    }
    let found: ListBucketResult = quick_xml::de::from_str(&text).map_err(|_| invalid())?;
    for object in found.contents {
        let modified: Option<Timestamp> = object.last_modified.parse().ok();
        // A name of an object can also have a version behind a question mark.
        if let Some(path) = object.key.strip_prefix(prefix)
            && !path.contains("?versionId=")
        {
            listing.add(ListedArchive {
                path: path.to_owned(),
                modified: modified.map_or(0, Timestamp::as_second),
            });
        }
    }
    let next = found.next_continuation_token;
    let next = next.filter(|token| !token.is_empty());
    match (found.is_truncated, next) {
        (Some(true), None) => Err(Cause::Protocol(
            "the listing goes on, and the server does not say where".to_owned(),
        )),
        (Some(false), _) => Ok(None),
        (_, next) => Ok(next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: archives-listed
    #[test]
    fn listing_of_a_bucket_is_parsed() {
        let body = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
            <ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>b</Name>\
            <Prefix>p/</Prefix><KeyCount>2</KeyCount><IsTruncated>true</IsTruncated>\
            <Contents><Key>p/a &amp; b.tar</Key><LastModified>1970-01-01T00:00:09.000Z</LastModified>\
            <ETag>&quot;1&quot;</ETag><Size>7</Size><StorageClass>STANDARD</StorageClass></Contents>\
            <Contents><Key>elsewhere.tar</Key><Size>1</Size></Contents>\
            <Contents><Key>p/a?versionId=1/b.tar</Key><Size>1</Size></Contents>\
            <NextContinuationToken>t/+=</NextContinuationToken></ListBucketResult>";
        let mut listing = Listing::default();
        let next = parse(body.as_bytes(), "p/", &mut listing).expect("a listing");
        let expected = ListedArchive {
            path: "a & b.tar".to_owned(),
            modified: 9,
        };
        assert_eq!(listing.archives, [expected]);
        assert_eq!(next.as_deref(), Some("t/+="));
        let token = "<NextContinuationToken>t</NextContinuationToken>";
        let whole = format!("<IsTruncated>false</IsTruncated>{token}");
        for (content, expected) in [
            ("", Some(None)),
            (&*whole, Some(None)),
            (token, Some(Some("t"))),
            ("<IsTruncated>true</IsTruncated>", None),
            (
                "<IsTruncated>true</IsTruncated><NextMarker>a</NextMarker>",
                None,
            ),
        ] {
            let body = format!("<ListBucketResult>{content}</ListBucketResult>");
            let parsed = parse(body.as_bytes(), "", &mut listing).ok();
            assert_eq!(parsed.as_ref().map(Option::as_deref), expected, "{content}");
        }
        for wrong in [
            "",
            "{}",
            "<html><body>no",
            "<html>no</html>",
            "<!DOCTYPE a [<!ENTITY b \"c\">]><ListBucketResult>&b;",
        ] {
            assert!(
                parse(wrong.as_bytes(), "", &mut listing).is_err(),
                "{wrong}"
            );
        }
    }
}
