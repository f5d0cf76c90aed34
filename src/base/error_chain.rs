//! Errors as one line of text.

use std::error::Error;

use super::escape::escape_controls;
use super::redact::redact_urls;

/// Formats an error and its causes on one line, each once and without the numbers of system errors.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for error in std::iter::successors(Some(error), |&error| error.source()) {
        let next = strip_errno(error.to_string());
        // Some libraries print their cause and also return it as the source.
        if text.is_empty() {
            text = next;
        } else if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
    }
    escape_controls(&redact_urls(text.trim_end()))
}

fn strip_errno(mut text: String) -> String {
    const MARK: &str = " (os error ";
    if let Some(at) = text.rfind(MARK)
        && let Some(tail) = text.get(at + MARK.len()..)
        && tail
            .strip_suffix(')')
            .is_some_and(|number| number.parse::<i32>().is_ok())
    {
        text.truncate(at);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Outer(&'static str, #[source] io::Error);

    // Promises: error-line
    #[test]
    fn each_cause_is_printed_once_and_without_its_number() {
        let cause = || io::Error::from_raw_os_error(111);
        assert_eq!(
            error_chain(&Outer("cannot connect", cause())),
            "cannot connect: Connection refused"
        );
        assert_eq!(
            error_chain(&Outer("cannot connect: Connection refused", cause())),
            "cannot connect: Connection refused"
        );
    }
}
