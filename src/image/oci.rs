//! Reads images from OCI layouts and registries: index, manifest, config and layers.

use std::collections::{BTreeSet, HashMap};

use bytes::Bytes;
use tokio::runtime::Handle;

use super::error::{Cause, Error};
use super::layout::Layout;
use super::opener::{self, Digests, Image, ImageOpener, ImageOrArtifact};
use crate::base::sha256::Sha256;
use crate::source::documents::{self, Descriptor, DescriptorKind, Platform};

/// Maximum depth of nested indexes.
const MAX_DEPTH: usize = 3;

const MAX_INDEXES: usize = 32;

const INDEX: &str = "index.json";

/// A manifest, with the platform and names from the indexes.
#[derive(Clone, Debug)]
struct Candidate {
    manifest: Descriptor,
    names: Vec<String>,
    /// Number of the image that has it, among those that the user may mean.
    image: usize,
}

impl Candidate {
    /// Names by which the user can select it.
    fn display_names(&self) -> Vec<String> {
        opener::display_names(&self.names, Some(self.manifest.digest))
    }
}

struct Search<'a> {
    layout: &'a Layout,
    network: &'a Handle,
    remaining_indexes: usize,
    found: Vec<Candidate>,
}

pub(super) fn open(opener: &ImageOpener<'_>) -> Result<Image, Error> {
    let (chosen, bytes) = read_chosen_manifest(opener)?;
    open_image(opener, chosen, &bytes)
}

/// Opens the image or artifact in a registry.
pub(super) fn open_image_or_artifact(opener: &ImageOpener<'_>) -> Result<ImageOrArtifact, Error> {
    let layout = opener.layout;
    let (chosen, bytes) = read_chosen_manifest(opener)?;
    let digest = chosen.manifest.digest;
    let artifact = documents::parse_artifact(&bytes)
        .map_err(|cause| layout.error(&chosen.manifest.blob_path(), cause))?;
    let Some(file) = artifact else {
        let image = open_image(opener, chosen, &bytes)?;
        return Ok(ImageOrArtifact::Image(Box::new(image)));
    };
    let digests = Digests {
        packed: Some(file.digest),
        plain: None,
    };
    let blob = (layout.blob(&file)?, &*file.blob_path());
    let layer = opener.layer(blob, (0, 1), digests, Some(file.media_type))?;
    Ok(ImageOrArtifact::Artifact {
        location: layout.location().to_owned(),
        digest,
        archive: layer.source,
    })
}

fn read_chosen_manifest(opener: &ImageOpener<'_>) -> Result<(Candidate, Bytes), Error> {
    let (layout, network) = (opener.layout, opener.network);
    let root = layout.read_root(network)?;
    let known = root
        .as_ref()
        .map(|(root, bytes)| (root.digest, bytes.clone()));
    let chosen = choose_manifest(opener, root)?;
    let bytes = match known {
        Some((digest, bytes)) if digest == chosen.manifest.digest => bytes,
        _ => layout.read_verified(&chosen.manifest, network)?,
    };
    Ok((chosen, bytes))
}

fn open_image(
    opener: &ImageOpener<'_>,
    chosen: Candidate,
    manifest: &[u8],
) -> Result<Image, Error> {
    let (layout, network) = (opener.layout, opener.network);
    let manifest = documents::parse_manifest(manifest)
        .map_err(|cause| layout.error(&chosen.manifest.blob_path(), cause))?;
    let config_path = manifest.config.blob_path();
    let bytes = layout.read_verified(&manifest.config, network)?;
    let config = opener.parse_config(&config_path, &bytes)?;
    let count = manifest.layers.len();
    // An artifact other than a container image may have a configuration without layers.
    if !config.diff_ids.is_empty() {
        opener.check_layer_count(&config_path, &config, count)?;
    }
    let layers = manifest.layers.iter().enumerate().map(|(number, layer)| {
        let (file, path) = (opener.layer_file(layer)?, layer.blob_path());
        // A layer that is not packed has one digest for both.
        let (packed, plain) = (Some(layer.digest), config.diff_ids.get(number).copied());
        let plain = plain.filter(|_| plain != packed);
        let media_type = Some(layer.media_type.clone());
        opener.layer(
            (file, &path),
            (number, count),
            Digests { packed, plain },
            media_type,
        )
    });
    Ok(Image {
        location: layout.location().to_owned(),
        names: chosen.names,
        digest: chosen.manifest.digest,
        config_digest: manifest.config.digest,
        layers: layers.collect::<Result<_, Error>>()?,
        config,
    })
}

/// Chooses from `root`, the document of a name in a registry, or else from the layout's index.
fn choose_manifest(
    opener: &ImageOpener<'_>,
    root: Option<(Descriptor, Bytes)>,
) -> Result<Candidate, Error> {
    let layout = opener.layout;
    let error = |cause| opener.error(cause);
    let is_one_image = root.is_some() || opener.name.is_some();
    let listed = match root {
        Some((root, bytes)) if root.kind() == DescriptorKind::Index => {
            parse_index(layout, "manifest", &bytes)?
        }
        Some((root, _)) => vec![root],
        None => parse_index(layout, INDEX, &opener.read_marker(INDEX)?)?,
    };
    let (listed, manifest) = match_name(listed, opener.name).map_err(error)?;
    let mut search = Search {
        layout,
        network: opener.network,
        remaining_indexes: MAX_INDEXES,
        found: Vec::new(),
    };
    for (number, descriptor) in listed.into_iter().enumerate() {
        let names = descriptor.names();
        let image = if is_one_image { 0 } else { number };
        search.descend(descriptor, (&names, image), MAX_DEPTH)?;
    }
    if let Some(wanted) = manifest {
        search.retain_digest(wanted).map_err(error)?;
    }
    choose_for_platform(&search.found, opener.platform).map_err(error)
}

fn parse_index(layout: &Layout, path: &str, bytes: &[u8]) -> Result<Vec<Descriptor>, Error> {
    documents::parse_index(bytes).map_err(|cause| layout.error(path, cause))
}

/// The descriptors of `listed` with name or digest `wanted`; all of them without `wanted`. If none has that
/// digest, returns the digest and all of them, because a nested index may have it.
fn match_name(
    listed: Vec<Descriptor>,
    wanted: Option<&str>,
) -> Result<(Vec<Descriptor>, Option<Sha256>), Cause> {
    let Some(wanted) = wanted else {
        return Ok((listed, None));
    };
    let digest = Sha256::from_oci(wanted);
    let (found, others): (Vec<_>, Vec<_>) = listed.into_iter().partition(|descriptor| {
        descriptor.names().iter().any(|name| name == wanted) || digest == Some(descriptor.digest)
    });
    if !found.is_empty() {
        return Ok((found, None));
    }
    if digest.is_some() {
        return Ok((others, digest));
    }
    let images = others.iter();
    let images = images.filter(|other| other.kind() != DescriptorKind::Other);
    let known = images.flat_map(|one| opener::display_names(&one.names(), Some(one.digest)));
    Err(Cause::NoSuchName {
        wanted: wanted.to_owned(),
        known: known.collect(),
    })
}

impl Search<'_> {
    fn retain_digest(&mut self, wanted: Sha256) -> Result<(), Cause> {
        let found = std::mem::take(&mut self.found).into_iter();
        let (kept, others): (Vec<_>, Vec<_>) =
            found.partition(|candidate| candidate.manifest.digest == wanted);
        if kept.is_empty() {
            let known = others.iter().flat_map(Candidate::display_names).collect();
            let wanted = format!("sha256:{wanted}");
            return Err(Cause::NoSuchName { wanted, known });
        }
        self.found = kept;
        Ok(())
    }

    fn descend(
        &mut self,
        descriptor: Descriptor,
        (names, image): (&[String], usize),
        depth: usize,
    ) -> Result<(), Error> {
        match descriptor.kind() {
            DescriptorKind::Other => {}
            DescriptorKind::Manifest if self.found.len() >= documents::MAX_ENTRIES => {
                let cause = Cause::Malformed("there are too many manifests".to_owned());
                return Err(self.layout.error(&descriptor.blob_path(), cause));
            }
            DescriptorKind::Manifest => self.found.push(Candidate {
                manifest: descriptor,
                names: names.to_vec(),
                image,
            }),
            DescriptorKind::Index => {
                let path = descriptor.blob_path();
                let malformed = |what: &str| {
                    let cause = Cause::Malformed(what.to_owned());
                    Err(self.layout.error(&path, cause))
                };
                if depth == 0 {
                    return malformed("it is an index in too many others");
                }
                if self.remaining_indexes == 0 {
                    return malformed("there are too many indexes");
                }
                self.remaining_indexes -= 1;
                let bytes = self.layout.read_verified(&descriptor, self.network)?;
                let listed = parse_index(self.layout, &path, &bytes)?;
                for descriptor in listed {
                    self.descend(descriptor, (names, image), depth - 1)?;
                }
            }
        }
        Ok(())
    }
}

/// The one of `found` for `wanted` or this machine, or without a platform; without `wanted`, the only one. The first
/// of an image counts, as the specification recommends.
fn choose_for_platform(found: &[Candidate], wanted: Option<&Platform>) -> Result<Candidate, Cause> {
    let host = Platform::host();
    let platform = wanted.unwrap_or(&host);
    let distance = |candidate: &Candidate| candidate.manifest.platform.as_ref()?.distance(platform);
    let nearest = found.iter().filter_map(distance).min();
    let is_best = |candidate: &&Candidate| match nearest {
        Some(_) => distance(candidate) == nearest,
        // Their manifests name no platform. Their configurations, read later, may do so.
        None => candidate.manifest.platform.is_none(),
    };
    let mut best: Vec<_> = found.iter().filter(is_best).cloned().collect();
    // Two entries with the same manifest are one image with two names.
    best.dedup_by(|next, before| {
        let is_same = next.manifest.digest == before.manifest.digest;
        if is_same {
            before.names.append(&mut next.names);
        }
        is_same
    });
    if best.is_empty() && found.len() == 1 && wanted.is_none() {
        // The user wants no platform, and there is only one image.
        best = found.to_vec();
    }
    let first = best.first().map(|one| one.image);
    match best.len() {
        0 => {
            let platforms = found
                .iter()
                .filter_map(|one| one.manifest.platform.as_ref());
            let known: BTreeSet<_> = platforms.map(ToString::to_string).collect();
            Err(Cause::NoSuchPlatform {
                wanted: platform.clone(),
                known: known.into_iter().collect(),
            })
        }
        _ if best.iter().all(|one| Some(one.image) == first) => Ok(best.swap_remove(0)),
        _ => {
            remove_shared_names(&mut best);
            let known = best.iter().flat_map(Candidate::display_names);
            Err(Cause::AmbiguousImage(known.collect()))
        }
    }
}

fn remove_shared_names(found: &mut [Candidate]) {
    let mut owners: HashMap<String, Option<usize>> = HashMap::new();
    for (number, one) in found.iter().enumerate() {
        for name in &one.names {
            let owner = owners.entry(name.clone()).or_insert(Some(number));
            *owner = owner.filter(|&owner| owner == number);
        }
    }
    for one in found {
        one.names
            .retain(|name| owners.get(name).is_some_and(Option::is_some));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

    fn candidate(number: u8, name: &str, platform: Option<&str>) -> Candidate {
        let text = format!(
            r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"{MANIFEST}","size":1,
                "digest":"sha256:{}"}}]}}"#,
            format!("{number:02x}").repeat(32)
        );
        let mut listed = documents::parse_index(text.as_bytes()).expect("an index");
        let mut manifest = listed.swap_remove(0);
        manifest.platform = platform.map(|text| text.parse().expect("a platform"));
        let names = vec![name.to_owned()];
        Candidate {
            manifest,
            names,
            image: number.into(),
        }
    }

    fn chosen(found: &[Candidate], wanted: Option<&str>) -> Result<Vec<String>, Cause> {
        let wanted: Option<Platform> = wanted.map(|text| text.parse().expect("a platform"));
        choose_for_platform(found, wanted.as_ref()).map(|one| one.names)
    }

    // Promises: image-platform
    #[test]
    fn platform_selects_the_manifest_and_unspecified_is_last() {
        let found = [
            candidate(1, "silent", None),
            candidate(2, "arm", Some("linux/arm/v5")),
            candidate(3, "arm7", Some("linux/arm/v7")),
            candidate(4, "s390x", Some("linux/s390x")),
        ];
        assert_eq!(chosen(&found, Some("linux/arm")).expect("one"), ["arm7"]);
        assert_eq!(chosen(&found, Some("linux/arm/v5")).expect("one"), ["arm"]);
        assert_eq!(
            chosen(&found, Some("linux/riscv64")).expect("one"),
            ["silent"]
        );
        let none = chosen(found.get(1..).expect("three"), Some("linux/riscv64"));
        let told = none.expect_err("none").to_string();
        assert!(
            told.contains("'linux/arm/v5', 'linux/arm/v7', 'linux/s390x'"),
            "{told}"
        );
    }

    // Promises: image-platform
    #[test]
    fn first_manifest_of_an_image_is_selected() {
        let found = [2, 1, 3].map(|number| Candidate {
            image: 0,
            ..candidate(number, &number.to_string(), Some("linux/amd64"))
        });
        assert_eq!(chosen(&found, Some("linux/amd64")).expect("one"), ["2"]);
    }

    // Promises: image-platform
    #[test]
    fn only_image_is_selected_unless_a_platform_is_requested() {
        let found = [candidate(1, "only", Some("plan9/mips"))];
        assert_eq!(chosen(&found, None).expect("the one"), ["only"]);
        assert!(chosen(&found, Some("linux/amd64")).is_err());
    }

    // Promises: image-selected
    #[test]
    fn several_images_are_ambiguous_but_several_names_are_not() {
        let twice = [candidate(1, "a", None), candidate(1, "b", None)];
        assert_eq!(chosen(&twice, None).expect("the one"), ["a", "b"]);
        let two = [candidate(1, "a", None), candidate(2, "b", None)];
        let told = chosen(&two, None).expect_err("which?").to_string();
        assert!(told.contains("'a', 'b'"), "{told}");
        let named = |wanted: &str| {
            let listed = two.iter().map(|one| {
                let mut descriptor = one.manifest.clone();
                let name = "org.opencontainers.image.ref.name".to_owned();
                descriptor.annotations.insert(name, one.names[0].clone());
                descriptor
            });
            let named = match_name(listed.collect(), Some(wanted));
            named.map(|(listed, manifest)| (listed.len(), manifest))
        };
        let digest = |byte: u8| format!("sha256:{}", format!("{byte:02x}").repeat(32));
        assert_eq!(named("b").expect("one"), (1, None));
        assert_eq!(named(&digest(1)).expect("one"), (1, None));
        // The digest may be in a nested index.
        let deep = (2, Some(Sha256([3; 32])));
        assert_eq!(named(&digest(3)).expect("all"), deep);
        assert!(matches!(named("c"), Err(Cause::NoSuchName { .. })));
    }

    // Promises: image-selected
    #[test]
    fn image_without_a_unique_name_is_listed_by_digest() {
        let mut silent = candidate(4, "", None);
        silent.names.clear();
        let found = [
            candidate(1, "a", None),
            candidate(2, "a", None),
            candidate(3, "c", None),
            silent,
        ];
        let told = chosen(&found, None).expect_err("which?").to_string();
        let digest = |byte: u8| format!("'sha256:{}'", format!("{byte:02x}").repeat(32));
        let expected = format!(
            "there are several images: {}, {}, 'c', {}",
            digest(1),
            digest(2),
            digest(4)
        );
        assert!(told.ends_with(&expected), "{told}");
    }
}
