//! Headers of the user for the archive's host, often credentials.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::authorizer::HeaderLoader;
use crate::base::bounded_read::{MAX_SETTINGS_BYTES, read_text};
use crate::base::environment::{Environment, HEADERS, is_name_of_process};

/// A header, `NAME: VALUE`, or `@FILE` with one header per line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HeaderArg(Arg);

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Arg {
    Inline(Header),
    /// A path, which need not be UTF-8, as serde's paths must be.
    File(OsString),
}

impl FromStr for HeaderArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(match text.strip_prefix('@') {
            Some("") => return Err("no file name follows the @".to_owned()),
            Some(path) => Arg::File(path.into()),
            None => Arg::Inline(text.parse()?),
        }))
    }
}

/// A `NAME: VALUE` pair.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Header {
    name: String,
    /// The part after it, without surrounding spaces.
    value: String,
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

/// All headers of the user: those of flags, then those of `TARFS_HEADERS`.
#[derive(Clone, Debug)]
pub struct UserHeaders {
    args: Vec<HeaderArg>,
    /// Directory of relative paths.
    directory: PathBuf,
}

impl UserHeaders {
    /// The headers `args`, and after them those of `environment`.
    ///
    /// # Errors
    /// The variable has an invalid line. The text names no value.
    pub fn new(args: &[HeaderArg], environment: &Environment) -> Result<Self, String> {
        let mut args = args.to_vec();
        if let Some(text) = environment.variable(HEADERS) {
            let text = text.to_str();
            let text = text.ok_or_else(|| format!("{HEADERS} is not UTF-8"))?;
            args.extend(parse_lines::<HeaderArg>(text, HEADERS)?);
        }
        let directory = environment.directory().to_owned();
        Ok(Self { args, directory })
    }

    /// Parses `text`, a value of `TARFS_HEADERS`. Its files are relative to `directory`.
    ///
    /// # Errors
    /// It has an invalid line. The error names no value.
    pub fn parse(text: &str, directory: &Path) -> Result<Self, String> {
        Ok(Self {
            args: parse_lines(text, HEADERS)?,
            directory: directory.to_owned(),
        })
    }

    /// The headers for another process, with absolute paths. Those in pipes, or in descriptors of this process, are read.
    ///
    /// # Errors
    /// As of [`load`](Self::load).
    pub(crate) fn for_other_process(self) -> Result<Vec<HeaderArg>, String> {
        let mut args = Vec::new();
        for HeaderArg(arg) in &self.args {
            match arg {
                Arg::File(path) => {
                    let full = self.directory.join(path);
                    let is_own = is_name_of_process(&full);
                    if is_own || full.exists() && !full.is_file() {
                        let read = self.read_file(Path::new(path))?;
                        args.extend(
                            read.into_iter()
                                .map(|header| HeaderArg(Arg::Inline(header))),
                        );
                    } else {
                        args.push(HeaderArg(Arg::File(full.into())));
                    }
                }
                Arg::Inline(_) => args.push(HeaderArg(arg.clone())),
            }
        }
        Ok(args)
    }

    /// Whether some are in a pipe, which cannot be read again.
    pub fn has_pipe(&self) -> bool {
        self.files().any(|path| {
            let path = self.directory.join(path);
            path.exists() && !path.is_file()
        })
    }

    fn files(&self) -> impl Iterator<Item = &OsString> {
        self.args.iter().filter_map(|HeaderArg(arg)| match arg {
            Arg::File(path) => Some(path),
            Arg::Inline(_) => None,
        })
    }

    /// Loads all headers in their order, those of a file in its place.
    ///
    /// # Errors
    /// A file cannot be read, is longer than 16 MiB, or has an invalid line.
    pub fn load(&self) -> Result<Vec<(String, String)>, String> {
        let mut headers = Vec::new();
        for HeaderArg(arg) in &self.args {
            match arg {
                Arg::Inline(header) => headers.push(header.clone()),
                Arg::File(path) => headers.extend(self.read_file(Path::new(path))?),
            }
        }
        let pairs = headers
            .into_iter()
            .map(|header| (header.name, header.value));
        Ok(pairs.collect())
    }

    /// Reads the headers in the file at `path`, one per line, like curl.
    fn read_file(&self, path: &Path) -> Result<Vec<Header>, String> {
        let name = path.display();
        let file = File::open(self.directory.join(path));
        let read = file.and_then(|file| read_text(file, MAX_SETTINGS_BYTES));
        let text = read.map_err(|error| format!("cannot read the headers in {name}: {error}"))?;
        parse_lines(&text, &name.to_string())
    }

    /// Returns a loader of all headers if some are in regular files, which another program may renew.
    pub fn loader(self) -> Option<HeaderLoader> {
        let has_file = self.files().next().is_some();
        (has_file && !self.has_pipe()).then(|| HeaderLoader::new(move || self.load()))
    }
}

/// Parses the lines of `text` that are not blank or comments. Errors name `place` and the line.
fn parse_lines<T: FromStr<Err = String>>(text: &str, place: &str) -> Result<Vec<T>, String> {
    let lines = (1..).zip(text.lines().map(str::trim));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let parse = |(number, line): (usize, &str)| {
        let parsed = line.parse();
        parsed.map_err(|error| format!("{place}, line {number}: {error}"))
    };
    lines.map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arg(text: &str) -> HeaderArg {
        text.parse().expect("well-formed")
    }

    fn load(args: &[HeaderArg]) -> Result<Vec<(String, String)>, String> {
        let environment = Environment::new([], "/".into());
        UserHeaders::new(args, &environment)?.load()
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
        let headers = load(&[arg("A: 1"), HeaderArg(Arg::File(path.into())), arg("C:3")]);
        let expected = [
            ("A", "1"),
            ("Authorization", "Bearer x"),
            ("B", "2"),
            ("C", "3"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(headers.expect("well-formed"), expected);
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
            let message =
                load(&[HeaderArg(Arg::File(path.clone().into()))]).expect_err("malformed");
            assert!(message.contains(&format!("line {line}: ")), "{message}");
            assert!(!message.contains("secret"), "{message}");
        }
    }

    // Promises: header-file, secret-hidden
    #[test]
    fn invalid_header_file_is_rejected_after_bounded_read() {
        let refusal = |path: &str| load(&[arg(path)]).expect_err("refused");
        assert!(refusal("@/nowhere").contains("/nowhere"));
        assert!(refusal("@/dev/zero").contains("longer than"));
    }
}
