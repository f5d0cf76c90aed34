//! Names and texts without the secrets of URLs, also of URLs that are spelled wrong.
//!
//! A user and a password end at the last `@` of the authority. If what looks like a port is no number, the
//! password may have a slash, and ends at the last `@` before the query. Queries and fragments are hidden.

/// Schemes of URLs that may lack their colon or a slash. A name with `oci:` or `file:` is a path.
const SCHEMES: [&str; 13] = [
    "http", "https", "s3", "s3a", "s3n", "gs", "gcs", "az", "abfs", "abfss", "wasb", "wasbs",
    "docker",
];
/// Schemes of data lakes, where the name before the `@` is a container.
const LAKES: [&str; 4] = ["abfs", "abfss", "wasb", "wasbs"];
/// Schemes whose names may have a tag where others have a port.
const REGISTRIES: [&str; 2] = ["oci", "docker"];
/// Query parameters with signatures or credentials, in lower case. Their values change for the same bytes.
const SECRETS: [&str; 22] = [
    "access_token",
    "awsaccesskeyid",
    "expires",
    "googleaccessid",
    "key-pair-id",
    "policy",
    "se",
    "ses",
    "sig",
    "signature",
    "sip",
    "ske",
    "skoid",
    "sks",
    "skt",
    "sktid",
    "skv",
    "sp",
    "spr",
    "sr",
    "st",
    "sv",
];
/// Prefixes of such parameters, in lower case.
const SECRET_PREFIXES: [&str; 4] = ["x-amz-", "x-goog-", "x-oss-", "x-cos-"];
/// Characters of a message before a name.
const QUOTES: [char; 4] = ['(', '\'', '"', '`'];
/// Characters of a message behind a name.
const PUNCTUATION: [char; 8] = [':', ',', ';', ')', '?', '\'', '"', '`'];

/// Where a URL starts in a name.
#[derive(Clone, Copy)]
struct UrlStart<'a> {
    scheme: &'a str,
    /// Start of the scheme.
    start: usize,
    /// Start of what is behind the scheme, its colon and slashes.
    authority: usize,
}

/// Returns `name`, such as a SOURCE, without users, passwords, queries and fragments of its URLs.
pub fn redact(name: &str) -> String {
    let mut urls = Urls::of(name);
    let Some(mut url) = urls.next() else {
        let query = name.find('?').filter(|_| host_of_path(name).is_some());
        let has_secret = |query: &str| query.split('&').any(is_secret);
        let signed = query.filter(|&query| has_secret(slice(name, query + 1, name.len())));
        return signed.map_or(name.to_owned(), |query| {
            slice(name, 0, query).to_owned() + "?…"
        });
    };
    let mut shown = String::with_capacity(name.len());
    let before = slice(name, 0, url.start);
    let parts = before.rfind(',').map_or(0, |comma| comma + 1);
    let (parts, before) = before.split_at(parts);
    // A password before the scheme may have a slash.
    let is_user = |&at: &usize| {
        let is_path = before.starts_with(['/', '.']) || at + 1 < before.len();
        !(is_path && before.contains('/'))
    };
    let user = before.rfind('@').filter(is_user);
    let prefix = slice(before, user.map_or(0, |at| at + 1), before.len());
    shown.extend([parts, prefix]);
    loop {
        let is_after_query = urls.is_after_query;
        let next = urls.next();
        let end = next.map_or(name.len(), |next| next.start);
        shown.push_str(slice(name, url.start, url.authority));
        let rest = slice(name, url.authority, end);
        // The URL of a file without a host is a path.
        let is_path = slice(name, url.start, url.authority).eq_ignore_ascii_case("file:///");
        push_rest(&mut shown, url.scheme, rest, (is_path, is_after_query));
        let Some(next) = next else {
            return shown;
        };
        if urls.is_after_query && !shown.ends_with(',') {
            shown.push(',');
        }
        url = next;
    }
}

/// Returns a message without the secrets of its URLs, as [`redact`] does.
pub fn redact_urls(text: &str) -> String {
    let (mut redacted, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(start) = rest.find(|next: char| !next.is_whitespace()) {
        let words = slice(rest, start, rest.len()).trim_start_matches(QUOTES);
        let before = slice(rest, 0, rest.len() - words.len());
        let (name, others) = words.split_at(name_len(words));
        let (name, punctuation) = name.split_at(name.trim_end_matches(PUNCTUATION).len());
        redacted.push_str(before);
        redacted.push_str(&redact(name));
        redacted.push_str(punctuation);
        rest = others;
    }
    redacted + rest
}

/// Whether `name` begins as a URL, perhaps a misspelled one. A path with a URL in it does not.
pub(crate) fn has_scheme(name: &str) -> bool {
    let (first, _) = name.split_once(':').unwrap_or_default();
    let is_url = |url: UrlStart<'_>| !slice(name, 0, url.start).contains('/');
    is_one_of(first, &SCHEMES) || Urls::of(name).next().is_some_and(is_url)
}

/// Returns the authority of `name` and its host, if `name` looks like a URL without a scheme.
pub(crate) fn host_of_path(name: &str) -> Option<(&str, &str)> {
    let (authority, _) = name.split_once('/')?;
    let host = match authority.rsplit_once(':') {
        Some((host, port)) => port.parse::<u16>().is_ok().then_some(host)?,
        None => authority,
    };
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_label = |label: &str| !label.is_empty() && label.bytes().all(is_letter);
    // Addresses are names of this form, too.
    let is_host = host == "localhost" || host.contains('.') && host.split('.').all(is_label);
    is_host.then_some((authority, host))
}

/// Whether the parameter `pair` of a query has a signature or a credential.
pub(crate) fn is_secret(pair: &str) -> bool {
    let name = pair
        .split('=')
        .next()
        .unwrap_or_default()
        .to_ascii_lowercase();
    SECRETS.contains(&name.as_str())
        || name == "token"
        || SECRET_PREFIXES
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

fn slice(text: &str, start: usize, end: usize) -> &str {
    text.get(start..end).unwrap_or_default()
}

fn is_one_of(scheme: &str, schemes: &[&str]) -> bool {
    schemes.iter().any(|one| one.eq_ignore_ascii_case(scheme))
}

/// The URLs of a list, and those in the paths of others, but none in a query, which is hidden.
struct Urls<'a> {
    name: &'a str,
    /// Where the search goes on.
    from: usize,
    /// Offset of the first `?` or `#` behind the last URL; the length without any.
    query: usize,
    /// Whether the last URL is behind a query.
    is_after_query: bool,
    /// Offset of the last `@`, if there is one.
    last_user: Option<usize>,
    /// Offset of the last `?`, if there is one.
    last_query: Option<usize>,
    /// Whether a comma may separate URLs, as in `join:`.
    is_list: bool,
}

impl<'a> Urls<'a> {
    fn of(name: &'a str) -> Self {
        Self {
            name,
            from: 0,
            query: 0,
            is_after_query: false,
            last_user: name.rfind('@'),
            last_query: name.rfind('?'),
            is_list: false,
        }
    }

    /// Finds the first URL from `self.from` on. Behind the first URL, any `://` belongs to one. In a path, an unknown
    /// scheme and a misspelled one are parts of the path.
    fn find_next(&self) -> Option<UrlStart<'a>> {
        let text = slice(self.name, self.from, self.name.len());
        let mut is_path = self.from > 0;
        for (at, separator) in text.match_indices([':', '/', ',']) {
            let (before, mark) = text.split_at(at);
            let is_any = mark.starts_with("://") && (self.from > 0 || !is_path);
            let before = if mark.starts_with("//") {
                // A wrong character may be in place of the colon.
                let wrong = |last: char| !last.is_ascii_alphanumeric() && last != '/';
                before.strip_suffix(wrong).unwrap_or(before)
            } else {
                before
            };
            let is_letter = |last: char| last.is_ascii_alphanumeric();
            let start = before.trim_end_matches(is_letter).len();
            let scheme = before.split_at(start).1;
            let is_known = || is_one_of(scheme, &SCHEMES);
            let is_misspelled =
                mark.starts_with(":/") || !is_path && self.is_bare(self.from + at, scheme, mark);
            if is_any || is_misspelled && is_known() {
                let behind = mark.strip_prefix(':').unwrap_or(mark);
                return Some(UrlStart {
                    scheme,
                    start: self.from + start,
                    authority: self.name.len() - behind.trim_start_matches('/').len(),
                });
            }
            is_path = separator == "/" || is_path && separator != ",";
        }
        None
    }

    /// Whether a scheme may end at the offset `at`, although its colon or slashes are missing.
    fn is_bare(&self, at: usize, scheme: &str, mark: &str) -> bool {
        if !mark.starts_with(':') {
            return mark.starts_with("//");
        }
        let user = self.last_user.filter(|&user| user > at);
        let has_password = user.is_some_and(|user| slice(self.name, at + 1, user).contains(':'));
        let has_query = self.last_query.is_some_and(|query| query > at);
        let has_secret = is_one_of(scheme, &["http", "https"]) || has_password || has_query;
        has_secret && !mark.starts_with("::")
    }
}

impl<'a> Iterator for Urls<'a> {
    type Item = UrlStart<'a>;

    fn next(&mut self) -> Option<UrlStart<'a>> {
        let is_first = self.from == 0;
        while let Some(next) = self.find_next() {
            self.from = next.authority;
            let before = slice(self.name, 0, next.start);
            self.is_list |= is_first && before.contains("join:");
            let is_in_list = self.is_list && before.ends_with(',') && !before.ends_with("\\,");
            let is_hidden = self.is_after_query || !is_first && self.query < next.start;
            if is_hidden && !is_in_list {
                continue;
            }
            self.is_after_query = is_hidden;
            if is_first || self.query < next.authority {
                let rest = slice(self.name, next.authority, self.name.len());
                let query = rest.find(['?', '#']);
                self.query = query.map_or(self.name.len(), |query| next.authority + query);
            }
            return Some(next);
        }
        None
    }
}

/// Adds the part of a URL behind its scheme, up to the next URL. Behind a query, also hides what may belong to it.
fn push_rest(
    shown: &mut String,
    scheme: &str,
    rest: &str,
    (is_path, is_after_query): (bool, bool),
) {
    let query = rest.find(['?', '#']).unwrap_or(rest.len());
    let authority = if is_path { "" } else { authority(rest) };
    let is_whole = !has_other_port(authority.rsplit('@').next().unwrap_or_default());
    let users = if is_whole {
        authority
    } else {
        slice(rest, 0, query)
    };
    let user = user_len(users);
    if !is_whole && user_len(rest) > user {
        shown.push('…');
        return;
    }
    let container = rest.split([':', '@']).next().unwrap_or_default();
    let place = match user {
        Some(at) if is_one_of(scheme, &LAKES) => {
            shown.push_str(container);
            slice(rest, at, rest.len())
        }
        Some(at) => slice(rest, at + 1, rest.len()),
        None => rest,
    };
    let ends: &[char] = if is_after_query {
        &['?', '#', '&', ',']
    } else {
        &['?', '#']
    };
    let (place, hidden) = place.split_at(place.find(ends).unwrap_or(place.len()));
    shown.push_str(place);
    shown.push_str(match hidden.chars().next() {
        Some('?') => "?…",
        Some('#') => "#…",
        Some('&') => "…",
        Some(',') if hidden != "," => ",…",
        _ => "",
    });
}

fn authority(rest: &str) -> &str {
    rest.split(['/', '?', '#']).next().unwrap_or_default()
}

/// Length of the user and password, which the last `@` ends that begins no digest.
fn user_len(text: &str) -> Option<usize> {
    let mut ends = text.rmatch_indices('@').map(|(at, _)| at);
    let is_digest = |at: usize| {
        let digest = slice(text, at + 1, text.len()).split_once(':');
        matches!(digest, Some(("sha256" | "sha384" | "sha512", _)))
    };
    ends.find(|&at| !is_digest(at))
}

/// Whether something else than a port is behind the host, perhaps a part of a password.
fn has_other_port(authority: &str) -> bool {
    let address = authority
        .rsplit_once(']')
        .filter(|_| authority.starts_with('['));
    let behind_address = address.map_or(authority, |parts| parts.1);
    let port = behind_address.split_once(':').map(|(_, port)| port);
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    port.is_some_and(|port| !is_port(port)) && !authority.starts_with("arn:")
}

/// Length of the name at the start of `text`: a word, or more if a password may have blanks.
fn name_len(text: &str) -> usize {
    let len = word_len(text);
    let word = slice(text, 0, len).trim_end_matches(PUNCTUATION);
    if word.contains('@') {
        return len;
    }
    let Some(url) = Urls::of(word).last() else {
        return len;
    };
    let authority = authority(slice(word, url.authority, word.len()));
    if !has_other_port(authority) || is_one_of(url.scheme, &REGISTRIES) {
        return len;
    }
    let line = text.lines().next().unwrap_or_default();
    let end = line.rfind('@');
    end.map_or(len, |at| at + word_len(slice(text, at, text.len())))
}

/// Length of the word at the start of `text`, in which blanks may be escaped.
fn word_len(text: &str) -> usize {
    let mut is_escaped = false;
    let is_end = |next: char| {
        let is_end = next.is_whitespace() && !is_escaped;
        is_escaped = next == '\\' && !is_escaped;
        is_end
    };
    text.find(is_end).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, and the same without secrets.
    const NAMES: [(&str, &str); 73] = [
        ("a:b@c", "a:b@c"),
        ("az:1@2.tar", "az:1@2.tar"),
        ("az:acct/c/a.tar?sig=secret", "az:acct/c/a.tar?…"),
        ("s3:k:secret@b/c", "s3:b/c"),
        ("https;//me:secret@h/a", "https;//h/a"),
        ("https://me:/secret@h/a", "https://h/a"),
        ("https://me:p]w/secret@h/a", "https://h/a"),
        ("/mnt/s3//team@prod/a.tar", "/mnt/s3//team@prod/a.tar"),
        ("/srv/http:2024@host.tar", "/srv/http:2024@host.tar"),
        ("s3://b/az//x@y", "s3://b/az//x@y"),
        ("d/http:me@h.txt", "d/http:me@h.txt"),
        (
            "join:alice@2024.tar,http://h/c",
            "join:alice@2024.tar,http://h/c",
        ),
        (
            "join:http://h/a?next=1\\,http://t/secret,b",
            "join:http://h/a?…",
        ),
        ("HTTP::A@B", "HTTP::A@B"),
        ("/d/x://u@b.tar?c", "/d/x://u@b.tar?c"),
        ("tar:/d/x://u@b.tar", "tar:/d/x://u@b.tar"),
        ("file:///a@b/c?d", "file:///a@b/c?…"),
        ("file:///a@b/c#d", "file:///a@b/c#…"),
        ("file://me:secret@h/a", "file://h/a"),
        ("h.com/a.tar?sig=secret", "h.com/a.tar?…"),
        ("h.com/a.html?id=3", "h.com/a.html?id=3"),
        ("https://me:secret@sharp.com/a", "https://sharp.com/a"),
        ("https://me:secret@sha256/a", "https://sha256/a"),
        ("localhost:80/a.tar?sig=secret", "localhost:80/a.tar?…"),
        ("https://me@corp.com:SEC#RET@h/a", "https://…"),
        ("https://me@corp.com:SEC/RET@h/a", "https://h/a"),
        ("KEY:SE/CRET@s3://b/k", "s3://b/k"),
        ("tar:KEY:SE/C@https://h/a!/b", "https://h/a!/b"),
        ("/d@a/x@s3://b", "/d@a/x@s3://b"),
        (
            "https://h/zip?u=https://a/x,https://b/secret",
            "https://h/zip?…",
        ),
        ("https://h/a?sig=x,http:secret", "https://h/a?…"),
        ("docker://debian@sha512:00", "docker://debian@sha512:00"),
        ("data.d/part?.tar", "data.d/part?.tar"),
        ("./h.com/a?b=c", "./h.com/a?b=c"),
        ("tar:HTTP://H:80/a b!/c", "tar:HTTP://H:80/a b!/c"),
        ("http://server/pkg@1.2.tar", "http://server/pkg@1.2.tar"),
        ("http://[::1]:8080/a@b.tar", "http://[::1]:8080/a@b.tar"),
        (
            "https://me:pw@h.com/pkg@1/a?b@c&secret",
            "https://h.com/pkg@1/a?…",
        ),
        ("http://h:80/a#secret", "http://h:80/a#…"),
        ("http://:secret@h:80/a?secret", "http://h:80/a?…"),
        ("oci-archive:http://me:secret@h/a", "oci-archive:http://h/a"),
        (
            "--layer=tar:http://me:secret@h/a!/b",
            "--layer=tar:http://h/a!/b",
        ),
        ("me:secret@tar:http://h/a", "tar:http://h/a"),
        ("ht_tp://me:secret@h/a", "ht_tp://h/a"),
        ("ht\ntp://me:secret@h/a", "ht\ntp://h/a"),
        ("http:me:secret@h", "http:h"),
        ("http:/me:secret@h", "http:/h"),
        ("http//me:secret@h", "http//h"),
        ("s3:/k:secret@b/c", "s3:/b/c"),
        ("/cwd/https:/me:secret@h/a", "/cwd/https:/h/a"),
        ("https:/secret@h/a?next=https://b", "https:/h/a?…"),
        ("https://me:se/cr/et@h/a?b", "https://h/a?…"),
        ("https://me:se cret@h/a b", "https://h/a b"),
        ("https://h:8O/a?m=b@c&secret", "https://…"),
        (
            "https://p.com/https://me:secret@h/k",
            "https://p.com/https://h/k",
        ),
        (
            "s3://arn:aws:s3:r:1:accesspoint/p/k@1",
            "s3://arn:aws:s3:r:1:accesspoint/p/k@1",
        ),
        (
            "s3://arn:aws:s3:r:1:accesspoint/p/k?secret",
            "s3://arn:aws:s3:r:1:accesspoint/p/k?…",
        ),
        ("docker://debian:stable", "docker://debian:stable"),
        (
            "docker://debian:stable@sha256:00",
            "docker://debian:stable@sha256:00",
        ),
        ("docker://me:secret@debian:stable", "docker://debian:stable"),
        ("oci://h:80/a:1@sha256:00", "oci://h:80/a:1@sha256:00"),
        ("oci://me:secret@h/a:1@sha256:00", "oci://h/a:1@sha256:00"),
        ("oci://me:secret@sha256:00@h/a", "oci://h/a"),
        ("oci://me:se/cret@h/a?secret", "oci://h/a?…"),
        ("abfss://data@h/a", "abfss://data@h/a"),
        ("wasbs://data:secret@h/a?m=b@c&secret", "wasbs://data@h/a?…"),
        (
            "tar:join:a,http://me:secret@h/b,http://h/c!/d",
            "tar:join:a,http://h/b,http://h/c!/d",
        ),
        (
            "join:http://h/a,http:/me:secret@h/b",
            "join:http://h/a,http:/h/b",
        ),
        ("/a.tar,https://me:secret@h/b", "/a.tar,https://h/b"),
        (
            "join:http://h/a?b,secret,http://h/c",
            "join:http://h/a?…,http://h/c",
        ),
        (
            "join:http://h/a?b,http://h/c,secret",
            "join:http://h/a?…,http://h/c,…",
        ),
        (
            "h/a?u=b,https://h/c?d,https://h/e&secret",
            "h/a?u=b,https://h/c?…",
        ),
        ("join:s3:/a@b,s3://b", "join:s3:/b,s3://b"),
    ];

    // Promises: helper-table, auth-origin, secret-hidden
    #[test]
    fn secrets_of_urls_are_hidden_and_all_else_is_shown() {
        for (name, shown) in NAMES {
            assert_eq!(redact(name), shown);
            assert_eq!(redact(shown), shown, "once more");
            if !name.contains([' ', '\n']) {
                assert_eq!(
                    redact_urls(&format!("'{name}': failed")),
                    format!("'{shown}': failed")
                );
            }
        }
    }

    // Promises: error-line, secret-hidden
    #[test]
    fn words_around_urls_are_shown() {
        for (text, shown) in [
            ("did you mean https://h/a?", "did you mean https://h/a?"),
            ("(https://h/a?secret, or b@c)", "(https://h/a?…, or b@c)"),
            ("https://me:se cret@h/k: no", "https://h/k: no"),
            ("docker://debian:x: ask b@c", "docker://debian:x: ask b@c"),
            ("http: ask b@c\n a", "http: ask b@c\n a"),
            ("http://h/a\\ b?secret\\ c: no", "http://h/a\\ b?…: no"),
        ] {
            assert_eq!(redact_urls(text), shown);
        }
    }
}
