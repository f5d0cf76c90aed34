//! Rules for the structure of the crate: layers, import cycles, sizes, names, and the language of its prose.
//!
//! One crate has no manifest between its layers, so [`LAYERS`] is that manifest. The comments of
//! `Cargo.toml` say which layers use an external crate.

mod cycles;
mod names;
mod prose;
mod size;
mod source;

use std::collections::{BTreeMap, BTreeSet};
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
        name: "layers",
        imports: &["base", "source", "index", "archive"],
    },
    // `tar` for its types: an entry's time and device, a member as it is written.
    Layer {
        name: "fuse",
        imports: &["base", "tar", "index", "archive"],
    },
    // `fetch` and `codec` for a document's bytes, and for whether a layer is packed, `index` for its store.
    Layer {
        name: "image",
        imports: &["base", "source", "codec", "fetch", "index", "archive"],
    },
    // `tar` for its types: a time.
    Layer {
        name: "tree",
        imports: &["base", "tar", "index"],
    },
    // `tar` for its types: a time.
    Layer {
        name: "list",
        imports: &["base", "tar", "tree"],
    },
    Layer {
        name: "change",
        imports: &["base", "tree"],
    },
    // `layers` for what a layer says of those below it.
    Layer {
        name: "materialize",
        imports: &["base", "tar", "index", "archive", "layers", "tree"],
    },
    // `fetch` and `codec` for whether an archive around SOURCE is packed, `tar` for its options, `fuse` and `materialize`
    // for advice about their errors.
    Layer {
        name: "locate",
        imports: &[
            "base",
            "source",
            "codec",
            "tar",
            "fetch",
            "index",
            "archive",
            "layers",
            "fuse",
            "image",
            "materialize",
        ],
    },
    Layer {
        name: "serve",
        imports: &[
            "base",
            "source",
            "fetch",
            "index",
            "archive",
            "fuse",
            "materialize",
            "locate",
        ],
    },
    Layer {
        name: "python",
        imports: &[
            "base",
            "source",
            "tar",
            "index",
            "archive",
            "materialize",
            "locate",
            "serve",
        ],
    },
    // Parts of `base` that it shares with the library are in `tarfs::internal`.
    Layer {
        name: PROGRAM_LAYER,
        imports: &[
            "source",
            "codec",
            "tar",
            "index",
            "archive",
            "layers",
            "fuse",
            "image",
            "tree",
            "list",
            "change",
            "materialize",
            "locate",
            "serve",
        ],
    },
];

/// The layer that is part of the program, and not of the library.
const PROGRAM_LAYER: &str = "cli";

/// Layers that know neither files, clocks, sockets nor threads; and their files and folders that do.
const PURE_LAYERS: &[(&str, &[&str])] = &[
    ("codec", &[]),
    ("tar", &[]),
    ("index", &["store"]),
    ("layers", &["open.rs"]),
    ("tree", &["directory_tree.rs", "parallel.rs", "remove.rs"]),
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
    "base::thread",
    "base::thread_pool",
];

/// The only files that may hold unsafe code.
const UNSAFE_FILES: &[&str] = &[
    "src/base/file/syscalls.rs",
    "src/fuse/mount/takeover.rs",
    "src/fuse/mount/namespace.rs",
    "src/codec/gzip/sys.rs",
    "src/codec/lz4/sys.rs",
    "src/codec/zstd/sys.rs",
    "src/index/storage/frame_memory.rs",
    "src/cli/malloc.rs",
    "src/cli/before_main.rs",
    "src/cli/daemon/inherited_fds.rs",
    "src/cli/daemon/fork.rs",
    "src/cli/daemon/resident_memory.rs",
];

/// The only files that may start a program: any other one, and this one again.
const COMMAND_FILES: &[&str] = &[
    "src/base/file/foreign_command.rs",
    "src/cli/daemon/daemon_process.rs",
    "src/cli/daemon/scope.rs",
];

struct Source {
    path: PathBuf,
    layer: String,
    /// Code only: comments and tests are cut.
    code: String,
}

fn sources() -> Vec<Source> {
    let read = |path: PathBuf| {
        let layer = path.iter().nth(1).expect("below src").to_string_lossy();
        let text = fs::read_to_string(source::root().join(&path)).expect("UTF-8");
        Source {
            layer: layer.into_owned(),
            code: code_only(&text),
            path,
        }
    };
    let files: Vec<_> = source::files("src", ".rs").into_iter().map(read).collect();
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

/// Every name that directly follows `root`, those in a `root{…}` group included.
///
/// `root` is `crate::` in the library, and `tarfs::` in the program.
fn imported_layers(code: &str, root: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for after in code.split(root).skip(1) {
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
        let is_import = code[..at].ends_with("use ") && after.starts_with(" as ");
        (after.starts_with("::") || is_import)
            && !before.is_some_and(|letter| letter.is_alphanumeric() || "_:".contains(letter))
    })
}

/// The layers in a cell of the page's table.
fn layers_in(cell: &str, above: &[&str]) -> BTreeSet<String> {
    let named = |text: &str| -> BTreeSet<String> {
        let names = text.split('`').skip(1).step_by(2);
        names.map(str::to_owned).collect()
    };
    match cell.strip_prefix("all above") {
        None => named(cell),
        Some(but) => {
            let but = named(but);
            let all = above.iter().map(|&layer| layer.to_owned());
            all.filter(|layer| !but.contains(layer)).collect()
        }
    }
}

#[test]
fn architecture_page_lists_imports_of_each_layer() {
    let page = source::root().join("docs/architecture.md");
    let page = fs::read_to_string(page).expect("readable");
    let (_, table) = page
        .split_once("| layer | holds | knows |\n")
        .expect("the table");
    let mut above = Vec::new();
    for row in table
        .lines()
        .skip(1)
        .take_while(|line| line.starts_with('|'))
    {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let [_, name, _, knows, _] = cells[..] else {
            panic!("three cells: {row}");
        };
        let name = name.trim_matches('`');
        let layer = LAYERS.iter().find(|layer| layer.name == name);
        let imports = layer
            .unwrap_or_else(|| panic!("no layer is called {name}"))
            .imports;
        let imports: BTreeSet<_> = imports.iter().map(|&layer| layer.to_owned()).collect();
        assert_eq!(layers_in(knows, &above), imports, "{name}");
        above.push(name);
    }
    assert_eq!(above.len(), LAYERS.len(), "a row for each layer");
}

#[test]
fn layers_import_only_lower_layers() {
    let known: BTreeSet<&str> = LAYERS.iter().map(|layer| layer.name).collect();
    let (mut wrong, mut seen) = (Vec::new(), BTreeSet::new());
    for source in sources() {
        let Some(layer) = LAYERS.iter().find(|layer| layer.name == source.layer) else {
            assert!(
                matches!(source.layer.as_str(), "lib.rs" | "main.rs"),
                "{} belongs to no layer",
                source.path.display()
            );
            continue;
        };
        let root = match layer.name {
            PROGRAM_LAYER => "tarfs::",
            _ => "crate::",
        };
        for import in imported_layers(&source.code, root) {
            seen.insert((layer.name, import.clone()));
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
    for layer in LAYERS {
        let imports = layer.imports.iter();
        let unused = imports.filter(|&&import| !seen.contains(&(layer.name, import.to_owned())));
        wrong.extend(unused.map(|import| format!("{} never imports {import}", layer.name)));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The crates in `Cargo.toml`, as sources spell them, and what the comment above each says before its
/// colon: whose it is.
fn dependencies(manifest: &str) -> BTreeMap<String, BTreeSet<String>> {
    let (_, section) = manifest
        .split_once("\n[dependencies]\n")
        .expect("a section");
    let section = section.split("\n[").next().unwrap_or_default();
    let mut found = BTreeMap::new();
    let (mut homes, mut in_comment) = (BTreeSet::new(), false);
    for line in section.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            if !in_comment {
                let named = comment.split(": ").next().unwrap_or_default();
                homes = named.split(", ").map(str::to_owned).collect();
            }
            in_comment = true;
        } else if let Some((name, _)) = line.split_once(" = ") {
            found.insert(name.replace('-', "_"), homes.clone());
            in_comment = false;
        }
    }
    found
}

#[test]
fn external_crates_are_used_only_in_their_declared_layers() {
    let manifest = source::root().join("Cargo.toml");
    let manifest = fs::read_to_string(manifest).expect("readable");
    let dependencies = dependencies(&manifest);
    assert!(dependencies.len() > 20, "the dependencies were found");
    let (sources, mut wrong) = (sources(), Vec::new());
    for (name, homes) in dependencies {
        let users = sources
            .iter()
            .filter(|source| names_crate(&source.code, &name));
        let users: BTreeSet<_> = users.map(|source| source.layer.clone()).collect();
        let is_pure = |layer: &String| PURE_LAYERS.iter().any(|(pure, _)| layer == pure);
        let is_right = match homes.first().map(String::as_str) {
            Some("every layer") => !users.is_empty(),
            Some("every impure layer") => !users.is_empty() && !users.iter().any(is_pure),
            _ => users == homes,
        };
        if !is_right {
            wrong.push(format!(
                "{name}: {homes:?} says Cargo.toml, and {users:?} name it"
            ));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn pure_layers_use_no_files_clocks_or_threads() {
    let (mut wrong, mut used) = (Vec::new(), BTreeSet::new());
    for source in sources() {
        let Some((layer, exceptions)) =
            PURE_LAYERS.iter().find(|(layer, _)| *layer == source.layer)
        else {
            continue;
        };
        let found = IMPURITIES
            .iter()
            .filter(|word| source.code.contains(**word));
        let found: Vec<_> = found.collect();
        if found.is_empty() || is_test_file(&source.path) {
            continue;
        }
        let is_part = |name: &&&str| source.path.iter().any(|part| part == **name);
        match exceptions.iter().find(is_part) {
            Some(exception) => _ = used.insert((*layer, *exception)),
            None => wrong.push(format!("{}: {found:?}", source.path.display())),
        }
    }
    for (layer, exceptions) in PURE_LAYERS {
        let unused = exceptions
            .iter()
            .filter(|name| !used.contains(&(*layer, **name)));
        wrong.extend(unused.map(|name| format!("{layer}: {name} is pure")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Whether the file holds tests alone.
fn is_test_file(path: &Path) -> bool {
    path.iter().any(|part| part == "tests") || path.to_string_lossy().ends_with("tests.rs")
}

#[test]
fn unsafe_code_is_only_in_listed_files() {
    for source in sources() {
        let fenced = UNSAFE_FILES
            .iter()
            .any(|fence| source.path == Path::new(fence));
        let is_unsafe = source.code.contains("unsafe {") || source.code.contains("unsafe_code");
        assert!(
            fenced || !is_unsafe,
            "{} holds unsafe code",
            source.path.display()
        );
    }
}

#[test]
fn other_programs_are_started_by_one_function() {
    let starts = |source: &Source| source.code.contains("Command::new");
    let found: Vec<_> = sources().into_iter().filter(starts).collect();
    let found: Vec<_> = found.iter().map(|source| source.path.as_path()).collect();
    let expected: Vec<_> = COMMAND_FILES.iter().map(Path::new).collect();
    assert_eq!(found, expected, "other files call foreign_command");
}

/// Names of threads in `code`, of a numbered one with `-N` at the end.
fn thread_names(code: &str) -> Vec<String> {
    let mut names = Vec::new();
    for call in ["Thread::spawn(", "ThreadPool::start(", ".thread_name("] {
        for text in code.split(call).skip(1) {
            let text = text.trim_start_matches("&format!(");
            if let Some(name) = text.strip_prefix('"') {
                let name = name.split('"').next().unwrap_or_default();
                names.push(name.replace("{number}", "N"));
            }
        }
    }
    names
}

#[test]
fn thread_names_fit_the_kernel_and_are_in_the_table() {
    /// Bytes of a thread's name that Linux keeps.
    const MAX_NAME_BYTES: usize = 15;
    let page = source::root().join("docs/architecture.md");
    let page = fs::read_to_string(page).expect("readable");
    let sources = sources()
        .into_iter()
        .filter(|source| !is_test_file(&source.path));
    let names: BTreeSet<_> = sources
        .flat_map(|source| thread_names(&source.code))
        .collect();
    assert!(names.len() > 20, "only {names:?}");
    for name in names {
        assert!(name.starts_with("tarfs-"), "{name}");
        // A number has up to two digits (`--writers 64`).
        assert!(name.replace('N', "63").len() <= MAX_NAME_BYTES, "{name}");
        assert!(page.contains(&format!("`{name}`")), "{name}");
    }
}

#[test]
fn import_scan_finds_grouped_imports() {
    let code = "use crate::{codec::{self, Pull}, fetch};\ncrate::tar::Parser";
    let names = imported_layers(code, "crate::");
    assert_eq!(
        names.into_iter().collect::<Vec<_>>(),
        ["codec", "fetch", "tar"]
    );
}
