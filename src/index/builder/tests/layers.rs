//! Layers and their whiteouts.

use super::*;

fn whiteouts(index: &Index) -> Vec<String> {
    let text = |whiteout: crate::index::Whiteout<'_>| {
        let parent = index.path(whiteout.parent).unwrap_or_default();
        let name = whiteout.name.unwrap_or(b"*");
        format!("{parent}/{}", name.escape_ascii())
    };
    let mut found: Vec<_> = index.whiteouts().map(text).collect();
    found.sort_unstable();
    found
}

// Promises: whiteout-scope
#[test]
fn whiteout_in_layer_names_its_literal_path() {
    let index = layer(
        &[
            symlink("d", "/e"),
            file("d/.wh.a", 0..0),
            symlink("s", "r"),
            file("s/.wh.b", 0..0),
            file("g/h/.wh.c", 0..0),
            file("g/.wh..wh..opq", 0..0),
            hard_link("g/.wh.x", "nothing"),
            file(&format!(".wh.{}", "n".repeat(255)), 0..0),
            file(&format!(".wh.{}", "n".repeat(256)), 0..0),
            file(".wh...", 0..0),
            file(".wh..wh.aufs", 0..0),
        ],
        WhiteoutFormat::Oci,
    );
    let long = format!("./{}", "n".repeat(255));
    let expected = ["./.wh.aufs", &long, "g/*", "g/h/c", "g/x"];
    assert_eq!(whiteouts(&index), expected);
    let unseen = |path: &str| {
        let entry = index.find(&ArchivePath::sanitize(path.as_bytes()).path);
        entry.map(|entry| entry.is_whiteout_only())
    };
    assert_eq!([unseen("g"), unseen("g/h")], [Some(true); 2]);
    assert_eq!([unseen("e"), unseen("r")], [None; 2]);
    assert_eq!(index.problem_count(), 0);
}

// Promises: layer-replaces
#[test]
fn file_in_layer_replaces_a_full_directory() {
    let index = layer(
        &[
            file("q/x", 0..1),
            file("q/y/z", 0..1),
            hard_link("kept", "q/x"),
            file("q/.wh.a", 0..0),
            file("q", 0..2),
            file("r/x", 0..1),
            symlink("r", "t"),
            directory("r", 0o700),
            file("r/w", 0..1),
        ],
        WhiteoutFormat::Oci,
    );
    assert_eq!(
        listing(&index),
        [
            "kept f 644 1 1",
            "q f 644 1 2",
            "r d 700 2 0",
            "r/w f 644 1 1"
        ]
    );
    assert_eq!(whiteouts(&index), ["r/*"]);
    assert_eq!(index.entry_count(), 5);
    assert_eq!(index.problem_count(), 0);
}
