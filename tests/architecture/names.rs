//! Names with one meaning, and names that say what they mean.

use std::fs;
use std::path::Path;

use proc_macro2::{Ident, TokenStream, TokenTree};

use crate::source::{files, modules, root};

/// Names that at most one type has.
const NAMES_OF_ONE_TYPE: &[&str] = &[
    "Change",
    "Comparison",
    "Contents",
    "Place",
    "Step",
    "Target",
    "Tree",
];

/// Identifiers that hide their meaning, and the folders without them. One that ends in `_` stands for all that begin so.
const VAGUE_IDENTIFIERS: &[(&str, &[&str])] = &[
    (
        "it",
        &["src/cli", "src/list", "src/materialize", "src/tree"],
    ),
    ("note_", &["src/change", "src/fuse", "src/tree"]),
];

/// The name of a type that `item` defines.
fn defined_type(item: &syn::Item) -> Option<&Ident> {
    match item {
        syn::Item::Enum(item) => Some(&item.ident),
        syn::Item::Struct(item) => Some(&item.ident),
        syn::Item::Trait(item) => Some(&item.ident),
        syn::Item::Type(item) => Some(&item.ident),
        _ => None,
    }
}

#[test]
fn listed_names_have_one_type() {
    let modules = modules();
    for name in NAMES_OF_ONE_TYPE {
        let is_defined = |item: &syn::Item| defined_type(item).is_some_and(|ident| ident == name);
        let mut defining = Vec::new();
        for module in modules.values() {
            if module.syntax.items.iter().any(is_defined) {
                defining.push(&module.file);
            }
        }
        assert!(defining.len() <= 1, "{name} is a type in {defining:?}");
    }
}

/// The identifiers in the code of a file, those in macros and attributes included.
fn identifiers(tokens: TokenStream) -> Vec<Ident> {
    let of_token = |token| match token {
        TokenTree::Group(group) => identifiers(group.stream()),
        TokenTree::Ident(ident) => vec![ident],
        _ => Vec::new(),
    };
    tokens.into_iter().flat_map(of_token).collect()
}

fn identifiers_of(path: &Path) -> Vec<Ident> {
    let text = fs::read_to_string(root().join(path)).expect("UTF-8");
    identifiers(text.parse().expect("Rust"))
}

#[test]
fn identifiers_are_not_vague() {
    let mut wrong = Vec::new();
    for (vague, folders) in VAGUE_IDENTIFIERS {
        let is_vague =
            |name: &str| name == *vague || vague.ends_with('_') && name.starts_with(vague);
        for path in folders.iter().flat_map(|folder| files(folder, ".rs")) {
            let mut identifiers = identifiers_of(&path);
            identifiers.retain(|ident| is_vague(&ident.to_string()));
            for ident in identifiers {
                let line = ident.span().start().line;
                wrong.push(format!("{}:{line}: {ident}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
