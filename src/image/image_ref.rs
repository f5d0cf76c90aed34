//! References to images on the command line; pure.

use std::fmt;

/// How an image is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// An OCI image layout in a directory.
    Oci,
    /// An OCI image layout in a tar archive.
    OciArchive,
    /// An archive of `docker save`.
    DockerArchive,
}

impl Transport {
    const ALL: [Self; 3] = [Self::Oci, Self::OciArchive, Self::DockerArchive];

    /// The prefix before the first colon.
    pub fn name(self) -> &'static str {
        match self {
            Self::Oci => "oci",
            Self::OciArchive => "oci-archive",
            Self::DockerArchive => "docker-archive",
        }
    }
}

/// A reference to an image, with transport, location and name.
///
/// The forms are `oci:DIR[:TAG]`, `oci-archive:FILE[:TAG]` and `docker-archive:FILE[:NAME]`. FILE may be a
/// URL, or a part of another file: `tar:FILE!/PATH`, `slice:START+LEN:FILE`. The first colon after DIR or
/// FILE ends it, in a URL the first one after host and port. A later colon in a URL is written as `%3A`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageRef {
    /// How the image is stored.
    pub transport: Transport,
    /// The directory, file or URL.
    pub location: String,
    /// Name of the image there, if given.
    pub name: Option<String>,
}

impl ImageRef {
    /// Parses `spec`; `None` without a transport, for a path or a URL.
    ///
    /// A file with such a name can be written as `./oci:name`.
    pub fn parse(spec: &str) -> Option<Self> {
        let (transport, rest) = spec.split_once(':')?;
        let mut transports = Transport::ALL.into_iter();
        let transport = transports.find(|known| known.name() == transport)?;
        // The scheme of a URL, as in `oci://HOST/NAME`.
        let host = rest.strip_prefix("//");
        if transport == Transport::Oci && host.is_some_and(|host| !host.starts_with('/')) {
            return None;
        }
        let name_search_start = name_search_start(rest);
        let tail = rest.get(name_search_start..);
        let colon = tail.and_then(|tail| tail.find(':'));
        let (location, name) = match colon.map(|colon| rest.split_at(name_search_start + colon)) {
            Some((location, name)) => (location, name.strip_prefix(':')),
            None => (rest, None),
        };
        Some(Self {
            transport,
            location: location.to_owned(),
            name: name.filter(|name| !name.is_empty()).map(str::to_owned),
        })
    }
}

/// Number of bytes of `rest` that belong to the location, including their colons.
fn name_search_start(rest: &str) -> usize {
    if rest.starts_with("tar:")
        && let Some(bang) = rest.rfind("!/")
    {
        return bang + "!/".len();
    }
    if let Some((range, location)) = rest
        .strip_prefix("slice:")
        .and_then(|rest| rest.split_once(':'))
        && range.starts_with(|first: char| first.is_ascii_digit())
    {
        return rest.len() - location.len() + name_search_start(location);
    }
    rest.find("://").map_or(0, |at| {
        let host = at + "://".len();
        let path = rest.get(host..).and_then(|rest| rest.find('/'));
        path.map_or(rest.len(), |path| host + path)
    })
}

impl fmt::Display for ImageRef {
    /// Writes the form that [`parse`](Self::parse) reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.transport.name(), self.location)?;
        self.name.iter().try_for_each(|name| write!(f, ":{name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::Transport::{DockerArchive, Oci, OciArchive};
    use super::*;

    #[test]
    fn image_ref_has_transport_location_and_name() {
        let parsed = |spec: &str| {
            let reference = ImageRef::parse(spec).expect("an image");
            assert_eq!(reference.to_string(), spec.trim_end_matches(':'));
            (reference.transport, reference.location, reference.name)
        };
        let named = |name: &str| Some(name.to_owned());
        for (spec, transport, location, name) in [
            ("oci:dir", Oci, "dir", None),
            ("oci:/a/b:v1", Oci, "/a/b", named("v1")),
            ("oci-archive:x.tar:", OciArchive, "x.tar", None),
            (
                "docker-archive:x.tar:docker.io/library/busybox:1.36",
                DockerArchive,
                "x.tar",
                named("docker.io/library/busybox:1.36"),
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
                named("v1:a"),
            ),
            ("oci-archive:http://h:80", OciArchive, "http://h:80", None),
            (
                "oci-archive:tar:tar:https://h:80/a.tar!/b:c!/d.tar:v1",
                OciArchive,
                "tar:tar:https://h:80/a.tar!/b:c!/d.tar",
                named("v1"),
            ),
            (
                "docker-archive:slice:0+512:http://h:80/a:me/tool:1",
                DockerArchive,
                "slice:0+512:http://h:80/a",
                named("me/tool:1"),
            ),
            ("oci-archive:slice:7:a", OciArchive, "slice:7:a", None),
            ("oci:tar:v1", Oci, "tar", named("v1")),
            ("oci:slice:v1", Oci, "slice", named("v1")),
        ] {
            assert_eq!(
                parsed(spec),
                (transport, location.to_owned(), name),
                "{spec}"
            );
        }
    }

    #[test]
    fn source_without_a_transport_is_no_image_ref() {
        for spec in [
            "x.tar",
            "./oci:x",
            "https://example.com/oci:x",
            "oci",
            "OCI:x",
            "oci://registry.example/x:1",
            "-",
            "",
        ] {
            assert_eq!(ImageRef::parse(spec), None, "{spec}");
        }
    }
}
