//! The kind of credentials that a registry asks for; pure.

use http_auth::ChallengeParser;
use reqwest::header::{HeaderMap, WWW_AUTHENTICATE};
use url::Url;

/// Maximum length of a header with challenges.
const MAX_HEADER_LEN: usize = 4 << 10;

/// A challenge of `WWW-Authenticate`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Challenge {
    /// User and password in each request.
    Basic,
    /// A token of a server.
    Bearer(TokenServer),
}

/// A server of tokens, as a registry names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct TokenServer {
    /// URL of the server.
    pub(super) realm: Url,
    /// The registry's name there.
    pub(super) service: Option<String>,
    /// Scope of the token, if it is only to pull.
    pub(super) scope: Option<String>,
}

impl Challenge {
    /// Finds the best challenge of a response: a token's, or else that of a password. A registry with TLS may
    /// not name a token server without it, if not `allows_http`.
    pub(super) fn parse(headers: &HeaderMap, allows_http: bool) -> Option<Self> {
        let mut found = None;
        for header in headers.get_all(WWW_AUTHENTICATE) {
            let text = header.to_str().ok();
            let text = text.filter(|text| text.len() <= MAX_HEADER_LEN);
            let text = single_blanks(text.unwrap_or_default());
            for challenge in ChallengeParser::new(&text).flatten() {
                let value = |wanted: &str| {
                    let mut params = challenge.params.iter();
                    let param = params.find(|(name, _)| name.eq_ignore_ascii_case(wanted));
                    param.map(|(_, value)| value.to_unescaped())
                };
                if challenge.scheme.eq_ignore_ascii_case("Basic") {
                    found = found.or(Some(Self::Basic));
                } else if challenge.scheme.eq_ignore_ascii_case("Bearer")
                    && let Some(realm) =
                        value("realm").and_then(|realm| parse_realm(&realm, allows_http))
                {
                    return Some(Self::Bearer(TokenServer {
                        realm,
                        service: value("service"),
                        scope: value("scope").filter(|scope| is_pull_scope(scope)),
                    }));
                }
            }
        }
        found
    }
}

/// Shortens blanks outside of quotes to one. RFC 9110 (11.3) permits several, and the parser does not.
fn single_blanks(text: &str) -> String {
    let (mut is_quoted, mut last) = (false, ' ');
    let mut shortened = String::new();
    for letter in text.chars() {
        // A quote behind a backslash is a letter.
        is_quoted ^= letter == '"' && !(is_quoted && last == '\\');
        let is_further_blank = !is_quoted && last == ' ' && letter == ' ';
        if !is_further_blank {
            shortened.push(letter);
        }
        last = if last == '\\' && letter == '\\' {
            ' '
        } else {
            letter
        };
    }
    shortened
}

fn parse_realm(realm: &str, allows_http: bool) -> Option<Url> {
    let url = Url::parse(realm).ok()?;
    let is_secure = url.scheme() == "https" || allows_http && url.scheme() == "http";
    (is_secure && url.has_host() && url.username().is_empty()).then_some(url)
}

/// Whether a token with `scope` can only read one repository.
fn is_pull_scope(scope: &str) -> bool {
    scope.starts_with("repository:") && scope.ends_with(":pull") && !scope.contains(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(headers: &[&str], allows_http: bool) -> Option<Challenge> {
        let mut map = HeaderMap::new();
        for &header in headers {
            map.append(WWW_AUTHENTICATE, header.parse().expect("valid"));
        }
        Challenge::parse(&map, allows_http)
    }

    fn bearer(realm: &str, service: Option<&str>, scope: Option<&str>) -> Challenge {
        Challenge::Bearer(TokenServer {
            realm: Url::parse(realm).expect("valid"),
            service: service.map(str::to_owned),
            scope: scope.map(str::to_owned),
        })
    }

    #[test]
    fn challenge_for_a_token_is_preferred() {
        let scope = "repository:a/b:pull";
        let token = format!(
            r#"Bearer realm="https://auth.example.com/token?x=1",service="a \"b\"",scope="{scope}""#
        );
        let found = bearer(
            "https://auth.example.com/token?x=1",
            Some("a \"b\""),
            Some(scope),
        );
        assert_eq!(parse(&[&token], false).as_ref(), Some(&found));
        let two = parse(&["Basic realm=\"x\"", &token], false);
        assert_eq!(two.as_ref(), Some(&found));
        let both = format!("Basic realm=\"x\", {token}");
        assert_eq!(parse(&[&both], false).as_ref(), Some(&found));
        let blanks = token.replacen("Bearer ", "  Bearer   ", 1);
        assert_eq!(parse(&[&blanks], false), Some(found));
        let lower = "bearer realm=\"https://example.com\"";
        assert_eq!(
            parse(&[lower], false),
            Some(bearer("https://example.com", None, None))
        );
    }

    #[test]
    fn challenge_for_a_password_is_found_without_a_token_server() {
        for headers in [
            &["Basic realm=\"x\""][..],
            &["Negotiate, Basic realm=\"x\""],
            &["Bearer realm=\"ftp://example.com\"", "basic realm=x"],
        ] {
            assert_eq!(parse(headers, false), Some(Challenge::Basic), "{headers:?}");
        }
        for headers in [
            &[][..],
            &["Digest realm=\"x\""],
            &["Bearer service=\"x\""],
            &["Bearer realm=\"https://me:secret@example.com\""],
            &["\"\"\"\"", "====", ",,,,"],
            &[&format!("Basic realm=\"{}\"", "a".repeat(5000))],
        ] {
            assert_eq!(parse(headers, true), None, "{headers:?}");
        }
    }

    // Promises: login-tokens
    #[test]
    fn token_server_without_tls_needs_a_registry_without_tls() {
        let header = "Bearer realm=\"http://example.com/token\"";
        assert_eq!(parse(&[header], false), None);
        let found = bearer("http://example.com/token", None, None);
        assert_eq!(parse(&[header], true), Some(found));
    }

    // Promises: login-tokens
    #[test]
    fn scope_that_allows_more_than_pull_is_ignored() {
        for scope in [
            "repository:a:pull,push",
            "repository:a:push",
            "repository:a:pull repository:b:push",
            "registry:catalog:*",
        ] {
            let header = format!("Bearer realm=\"https://example.com\",scope=\"{scope}\"");
            let found = bearer("https://example.com", None, None);
            assert_eq!(parse(&[&header], false), Some(found));
        }
    }
}
