//! The error that a server describes in the body of an error response; pure.

use serde::Deserialize;

use crate::base::escape::is_control;

/// Maximum length of an error code.
const MAX_CODE_LEN: usize = 64;

/// Maximum length of an error message.
const MAX_MESSAGE_LEN: usize = 200;

/// Maximum length of a word of a message. A longer one may be a secret that the server repeats.
const MAX_WORD_LEN: usize = 40;

/// The same for a URL without a query.
const MAX_URL_LEN: usize = 80;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct ServerError {
    /// Its code, such as `AccessDenied`.
    pub(crate) code: Option<String>,
    /// Its message, if it is short and has no secrets.
    pub(crate) message: Option<String>,
    /// The region that the request should be for.
    pub(crate) region: Option<String>,
}

/// Body of a registry's error response, and of a token server's.
#[derive(Deserialize)]
struct JsonErrors {
    #[serde(default)]
    errors: Vec<JsonError>,
    details: Option<String>,
    message: Option<String>,
}

#[derive(Deserialize, Default)]
struct JsonError {
    code: Option<String>,
    message: Option<String>,
}

impl ServerError {
    /// Finds code and message in `body`: XML in object stores, JSON in registries.
    pub(crate) fn parse(body: &[u8]) -> Self {
        let text = String::from_utf8_lossy(body);
        let element = |name| element(&text, name).map(str::to_owned);
        let from_xml = || (element("Code"), element("Message"));
        let (code, message) = from_json(body).unwrap_or_else(from_xml);
        Self {
            code: code.filter(|code| is_code(code)),
            message: message.filter(|message| is_presentable(message)),
            region: element("Region"),
        }
    }
}

fn from_json(body: &[u8]) -> Option<(Option<String>, Option<String>)> {
    let found: JsonErrors = serde_json::from_slice(body).ok()?;
    let first = found.errors.into_iter().next().unwrap_or_default();
    let message = first.message.or(found.message).or(found.details);
    Some((first.code, message))
}

/// The text of the first element `name` of XML.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (content, _) = rest.split_once(&format!("</{name}>"))?;
    Some(content)
}

fn is_code(code: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"_.".contains(&byte);
    !code.is_empty() && code.len() <= MAX_CODE_LEN && code.bytes().all(is_valid)
}

fn is_presentable(message: &str) -> bool {
    !message.is_empty()
        && message.len() <= MAX_MESSAGE_LEN
        && !message.contains(is_control)
        && message.split(' ').all(|word| {
            let is_plain_url = word.starts_with("https://") && !word.contains(['?', '@', '#']);
            word.len()
                <= if is_plain_url {
                    MAX_URL_LEN
                } else {
                    MAX_WORD_LEN
                }
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> (Option<String>, Option<String>) {
        let found = ServerError::parse(body.as_bytes());
        (found.code, found.message)
    }

    #[test]
    fn error_is_found_in_xml_and_json() {
        let both = |code: &str, message: &str| {
            let message = (!message.is_empty()).then(|| message.to_owned());
            (Some(code.to_owned()), message)
        };
        let xml = "<?xml version=\"1.0\"?><Error><Code>NoSuchKey</Code></Error>";
        assert_eq!(parse(xml), both("NoSuchKey", ""));
        let xml = "<Error><Code>KMS.DisabledException</Code><Message>it is off</Message></Error>";
        assert_eq!(parse(xml), both("KMS.DisabledException", "it is off"));
        let xml = "<Error><Code>A</Code><Region>eu-west-1</Region></Error>";
        let region = ServerError::parse(xml.as_bytes()).region;
        assert_eq!(region.as_deref(), Some("eu-west-1"));
        let limit = "pull rate limit. https://www.docker.com/increase-rate-limit/of-docker-hub";
        let json =
            serde_json::json!({ "errors": [{ "code": "TOOMANYREQUESTS", "message": limit }] });
        assert_eq!(parse(&json.to_string()), both("TOOMANYREQUESTS", limit));
        let json = r#"{"errors":[{"code":"DENIED","message":"no access","detail":[1]}]}"#;
        assert_eq!(parse(json), both("DENIED", "no access"));
        let token = r#"{"details":"incorrect username or password"}"#;
        let message = "incorrect username or password".to_owned();
        assert_eq!(parse(token), (None, Some(message)));
        for empty in ["", "no", "{}", "[1]", r#"{"errors":[]}"#] {
            assert_eq!(parse(empty), (None, None), "{empty}");
        }
    }

    // Promises: login-errors
    #[test]
    fn error_text_that_may_be_a_secret_or_a_command_is_dropped() {
        for message in [
            "a".repeat(41),
            format!("https://example.com/{}", "a".repeat(80)),
            "https://example.com/?token=hunter2hunter2hunter2".to_owned(),
            "a ".repeat(101),
            "\u{1b}[2J".to_owned(),
            "two\nlines".to_owned(),
        ] {
            let body = serde_json::json!({ "errors": [{ "code": "a b", "message": message }] });
            assert_eq!(parse(&body.to_string()), (None, None), "{message}");
        }
    }
}
