//! Stacked layers: a mount, `materialize` and `ls` show the tree of a simple model.
//!
//! `tests/library` has the tests that do not mount.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use bytes::Bytes;
use rustix::fs::getxattr;

use crate::support::fixture::TestDir;
use crate::support::layers::Step::{Device, Directory, File, Hard, Link, Marked};
use crate::support::layers::{ObservedTree, Place, Step, bottom, seen};
use crate::support::namespace;
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::{Archive, Header, random_bytes};
use crate::support::wait::wait_until;

/// An entry of the model.
#[derive(Clone, Debug)]
struct Node {
    /// Equal for all names of an entry.
    id: usize,
    text: String,
    is_directory: bool,
    is_implied: bool,
}

/// The overlay rules as maps from paths to entries, written for clarity.
#[derive(Default)]
struct Model {
    nodes: BTreeMap<String, Node>,
    made: usize,
}

impl Model {
    fn of(layers: &[Vec<Step>], whiteouts: &str) -> Self {
        let mut model = Self::default();
        for layer in layers {
            model.apply_layer(layer, whiteouts);
        }
        model
    }

    fn node(&mut self, text: String, is_directory: bool) -> Node {
        self.made += 1;
        Node {
            id: self.made,
            text,
            is_directory,
            is_implied: false,
        }
    }

    /// The entries of one layer, and its hard links to other layers.
    fn layer_entries(&mut self, layer: &[Step]) -> (BTreeMap<String, Node>, Vec<(String, String)>) {
        let mut own = BTreeMap::new();
        let mut links = Vec::new();
        for step in layer {
            let (name, node) = match *step {
                Directory(name, mode) => (name, self.node(format!("d {mode:o}"), true)),
                Marked(name, _) => (name, self.node("d 755".to_owned(), true)),
                File(name, content) => (name, self.node(format!("f {content}"), false)),
                Link(name, target) => (name, self.node(format!("l {target}"), false)),
                Device(name, major, minor) => {
                    (name, self.node(format!("c {major},{minor}"), false))
                }
                Hard(name, target) => {
                    links.push((name.to_owned(), target.to_owned()));
                    continue;
                }
            };
            if name.split('/').any(|part| part == "..") {
                continue;
            }
            self.add_implied_parents(&mut own, name);
            own.insert(name.to_owned(), node);
        }
        links.retain(|(name, target)| {
            self.add_implied_parents(&mut own, name);
            let found = own.get(target).cloned();
            let is_own = found.is_some();
            own.extend(found.map(|node| (name.clone(), node)));
            !is_own
        });
        (own, links)
    }

    fn add_implied_parents(&mut self, own: &mut BTreeMap<String, Node>, name: &str) {
        for (slash, _) in name.match_indices('/') {
            let parent = name[..slash].to_owned();
            let implied = self.node("d 755".to_owned(), true);
            own.entry(parent).or_insert(Node {
                is_implied: true,
                ..implied
            });
        }
    }

    fn apply_layer(&mut self, layer: &[Step], whiteouts: &str) {
        let (mut own, mut links) = self.layer_entries(layer);
        let mut gone = Vec::new();
        // An implied directory is no whiteout.
        let spoken_of = own.iter().filter(|(_, node)| !node.is_implied);
        let own_names = spoken_of.map(|(path, node)| (path, node.text.as_str()));
        let link_names = links.iter().map(|(path, _)| (path, "a link"));
        for (path, text) in own_names.chain(link_names) {
            let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
            let below = |name: &str| format!("{parent}/{name}").trim_matches('/').to_owned();
            match name.strip_prefix(".wh.") {
                Some(".wh..opq") if whiteouts == "oci" => gone.push((parent.to_owned(), false)),
                Some("" | "." | "..") => {}
                Some(name) if whiteouts == "oci" => gone.push((below(name), true)),
                _ if whiteouts == "overlay" && text == "c 0,0" => {
                    gone.push((path.clone(), true));
                }
                _ => {}
            }
        }
        if whiteouts == "overlay" {
            gone.extend(layer.iter().filter_map(|step| match step {
                Marked(name, "trusted.overlay.opaque" | "user.overlay.opaque") => {
                    Some(((*name).to_owned(), false))
                }
                _ => None,
            }));
        }
        for (path, itself) in gone {
            self.remove_below(&path);
            if itself {
                self.nodes.remove(&path);
            }
        }
        if whiteouts == "oci" {
            let is_shown = |path: &str| !path.split('/').any(|part| part.starts_with(".wh."));
            own.retain(|path, _| is_shown(path));
            links.retain(|(path, _)| is_shown(path));
        }
        if whiteouts == "overlay" {
            own.retain(|_, node| node.text != "c 0,0");
        }
        for (path, node) in own {
            self.put(path, node);
        }
        self.resolve_links(links);
    }

    /// Resolves links to lower layers, and then links to other links.
    fn resolve_links(&mut self, mut links: Vec<(String, String)>) {
        let mut made = true;
        while std::mem::take(&mut made) {
            let waits = |target: &str| links.iter().any(|(name, _)| name == target);
            let ready = links
                .iter()
                .position(|(name, target)| name == target || !waits(target));
            let Some((name, target)) = ready.map(|at| links.remove(at)) else {
                return;
            };
            let target = self.nodes.get(&target).cloned();
            if let Some(node) = target.filter(|node| !node.is_directory) {
                self.put(name, node);
            }
            made = true;
        }
    }

    fn put(&mut self, path: String, node: Node) {
        match self.nodes.get_mut(&path) {
            Some(below) if below.is_directory && node.is_directory => {
                if !node.is_implied {
                    *below = node;
                }
            }
            _ => {
                self.remove_below(&path);
                self.nodes.insert(path, node);
            }
        }
    }

    fn remove_below(&mut self, path: &str) {
        let inside = format!("{path}/");
        self.nodes
            .retain(|name, _| !path.is_empty() && !name.starts_with(&inside));
    }

    fn observed(&self) -> ObservedTree {
        let line = |(path, node): (&String, &Node)| {
            let leader = self.nodes.iter().find(|(_, other)| other.id == node.id);
            let leader = leader.map_or("", |(path, _)| path);
            let links = self.nodes.values().filter(|other| other.id == node.id);
            let text = if node.is_directory {
                node.text.clone()
            } else {
                format!("{} x{} ={leader}", node.text, links.count())
            };
            (path.clone(), text)
        };
        self.nodes.iter().map(line).collect()
    }
}

/// Compares mount, disk and listing with the model. Returns the warnings of `materialize`.
fn assert_matches_model(name: &str, layers: &[Vec<Step>], whiteouts: &str) -> String {
    let place = Place::of_steps(layers);
    let expected = Model::of(layers, whiteouts).observed();
    let flags: &[&str] = match whiteouts {
        "oci" => &[],
        other => &["--whiteouts", other],
    };
    let mounted = place.with_mount(flags, seen);
    assert_eq!(mounted, expected, "{name}: the mount");
    let (written, complaints) = place.materialize(flags);
    assert_eq!(written, expected, "{name}: on disk");
    let paths: Vec<_> = expected.keys().cloned().collect();
    assert_eq!(place.listed(flags), paths, "{name}: listed");
    complaints
}

// Promises: layer-directory, layer-replaces, layer-links, whiteout-oci, whiteout-scope, whiteout-hidden
// Promises: layerlink-target, layer-written
#[test]
fn layers_hide_and_replace_lower_entries() {
    let over_bottom = |name: &'static str, above: Vec<Step>| (name, vec![bottom(), above]);
    let cases = [
        over_bottom("a file is gone", vec![File(".wh.f", "")]),
        over_bottom("a directory is gone", vec![File(".wh.d", "")]),
        over_bottom(
            "what was not there is gone",
            vec![File(".wh.none", ""), File("d/.wh.none", "")],
        ),
        over_bottom("a file in a directory is gone", vec![File("d/.wh.x", "")]),
        over_bottom(
            "opaque",
            vec![Directory("d", 0o711), File("d/.wh..wh..opq", "")],
        ),
        over_bottom(
            "opaque, spoken of by its marker alone",
            vec![File("d/.wh..wh..opq", "")],
        ),
        over_bottom(
            "opaque before what is new",
            vec![
                File("d/.wh..wh..opq", ""),
                File("d/new", "above"),
                File("d/sub/new", "above"),
            ],
        ),
        over_bottom(
            "opaque behind what is new",
            vec![
                File("d/new", "above"),
                File("d/sub/new", "above"),
                File("d/.wh..wh..opq", ""),
            ],
        ),
        over_bottom(
            "the root is opaque",
            vec![File("f", "above"), File(".wh..wh..opq", "")],
        ),
        over_bottom("gone and new", vec![File(".wh.f", ""), File("f", "above")]),
        over_bottom("new and gone", vec![File("f", "above"), File(".wh.f", "")]),
        over_bottom(
            "a directory gone and new",
            vec![
                File(".wh.d", ""),
                Directory("d", 0o711),
                File("d/new", "above"),
            ],
        ),
        over_bottom(
            "a directory new and gone",
            vec![
                Directory("d", 0o711),
                File("d/new", "above"),
                File(".wh.d", ""),
            ],
        ),
        over_bottom(
            "a directory that only paths speak of, new and gone",
            vec![File("d/sub/new", "above"), File(".wh.d", "")],
        ),
        over_bottom(
            "a directory that only paths speak of, gone and new",
            vec![File(".wh.d", ""), File("d/sub/new", "above")],
        ),
        over_bottom("a file over a directory", vec![File("d", "above")]),
        over_bottom("a link over a directory", vec![Link("d", "f")]),
        over_bottom("a device over a directory", vec![Device("d", 1, 3)]),
        over_bottom(
            "a directory over a file",
            vec![Directory("f", 0o711), File("f/x", "above")],
        ),
        over_bottom(
            "a directory over a link",
            vec![Directory("l", 0o711), File("l/x", "above")],
        ),
        over_bottom("a path over a link", vec![File("l/x", "above")]),
        over_bottom("a path over a file", vec![File("f/x/y", "above")]),
        over_bottom(
            "a file over a file with two names",
            vec![File("f", "above")],
        ),
        over_bottom("a link over a file", vec![Link("f", "g")]),
        over_bottom("attributes of a directory", vec![Directory("d", 0o711)]),
        over_bottom(
            "a path changes no attributes",
            vec![File("d/sub/new", "above")],
        ),
        over_bottom(
            "another name for what lies below",
            vec![Hard("d/more", "f")],
        ),
        over_bottom(
            "names for names for what lies below",
            vec![
                Hard("one", "two"),
                Hard("two", "d/sub/deep"),
                Hard("three", "one"),
            ],
        ),
        over_bottom(
            "another name for its own file",
            vec![Hard("d/x", "n"), File("n", "above")],
        ),
        over_bottom("another name for itself", vec![Hard("f", "f")]),
        over_bottom(
            "gone by links to what lies below",
            vec![Hard(".wh.f", "d/x"), Hard("d/.wh.y", "f")],
        ),
        over_bottom(
            "gone by links to what does not exist",
            vec![
                Hard(".wh.f", ".wh..wh.aufs"),
                Hard("d/.wh.x", ".wh..wh.aufs"),
                Hard(".wh.none", ".wh..wh.aufs"),
                Hard(".wh.kept/x", "d/y"),
            ],
        ),
        over_bottom(
            "gone by a link, and new",
            vec![File("f", "above"), Hard(".wh.f", "d/x")],
        ),
        over_bottom(
            "opaque by a link",
            vec![Hard("d/.wh..wh..opq", "nowhere"), File("d/new", "above")],
        ),
        over_bottom(
            "another name for what a link hides under its other name",
            vec![Hard(".wh.f", "d/x"), Hard("n", "g")],
        ),
        (
            "gone by a link from one layer and back in the next",
            vec![
                bottom(),
                vec![Hard(".wh.d", "f")],
                vec![File("d/z", "third"), Hard("d/y", "f")],
            ],
        ),
        (
            "what the bottom says by links to be gone",
            vec![
                vec![File("a", "below"), Hard(".wh.a", "none")],
                vec![File("b", "above")],
            ],
        ),
        (
            "another name for what is gone",
            vec![bottom(), vec![Hard("h", "d/x")], vec![File(".wh.d", "")]],
        ),
        (
            "one over the other",
            vec![
                bottom(),
                vec![
                    File("d/x", "second"),
                    File("new/x", "second"),
                    File(".wh.f", ""),
                ],
                vec![
                    File("d/.wh.x", ""),
                    File("new/y", "third"),
                    File("f/x", "third"),
                ],
            ],
        ),
        (
            "gone from below what was replaced",
            vec![
                bottom(),
                vec![File("d", "second")],
                vec![
                    Directory("d", 0o711),
                    File("d/.wh.x", ""),
                    File("d/z", "third"),
                ],
            ],
        ),
        (
            "gone in the middle and back on top",
            vec![
                bottom(),
                vec![File(".wh.d", "")],
                vec![File("d/z", "third")],
            ],
        ),
        (
            "what the bottom says to be gone",
            vec![
                vec![
                    File("a", "below"),
                    File(".wh.a", ""),
                    File("d/.wh..wh..opq", ""),
                    File("d/x", "below"),
                ],
                vec![File("b", "above")],
            ],
        ),
        over_bottom(
            "links that are called like those that wait for their places",
            vec![
                Hard(".tarfs-link-1", "d/y"),
                Hard("b", "d/x"),
                File(".tarfs-link-0", "above"),
            ],
        ),
        over_bottom(
            "what was in a directory that is a file now",
            vec![
                File("d", "above"),
                File("d/.wh.x", ""),
                File("d/.wh.sub", ""),
            ],
        ),
        over_bottom(
            "names that are none",
            vec![
                File(".wh...", ""),
                File(".wh..", ""),
                File(".wh.", ""),
                File("d/.wh...", ""),
                File("d/.wh..", ""),
                File("d/sub/.wh...", ""),
                File("d/.wh.sub/x", "hidden"),
                File(".wh..wh.plnk/1", "hidden"),
            ],
        ),
    ];
    for (name, layers) in &cases {
        let complaints = assert_matches_model(name, layers, "oci");
        assert_eq!(complaints, "", "{name}");
    }
}

// Promises: xattr-overlay, whiteout-overlay
#[test]
fn overlay_whiteouts_are_devices_and_attributes() {
    let cases = [
        ("a file is gone", vec![Device("f", 0, 0)]),
        ("a directory is gone", vec![Device("d", 0, 0)]),
        ("a device is a device", vec![Device("f", 0, 1)]),
        (
            "opaque",
            vec![
                Marked("d", "trusted.overlay.opaque"),
                File("d/new", "above"),
            ],
        ),
        (
            "opaque for others",
            vec![File("d/new", "above"), Marked("d", "user.overlay.opaque")],
        ),
        ("marked otherwise", vec![Marked("d", "user.overlay.other")]),
        (
            "names are names",
            vec![File(".wh.f", ""), File("d/.wh..wh..opq", "")],
        ),
    ];
    for (name, above) in cases {
        let complaints = assert_matches_model(name, &[bottom(), above], "overlay");
        assert_eq!(complaints, "", "{name}");
    }
}

// Promises: whiteout-keep
#[test]
fn literal_whiteouts_hide_nothing() {
    let above = vec![
        File(".wh.f", ""),
        File("d/.wh..wh..opq", ""),
        File("f", "above"),
        Device("n", 0, 0),
    ];
    assert_matches_model("kept", &[bottom(), above], "keep");
}

// Promises: whiteout-keep
#[test]
fn single_archive_shows_whiteouts_unless_used_as_layer() {
    let layers = [vec![File(".wh.a", "kept"), File("a", "seen")]];
    let place = Place::of_steps(&layers);
    assert_eq!(place.listed(&[]), [".wh.a", "a"]);
    assert_eq!(place.listed(&["--whiteouts", "oci"]), ["a"]);
    assert_eq!(place.listed(&["--whiteouts", "keep"]), [".wh.a", "a"]);
    let names = place.with_mount(&[], |mnt| seen(mnt).into_keys().collect::<Vec<_>>());
    assert_eq!(names, [".wh.a", "a"]);
    assert_matches_model("one layer", &layers, "keep");
}

// Promises: layerlink-lost, layer-missing
#[test]
fn links_without_target_are_reported() {
    let place = Place::of_steps(&[
        bottom(),
        vec![
            Hard("h", "nowhere"),
            Hard("i", "d"),
            Hard("one", "other"),
            Hard("other", "one"),
            // A whiteout must not be a hard link.
            Hard("s", ".wh.t"),
            Hard(".wh.t", "g"),
            File("n", "above"),
        ],
    ]);
    let expected = Model::of(&[bottom(), vec![File("n", "above")]], "oci").observed();
    let (written, complaints) = place.materialize(&[]);
    assert_eq!(written, expected);
    assert_eq!(place.with_mount(&[], seen), expected);
    for told in ["h", "i", "one", "other", "s"] {
        let told = format!(
            "{told}: layer 2: the target of the hard link is missing, and all else that the layer has at \
             its path or below it is left out"
        );
        assert!(complaints.contains(&told), "{told}: {complaints}");
    }
    let output = place.run(&["ls", "-R"], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr_text(&output).contains("5 members are damaged or not in the tree"),
        "{}",
        stderr_text(&output)
    );
    let below = Place::of_steps(&[bottom(), vec![Hard("h", "l/x")]]);
    let (written, complaints) = below.materialize(&[]);
    assert_eq!(complaints, "");
    assert_eq!(written.get("h"), written.get("d/x"), "by a link on the way");
    assert_eq!(below.with_mount(&[], seen), written);
}

// Promises: layerlink-lost
#[test]
fn link_without_target_skips_its_name() {
    let place = Place::of_steps(&[
        vec![File("d/a", "below")],
        vec![
            Directory("d", 0o755),
            File("d/x", "lost"),
            Hard("d", "nowhere"),
        ],
    ]);
    let (written, complaints) = place.materialize(&[]);
    assert_eq!(written.keys().collect::<Vec<_>>(), ["d", "d/a"]);
    assert_eq!(place.with_mount(&[], seen), written);
    let told = "d: layer 2: the target of the hard link is missing, and all else";
    assert!(complaints.contains(told), "{complaints}");
}

// Promises: whiteout-scope
#[test]
fn whiteout_stored_as_link_ignores_its_target() {
    let above = vec![
        Directory("n", 0o755),
        File("t", "above"),
        Hard(".wh.f", "n"),
        Hard("d/.wh.x", "t/nothing"),
        Hard("d/sub/.wh..wh..opq", "late"),
        Directory("late", 0o755),
        File(".wh.l", ""),
        Hard(".wh.l", "nowhere"),
        Hard(".wh.kept/x", "n"),
    ];
    let place = Place::of_steps(&[bottom(), above]);
    let output = place.run(&["ls", "-R"], &[]);
    let listed = "d\nd/sub\nd/y\ng\nlate\nn\nt\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), listed);
    assert_eq!(stderr_text(&output), "");
    assert_eq!(output.status.code(), Some(0));
    let (written, complaints) = place.materialize(&[]);
    assert_eq!(complaints, "");
    assert_eq!(place.with_mount(&[], seen), written);
    assert_eq!(written.len(), 7, "{written:?}");
}

// Promises: whiteout-scope
#[test]
fn whiteout_below_a_file_is_ignored() {
    let place = Place::of_steps(&[bottom(), vec![File("d", "above"), File("d/.wh.x", "")]]);
    let output = place.run(&["ls", "-R"], &[]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "d\nf\ng\nl\n");
    assert_eq!(
        (stderr_text(&output), output.status.code()),
        (String::new(), Some(0))
    );
    let (written, complaints) = place.materialize(&[]);
    assert_eq!(complaints, "");
    assert_eq!(place.with_mount(&[], seen), written);
    // Outside of a stack it is a file whose parent is not a directory.
    let place = Place::of_steps(&[vec![File("d", ""), File("d/.wh.x", "")]]);
    let output = place.run(&["ls"], &[]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr_text(&output));
}

// Promises: layerlink-lost
#[test]
fn link_to_whiteout_is_skipped_and_reported() {
    let above = vec![
        File(".wh.z", "hidden"),
        File("own", "above"),
        Hard("own", ".wh.z"),
        Hard("f", ".wh.z"),
        Hard("late", ".wh.late"),
        Directory("empty", 0o755),
        Hard("empty", ".wh.z"),
        File(".wh.late", ""),
    ];
    for layers in [vec![bottom(), above.clone()], vec![above]] {
        let place = Place::of_steps(&layers);
        let (written, complaints) = place.materialize(&["--whiteouts", "oci"]);
        for name in ["own", "f", "late", "empty"] {
            let below = if layers.len() == 2 && name == "f" {
                Some("f below x2 =f")
            } else {
                None
            };
            let found = written.get(name).map(String::as_str);
            assert_eq!(found, below, "{name}: {written:?}");
            let told = format!("{name}: layer ");
            assert!(complaints.contains(&told), "{told}: {complaints}");
        }
        assert_eq!(place.with_mount(&["--whiteouts", "oci"], seen), written);
    }
}

/// The tree of `layers`, equal for a mount and `materialize`, without a warning.
fn tree_of(name: &str, layers: &[Vec<Step>]) -> Vec<String> {
    let place = Place::of_steps(layers);
    let mounted = place.with_mount(&["--whiteouts", "oci"], seen);
    let (written, complaints) = place.materialize(&["--whiteouts", "oci"]);
    assert_eq!(written, mounted, "{name}");
    assert_eq!(complaints, "", "{name}");
    let lines = mounted
        .into_iter()
        .map(|(path, text)| format!("{path} {text}"));
    lines.collect()
}

// Promises: whiteout-scope
#[test]
fn whiteout_path_through_link_is_not_followed() {
    let over = |above: Vec<Step>| {
        let below = vec![
            File("d/a", "below"),
            File("e/a", "below"),
            Directory("e", 0o755),
        ];
        tree_of("a whiteout behind a link", &[below, above])
    };
    let e = ["e d 755", "e/a f below x1 =e/a"];
    assert_eq!(
        over(vec![Link("d", "/e"), File("d/.wh.a", "")]),
        [&["d l /e x1 =d"], &e[..]].concat()
    );
    assert_eq!(
        over(vec![Link("d", "nowhere"), File("d/.wh.c", "")]),
        [&["d l nowhere x1 =d"], &e[..]].concat()
    );
    assert_eq!(
        over(vec![
            Link("d", "c/d"),
            File("d/.wh.e", ""),
            File("c/d", "above"),
        ]),
        [&["c d 755", "c/d f above x1 =c/d", "d l c/d x1 =d"], &e[..]].concat()
    );
}

// Promises: layer-replaces, whiteout-scope, whiteout-hidden, layerlink-target
#[test]
fn order_in_layer_gives_same_tree_as_umoci() {
    let long: &'static str = Box::leak("n".repeat(255).into_boxed_str());
    let hides_long: &'static str = Box::leak(format!("d/.wh.{long}").into_boxed_str());
    let long: &'static str = Box::leak(format!("d/{long}").into_boxed_str());
    let below = || {
        vec![
            Directory("d", 0o755),
            File("d/a", "below"),
            File(long, "below"),
            File("f", "below"),
        ]
    };
    let over = |name: &str, above: Vec<Step>| {
        let lines = tree_of(name, &[below(), above]);
        let is_other = |line: &String| !line.starts_with("d/n");
        lines.into_iter().filter(is_other).collect::<Vec<_>>()
    };
    let (d, a) = ("d d 755", "d/a f below x1 =d/a");
    let f = "f f below x1 =f";
    assert_eq!(
        over(
            "a whiteout in a directory that becomes a file",
            vec![File("d/.wh.a", ""), File("d", "above")]
        ),
        ["d f above x1 =d", f]
    );
    let shown = tree_of(
        "a whiteout of the longest name",
        &[below(), vec![File(hides_long, "")]],
    );
    assert_eq!(shown, [d, a, f]);
    assert_eq!(
        over(
            "a file over a full directory of its layer",
            vec![
                Directory("q", 0o755),
                File("q/x", "above"),
                File("q", "file")
            ]
        ),
        [d, a, f, "q f file x1 =q"]
    );
    assert_eq!(
        over(
            "a directory over a file of its layer over a directory below",
            vec![File("d", "above"), Directory("d", 0o711)]
        ),
        ["d d 711", f]
    );
    assert_eq!(
        over(
            "a link to what its layer then removes",
            vec![Hard("h", "f"), File(".wh.f", "")]
        ),
        [d, a, "h f below x1 =h"]
    );
    assert_eq!(
        over(
            "a link to what its layer then replaces",
            vec![Hard("h", "f"), File("f", "above")]
        ),
        [d, a, "f f above x1 =f", "h f below x1 =h"]
    );
    assert_eq!(
        over(
            "a link to a link to what its layer then replaces",
            vec![
                Hard("g", "f"),
                Hard("h", "g"),
                File("g", "above"),
                File(".wh.f", "")
            ]
        ),
        [d, a, "g f above x1 =g", "h f below x1 =h"]
    );
    assert_eq!(
        over(
            "links to files that AUFS keeps apart",
            vec![
                File(".wh..wh.plnk/1.2", "linked"),
                Hard("f", ".wh..wh.plnk/1.2"),
                Hard("h", ".wh..wh.plnk/1.2"),
            ]
        ),
        [d, a, "f f linked x2 =f", "h f linked x2 =f"]
    );
}

// Promises: layer-written
#[test]
fn layer_may_contain_name_of_temporary_files() {
    let named = |more: Vec<Step>| {
        let own = vec![
            Directory(".tarfs-layers", 0o755),
            Link(".tarfs-layers/l", "x"),
            Directory(".tarfs-layers-0", 0o755),
        ];
        vec![own, more]
    };
    let own = [
        ".tarfs-layers d 755",
        ".tarfs-layers-0 d 755",
        ".tarfs-layers/l l x x1 =.tarfs-layers/l",
    ];
    assert_eq!(tree_of("no file", &named(Vec::new())), own);
    assert_eq!(
        tree_of("a file", &named(vec![File("f", "1")])),
        [&own[..], &["f f 1 x1 =f"]].concat()
    );
    let two_names = vec![Link("a", "t"), Hard("b", "a")];
    assert_eq!(
        tree_of("a link of two names", &named(two_names)),
        [&own[..], &["a l t x2 =a", "b l t x2 =a"]].concat()
    );
}

// Promises: layer-links
#[test]
fn path_through_absolute_link_stays_in_the_root() {
    let layer = vec![
        Link("l", "/d"),
        Link("d/up", "../../../e"),
        File("l/x", "1"),
        File("d/up/y", "2"),
    ];
    let names: Vec<_> = tree_of("links", &[layer])
        .iter()
        .map(|line| line.split(' ').next().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(names, ["d", "d/up", "d/x", "e", "e/y", "l"]);
}

// Promises: whiteout-overlay
#[test]
fn overlay_redirects_are_skipped_and_reported() {
    let above = vec![Marked("d2", "trusted.overlay.redirect"), File("n", "above")];
    let place = Place::of_steps(&[bottom(), above]);
    let flags = ["--whiteouts", "overlay"];
    let (written, complaints) = place.materialize(&flags);
    assert!(!written.contains_key("d2"), "{written:?}");
    assert!(
        complaints.contains("d2: layer 2: what it is lies elsewhere"),
        "{complaints}"
    );
    assert_eq!(place.with_mount(&flags, seen), written);
}

// Promises: layer-state, layer-memory
#[test]
fn contents_come_from_their_layer_in_every_packing() {
    let packings = Packing::ALL;
    let last = packings.len() - 1;
    let long = |number: usize| {
        let mut content = random_bytes(1_500_000 + 4096 * number);
        for byte in &mut content {
            *byte = byte.wrapping_add(u8::try_from(number).expect("small"));
        }
        content
    };
    let layers: Vec<_> = packings
        .iter()
        .enumerate()
        .map(|(number, packing)| {
            let archive = Archive::new()
                .directory("d/")
                .file(&format!("d/own-{number}"), long(number))
                .file("d/shared", long(number))
                .file(&format!("d/.wh.own-{}", number.wrapping_sub(2)), "")
                .end();
            packing.pack(&Bytes::from(archive)).to_vec()
        })
        .collect();
    let place = Place::with_layers(&layers);
    let check = |root: &Path| {
        let read = |name: &str| fs::read(root.join("d").join(name)).ok();
        for number in 0..packings.len() {
            let expected = (number + 2 > last).then(|| long(number));
            assert!(read(&format!("own-{number}")) == expected, "{number}");
        }
        assert!(read("shared") == Some(long(last)));
    };
    place.with_mount(&["--memory", "64MiB"], check);
    // With saved indexes.
    place.with_mount(&["--prefetch", "all"], check);
    assert_eq!(place.write(&[]), "");
    check(&place.path("out"));
}

// Promises: layer-directory
#[test]
fn attributes_come_from_the_top_layer() {
    let layer = |value: &str, mode| {
        Archive::new()
            .pax(&[("SCHILY.xattr.user.of", value)])
            .add(Header::new("d", b'5').mode(mode).mtime(1000 + mode), "")
            .pax(&[("SCHILY.xattr.user.of", value)])
            .file("d/f", value)
            .end()
    };
    let place = Place::with_layers(&[layer("below", 0o700), layer("above", 0o755)]);
    let check = |root: &Path| {
        for name in ["d", "d/f"] {
            let mut value = vec![0; 64];
            let len = getxattr(root.join(name), "user.of", &mut value).expect("there");
            assert_eq!(value.get(..len), Some(&b"above"[..]), "{name}");
        }
        let stat = fs::metadata(root.join("d")).expect("there");
        assert_eq!((stat.mode() & 0o777, stat.mtime()), (0o755, 1000 + 0o755));
    };
    place.with_mount(&[], check);
    let (_, complaints) = place.materialize(&[]);
    assert_eq!(complaints, "");
    check(&place.path("out"));
}

// Promises: layer-state
#[test]
fn inode_numbers_stay_the_same_across_mounts() {
    let place = Place::of_steps(&[
        bottom(),
        vec![File("d/.wh.x", ""), File("n", "above"), Hard("h", "f")],
    ]);
    let numbers = |mnt: &Path| {
        let names = seen(mnt).into_keys();
        let number = |name: String| {
            let stat = mnt.join(&name).symlink_metadata().expect("there");
            (name, stat.ino())
        };
        names.map(number).collect::<BTreeMap<_, _>>()
    };
    let first = place.with_mount(&[], numbers);
    fs::remove_dir_all(place.path("cache")).expect("there");
    assert_eq!(place.with_mount(&[], numbers), first);
    // In the order of the layers, and of their members.
    assert!(first.get("f") < first.get("n") && first.get("d/y") < first.get("f"));
}

// Promises: layer-written
#[test]
fn layers_write_and_remove_nothing_outside() {
    let outside = TestDir::new(&["sub"]);
    let victim = outside.path("victim");
    outside.put("victim", "untouched");
    let target = outside.root().to_str().expect("UTF-8");
    let bottom = Archive::new()
        .symlink("out", target)
        .symlink("up", "../../../../../..")
        .file("kept", "kept")
        .end();
    let above = Archive::new()
        .file("out/planted", "x")
        .file("out/.wh.victim", "")
        .file("up/tmp/planted", "x")
        .file("out/sub/.wh..wh..opq", "")
        .file(".wh..", "")
        .file(".wh...", "")
        .file(".wh./../kept", "")
        .file(".wh.a/../../kept", "")
        .hard_link("stolen", "out/victim")
        .end();
    let third = Archive::new()
        .symlink("again", target)
        .hard_link("theirs", "again/victim")
        .file("again2/.wh.x", "")
        .end();
    let fourth = Archive::new().file("again/.wh..wh..opq", "").end();
    let place = Place::with_layers(&[bottom, above, third, fourth]);
    symlink(target, place.path("decoy")).expect("made");
    let (written, complaints) = place.materialize(&[]);
    assert_eq!(fs::read_to_string(&victim).expect("there"), "untouched");
    let names: Vec<_> = fs::read_dir(outside.root())
        .expect("listed")
        .map(|entry| entry.expect("listed").file_name())
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(fs::metadata(&victim).expect("there").nlink(), 1);
    assert_eq!(
        written.get("kept").map(String::as_str),
        Some("f kept x1 =kept")
    );
    assert_eq!(
        written.get("out/planted").map(String::as_str),
        Some("f x x1 =out/planted")
    );
    assert!(
        !written.contains_key("stolen") && !written.contains_key("theirs"),
        "{written:?}"
    );
    assert!(
        complaints.contains("stolen: ") && complaints.contains("theirs: "),
        "{complaints}"
    );
    assert!(
        complaints.contains("the name contains '..'"),
        "{complaints}"
    );
    assert_eq!(place.with_mount(&[], seen), written);
}

// Promises: layer-mount
#[test]
fn status_covers_all_layers_and_copy_is_merged() {
    let layers = vec![bottom(), vec![File("d/.wh.x", ""), File("n", "above")]];
    let place = Place::of_steps(&layers);
    let expected = Model::of(&layers, "oci").observed();
    let copy = place.path("copy");
    let status = place.with_mount(&["--copy-to", "copy"], |mnt| {
        wait_until("a copy", || {
            let output = place.tarfs(&["status", "mnt"]);
            let status = String::from_utf8_lossy(&output.stdout);
            let mut lines = status.lines().map(str::split_whitespace);
            lines.any(|mut words| words.next() == Some("copy") && words.next() == Some("complete,"))
        });
        assert_eq!(seen(mnt), expected);
        let output = place.tarfs(&["status", "mnt"]);
        String::from_utf8(output.stdout).expect("UTF-8")
    });
    for word in ["0.tar + 1 layer", "1.tar"] {
        assert!(status.contains(word), "{status}");
    }
    assert_eq!(seen(&copy), expected);
}

// Promises: sync-operands, layer-owners
#[test]
fn layers_keep_numeric_owners() {
    let script = r#"
        mkdir t mnt out; echo one >t/file
        tar --create --owner=games:4711 --group=games:4712 -C t -f below.tar file
        tar --create --owner=games:4711 -C t --transform s/file/other/ -f above.tar file
        export TARFS_CACHE_DIR="$PWD/cache" XDG_RUNTIME_DIR="$PWD"
        "$program" materialize -q --layer above.tar below.tar -C out; stat -c %u:%g out/file
        "$program" sync -q --layer above.tar below.tar update; stat -c %u:%g update/file
        "$program" ls -l --layer above.tar below.tar file | awk '{print $3 ":" $4}'
        "$program" mount --layer above.tar below.tar mnt; stat -c %u:%g mnt/file; "$program" umount mnt
    "#;
    let said = namespace::stdout_text(&namespace::run_program("", script));
    assert_eq!(said, "4711:4712\n".repeat(4));
}
