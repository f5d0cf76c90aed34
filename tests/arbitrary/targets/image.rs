//! The documents of container images, and the image names that users give.

use std::path::Path;

use tarfs::image::{self, BundleOptions, Config, Descriptor, Platform, SeccompProfile, User};
use tarfs::locate::SourceSpec;

/// Number of layers and groups that a document may list.
const MAX_ITEMS: usize = 1000;

/// Parses `bytes` as each document of an image, and as each name of one.
pub(super) fn run(bytes: &[u8]) {
    for descriptor in image::parse_index(bytes).into_iter().flatten() {
        check(&descriptor);
    }
    if let Ok(manifest) = image::parse_manifest(bytes) {
        check(&manifest.config);
        assert!(manifest.layers.len() <= MAX_ITEMS);
        manifest.layers.iter().for_each(check);
    }
    for image in image::parse_docker_manifest(bytes).into_iter().flatten() {
        assert!(image.layers.len() <= MAX_ITEMS);
    }
    if let Ok(config) = Config::parse(bytes) {
        bundle(&config);
    }
    // An invalid profile is an error.
    drop(SeccompProfile::parse(bytes, (6, 1)));
    let text = String::from_utf8_lossy(bytes);
    check_round_trip(&text);
    let half = bytes.len() / 2;
    let (passwd, group) = bytes.split_at(half);
    for spec in [
        text.lines().next().unwrap_or_default(),
        "0",
        "root",
        "root:users",
    ] {
        if let Ok(user) = User::find(spec, passwd, group) {
            assert!(user.groups.len() <= MAX_ITEMS);
            assert!(user.home.is_none_or(|home| home.starts_with('/')));
        }
    }
}

/// A descriptor names a blob and no other path.
fn check(descriptor: &Descriptor) {
    let path = descriptor.blob_path();
    let name = path.strip_prefix("blobs/sha256/").expect("among the blobs");
    assert_eq!(Path::new(name).components().count(), 1);
    assert!(name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit()));
}

/// Every configuration gives a runtime a valid document.
fn bundle(config: &Config) {
    assert!(config.diff_ids.len() <= MAX_ITEMS);
    let user = User {
        uid: 0,
        gid: 0,
        groups: Vec::new(),
        home: None,
    };
    for rootless in [None, Some((1000, 1000))] {
        let bundle = BundleOptions {
            user: user.clone(),
            args: vec!["given".to_owned()],
            name: config.execution.hostname.clone(),
            terminal: false,
            capabilities: Vec::new(),
            seccomp: SeccompProfile::built_in().ok(),
            volumes: config.execution.volumes.iter().cloned().collect(),
            rootless,
        };
        let text = image::runtime_spec(config, &bundle).expect("there is something to run");
        let document: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let at = |pointer: &str| {
            document
                .pointer(pointer)
                .and_then(serde_json::Value::as_str)
        };
        assert_eq!(at("/root/path"), Some("rootfs"));
        assert!(at("/process/cwd").is_some_and(|cwd| cwd.starts_with('/')));
        let hostname = at("/hostname").expect("a name");
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
        assert!((1..=63).contains(&hostname.len()) && hostname.bytes().all(is_plain));
        let args = document
            .pointer("/process/args")
            .and_then(|args| args.as_array());
        assert_eq!(args.and_then(|args| args.last()?.as_str()), Some("given"));
    }
}

/// A parsed name parses again after it is printed.
fn check_round_trip(text: &str) {
    let spec = SourceSpec::from(text);
    assert_eq!(SourceSpec::from(&*spec.to_string()), spec);
    if let Ok(platform) = text.parse::<Platform>() {
        assert_eq!(platform.to_string(), text);
        assert_eq!(platform.distance(&platform), Some(0));
    }
}
