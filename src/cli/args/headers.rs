//! `--header` and `TARFS_HEADERS`: headers for the archive's host, often credentials.
//!
//! All users can list the arguments of a process. A secret is safer in a file (`--header @FILE`) or in the
//! environment, which only its user can read.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context;
use tarfs::internal::bounded_read::MAX_SETTINGS_BYTES;
use tarfs::source::HeaderLoader;

use crate::cli::environment;
use crate::cli::files::read_text;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum HeaderArg {
    Inline(Header),
    File(PathBuf),
}

impl FromStr for HeaderArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix('@') {
            Some("") => Err("no file name follows the @".to_owned()),
            Some(path) => Ok(Self::File(path.into())),
            None => Ok(Self::Inline(text.parse()?)),
        }
    }
}

/// A `NAME: VALUE` pair.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub name: String,
    /// The part after it, without surrounding spaces.
    pub value: String,
}

impl FromStr for Header {
    type Err = String;

    /// Errors never contain a possible value.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text
            .split_once(':')
            .ok_or("a header looks like 'Name: value'")?;
        let valid = |byte: u8| byte.is_ascii_graphic() && byte != b':';
        if name.is_empty() || !name.bytes().all(valid) {
            return Err("the text before the colon is not a header name".to_owned());
        }
        Ok(Self {
            name: name.to_owned(),
            value: value.trim().to_owned(),
        })
    }
}

impl fmt::Debug for Header {
    /// Omits the value, because it is often a credential.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: …", self.name)
    }
}

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

/// Loads all headers in the order of `args`, those of a file in its place, then those of the environment.
pub(crate) fn load_all(args: &[HeaderArg]) -> anyhow::Result<Vec<(String, String)>> {
    load(&with_environment(args)?)
}

fn load(args: &[HeaderArg]) -> anyhow::Result<Vec<(String, String)>> {
    let mut headers = Vec::new();
    for arg in args {
        match arg {
            HeaderArg::Inline(header) => headers.push(header.clone()),
            HeaderArg::File(path) => headers.extend(read_file(path)?),
        }
    }
    let pairs = headers
        .into_iter()
        .map(|header| (header.name, header.value));
    Ok(pairs.collect())
}

/// Returns a loader of all headers if some are in regular files, which another program may renew.
pub(crate) fn loader(args: &[HeaderArg]) -> Option<HeaderLoader> {
    let mut args = with_environment(args).ok()?;
    let mut has_file = false;
    for arg in &mut args {
        if let HeaderArg::File(path) = arg {
            // A pipe cannot be read again.
            if !path.is_file() {
                return None;
            }
            has_file = true;
            // A mount changes its directory.
            *path = std::path::absolute(&path).ok()?;
        }
    }
    let load = move || load(&args).map_err(|error| format!("{error:#}"));
    has_file.then(|| HeaderLoader::new(load))
}

/// Returns `args`, and after them those of the environment.
fn with_environment(args: &[HeaderArg]) -> anyhow::Result<Vec<HeaderArg>> {
    let mut args = args.to_vec();
    let variable = environment::HEADERS;
    let Some(text) = environment::headers() else {
        return Ok(args);
    };
    let text = text
        .into_string()
        .map_err(|_| anyhow::anyhow!("{variable} is not UTF-8"))?;
    args.extend(parse_lines(&text, variable)?);
    Ok(args)
}

/// Reads the headers in the file at `path`, one per line, like curl.
fn read_file(path: &Path) -> anyhow::Result<Vec<Header>> {
    let name = path.display();
    let read = File::open(path).and_then(|file| read_text(file, MAX_SETTINGS_BYTES));
    let text = read.with_context(|| format!("cannot read the headers in {name}"))?;
    parse_lines(&text, &name.to_string())
}

/// Parses the lines of `text` that are not blank or comments. Errors name `place` and the line.
fn parse_lines<T: FromStr<Err = String>>(text: &str, place: &str) -> anyhow::Result<Vec<T>> {
    let lines = (1..).zip(text.lines().map(str::trim));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let parse = |(number, line): (usize, &str)| {
        let parsed = line.parse();
        parsed.map_err(|error| anyhow::anyhow!("{place}, line {number}: {error}"))
    };
    lines.map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(headers: &[(String, String)]) -> Vec<(&str, &str)> {
        let pairs = headers.iter();
        pairs
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect()
    }

    fn arg(text: &str) -> HeaderArg {
        text.parse().expect("well-formed")
    }

    #[test]
    fn header_is_parsed_into_name_and_value() {
        let header: Header = "Authorization: Bearer a:b".parse().expect("a header");
        assert_eq!(
            (&*header.name, &*header.value),
            ("Authorization", "Bearer a:b")
        );
        for wrong in ["no colon", ": x", "a b: x", "@"] {
            assert!(wrong.parse::<HeaderArg>().is_err(), "{wrong}");
        }
    }

    // Promises: header-file
    #[test]
    fn headers_of_files_keep_the_argument_order() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("headers");
        let text = "# who asks\r\n\r\nAuthorization: Bearer x\r\n\n  B: 2  \n";
        std::fs::write(&path, text).expect("written");
        let args = [arg("A: 1"), HeaderArg::File(path), arg("C:3")];
        let headers = load_all(&args).expect("well-formed");
        let expected = [
            ("A", "1"),
            ("Authorization", "Bearer x"),
            ("B", "2"),
            ("C", "3"),
        ];
        assert_eq!(pairs(&headers), expected);
    }

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

    // Promises: auth-origin, secret-hidden
    #[test]
    fn header_value_is_never_printed() {
        let header = arg("Authorization: secret");
        assert!(!format!("{header:?}").contains("secret"));
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("headers");
        for (text, line) in [("A: 1\nsecret\n", 2), ("\nmy secret: 1\n", 2)] {
            std::fs::write(&path, text).expect("written");
            let error = load_all(&[HeaderArg::File(path.clone())]).expect_err("malformed");
            let message = format!("{error:#}");
            assert!(message.contains(&format!("line {line}: ")), "{message}");
            assert!(!message.contains("secret"), "{message}");
        }
    }

    // Promises: header-file, secret-hidden
    #[test]
    fn invalid_header_file_is_rejected_after_bounded_read() {
        let refusal = |path: &str| format!("{:#}", load_all(&[arg(path)]).expect_err("refused"));
        assert!(refusal("@/nowhere").contains("/nowhere"));
        assert!(refusal("@/dev/zero").contains("longer than"));
    }
}
