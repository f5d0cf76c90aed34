//! Lists of the artifacts that refer to a manifest; pure.

use reqwest::header::{HeaderMap, LINK};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use url::Url;

use super::documents::{Descriptor, OCI_INDEX};
use crate::base::sha256::Sha256;
use crate::source::Cause;
use crate::source::client::MAX_ANSWER_BYTES;

/// Artifact type of the indexes of an image's layers.
pub const INDEX_ARTIFACT_TYPE: &str = "application/vnd.tarfs.index.v1";

/// Media type of an index in such an artifact.
pub const INDEX_BLOB_TYPE: &str = "application/vnd.tarfs.index.v1+zstd";

const EMPTY_LIST: &[u8] = br#"{"schemaVersion":2,"manifests":[]}"#;

/// Maximum number of referrers that are returned.
const MAX_REFERRERS: usize = 64;

/// A list of manifests, whose entries are parsed one by one.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct List<'a> {
    schema_version: u32,
    media_type: Option<String>,
    #[serde(borrow)]
    manifests: Vec<&'a RawValue>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    annotations: Option<&'a RawValue>,
}

impl<'a> List<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let bytes = (bytes.len() <= MAX_ANSWER_BYTES).then_some(bytes)?;
        let list: Self = serde_json::from_slice(bytes).ok()?;
        (list.schema_version == 2).then_some(list)
    }
}

/// The first artifacts of `artifact_type` in the list `bytes`; `None` if it is no list.
pub(super) fn parse_referrers(bytes: &[u8], artifact_type: &str) -> Option<Vec<Descriptor>> {
    let entries = List::parse(bytes)?.manifests.into_iter();
    let parsed = entries.filter_map(|entry| Descriptor::parse(entry.get()).ok());
    let wanted = parsed.filter(|entry| entry.artifact_type.as_deref() == Some(artifact_type));
    Some(wanted.take(MAX_REFERRERS).collect())
}

/// URL of the page after the one at `url`, which the header `Link` names (RFC 8288), on the same server.
pub(super) fn next_page(headers: &HeaderMap, url: &Url) -> Option<Url> {
    let links = headers.get_all(LINK).into_iter();
    let mut links = links
        .filter_map(|links| links.to_str().ok())
        .flat_map(|links| links.split(','));
    let target = links.find_map(|link| {
        let (target, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
        let mut parameters = parameters.split(';').map(str::trim);
        let is_next = |parameter: &str| matches!(parameter, r#"rel="next""# | "rel=next");
        parameters.any(is_next).then_some(target)
    })?;
    let next = url.join(target).ok()?;
    (next.origin() == url.origin()).then_some(next)
}

/// Tag with the list of referrers of `subject`, in registries without an API for it.
pub(super) fn fallback_tag(subject: Sha256) -> String {
    format!("sha256-{subject}")
}

/// Returns the list `old`, or an empty one, with `entry` in place of the entries of its type. If `old` is no list, the
/// error is [`Cause::Damaged`].
pub(super) fn with_referrer(old: Option<&[u8]>, entry: &Descriptor) -> Result<Vec<u8>, Cause> {
    let old = old.unwrap_or(EMPTY_LIST);
    let mut list = List::parse(old).ok_or_else(|| {
        let text = "the tag for its referrers has something else, which is left there";
        Cause::Damaged(text.to_owned())
    })?;
    list.manifests.retain(|other| {
        let other = Descriptor::parse(other.get());
        other.map_or(true, |other| other.artifact_type != entry.artifact_type)
    });
    let unwritable = |error: serde_json::Error| Cause::Malformed(error.to_string());
    let entry = serde_json::value::to_raw_value(entry).map_err(unwritable)?;
    list.manifests.push(&entry);
    list.media_type = Some(OCI_INDEX.to_owned());
    serde_json::to_vec(&list).map_err(unwritable)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPE: &str = "application/x-tests";

    fn entry(number: u8, artifact_type: Option<&str>) -> Descriptor {
        Descriptor {
            artifact_type: artifact_type.map(str::to_owned),
            ..Descriptor::new("m", Sha256([number; 32]), 7)
        }
    }

    fn referrers(list: &str) -> Option<Vec<Descriptor>> {
        parse_referrers(list.as_bytes(), TYPE)
    }

    #[test]
    fn referrers_of_one_type_are_found_among_unusable_entries() {
        let text = |entry: &Descriptor| serde_json::to_string(entry).expect("JSON");
        let (wanted, other) = (entry(1, Some(TYPE)), entry(2, Some("x")));
        let (plain, sha512) = (entry(3, None), text(&wanted).replace("sha256:", "sha512:"));
        let list = format!(
            r#"{{"schemaVersion":2,"x":[],"manifests":[1,{{}},{},{},{sha512},{}]}}"#,
            text(&other),
            text(&wanted),
            text(&plain),
        );
        assert_eq!(referrers(&list), Some(vec![wanted.clone()]));
        let many = format!("{},", text(&wanted)).repeat(100);
        let list = format!(
            r#"{{"schemaVersion":2,"manifests":[{many}{}]}}"#,
            text(&wanted)
        );
        assert_eq!(referrers(&list).map(|found| found.len()), Some(64));
        let long = format!(
            r#"{{"schemaVersion":2,"manifests":[{}1]}}"#,
            "1,".repeat(1 << 20)
        );
        for malformed in [
            "",
            "[]",
            "<html>",
            r#"{"schemaVersion":1,"manifests":[]}"#,
            &long,
        ] {
            assert_eq!(referrers(malformed), None);
        }
    }

    #[test]
    fn referrer_replaces_those_of_its_type_and_no_others() {
        let first = with_referrer(None, &entry(1, Some(TYPE))).expect("JSON");
        let text = str::from_utf8(&first).expect("UTF-8");
        assert_eq!(referrers(text), Some(vec![entry(1, Some(TYPE))]));
        let old = r#"{"schemaVersion":2,"annotations":{"a":"b"},"manifests":[{"x": [1]},OLD]}"#;
        let older = serde_json::to_string(&entry(1, Some(TYPE))).expect("JSON");
        let old = old.replace("OLD", &format!("{older},{older}"));
        let new = with_referrer(Some(old.as_bytes()), &entry(2, Some(TYPE))).expect("JSON");
        let text = str::from_utf8(&new).expect("UTF-8");
        assert_eq!(referrers(text), Some(vec![entry(2, Some(TYPE))]));
        assert!(
            text.contains(r#"{"x": [1]}"#) && text.contains(r#"{"a":"b"}"#),
            "{text}"
        );
        for other in ["", "{}", r#"{"schemaVersion":2,"layers":[]}"#] {
            let refused = with_referrer(Some(other.as_bytes()), &entry(1, None));
            assert!(matches!(refused, Err(Cause::Damaged(_))));
        }
    }
}
