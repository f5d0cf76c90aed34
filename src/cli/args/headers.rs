//! Arguments without their secrets, such as the values of `--header`.
//!
//! All users can list the arguments of a process. A secret is safer in a file (`--header @FILE`) or in the
//! environment, which only its user can read.

use std::ffi::OsString;

const HEADER_FLAG: &str = "--header";
const REDACTED: &str = "…";

/// Returns `words` without the values of headers and without secrets in URLs.
pub(crate) fn redact_arguments(words: &[OsString]) -> Vec<OsString> {
    let mut is_header = false;
    let show = |word: &OsString| {
        let text = word.to_string_lossy();
        let value = text
            .strip_prefix(HEADER_FLAG)
            .and_then(|rest| rest.strip_prefix('='));
        let shown = match value {
            Some(value) if !value.starts_with('@') => format!("{HEADER_FLAG}={REDACTED}"),
            _ if is_header && !text.starts_with('@') => REDACTED.to_owned(),
            _ => tarfs::source::redact(&text),
        };
        is_header = text == HEADER_FLAG;
        shown.into()
    };
    words.iter().map(show).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: secret-hidden
    #[test]
    fn arguments_are_redacted_of_headers_and_url_secrets() {
        let words = [
            "mount",
            "--header=A: hunter2",
            "--header=@/file",
            "--header",
            "B: hunter2",
            "--header",
            "@/file",
            "--layer=https://me:hunter2@host/a.tar",
            "tar:https://host/a.tar?token=hunter2!/b.tar",
            "https://host/a.tar",
            "/mnt",
        ];
        let shown = redact_arguments(&words.map(OsString::from));
        let expected = [
            "mount",
            "--header=…",
            "--header=@/file",
            "--header",
            "…",
            "--header",
            "@/file",
        ];
        assert_eq!(shown.get(..7), Some(&expected.map(OsString::from)[..]));
        assert_eq!(
            shown.get(9..),
            Some(&["https://host/a.tar", "/mnt"].map(OsString::from)[..])
        );
        assert!(!format!("{shown:?}").contains("hunter2"), "{shown:?}");
    }
}
