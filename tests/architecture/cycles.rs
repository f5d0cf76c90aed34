//! Import cycles between files.
//!
//! A file depends on each file whose items it names, by an import or by a path. A re-export is followed
//! to the file that declares the item; the re-export itself is no dependency, nor is `mod`.

#![allow(clippy::indexing_slicing, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{self, Import, Module, ModulePath};

/// The modules of the crate, and what each imports.
struct Graph {
    modules: BTreeMap<ModulePath, Module>,
    imports: BTreeMap<ModulePath, Vec<Import>>,
}

impl Graph {
    fn of(modules: BTreeMap<ModulePath, Module>) -> Self {
        let imports = modules
            .iter()
            .map(|(path, module)| (path.clone(), source::imports(&module.syntax)))
            .collect();
        Self { modules, imports }
    }

    /// The module that declares the item at `path`, as `from` writes it; `None` for other crates.
    fn resolve(&self, from: &ModulePath, path: &[String], depth: usize) -> Option<ModulePath> {
        if depth > 16 {
            return None;
        }
        let (mut module, rest) = match path.first().map(String::as_str)? {
            "crate" | "tarfs" => (Vec::new(), &path[1..]),
            "self" => (from.clone(), &path[1..]),
            "super" => (from.get(..from.len().checked_sub(1)?)?.to_vec(), &path[1..]),
            name => {
                let child = [from.as_slice(), &[name.to_owned()]].concat();
                if self.modules.contains_key(&child) {
                    (from.clone(), path)
                } else {
                    // A name that was imported: a module, whose item follows, or an item.
                    let imports = &self.imports[from];
                    let import = imports.iter().find(|import| import.name == name)?;
                    let is_itself = import.path.first() == Some(&name.to_owned());
                    if is_itself {
                        return None;
                    }
                    let whole = [import.path.as_slice(), &path[1..]].concat();
                    return self.resolve(from, &whole, depth + 1);
                }
            }
        };
        for (position, name) in rest.iter().enumerate() {
            if name == "super" {
                module.pop();
                continue;
            }
            let child = [module.as_slice(), &[name.to_owned()]].concat();
            if self.modules.contains_key(&child) {
                module = child;
                continue;
            }
            // An item of `module`, or one that it exports again.
            let exported = self.imports[&module]
                .iter()
                .find(|import| import.is_public && import.name == *name);
            return match exported {
                Some(import) => {
                    let whole = [import.path.as_slice(), &rest[position + 1..]].concat();
                    self.resolve(&module, &whole, depth + 1)
                }
                None => Some(module),
            };
        }
        Some(module)
    }

    /// The modules whose items `path` names.
    fn dependencies(&self, path: &ModulePath) -> BTreeSet<ModulePath> {
        let code = source::paths(&self.modules[path].syntax);
        let is_used = |name: &str| {
            code.iter()
                .any(|names| names.iter().any(|part| part == name))
        };
        let imports = self.imports[path]
            .iter()
            .filter(|import| !import.is_public || is_used(&import.name))
            .map(|import| import.path.as_slice());
        let mut found: BTreeSet<_> = imports
            .chain(
                code.iter()
                    .filter(|names| names.len() > 1)
                    .map(Vec::as_slice),
            )
            .filter_map(|names| self.resolve(path, names, 0))
            .collect();
        found.remove(path);
        found
    }

    /// The folders of a layer that import each other, each with what it imports. A folder inside the other one is left out.
    fn folder_pairs(&self) -> BTreeSet<[String; 2]> {
        let folder = |path: &ModulePath| {
            let file = &self.modules[path].file;
            file.parent().expect("in src").to_owned()
        };
        let mut edges = BTreeSet::new();
        for path in self.modules.keys() {
            for imported in self.dependencies(path) {
                edges.insert((folder(path), folder(&imported)));
            }
        }
        let mutual = edges.iter().filter(|(one, other)| {
            one < other && !other.starts_with(one) && edges.contains(&(other.clone(), one.clone()))
        });
        mutual
            .map(|(one, other)| [one.display().to_string(), other.display().to_string()])
            .collect()
    }

    /// The sets of files that depend on each other.
    fn cycles(&self) -> Vec<Vec<String>> {
        let edges: BTreeMap<_, _> = self
            .modules
            .keys()
            .map(|path| (path, self.dependencies(path)))
            .collect();
        let reachable: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> = edges
            .keys()
            .map(|&start| {
                let mut seen = BTreeSet::new();
                let mut pending = vec![start];
                while let Some(path) = pending.pop() {
                    pending.extend(edges[path].iter().filter(|next| seen.insert(*next)));
                }
                (start, seen)
            })
            .collect();
        let mut cycles = BTreeSet::new();
        for (&path, seen) in &reachable {
            if seen.contains(path) {
                let members = seen
                    .iter()
                    .filter(|other| reachable[*other].contains(path))
                    .map(|other| self.modules[*other].file.display().to_string());
                cycles.insert(members.collect::<Vec<_>>());
            }
        }
        cycles.into_iter().collect()
    }
}

#[test]
fn files_import_each_other_in_no_cycle() {
    let graph = Graph::of(source::modules());
    let cycles = graph.cycles();
    assert!(cycles.is_empty(), "{cycles:#?}");
}

#[test]
fn folders_import_each_other_in_one_direction() {
    let pairs = Graph::of(source::modules()).folder_pairs();
    assert!(pairs.is_empty(), "{pairs:#?}");
}
