//! Passwords of HTTP servers in a netrc file, which has the format that curl reads.

use std::path::PathBuf;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use url::Url;

use super::context::read_file;
use crate::source::client::authorizer::HeaderLoader;

/// Name of the header with the credentials.
const AUTHORIZATION: &str = "authorization";

/// The entry of one host in a netrc file.
#[derive(Clone, Debug)]
pub(crate) struct Netrc {
    path: PathBuf,
    host: String,
    /// Whether the entry for every host is used. Without TLS, any server on the way could get it.
    allows_default: bool,
}

impl Netrc {
    /// The entry in the file at `path` for the host of `url`; `None` if the URL has a user or a password.
    pub(crate) fn new(path: PathBuf, url: &Url) -> Option<Self> {
        let host = url.host_str()?.trim_matches(['[', ']']).to_owned();
        let has_user = !url.username().is_empty() || url.password().is_some();
        let allows_default = url.scheme() == "https";
        (!has_user).then_some(Self {
            path,
            host,
            allows_default,
        })
    }

    /// Name of the file, for errors.
    pub(crate) fn file(&self) -> String {
        self.path.display().to_string()
    }

    /// Reads the file, and returns the value of the header; `None` without an entry or a regular file.
    pub(crate) fn authorization(&self) -> Option<String> {
        // `NETRC=/dev/null` means no file.
        if !self.path.is_file() {
            return None;
        }
        let read = read_file(&self.path);
        let warn = |error: &_| tracing::warn!("cannot read {}: {error}", self.file());
        let bytes = read.inspect_err(warn).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        let (login, password) = find(&text, &self.host, self.allows_default)?;
        let credentials = BASE64_STANDARD.encode(format!("{login}:{password}"));
        Some(format!("Basic {credentials}"))
    }

    /// Loads the header of this entry, besides those that `others` loads.
    pub(crate) fn loader(self, others: HeaderLoader) -> HeaderLoader {
        HeaderLoader::new(move || {
            let mut headers = others.load()?;
            let is_set = |(name, _): &(String, String)| name.eq_ignore_ascii_case(AUTHORIZATION);
            if !headers.iter().any(is_set) {
                let value = self.authorization();
                let missing = || format!("{} has no entry for {}", self.file(), self.host);
                headers.push((AUTHORIZATION.to_owned(), value.ok_or_else(missing)?));
            }
            Ok(headers)
        })
    }
}

/// Finds login and password for `host` in the text of a netrc file.
///
/// As in curl, the first entry counts, and `default` is for every host, if it is allowed.
fn find(text: &str, host: &str, allows_default: bool) -> Option<(String, String)> {
    let mut tokens = tokens(text).into_iter().peekable();
    while let Some(token) = tokens.next() {
        let is_for_host = match token.as_str() {
            "machine" => tokens.next()?.eq_ignore_ascii_case(host),
            "default" => allows_default,
            _ => continue,
        };
        let (mut login, mut password) = (None, None);
        while let Some(token) = tokens.next_if(|token| !matches!(&**token, "machine" | "default")) {
            match token.as_str() {
                "login" => login = tokens.next(),
                "password" => password = tokens.next(),
                "account" => drop(tokens.next()),
                _ => {}
            }
        }
        if is_for_host && (login.is_some() || password.is_some()) {
            return Some((login.unwrap_or_default(), password.unwrap_or_default()));
        }
    }
    None
}

/// Splits the text of a netrc file into words, without comments and macros.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let mut rest = line.trim_start();
        if rest.starts_with('#') {
            continue;
        }
        while !rest.is_empty() {
            let (token, after) = next_token(rest);
            if token == "macdef" {
                // The macro ends at an empty line.
                lines.by_ref().find(|line| line.is_empty());
                break;
            }
            tokens.push(token);
            rest = after.trim_start();
        }
    }
    tokens
}

/// Returns the first word of `text`, which may be in double quotes, and the text after it.
fn next_token(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(char::is_whitespace).unwrap_or(text.len());
        let (token, rest) = text.split_at(end);
        return (token.to_owned(), rest);
    };
    let (mut token, mut chars) = (String::new(), quoted.chars());
    while let Some(next) = chars.next().filter(|&next| next != '"') {
        let escaped = (next == '\\').then(|| chars.next());
        token.extend(escaped.unwrap_or(Some(next)));
    }
    (token, chars.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# machine example.com login none password none
machine example.com login me password one
machine Other.example.com
    login me account x
    password \"a \\\"b\\\\ #c\"
macdef init
machine macro.example.com login none

machine example.com login you password two machine empty.example.com
default login anonymous password guest";

    fn find_in(text: &str, host: &str) -> Option<String> {
        find(text, host, true).map(|(login, password)| format!("{login}:{password}"))
    }

    // Promises: auth-netrc
    #[test]
    fn default_entry_of_netrc_is_only_for_tls() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "default login me password one").expect("written");
        let authorization = |url: &str| {
            let url = Url::parse(url).expect("well-formed");
            let netrc = Netrc::new(file.path().to_owned(), &url);
            netrc.expect("no user").authorization()
        };
        assert_eq!(authorization("http://example.com/a"), None);
        let sent = authorization("https://example.com/a");
        assert_eq!(sent.as_deref(), Some("Basic bWU6b25l"));
    }

    // Promises: auth-netrc
    #[test]
    fn netrc_entry_of_the_host_is_found() {
        for (host, expected) in [
            ("example.com", "me:one"),
            ("EXAMPLE.com", "me:one"),
            ("other.example.com", "me:a \"b\\ #c"),
            ("macro.example.com", "anonymous:guest"),
            ("empty.example.com", "anonymous:guest"),
        ] {
            let found = find_in(TEXT, host);
            assert_eq!(found.as_deref(), Some(expected), "{host}");
        }
        for text in ["", "machine", "machine a", "login b password c", "\"\\"] {
            assert_eq!(find_in(text, "a"), None, "{text}");
        }
        assert_eq!(find_in("machine a login", "a"), None);
        let token = find_in("machine a login token", "a");
        assert_eq!(token.as_deref(), Some("token:"));
    }

    // Promises: auth-netrc
    #[test]
    fn netrc_is_not_read_for_urls_with_a_user() {
        let netrc = |url: &str| Netrc::new(PathBuf::new(), &Url::parse(url).expect("well-formed"));
        assert!(netrc("http://me:secret@example.com/a").is_none());
        assert!(netrc("http://me@example.com/a").is_none());
        let found = netrc("http://[::1]:80/a").expect("an entry");
        assert_eq!(found.host, "::1");
    }
}
