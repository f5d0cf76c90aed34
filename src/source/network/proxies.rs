//! Proxies that an environment names.

use std::fmt;
use std::sync::Arc;

use hyper_util::client::proxy::matcher::Matcher;
use reqwest::Url;

use crate::base::environment::Environment;

/// URLs of two hosts that no list of exceptions names.
const ANY_URLS: [&str; 2] = ["http://name.invalid", "https://name.invalid"];

/// Schemes of proxies.
const SCHEMES: [&str; 6] = ["http", "https", "socks4", "socks4a", "socks5", "socks5h"];

/// Proxies for the schemes `http` and `https`.
pub(super) struct Proxies {
    http: Option<Url>,
    https: Option<Url>,
    /// Decides which hosts are asked through a proxy.
    matcher: Matcher,
}

impl fmt::Debug for Proxies {
    /// Omits users and passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.matcher.fmt(f)
    }
}

impl Proxies {
    /// The proxies of the variables `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`, which may also be in capitals.
    /// `None` without any, or if `no_proxy` is `*`. For curl that is every host, and the crate takes it for every name.
    pub(super) fn of(environment: &Environment) -> Option<Arc<Self>> {
        if environment.variable("REQUEST_METHOD").is_some() {
            // The header `Proxy` of a request to a CGI program is in a variable of this name.
            return None;
        }
        let variable = |name: &str| {
            let capital = environment.text(&name.to_ascii_uppercase());
            capital.or_else(|| environment.text(name))
        };
        let all = variable("all_proxy");
        let of_scheme = |name| {
            let own = variable(name).and_then(|text| parse(&text));
            own.or_else(|| parse(all.as_deref()?))
        };
        let (http, https) = (of_scheme("http_proxy"), of_scheme("https_proxy"));
        let text = |url: &Option<Url>| url.as_ref().map(Url::to_string).unwrap_or_default();
        let matcher = Matcher::builder()
            .http(text(&http))
            .https(text(&https))
            .no(variable("no_proxy").unwrap_or_default())
            .build();
        let proxies = Self {
            http,
            https,
            matcher,
        };
        let is_used = proxies.urls().next().is_some();
        is_used.then(|| Arc::new(proxies))
    }

    /// The proxy for requests to `url`.
    pub(super) fn find(&self, url: &Url) -> Option<&Url> {
        self.matcher.intercept(&url.as_str().parse().ok()?)?;
        match url.scheme() {
            "https" => self.https.as_ref(),
            _ => self.http.as_ref(),
        }
    }

    /// The URLs of all proxies that are used for some host.
    pub(super) fn urls(&self) -> impl Iterator<Item = &Url> {
        let any = ANY_URLS.iter().filter_map(|url| Url::parse(url).ok());
        any.filter_map(|url| self.find(&url))
    }
}

/// The URL of a proxy, whose scheme may be missing.
fn parse(text: &str) -> Option<Url> {
    let has_scheme = text.contains("://");
    let text = if has_scheme {
        text.to_owned()
    } else {
        format!("http://{text}")
    };
    let url = Url::parse(&text).ok().filter(Url::has_host)?;
    SCHEMES.contains(&url.scheme()).then_some(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Option<Arc<Proxies>> {
        let variables = variables.iter();
        let variables = variables.map(|&(name, value)| (name.into(), value.into()));
        Proxies::of(&Environment::new(variables, "/".into()))
    }

    fn proxy_of(url: &str, variables: &[(&str, &str)]) -> Option<String> {
        let url = Url::parse(url).expect("well-formed");
        Some(proxies(variables)?.find(&url)?.to_string())
    }

    // Promises: proxy-environment
    #[test]
    fn each_scheme_has_its_proxy() {
        let variables = [("http_proxy", "a:1"), ("all_proxy", "https://u:p@b:2")];
        let shown = |url: &str| proxy_of(url, &variables);
        assert_eq!(shown("http://h/x").as_deref(), Some("http://a:1/"));
        assert_eq!(shown("https://h/x").as_deref(), Some("https://u:p@b:2/"));
        let capitals = [("HTTP_PROXY", "http://c"), ("http_proxy", "http://a")];
        assert_eq!(
            proxy_of("http://h", &capitals).as_deref(),
            Some("http://c/")
        );
        assert_eq!(proxy_of("https://h", &capitals), None);
        let unusable = [("http_proxy", "ftp://x"), ("all_proxy", "http://b")];
        assert_eq!(
            proxy_of("http://h", &unusable).as_deref(),
            Some("http://b/")
        );
        let shown = format!("{:?}", proxies(&[("all_proxy", "http://u:secret@b")]));
        assert!(!shown.contains("secret"), "{shown}");
    }

    // Promises: proxy-environment
    #[test]
    fn exceptions_and_cgi_programs_have_none() {
        let variables = |exceptions| [("all_proxy", "http://a"), ("no_proxy", exceptions)];
        assert_eq!(proxy_of("http://h.example/x", &variables("example")), None);
        assert!(proxy_of("http://h.org/x", &variables("example")).is_some());
        assert!(proxies(&variables("*")).is_none());
        assert!(proxies(&[("http_proxy", "")]).is_none());
        assert!(proxies(&[("HTTP_PROXY", "http://a"), ("REQUEST_METHOD", "GET")]).is_none());
    }
}
