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
    let Some(mut url) = find_url(name, 0) else {
        return name.to_owned();
    };
    let mut shown = String::with_capacity(name.len());
    let before = slice(name, 0, url.start);
    let user = before.rfind('@').filter(|_| !before.contains('/'));
    shown.push_str(slice(before, user.map_or(0, |at| at + 1), before.len()));
    let mut is_after_query = false;
    loop {
        let next = next_url(name, &url, is_after_query);
        let end = next.map_or(name.len(), |next| next.start);
        let rest = slice(name, url.authority, end);
        shown.push_str(slice(name, url.start, url.authority));
        push_rest(&mut shown, url.scheme, rest, is_after_query);
        let Some(next) = next else {
            return shown;
        };
        is_after_query |= rest.contains(['?', '#']);
        if is_after_query && !shown.ends_with(',') {
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

/// Whether `name` is a URL, or may be one that is spelled wrong, and no path with one.
pub(crate) fn has_scheme(name: &str) -> bool {
    find_url(name, 0).is_some_and(|url| !slice(name, 0, url.start).contains('/'))
}

fn slice(text: &str, start: usize, end: usize) -> &str {
    text.get(start..end).unwrap_or_default()
}

fn is_one_of(scheme: &str, schemes: &[&str]) -> bool {
    schemes.iter().any(|one| one.eq_ignore_ascii_case(scheme))
}

/// Finds the first URL of `name` at or after `from`. Behind the first URL, any `://` belongs to one. Before it,
/// an unknown scheme may be a part of a path.
fn find_url(name: &str, from: usize) -> Option<UrlStart<'_>> {
    let text = slice(name, from, name.len());
    let mut is_path = false;
    for (at, separator) in text.match_indices([':', '/', ',']) {
        let (before, mark) = text.split_at(at);
        let start = before
            .trim_end_matches(|last: char| last.is_ascii_alphanumeric())
            .len();
        let scheme = before.split_at(start).1;
        let is_web = is_one_of(scheme, &["http", "https"]);
        let is_misspelled = mark.starts_with(":/")
            || mark.starts_with("//")
            || is_web && mark.starts_with(':') && !mark.starts_with("::");
        let is_url = mark.starts_with("://") && (from > 0 || !is_path)
            || is_misspelled && is_one_of(scheme, &SCHEMES);
        if is_url {
            let behind = mark.strip_prefix(':').unwrap_or(mark);
            let authority = name.len() - behind.trim_start_matches('/').len();
            let start = from + start;
            return Some(UrlStart {
                scheme,
                start,
                authority,
            });
        }
        is_path = separator == "/" || is_path && separator != ",";
    }
    None
}

/// Finds the next URL of a list, or the one in the path of `url`. One in a query is a part of the query.
fn next_url<'a>(name: &'a str, url: &UrlStart<'a>, is_after_query: bool) -> Option<UrlStart<'a>> {
    let rest = slice(name, url.authority, name.len());
    let query = rest.find(['?', '#']).map(|at| url.authority + at);
    let mut from = url.authority;
    while let Some(next) = find_url(name, from) {
        let is_hidden = is_after_query || query.is_some_and(|query| query < next.start);
        if !is_hidden || slice(name, 0, next.start).ends_with(',') {
            return Some(next);
        }
        from = next.authority;
    }
    None
}

/// Adds the part of a URL behind its scheme, up to the next URL. Behind a query, also hides what may belong to it.
fn push_rest(shown: &mut String, scheme: &str, rest: &str, is_after_query: bool) {
    let query = rest.find(['?', '#']).unwrap_or(rest.len());
    let authority = authority(rest);
    let may_have_slash = authority.contains('@') || !has_other_port(authority);
    let users = if may_have_slash {
        authority
    } else {
        slice(rest, 0, query)
    };
    let user = user_len(users);
    if user.is_none() && !may_have_slash && user_len(rest).is_some() {
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
    ends.find(|&at| !slice(text, at, text.len()).starts_with("@sha256:"))
}

/// Whether something else than a port is behind the host, perhaps a part of a password.
fn has_other_port(authority: &str) -> bool {
    let behind_address = authority
        .rsplit_once(']')
        .map_or(authority, |parts| parts.1);
    let (_, port) = behind_address.split_once(':').unwrap_or_default();
    !port.bytes().all(|byte| byte.is_ascii_digit()) && !authority.starts_with("arn:")
}

/// Length of the name at the start of `text`: a word, or more if a password may have blanks.
fn name_len(text: &str) -> usize {
    let len = word_len(text);
    let word = slice(text, 0, len).trim_end_matches(PUNCTUATION);
    let Some(mut url) = find_url(word, 0).filter(|_| !word.contains('@')) else {
        return len;
    };
    while let Some(next) = next_url(word, &url, false) {
        url = next;
    }
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
    const NAMES: [(&str, &str); 45] = [
        ("a:b@c", "a:b@c"),
        ("az:1@2.tar", "az:1@2.tar"),
        ("HTTP::A@B", "HTTP::A@B"),
        ("/d/x://u@b.tar?c", "/d/x://u@b.tar?c"),
        ("tar:/d/x://u@b.tar", "tar:/d/x://u@b.tar"),
        ("file:///a", "file:///a"),
        ("tar:HTTP://H:80/a b!/c", "tar:HTTP://H:80/a b!/c"),
        ("http://server/pkg@1.2.tar", "http://server/pkg@1.2.tar"),
        ("http://[::1]:8080/a@b.tar", "http://[::1]:8080/a@b.tar"),
        (
            "https://me:pw@h.com/pkg@1/a?b@c&secret",
            "https://h.com/pkg@1/a?…",
        ),
        ("http://h:80/a#secret", "http://h:80/a"),
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
            "h/a?u=b,https://h/c?…,https://h/e…",
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
