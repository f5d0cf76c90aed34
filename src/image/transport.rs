//! Storage formats of images.

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
    /// Returns the transport with this [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Oci, Self::OciArchive, Self::DockerArchive];
        all.into_iter().find(|transport| transport.name() == name)
    }

    /// The prefix before the first colon of a SOURCE.
    pub fn name(self) -> &'static str {
        match self {
            Self::Oci => "oci",
            Self::OciArchive => "oci-archive",
            Self::DockerArchive => "docker-archive",
        }
    }
}
