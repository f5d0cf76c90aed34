//! Meaning of a response's status and headers; pure.

use std::time::Duration;

use percent_encoding::{AsciiSet, percent_encode};
use reqsign_core::time::Timestamp;
use reqwest::StatusCode;
use reqwest::header::{self, HeaderMap, HeaderName};

use crate::source::{Cause, Denial, Fingerprint, Validator};

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ResponseHead {
    pub(crate) status: u16,
    pub(crate) range: Option<ContentRange>,
    pub(crate) content_len: Option<u64>,
    pub(crate) validator: Validator,
    pub(crate) redirect: Option<String>,
    pub(crate) retry_after: Option<Duration>,
    /// Codings of the body, without labels that name none.
    encoding: Option<String>,
    /// Details of a denial, if credentials were looked for.
    pub(crate) denial: Option<Denial>,
    /// Code and message of the error that the body describes, if that was read.
    pub(crate) error: (Option<String>, Option<String>),
}

impl ResponseHead {
    /// Parses `headers`. `now` is in seconds since the epoch, for a server that sends no date.
    pub(crate) fn new(status: StatusCode, headers: &HeaderMap, now: u64) -> Self {
        let number = |name| header_text(headers, name).and_then(|text| parse_digits(text.trim()));
        Self {
            status: status.as_u16(),
            range: header_text(headers, header::CONTENT_RANGE).and_then(ContentRange::parse),
            content_len: number(header::CONTENT_LENGTH),
            validator: Validator::from_http(
                header_text(headers, header::ETAG),
                header_text(headers, header::LAST_MODIFIED),
            ),
            redirect: status
                .is_redirection()
                .then(|| {
                    headers
                        .get(header::LOCATION)
                        .map(|place| ascii_url(place.as_bytes()))
                })
                .flatten(),
            retry_after: retry_after(headers, now),
            encoding: codings(headers),
            denial: None,
            error: (None, None),
        }
    }

    /// Fingerprint of the whole.
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        let len = match self.range {
            Some(ContentRange::Part { total, .. } | ContentRange::Unsatisfied { total }) => total,
            None if self.is_whole() => self.content_len,
            None => None,
        };
        Fingerprint {
            len,
            validator: self.validator.clone(),
        }
    }

    /// Whether the body is all of the source. A proxy that changed headers answers with 203.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.status, 200 | 203)
    }

    /// Whether it may be an answer of a server that does not support ranges.
    pub(crate) fn refuses_range(&self) -> bool {
        self.denial.is_none() && matches!(self.status, 206 | 400 | 416 | 501)
    }

    /// Range of a 206, half-open and never empty.
    pub(crate) fn content_range(&self) -> Result<(u64, u64), Cause> {
        match self.range {
            Some(ContentRange::Part { start, end, .. }) => Ok((start, end)),
            _ => Err(Cause::Protocol(
                "the server sends a part without saying which (no Content-Range)".to_owned(),
            )),
        }
    }

    /// Content-Encoding of the stored bytes, which some servers send for a `.tar.gz`. Ranges stay encoded.
    pub(crate) fn stored_encoding(&self) -> Result<Option<&str>, Cause> {
        match self.encoding.as_deref() {
            Some(encoding) if !STORED_ENCODINGS.contains(&encoding) => {
                Err(unexpected_encoding(encoding))
            }
            encoding => Ok(encoding),
        }
    }

    /// Checks that the encoding is that of the first response, or none, which means the same bytes.
    pub(crate) fn check_encoding(&self, first: Option<&str>) -> Result<(), Cause> {
        match self.encoding.as_deref() {
            Some(encoding) if first != Some(encoding) => Err(unexpected_encoding(encoding)),
            _ => Ok(()),
        }
    }

    pub(crate) fn failure_cause(&self) -> Cause {
        let cause = Cause::from_status(self.status, self.retry_after);
        let (code, message) = self.error.clone();
        let cause = cause.with_error(self.status, code, message);
        match &self.denial {
            Some(denial) if !cause.is_transient() => Cause::Denied(Box::new(denial.clone())),
            _ => cause,
        }
    }

    /// Whether the response may be about `version`, so that a 412 does not prove that it is gone.
    pub(crate) fn permits(&self, version: &Fingerprint) -> bool {
        self.validator == Validator::None || self.validator == version.validator
    }

    /// Whether a resolved URL may have expired while the original one still works. Object stores and CDNs
    /// report that by any client error, except those about the request itself or its rate.
    pub(crate) fn may_be_expired_url(&self) -> bool {
        matches!(self.status, 400..=499) && !matches!(self.status, 408 | 412 | 416 | 425 | 429)
    }
}

/// Codings of archives, which are decoded by what their bytes are.
const STORED_ENCODINGS: [&str; 9] = [
    "gzip", "x-gzip", "zstd", "bzip2", "x-bzip2", "xz", "x-xz", "lz4", "x-lz4",
];

/// Codings that no archive has.
const OTHER_ENCODINGS: [&str; 7] = [
    "br",
    "compress",
    "x-compress",
    "deflate",
    "dcb",
    "dcz",
    "exi",
];

/// The codings that `Content-Encoding` lists. It may also have labels of stores and uploads, such as `aws-chunked`,
/// `utf-8` or `x-tar`, which say nothing about the bytes.
fn codings(headers: &HeaderMap) -> Option<String> {
    let values = headers.get_all(header::CONTENT_ENCODING).iter();
    let words = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(','));
    let words = words.map(|word| word.trim().to_ascii_lowercase());
    let is_coding = |word: &String| {
        let mut known = STORED_ENCODINGS.iter().chain(&OTHER_ENCODINGS);
        known.any(|coding| coding == word)
    };
    let codings: Vec<_> = words.filter(is_coding).collect();
    (!codings.is_empty()).then(|| codings.join(", "))
}

/// A URL whose bytes beyond ASCII are percent-encoded, as browsers and curl send them.
fn ascii_url(bytes: &[u8]) -> String {
    const LETTERS: &AsciiSet = &AsciiSet::EMPTY;
    percent_encode(bytes, LETTERS).to_string()
}

fn unexpected_encoding(encoding: &str) -> Cause {
    Cause::Protocol(format!(
        "the server sends Content-Encoding: {encoding} although identity was asked for"
    ))
}

/// Parses `Retry-After` (RFC 9110, 10.2.3): seconds, or a date relative to the server's `Date`, if any.
fn retry_after(headers: &HeaderMap, now: u64) -> Option<Duration> {
    let pause = header_text(headers, header::RETRY_AFTER)?.trim();
    let seconds = parse_digits(pause).or_else(|| {
        let told = header_text(headers, header::DATE).and_then(parse_http_date);
        Some(parse_http_date(pause)?.saturating_sub(told.unwrap_or(now)))
    });
    seconds.map(Duration::from_secs)
}

/// Parses an IMF-fixdate (RFC 9110, 5.6.7) to seconds since the epoch. A leap second counts as the second before.
fn parse_http_date(text: &str) -> Option<u64> {
    let time = Timestamp::parse_rfc2822(text).ok()?;
    // Mail has dates of other forms, too.
    let is_strict = time.format_http_date() == text.replace(":60 GMT", ":59 GMT");
    u64::try_from(time.as_second()).ok().filter(|_| is_strict)
}

fn header_text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

fn parse_digits(text: &str) -> Option<u64> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ContentRange {
    /// `bytes 0-9/100`
    Part {
        start: u64,
        /// Greater than `start`.
        end: u64,
        /// At least `end`; `None` if the server does not know it.
        total: Option<u64>,
    },
    /// `bytes */100`: no requested byte exists.
    Unsatisfied {
        /// Length of the whole.
        total: Option<u64>,
    },
}

impl ContentRange {
    /// Parses the header; `None` for other units and contradictory values.
    pub(crate) fn parse(value: &str) -> Option<Self> {
        let (unit, rest) = value.trim().split_once([' ', '='])?;
        let (range, total) = rest.trim().split_once('/')?;
        let total = match total {
            "*" => None,
            total => Some(parse_digits(total)?),
        };
        if !unit.eq_ignore_ascii_case("bytes") {
            return None;
        }
        if range == "*" {
            return Some(Self::Unsatisfied { total });
        }
        let (first, last) = range.split_once('-')?;
        let (start, end) = (parse_digits(first)?, parse_digits(last)?.checked_add(1)?);
        (start < end && total.is_none_or(|total| end <= total)).then_some(Self::Part {
            start,
            end,
            total,
        })
    }
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;

    #[test]
    fn http_date_is_parsed_to_unix_seconds() {
        for (text, expected) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777),
            ("Tue, 29 Feb 2000 23:59:59 GMT", 951_868_799),
            ("Sat, 31 Dec 2016 23:59:60 GMT", 1_483_228_799),
            ("Thu, 30 Dec 9999 21:59:59 GMT", 253_402_207_199),
        ] {
            assert_eq!(parse_http_date(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn malformed_http_date_is_rejected() {
        for text in [
            "",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
            "Mon, 06 Nov 1994 08:49:37 GMT",
            "Sun, 6 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:37 UTC",
            "Sun, 06 Nov 1994 08:49:37 GMT ",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 06 Nov 1994 08:60:37 GMT",
            "Sun, 06 Nov 1994 08:49:61 GMT",
            "Sun, 06 Nov 1994 08:49 GMT",
            "Sun, 06 Nov 1994 08:49:37:00 GMT",
            "Wed, 31 Nov 1994 08:49:37 GMT",
            "Mon, 29 Feb 2100 00:00:00 GMT",
            "Wed, 31 Dec 1969 23:59:59 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, +6 Nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(parse_http_date(text), None, "{text}");
        }
    }

    /// Fri, 31 Dec 1999 23:59:00 GMT.
    const NOW: u64 = 946_684_740;

    fn head(status: u16, headers: &[(&'static str, &'static str)]) -> ResponseHead {
        let headers = headers
            .iter()
            .map(|&(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect();
        let status = StatusCode::from_u16(status).expect("a status");
        ResponseHead::new(status, &headers, NOW)
    }

    #[test]
    fn content_range_is_parsed() {
        assert_eq!(
            ContentRange::parse("bytes 5-9/100"),
            Some(ContentRange::Part {
                start: 5,
                end: 10,
                total: Some(100)
            })
        );
        assert_eq!(
            ContentRange::parse("Bytes 0-0/*"),
            Some(ContentRange::Part {
                start: 0,
                end: 1,
                total: None
            })
        );
        assert_eq!(
            ContentRange::parse("bytes=5-9/100"),
            ContentRange::parse("bytes 5-9/100")
        );
        assert_eq!(
            ContentRange::parse("bytes */7"),
            Some(ContentRange::Unsatisfied { total: Some(7) })
        );
    }

    #[test]
    fn contradictory_content_range_is_rejected() {
        for value in [
            "",
            "bytes",
            "bytes 5-4/100",
            "bytes 0-100/100",
            "bytes -5/100",
            "bytes 0-/100",
            "bytes 0-9",
            "lines 0-9/100",
            "bytes +0-9/100",
            "bytes 0-18446744073709551615/*",
        ] {
            assert_eq!(ContentRange::parse(value), None, "{value}");
        }
    }

    #[test]
    fn source_length_is_not_taken_from_a_part() {
        let part = head(
            206,
            &[("content-length", "10"), ("content-range", "bytes 0-9/*")],
        );
        assert_eq!(part.fingerprint().len, None);
        let part = head(
            206,
            &[("content-length", "10"), ("content-range", "bytes 0-9/55")],
        );
        assert_eq!(part.fingerprint().len, Some(55));
        assert_eq!(
            head(200, &[("content-length", "10")]).fingerprint().len,
            Some(10)
        );
        assert_eq!(
            head(416, &[("content-length", "10")]).fingerprint().len,
            None
        );
    }

    // Promises: http-encoding
    #[test]
    fn content_encodings_of_stored_archives_are_pinned() {
        let encoded = |encoding| head(206, &[("content-encoding", encoding)]);
        assert_eq!(head(206, &[]).stored_encoding().ok(), Some(None));
        assert_eq!(encoded("identity").stored_encoding().ok(), Some(None));
        assert_eq!(
            encoded("X-GZIP").stored_encoding().ok(),
            Some(Some("x-gzip"))
        );
        for refused in ["br", "deflate", "gzip, gzip"] {
            let cause = encoded(refused)
                .stored_encoding()
                .expect_err("no archive is packed so");
            assert!(cause.to_string().contains(refused), "{cause}");
        }
        for (label, coding) in [
            ("aws-chunked", None),
            ("none", None),
            ("binary", None),
            ("UTF-8", None),
            ("x-tar, utf-8", None),
            ("gzip,aws-chunked", Some("gzip")),
            ("identity, x-xz", Some("x-xz")),
            ("lz4", Some("lz4")),
        ] {
            assert_eq!(
                encoded(label).stored_encoding().ok(),
                Some(coding),
                "{label}"
            );
        }
        assert!(encoded("gzip").check_encoding(Some("gzip")).is_ok());
        assert!(encoded("gzip").check_encoding(None).is_err());
        assert!(encoded("gzip").check_encoding(Some("x-gzip")).is_err());
        assert!(head(206, &[]).check_encoding(Some("gzip")).is_ok());
        assert!(head(206, &[]).check_encoding(None).is_ok());
    }

    #[test]
    fn http_status_maps_to_a_cause() {
        assert!(matches!(
            head(403, &[]).failure_cause(),
            Cause::DeniedStatus(403)
        ));
        assert!(matches!(head(410, &[]).failure_cause(), Cause::NotFound));
        assert!(matches!(head(412, &[]).failure_cause(), Cause::Changed));
        assert!(matches!(head(500, &[]).failure_cause(), Cause::Http(500)));
    }

    // Promises: retry-pauses
    #[test]
    fn retry_after_is_parsed_as_seconds_and_as_date() {
        let after = |headers: &[_]| {
            let head = head(503, headers);
            head.retry_after.map(|pause| pause.as_secs())
        };
        let until = ("retry-after", "Fri, 31 Dec 1999 23:59:59 GMT");
        assert_eq!(after(&[]), None);
        assert_eq!(after(&[("retry-after", "7")]), Some(7));
        assert_eq!(after(&[("retry-after", "-7")]), None);
        assert_eq!(after(&[("retry-after", "soon")]), None);
        assert_eq!(after(&[until]), Some(59), "by our clock");
        let date = |date| after(&[until, ("date", date)]);
        assert_eq!(date("Fri, 31 Dec 1999 23:59:57 GMT"), Some(2), "by its own");
        assert_eq!(date("Sat, 01 Jan 2000 00:00:00 GMT"), Some(0), "over");
        assert_eq!(date("nonsense"), Some(59));
    }
}
