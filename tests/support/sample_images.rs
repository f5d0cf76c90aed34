//! Sample images, and every way to store one.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::fixture::TestDir;
use super::image::{self, Image};
use super::packing::Packing;
use super::raw::Archive;
use super::rng::Rng;

/// A layer with a file of noise.
pub(crate) fn layer() -> Vec<u8> {
    files().end()
}

pub(crate) fn files() -> Archive {
    Archive::new()
        .directory("d/")
        .file("d/noise", Rng::new(7).bytes(3 << 20))
        .file("d/text", "some text")
        .symlink("link", "d/text")
}

pub(crate) fn one() -> Image {
    Image::new("one", vec![layer()]).running(json!({ "Cmd": ["true"] }))
}

/// An image of two layers. The upper layer removes a file of the lower one.
pub(crate) fn two() -> Image {
    let lower = Archive::new()
        .directory("d/")
        .file("d/gone", "for good")
        .file("low", "below");
    let upper = files().file("d/.wh.gone", "");
    Image::new("two", vec![lower.end(), upper.end()])
}

/// SOURCE for every way to store an image.
pub(crate) fn image_sources(place: &TestDir, image: &Image) -> Vec<String> {
    let oci = image::oci(std::slice::from_ref(image));
    oci.write(&place.path("layout"));
    place.put("oci.tar", oci.tar());
    place.put("oci.tgz", image::packed(Packing::Gzip, &oci.tar()));
    let docker = image::docker(image).end();
    place.put("docker.tar", &docker);
    place.put("docker.tar.zst", image::packed(Packing::Zstd, &docker));
    place.put("blobs.tar", image::docker_with_blobs(image).tar());
    let mut kept = vec![
        "oci:layout".to_owned(),
        format!("oci:layout:{}", image.name),
        format!("oci-archive:oci.tar:{}", image.name),
        "oci-archive:oci.tgz".to_owned(),
        "docker-archive:docker.tar".to_owned(),
        format!("docker-archive:docker.tar.zst:{}:latest", image.name),
        "docker-archive:blobs.tar".to_owned(),
    ];
    let absolute = place.path("oci.tar");
    kept.push(format!("oci-archive:{}", absolute.display()));
    kept
}

/// The names of all entries of a directory.
pub(crate) fn names_in(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).expect("a directory");
    let names = names.map(|entry| entry.expect("a name").file_name().into_string());
    let mut names: Vec<_> = names.map(|name| name.expect("UTF-8")).collect();
    names.sort_unstable();
    names
}
