//! The sources of the crate, parsed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};

/// The directory of the manifest.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files below `directory` of the project whose names end in `suffix`, with paths from the root.
pub(crate) fn files(directory: &str, suffix: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![root().join(directory)];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(&directory).expect("readable") {
            let path = entry.expect("readable").path();
            if path.is_dir() {
                pending.push(path);
            } else if path.to_string_lossy().ends_with(suffix) {
                found.push(path.strip_prefix(root()).expect("below root").to_owned());
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "{directory} has files");
    found
}

/// Path of a module from its crate: `["fuse", "mount"]`; empty for `lib.rs` and `main.rs`.
pub(crate) type ModulePath = Vec<String>;

/// The path of the module in `file`, a path that begins with `src/`.
fn module_path(file: &Path) -> ModulePath {
    let file = file.strip_prefix("src").expect("in src").with_extension("");
    let mut names: Vec<_> = file
        .iter()
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    if names.last().is_some_and(|name| name == "mod") || names == ["lib"] || names == ["main"] {
        names.pop();
    }
    names
}

/// A file of `src`, without its tests.
pub(crate) struct Module {
    pub(crate) file: PathBuf,
    pub(crate) syntax: syn::File,
}

/// All files of `src` by module, except those that are compiled for tests only.
pub(crate) fn modules() -> BTreeMap<ModulePath, Module> {
    let mut modules = BTreeMap::new();
    let mut test_only = Vec::new();
    for file in files("src", ".rs") {
        // The binary has modules of its own below `main.rs`; itself it is imported by none.
        if file == Path::new("src/main.rs") {
            continue;
        }
        let text = fs::read_to_string(root().join(&file)).expect("UTF-8");
        let mut syntax = syn::parse_file(&text).expect("Rust");
        let path = module_path(&file);
        remove_tests(&mut syntax.items, &path, &mut test_only);
        modules.insert(path, Module { file, syntax });
    }
    modules.retain(|path, _| !test_only.iter().any(|test| path.starts_with(test)));
    modules
}

/// Removes items that only tests have, and adds the modules among them to `test_only`.
fn remove_tests(items: &mut Vec<syn::Item>, path: &ModulePath, test_only: &mut Vec<ModulePath>) {
    items.retain(|item| {
        if !is_test_only(attributes(item)) {
            return true;
        }
        if let syn::Item::Mod(module) = item {
            test_only.push([path.as_slice(), &[module.ident.to_string()]].concat());
        }
        false
    });
}

fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<syn::Meta>()
                .is_ok_and(|meta| meta.path().is_ident("test"))
    })
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// A name that a `use` declaration brings into a module.
pub(crate) struct Import {
    /// The path as it is written: `["super", "write", "Job"]`.
    pub(crate) path: Vec<String>,
    /// The name in this module.
    pub(crate) name: String,
    /// Whether other modules may import it from here.
    pub(crate) is_public: bool,
}

/// The imports of a file, groups taken apart.
pub(crate) fn imports(file: &syn::File) -> Vec<Import> {
    let mut found = Vec::new();
    for item in &file.items {
        if let syn::Item::Use(item) = item {
            let is_public = !matches!(item.vis, syn::Visibility::Inherited);
            flatten(&item.tree, &mut Vec::new(), is_public, &mut found);
        }
    }
    found
}

fn flatten(tree: &syn::UseTree, path: &mut Vec<String>, is_public: bool, found: &mut Vec<Import>) {
    let mut add = |path: &[String], last: Option<String>, name: String| {
        let path = path.iter().cloned().chain(last).collect();
        found.push(Import {
            path,
            name,
            is_public,
        });
    };
    match tree {
        syn::UseTree::Path(tree) => {
            path.push(tree.ident.to_string());
            flatten(&tree.tree, path, is_public, found);
            path.pop();
        }
        syn::UseTree::Name(tree) if tree.ident == "self" => {
            add(path, None, path.last().cloned().unwrap_or_default());
        }
        syn::UseTree::Name(tree) => add(path, Some(tree.ident.to_string()), tree.ident.to_string()),
        syn::UseTree::Rename(tree) => {
            let last = (tree.ident != "self").then(|| tree.ident.to_string());
            add(path, last, tree.rename.to_string());
        }
        syn::UseTree::Glob(_) => add(path, None, "*".to_owned()),
        syn::UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, path, is_public, found);
            }
        }
    }
}

/// The paths in the code of a file, `use` declarations left out: `["page_cache", "push"]`.
pub(crate) fn paths(file: &syn::File) -> Vec<Vec<String>> {
    struct Paths(Vec<Vec<String>>);
    impl<'ast> Visit<'ast> for Paths {
        fn visit_item_use(&mut self, _: &'ast syn::ItemUse) {}
        fn visit_path(&mut self, path: &'ast syn::Path) {
            let names = path.segments.iter().map(|part| part.ident.to_string());
            self.0.push(names.collect());
            visit::visit_path(self, path);
        }
        fn visit_macro(&mut self, call: &'ast syn::Macro) {
            let tokens = call.tokens.to_string();

            let joined = tokens.replace(" :: ", "::");
            for word in
                joined.split(|letter: char| !(letter.is_alphanumeric() || "_:".contains(letter)))
            {
                let names: Vec<_> = word.split("::").map(str::to_owned).collect();
                if !names.iter().any(String::is_empty) {
                    self.0.push(names);
                }
            }
            visit::visit_macro(self, call);
        }
    }
    let mut paths = Paths(Vec::new());
    paths.visit_file(file);
    paths.0
}

/// A function with a body.
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) lines: usize,
}

/// The functions and methods of a file.
pub(crate) fn functions(file: &syn::File) -> Vec<Function> {
    struct Functions(Vec<Function>);
    impl Functions {
        fn add(&mut self, signature: &syn::Signature, block: &syn::Block) {
            let first = signature.fn_token.span.start().line;
            let last = block.brace_token.span.close().end().line;
            self.0.push(Function {
                name: signature.ident.to_string(),
                lines: last - first + 1,
            });
        }
    }
    impl<'ast> Visit<'ast> for Functions {
        fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
            self.add(&item.sig, &item.block);
            visit::visit_item_fn(self, item);
        }
        fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
            self.add(&item.sig, &item.block);
            visit::visit_impl_item_fn(self, item);
        }
        fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
            if let Some(block) = &item.default {
                self.add(&item.sig, block);
            }
            visit::visit_trait_item_fn(self, item);
        }
    }
    let mut functions = Functions(Vec::new());
    functions.visit_file(file);
    functions.0
}
