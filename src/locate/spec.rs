//! SOURCE as users write it.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{self, Path, PathBuf};
use std::slice;

use serde::{Deserialize, Serialize};

use super::glob;
use crate::base::environment::is_name_of_process;
use crate::base::redact::has_scheme;
use crate::image::Transport;
use crate::layers::WhiteoutFormat;
use crate::source;

/// Separator before a member's path, as in Java's `jar:` URLs.
const MEMBER_SEPARATOR: &str = "!/";

/// Schemes of names in registries: the standard's, and that of `docker pull` and skopeo.
const REGISTRY_SCHEMES: [&str; 2] = ["oci", "docker"];

/// A parsed SOURCE: an archive, a part of another source, or an image. Every text is valid. Without a known
/// prefix it is a path or a URL, so a file `tar:name` is `./tar:name`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SourceSpec {
    /// A path, a URL, or `-` for standard input.
    Plain(OsString),
    /// A file in an archive: `tar:OUTER!/PATH`.
    Member {
        /// The archive.
        outer: Box<SourceSpec>,
        /// Path of the file.
        path: String,
    },
    /// A range of bytes: `slice:START+LEN:OUTER` or `slice:START:OUTER`.
    Slice {
        /// The source of the bytes.
        outer: Box<SourceSpec>,
        /// Offset of the first byte.
        start: u64,
        /// Number of bytes; `None` for all up to the end.
        len: Option<u64>,
    },
    /// Sources in order, as one: `join:PART,PART…`. A part may be a pattern for local files. A comma in a part
    /// is written as `\,` and a backslash as `\\`.
    Join(Vec<SourceSpec>),
    /// An image: `oci:DIR[:TAG]`, `oci-archive:OUTER[:TAG]` or `docker-archive:OUTER[:NAME]`. The first colon
    /// after DIR or OUTER ends it, in a URL after host and port. Others in a URL are `%3A`.
    Image {
        /// How the image is stored.
        transport: Transport,
        /// The directory or the archive.
        outer: Box<SourceSpec>,
        /// Name of the image there, if given.
        name: Option<String>,
    },
    /// An image or artifact in a registry: `oci://REGISTRY/REPOSITORY[:TAG|@DIGEST]`, or the same with
    /// `docker://`.
    Registry(String),
}

impl From<OsString> for SourceSpec {
    fn from(text: OsString) -> Self {
        let parse = |text: &str| parse_image(text).or_else(|| parse_outer(text));
        let parsed = match text.to_str() {
            Some(text) => parse(text),
            None => mark_bytes(&text)
                .and_then(|text| parse(&text))
                .and_then(|mut spec| spec.remove_marks().then_some(spec)),
        };
        parsed.unwrap_or_else(|| Self::plain(&text))
    }
}

impl From<&str> for SourceSpec {
    fn from(text: &str) -> Self {
        OsString::from(text).into()
    }
}

/// First of the private characters that stand for bytes that are not UTF-8 while a text is parsed.
const FIRST_MARK: u32 = 0x10_ff00;

/// `text` with marks for bytes that are not UTF-8; `None` if it has marks already.
fn mark_bytes(text: &OsStr) -> Option<String> {
    let mut marked = String::new();
    for chunk in text.as_bytes().utf8_chunks() {
        if is_marked(chunk.valid()) {
            return None;
        }
        marked.push_str(chunk.valid());
        let marks = chunk.invalid().iter();
        marked.extend(marks.filter_map(|&byte| char::from_u32(FIRST_MARK + u32::from(byte))));
    }
    Some(marked)
}

fn is_marked(text: &str) -> bool {
    text.chars().any(|letter| u32::from(letter) >= FIRST_MARK)
}

/// The bytes of a part of a marked text.
fn unmark_bytes(text: &str) -> OsString {
    let mut bytes = Vec::new();
    for character in text.chars() {
        match u32::from(character)
            .checked_sub(FIRST_MARK)
            .map(u8::try_from)
        {
            Some(Ok(byte)) => bytes.push(byte),
            _ => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    OsString::from_vec(bytes)
}

fn parse_image(text: &str) -> Option<SourceSpec> {
    let (kind, rest) = source::without_blanks(text).split_once(':')?;
    let transport = Transport::from_name(kind)?;
    let is_directory = transport == Transport::Oci;
    if is_directory && has_url_host(rest) {
        return None;
    }
    let rest = &*if is_directory {
        rest.into()
    } else {
        source::canonical_name(rest)
    };
    let name_search_start = name_search_start(rest);
    let colon = rest.get(name_search_start..)?.find(':');
    let (location, name) = match colon {
        Some(colon) => rest.split_at(name_search_start + colon),
        None => (rest, ""),
    };
    let outer = Some(location).filter(|_| !is_directory);
    let outer = outer.and_then(parse_outer);
    let name = name.strip_prefix(':').unwrap_or_default();
    Some(SourceSpec::Image {
        transport,
        outer: Box::new(outer.unwrap_or_else(|| SourceSpec::plain(location.as_ref()))),
        name: (!name.is_empty()).then(|| name.to_owned()),
    })
}

/// Whether `rest` follows the scheme of a URL, as in `oci://HOST/NAME`.
fn has_url_host(rest: &str) -> bool {
    let host = rest.strip_prefix("//");
    host.is_some_and(|host| !host.starts_with('/'))
}

/// Number of bytes of `rest` that belong to an image's location, including their colons.
fn name_search_start(rest: &str) -> usize {
    let text = source::without_blanks(rest);
    if text.starts_with("tar:")
        && let Some(bang) = rest.rfind(MEMBER_SEPARATOR)
    {
        return bang + MEMBER_SEPARATOR.len();
    }
    if let Some((range, location)) = text
        .strip_prefix("slice:")
        .and_then(|rest| rest.split_once(':'))
        && range.starts_with(|first: char| first.is_ascii_digit())
    {
        return rest.len() - location.len() + name_search_start(location);
    }
    if let Some((parts, last)) = rest.rsplit_once(',').filter(|_| text.starts_with("join:")) {
        return parts.len() + 1 + name_search_start(last);
    }
    let host = text.split_once("://").filter(|_| source::is_url(text));
    host.map_or(0, |(_, host)| {
        rest.len() - host.len() + host.find('/').unwrap_or(host.len())
    })
}

/// Parses what may enclose another source, if it has a known prefix.
fn parse_outer(text: &str) -> Option<SourceSpec> {
    let text = source::without_blanks(text);
    parse_part(text).or_else(|| parse_registry(text))
}

fn parse_registry(text: &str) -> Option<SourceSpec> {
    let (kind, rest) = text.split_once(':')?;
    let is_registry = REGISTRY_SCHEMES.contains(&kind) && has_url_host(rest);
    is_registry.then(|| SourceSpec::Registry(text.into()))
}

/// Parses a part of another source. A part of an image does not exist.
fn parse_part(text: &str) -> Option<SourceSpec> {
    let outer = |outer: &str| {
        let part = parse_outer(outer);
        Box::new(part.unwrap_or_else(|| SourceSpec::plain(outer.as_ref())))
    };
    let (kind, rest) = text.split_once(':')?;
    match kind {
        "tar" => {
            let (archive, path) = rest.rsplit_once(MEMBER_SEPARATOR)?;
            Some(SourceSpec::Member {
                outer: outer(archive),
                path: path.to_owned(),
            })
        }
        "slice" => {
            let (range, source) = rest.split_once(':')?;
            let (start, len) = match range.split_once('+') {
                Some((start, len)) => (start, Some(len.parse().ok()?)),
                None => (range, None),
            };
            Some(SourceSpec::Slice {
                start: start.parse().ok()?,
                len,
                outer: outer(source),
            })
        }
        "join" if !rest.is_empty() => {
            let parts = split_parts(rest);
            Some(SourceSpec::Join(
                parts.iter().map(|part| *outer(part)).collect(),
            ))
        }
        _ => None,
    }
}

/// Splits the text after `join:` at its commas, and removes the escapes.
fn split_parts(text: &str) -> Vec<String> {
    let (mut parts, mut part) = (Vec::new(), String::new());
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        let escaped = characters.next_if(|&next| character == '\\' && ",\\".contains(next));
        match (character, escaped) {
            (',', None) => parts.push(std::mem::take(&mut part)),
            (other, escaped) => part.push(escaped.unwrap_or(other)),
        }
    }
    parts.push(part);
    parts
}

impl fmt::Display for SourceSpec {
    /// Writes the form that [`From`] parses, with secrets. See [`redacted`](Self::redacted).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(location) => f.write_str(&source::location_text(location)),
            Self::Registry(name) => f.write_str(name),
            Self::Member { outer, path } => write!(f, "tar:{outer}{MEMBER_SEPARATOR}{path}"),
            Self::Slice { outer, start, len } => {
                write!(f, "slice:{start}")?;
                len.iter().try_for_each(|len| write!(f, "+{len}"))?;
                write!(f, ":{outer}")
            }
            Self::Join(parts) => {
                for (number, part) in parts.iter().enumerate() {
                    let part = part.to_string().replace('\\', "\\\\").replace(',', "\\,");
                    write!(f, "{}{part}", if number == 0 { "join:" } else { "," })?;
                }
                Ok(())
            }
            Self::Image {
                transport,
                outer,
                name,
            } => {
                write!(f, "{}:{outer}", transport.name())?;
                name.iter().try_for_each(|name| write!(f, ":{name}"))
            }
        }
    }
}

impl SourceSpec {
    /// A path or URL by its canonical name.
    fn plain(location: &OsStr) -> Self {
        Self::Plain(source::canonical_os_name(location))
    }

    fn parts(&self) -> &[Self] {
        match self {
            Self::Plain(_) | Self::Registry(_) => &[],
            Self::Join(parts) => parts,
            Self::Member { outer, .. } | Self::Slice { outer, .. } | Self::Image { outer, .. } => {
                slice::from_ref(&**outer)
            }
        }
    }

    fn parts_mut(&mut self) -> &mut [Self] {
        match self {
            Self::Plain(_) | Self::Registry(_) => &mut [],
            Self::Join(parts) => parts,
            Self::Member { outer, .. } | Self::Slice { outer, .. } | Self::Image { outer, .. } => {
                slice::from_mut(&mut **outer)
            }
        }
    }

    /// Replaces the marks in paths by their bytes. Returns false if the text has them elsewhere.
    fn remove_marks(&mut self) -> bool {
        let has_others = match self {
            Self::Plain(location) => {
                *location = unmark_bytes(&location.to_string_lossy());
                false
            }
            Self::Registry(text) | Self::Member { path: text, .. } => is_marked(text),
            Self::Image { name, .. } => name.as_deref().is_some_and(is_marked),
            Self::Slice { .. } | Self::Join(_) => false,
        };
        !has_others && self.parts_mut().iter_mut().all(Self::remove_marks)
    }

    /// Returns its text without secrets of URLs.
    pub fn redacted(&self) -> String {
        source::redact(&self.to_string())
    }

    /// Whether it is an image, or may be one. A registry also has artifacts, which are archives.
    pub fn is_image(&self) -> bool {
        matches!(self, Self::Image { .. } | Self::Registry(_))
    }

    /// Whether only its registry knows if it is an image or an archive.
    pub fn is_in_registry(&self) -> bool {
        matches!(self, Self::Registry(_))
    }

    /// Whether it is standard input itself.
    pub fn is_stdin(&self) -> bool {
        matches!(self, Self::Plain(location) if location == "-")
    }

    /// Whether a part is standard input, or a file that has its name only in this process.
    pub fn is_of_process(&self) -> bool {
        let is_own = |origin: &OsStr| is_name_of_process(Path::new(origin));
        self.is_stdin() || self.origins().into_iter().any(is_own)
    }

    /// Returns the path or URL of the file or directory that contains it, or its first part.
    pub fn origin(&self) -> &OsStr {
        match self {
            Self::Plain(location) => location,
            Self::Registry(name) => OsStr::new(name),
            _ => self.parts().first().map_or(OsStr::new(""), Self::origin),
        }
    }

    /// The paths and URLs of all its parts. A part may be a pattern.
    fn origins(&self) -> Vec<&OsStr> {
        match self.parts() {
            [] => vec![self.origin()],
            parts => parts.iter().flat_map(Self::origins).collect(),
        }
    }

    /// Number of archives that enclose it.
    pub fn enclosing_archives(&self) -> u64 {
        let is_in_archive = match self {
            Self::Member { .. } => true,
            Self::Image { transport, .. } => *transport != Transport::Oci,
            _ => false,
        };
        let parts = self.parts().iter().map(Self::enclosing_archives);
        u64::from(is_in_archive) + parts.sum::<u64>()
    }

    /// Returns it with an absolute path, or unchanged if its text would then be parsed differently, for
    /// example because of a colon in the name of the current directory.
    #[must_use]
    pub fn absolute(&self) -> Self {
        let mut absolute = self.clone();
        absolute.make_absolute();
        let is_plain = matches!(self, Self::Plain(_));
        if is_plain || Self::from(&*absolute.to_string()) == absolute {
            absolute
        } else {
            self.clone()
        }
    }

    fn make_absolute(&mut self) {
        match self {
            Self::Plain(location) => {
                let is_no_path = |text: &str| text == "-" || source::lacks_scheme(text);
                if !location.to_str().is_some_and(is_no_path) {
                    make_path_absolute(location);
                }
            }
            Self::Image {
                transport: Transport::Oci,
                outer,
                ..
            } => {
                if let Self::Plain(directory) = &mut **outer {
                    make_path_absolute(directory);
                }
            }
            _ => self.parts_mut().iter_mut().for_each(Self::make_absolute),
        }
    }
}

fn make_path_absolute(location: &mut OsString) {
    // A URL that is spelled wrong is not found, and the error should show it unchanged.
    let is_missing = || {
        let files = glob::expand(location).unwrap_or_default();
        !files.iter().any(|file| Path::new(file).exists())
    };
    let is_misspelled = location.to_str().is_some_and(has_scheme) && is_missing();
    // Fails only for an empty path.
    if !is_misspelled
        && !source::is_url(&*location)
        && let Ok(path) = path::absolute(&*location)
    {
        *location = source::location_text(path.as_os_str()).into();
    }
}

/// SOURCE with the layers over it, which form one tree.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TreeSpec {
    /// The lowest layer or layers.
    pub source: SourceSpec,
    /// The layers over it, from the bottom.
    pub layers: Vec<SourceSpec>,
    /// How a layer marks deleted files. If it is set, also a single archive is opened as a layer.
    pub whiteouts: Option<WhiteoutFormat>,
}

impl TreeSpec {
    /// The files and directories of this machine that hold its sources, layers and parts, without those that are
    /// missing.
    pub fn local_paths(&self) -> Vec<PathBuf> {
        let origins = self.sources().flat_map(SourceSpec::origins);
        let expanded = origins.flat_map(|origin| glob::expand(origin).unwrap_or_default());
        let local = expanded.filter_map(|origin| path::absolute(source::local_path(&origin)?).ok());
        local.filter(|path| path.exists()).collect()
    }
}

impl From<SourceSpec> for TreeSpec {
    fn from(source: SourceSpec) -> Self {
        Self {
            source,
            layers: Vec::new(),
            whiteouts: None,
        }
    }
}

impl TreeSpec {
    /// SOURCE and the layers, from the bottom.
    pub fn sources(&self) -> impl Iterator<Item = &SourceSpec> {
        std::iter::once(&self.source).chain(&self.layers)
    }

    /// Whether it is opened as layers. An image always is, because of its whiteouts.
    pub fn is_layered(&self) -> bool {
        self.has_layer_options() || self.source.is_image()
    }

    /// Whether SOURCE alone decides that it is opened as layers, and only its registry knows.
    pub fn may_be_artifact(&self) -> bool {
        self.source.is_in_registry() && !self.has_layer_options()
    }

    fn has_layer_options(&self) -> bool {
        !self.layers.is_empty() || self.whiteouts.is_some()
    }

    /// Number of archives that enclose SOURCE and the layers.
    pub fn enclosing_archives(&self) -> u64 {
        self.sources().map(SourceSpec::enclosing_archives).sum()
    }

    /// Returns it with absolute paths; see [`SourceSpec::absolute`].
    #[must_use]
    pub fn absolute(&self) -> Self {
        Self {
            source: self.source.absolute(),
            layers: self.layers.iter().map(SourceSpec::absolute).collect(),
            whiteouts: self.whiteouts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Transport::{DockerArchive, Oci, OciArchive};

    fn plain(location: &str) -> SourceSpec {
        SourceSpec::Plain(location.into())
    }

    // Promises: nested-tar, nested-slice, nested-join
    #[test]
    fn part_of_a_source_is_parsed_and_printed() {
        let member = |outer: &str, path: &str| SourceSpec::Member {
            outer: Box::new(outer.into()),
            path: path.to_owned(),
        };
        let slice = |outer: &str, start, len| SourceSpec::Slice {
            outer: Box::new(outer.into()),
            start,
            len,
        };
        let join =
            |parts: &[&str]| SourceSpec::Join(parts.iter().map(|&part| part.into()).collect());
        let url = "https://me:pw@example.com:8443/a.tar?sig=1";
        for (text, spec) in [
            ("tar:a.tar!/b.tar.gz", member("a.tar", "b.tar.gz")),
            (&*format!("tar:{url}!/d/b.tar"), member(url, "d/b.tar")),
            ("tar:tar:a!/b!/c", member("tar:a!/b", "c")),
            ("tar:slice:512:a!/b", member("slice:512:a", "b")),
            ("slice:7:a:b", slice("a:b", 7, None)),
            (
                "slice:0+1024:http://h/a",
                slice("http://h/a", 0, Some(1024)),
            ),
            ("slice:1+2:tar:a!/b", slice("tar:a!/b", 1, Some(2))),
            ("join:a", join(&["a"])),
            (
                &*format!("join:{url},slice:1+2:b\\,c\\\\d"),
                join(&[url, "slice:1+2:b,c\\d"]),
            ),
            ("tar:join:a,b!/c", member("join:a,b", "c")),
            ("join:tar:a!/b,c", join(&["tar:a!/b", "c"])),
            ("join:join:a\\,b,c", join(&["join:a,b", "c"])),
        ] {
            assert_eq!(SourceSpec::from(text), spec);
            assert_eq!(spec.to_string(), text);
        }
    }

    // Promises: image-layers
    #[test]
    fn image_has_transport_location_and_name() {
        for (text, transport, location, name) in [
            ("oci:dir", Oci, "dir", None),
            ("oci:/a/b:v1", Oci, "/a/b", Some("v1")),
            ("oci-archive:x.tar:", OciArchive, "x.tar", None),
            (
                "docker-archive:x.tar:docker.io/library/busybox:1.36",
                DockerArchive,
                "x.tar",
                Some("docker.io/library/busybox:1.36"),
            ),
            (
                "oci-archive:https://me:pw@example.com:8443/a/x.tar?sig=1",
                OciArchive,
                "https://me:pw@example.com:8443/a/x.tar?sig=1",
                None,
            ),
            (
                "oci-archive:https://example.com:8443/x.tar:v1:a",
                OciArchive,
                "https://example.com:8443/x.tar",
                Some("v1:a"),
            ),
            ("oci-archive:http://h:80", OciArchive, "http://h:80", None),
            (
                "oci-archive:tar:tar:https://h:80/a.tar!/b:c!/d.tar:v1",
                OciArchive,
                "tar:tar:https://h:80/a.tar!/b:c!/d.tar",
                Some("v1"),
            ),
            (
                "docker-archive:slice:0+512:http://h:80/a:me/tool:1",
                DockerArchive,
                "slice:0+512:http://h:80/a",
                Some("me/tool:1"),
            ),
            ("oci-archive:slice:7:a", OciArchive, "slice:7:a", None),
            (
                "oci-archive:join:http://h:80/a,slice:7:b:v1",
                OciArchive,
                "join:http://h:80/a,slice:7:b",
                Some("v1"),
            ),
            ("oci:tar:v1", Oci, "tar", Some("v1")),
            ("oci:slice:v1", Oci, "slice", Some("v1")),
        ] {
            let spec = SourceSpec::from(text);
            assert_eq!(spec.to_string(), text.trim_end_matches(':'));
            let outer = match transport {
                Oci => plain(location),
                OciArchive | DockerArchive => location.into(),
            };
            let image = SourceSpec::Image {
                transport,
                outer: Box::new(outer),
                name: name.map(str::to_owned),
            };
            assert_eq!(spec, image, "{text}");
        }
    }

    // Promises: nested-tar, image-layers
    #[test]
    fn other_text_is_a_path_or_url() {
        for text in [
            "a.tar",
            "tar:a.tar",
            "./tar:a!/b",
            "http://h/tar:a!/b",
            "slice:a",
            "join:",
            "slice:-1:a",
            "slice:1+:a",
            "slice:18446744073709551616:a",
            "./oci:x",
            "https://example.com/oci:x",
            "oci",
            "OCI:x",
            "docker:x",
            "docker:///x",
            "-",
            "",
        ] {
            assert_eq!(SourceSpec::from(text), plain(text));
        }
    }

    // Promises: registry-name, registry-artifact
    #[test]
    fn name_in_a_registry_needs_a_host() {
        for text in [
            "oci://registry.example/x:1",
            "oci://localhost:5000/a/b@sha256:00",
            "docker://debian",
        ] {
            let spec = SourceSpec::from(text);
            assert_eq!(spec, SourceSpec::Registry(text.into()));
            assert_eq!(spec.absolute().to_string(), text);
            let part = SourceSpec::from(&*format!("tar:slice:0:{text}!/b"));
            assert_eq!(part.origin(), text);
            assert_eq!(part.enclosing_archives(), 1);
        }
        let directory = SourceSpec::from("oci:///a/b:v1");
        assert!(!directory.is_in_registry() && directory.is_image());
        let alone = TreeSpec::from(SourceSpec::from("docker://debian"));
        let mut over = alone.clone();
        over.layers.push("a.tar".into());
        assert!(alone.may_be_artifact() && !over.may_be_artifact());
        assert!(alone.is_layered() && over.is_layered());
    }

    #[test]
    fn absolute_spec_has_the_path_of_the_outermost_file() {
        let here = std::env::current_dir().expect("a directory");
        let here = here.to_str().expect("UTF-8");
        for (text, absolute) in [
            ("a", format!("{here}/a")),
            ("tar:slice:1:a!/b", format!("tar:slice:1:{here}/a!/b")),
            ("join:a.*,http://h/b", format!("join:{here}/a.*,http://h/b")),
            ("docker-archive:a:n", format!("docker-archive:{here}/a:n")),
            ("oci:a.b/c", format!("oci:{here}/a.b/c")),
        ] {
            assert_eq!(SourceSpec::from(text).absolute().to_string(), absolute);
        }
        for text in [
            "-",
            "",
            "tar:http://h/a!/b",
            "a.b/c",
            "oci-archive:a.b/c",
            "oci:x://y",
        ] {
            assert_eq!(SourceSpec::from(text).absolute().to_string(), text);
        }
    }

    #[test]
    fn secrets_of_the_origin_are_redacted() {
        let spec = SourceSpec::from("docker-archive:tar:http://me:pw@h/a?b!/c:n");
        assert_eq!(spec.origin(), "http://me:pw@h/a?b");
        assert!(!spec.redacted().contains("pw"), "{}", spec.redacted());
    }

    #[test]
    fn enclosing_archives_of_all_layers_are_counted() {
        let count = |source: &str, layers: &[&str]| {
            let tree = TreeSpec {
                layers: layers.iter().map(|&layer| layer.into()).collect(),
                ..TreeSpec::from(SourceSpec::from(source))
            };
            tree.enclosing_archives()
        };
        assert_eq!(count("a.tar", &[]), 0);
        assert_eq!(count("oci:a", &["b.tar"]), 0);
        assert_eq!(count("oci-archive:a", &[]), 1);
        assert_eq!(count("a.tar", &["docker-archive:b", "oci-archive:c"]), 2);
        assert_eq!(count("slice:512:a.tar", &[]), 0);
        assert_eq!(count("join:tar:a!/b,tar:c!/d", &[]), 2);
        assert_eq!(count("tar:tar:a.tar!/b.tar!/c.tar", &["tar:d!/e"]), 3);
        assert_eq!(count("docker-archive:tar:a.tar!/b.tar", &[]), 2);
    }
}
