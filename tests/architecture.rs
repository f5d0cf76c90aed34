//! Holds the layers apart: who may import whom, and whose crate is whose.
//!
//! One crate has no manifest between its layers, so this test is that manifest. It reads the
//! sources as text, which sees grouped imports and full paths alike.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A layer, and the layers whose items it may name.
struct Layer {
    name: &'static str,
    imports: &'static [&'static str],
}

const LAYERS: &[Layer] = &[
    Layer {
        name: "base",
        imports: &[],
    },
    Layer {
        name: "source",
        imports: &["base"],
    },
    Layer {
        name: "codec",
        imports: &["base"],
    },
    Layer {
        name: "tar",
        imports: &["base"],
    },
    Layer {
        name: "fetch",
        imports: &["base", "source"],
    },
    Layer {
        name: "index",
        imports: &["base", "codec", "tar"],
    },
    Layer {
        name: "cache",
        imports: &["base"],
    },
    Layer {
        name: "archive",
        imports: &["base", "source", "codec", "tar", "fetch", "index", "cache"],
    },
    Layer {
        name: "stack",
        imports: &["base", "source", "codec", "tar", "index", "archive"],
    },
    // `tar` for its records: an entry's time and device, a member as it is written.
    Layer {
        name: "fs",
        imports: &["base", "tar", "index", "archive", "stack"],
    },
    // `stack` for what a layer says of those below it.
    Layer {
        name: "materialize",
        imports: &["base", "tar", "index", "archive", "stack"],
    },
    // `fetch` and `codec` for a document's bytes, and for whether a layer is packed.
    Layer {
        name: "image",
        imports: &["base", "source", "codec", "fetch", "index", "archive"],
    },
    Layer {
        name: "list",
        imports: &["base", "tar", "index"],
    },
    Layer {
        name: "cli",
        imports: &[
            "base",
            "source",
            "codec",
            "tar",
            "fetch",
            "index",
            "archive",
            "stack",
            "fs",
            "image",
            "materialize",
            "list",
        ],
    },
];

/// External crates that belong to some layers only. What is not listed, everyone may use.
const OWNERS: &[(&str, &[&str])] = &[
    ("reqwest", &["source"]),
    ("rustls", &["source"]),
    ("url", &["source"]),
    (
        "tokio",
        &["source", "fetch", "archive", "stack", "image", "cli"],
    ),
    ("futures_util", &["source", "fetch", "archive"]),
    ("lz4_flex", &["codec"]),
    ("lz4_sys", &["codec"]),
    ("flate2", &["codec"]),
    ("libz_rs_sys", &["codec"]),
    ("zstd", &["codec"]),
    ("liblzma", &["codec"]),
    ("bzip2", &["codec"]),
    ("xxhash_rust", &["codec", "index", "archive", "materialize"]),
    ("blake3", &["source", "index", "archive", "stack"]),
    ("ring", &["archive"]),
    ("hashbrown", &["index"]),
    ("zerocopy", &["index"]),
    ("moka", &["cache"]),
    ("fuser", &["fs"]),
    ("serde", &["image", "cli"]),
    ("serde_json", &["image", "cli"]),
    ("clap", &["cli"]),
    ("clap_complete", &["cli"]),
    ("clap_mangen", &["cli"]),
    ("anyhow", &["cli"]),
    ("httparse", &["cli"]),
    ("indicatif", &["cli"]),
    ("tracing_subscriber", &["cli"]),
    ("signal_hook", &["cli"]),
    ("libc", &["cli"]),
];

/// Layers that know neither files, clocks, sockets nor threads; and their files that do.
const PURE: &[(&str, &[&str])] = &[
    ("codec", &[]),
    ("tar", &[]),
    ("index", &["store.rs", "format.rs"]),
    ("stack", &["open.rs", "pages.rs"]),
    ("list", &[]),
];
const IMPURITIES: &[&str] = &[
    "std::fs",
    "std::net",
    "std::thread",
    "Instant",
    "SystemTime",
    "tokio",
    "rustix",
];

/// The only files that may hold unsafe code.
const FENCED: &[&str] = &[
    "src/fs/handover.rs",
    "src/codec/sys.rs",
    "src/codec/lz4/sys.rs",
    "src/codec/zstd/sys.rs",
    "src/cli/allocator.rs",
    "src/cli/descriptors.rs",
];

struct Source {
    path: PathBuf,
    layer: String,
    /// Code only: comments and tests are cut.
    code: String,
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    let mut pending = vec![root.join("src")];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(&directory).expect("src is readable") {
            let path = entry.expect("src is readable").path();
            if path.is_dir() {
                pending.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let relative = path.strip_prefix(root).expect("below root").to_owned();
                let layer = relative
                    .iter()
                    .nth(1)
                    .expect("below src")
                    .to_string_lossy()
                    .into_owned();
                let text = fs::read_to_string(&path).expect("sources are UTF-8");
                files.push(Source {
                    path: relative,
                    layer,
                    code: code_only(&text),
                });
            }
        }
    }
    assert!(files.len() > 20, "the sources were found");
    files
}

fn code_only(text: &str) -> String {
    let code = text
        .split("#[cfg(test)]\nmod tests")
        .next()
        .unwrap_or_default();
    code.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// Every name that directly follows `crate::`, those in a `crate::{…}` group included.
fn imported_layers(code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for after in code.split("crate::").skip(1) {
        match after.strip_prefix('{') {
            None => names.extend(identifier(after)),
            Some(group) => {
                let mut depth = 0;
                let mut fresh = true;
                for (at, letter) in group.char_indices() {
                    match letter {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => fresh = true,
                        letter if fresh && letter.is_alphabetic() => {
                            names.extend(identifier(&group[at..]));
                            fresh = false;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    names
}

fn identifier(text: &str) -> Option<String> {
    let name: String = text
        .chars()
        .take_while(|letter| letter.is_alphanumeric() || *letter == '_')
        .collect();
    (!name.is_empty()).then_some(name)
}

fn names_crate(code: &str, name: &str) -> bool {
    code.match_indices(name).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = &code[at + name.len()..];
        after.starts_with("::")
            && !before.is_some_and(|letter| letter.is_alphanumeric() || "_:".contains(letter))
    })
}

#[test]
fn layers_import_only_what_lies_below_them() {
    let known: BTreeSet<&str> = LAYERS.iter().map(|layer| layer.name).collect();
    let mut wrong = Vec::new();
    for source in sources() {
        let Some(layer) = LAYERS.iter().find(|layer| layer.name == source.layer) else {
            assert!(
                matches!(source.layer.as_str(), "lib.rs" | "main.rs"),
                "{} belongs to no layer",
                source.path.display()
            );
            continue;
        };
        for import in imported_layers(&source.code) {
            if known.contains(import.as_str())
                && import != layer.name
                && !layer.imports.contains(&import.as_str())
            {
                wrong.push(format!(
                    "{}: {} imports {import}",
                    source.path.display(),
                    layer.name
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn external_crates_stay_in_their_home() {
    let mut wrong = Vec::new();
    for source in sources() {
        for (name, homes) in OWNERS {
            if names_crate(&source.code, name) && !homes.contains(&source.layer.as_str()) {
                wrong.push(format!("{}: names {name}", source.path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn pure_layers_know_no_files_clocks_or_threads() {
    let mut wrong = Vec::new();
    for source in sources() {
        let Some((_, exceptions)) = PURE.iter().find(|(layer, _)| *layer == source.layer) else {
            continue;
        };
        let file = source.path.file_name().expect("a file").to_string_lossy();
        if exceptions.contains(&file.as_ref()) {
            continue;
        }
        for impurity in IMPURITIES {
            if source.code.contains(impurity) {
                wrong.push(format!("{}: {impurity}", source.path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn unsafe_code_is_fenced() {
    for source in sources() {
        let fenced = FENCED.iter().any(|fence| source.path == Path::new(fence));
        let is_unsafe = source.code.contains("unsafe {") || source.code.contains("unsafe_code");
        assert!(
            fenced || !is_unsafe,
            "{} holds unsafe code",
            source.path.display()
        );
    }
}

#[test]
fn grouped_imports_are_seen() {
    let names = imported_layers("use crate::{codec::{self, Pull}, fetch};\ncrate::tar::Parser");
    assert_eq!(
        names.into_iter().collect::<Vec<_>>(),
        ["codec", "fetch", "tar"]
    );
}
