use super::*;
use crate::base::resolve::PathError;

fn path(name: &str) -> ArchivePath {
    ArchivePath::sanitize(name.as_bytes()).path
}

fn selected(paths: &[&str]) -> Vec<SelectedPath> {
    let paths = paths.iter().map(|path| SelectedPath::new(path.as_bytes()));
    paths.collect::<Option<_>>().expect("no `..`")
}

// Promises: select-missing
#[test]
fn selected_path_with_parent_component_is_refused() {
    for path in ["..", "../a", "a/..", "a/../b"] {
        assert_eq!(SelectedPath::new(path.as_bytes()), None, "{path}");
    }
    assert!(SelectedPath::new(b"/a/..b/").is_some());
}

#[test]
fn default_selection_selects_everything() {
    assert!(Selection::default().selects(&path("a/b")));
    assert!(Selection::default().selects(&path("./")));
}

// Promises: select-path, select-missing, gnu-arguments
#[test]
fn selected_path_includes_its_descendants() {
    let mut selection = Selection {
        paths: selected(&["./a/b/", "nowhere"]),
        ..Selection::default()
    };
    assert!(selection.selects(&path("a/b")));
    assert!(selection.selects(&path("a/b/c")));
    assert!(!selection.selects(&path("a/bc")));
    assert!(!selection.selects(&path("a")));
    let found: Vec<_> = selection.paths.iter().map(|path| path.found).collect();
    assert_eq!(found, [true, false]);
}

// Promises: select-path
#[test]
fn selected_path_goes_through_links_that_were_seen() {
    let problems = Problems::default();
    for links in [PathLinks::followed(), PathLinks::default()] {
        let follows_links = links.is_followed;
        let mut selection = Selection {
            paths: selected(&["bin/sh"]),
            links,
            ..Selection::default()
        };
        let mut select = |name: &str, target: Option<&str>| {
            let target = target.map(|target| MemberKind::Symlink(target.as_bytes().to_vec()));
            let member = Member::new(name, target.unwrap_or(MemberKind::File));
            selection.select_member(&member, &problems).is_some()
        };
        assert!(!select("system/bin/sh", None));
        for (link, target) in [
            ("bin", "usr/./bin"),
            ("usr", "x/../system"),
            ("none", "bin"),
            ("system/bin/sh", "/outside"),
        ] {
            assert!(!select(link, Some(target)) || link == "system/bin/sh");
        }
        assert_eq!(select("system/bin/sh", None), follows_links);
        assert!(!select("usr/bin/other", None));
        let first = selection.paths.first();
        let resolved = first.and_then(|first| first.resolved.clone());
        assert_eq!(resolved, Some(Ok(path("system/bin/sh"))));
    }
}

fn note(selection: &mut Selection, name: &str, kind: MemberKind) -> bool {
    let member = Member::new(name, kind);
    let selected = selection.select_member(&member, &Problems::default());
    selected.is_some()
}

fn link(target: &str) -> MemberKind {
    MemberKind::Symlink(target.as_bytes().to_vec())
}

fn following(paths: &[&str]) -> Selection {
    Selection {
        paths: selected(paths),
        links: PathLinks::followed(),
        ..Selection::default()
    }
}

// Promises: select-path
#[test]
fn hard_link_to_a_symbolic_link_is_followed() {
    let mut selection = following(&["h/f"]);
    note(&mut selection, "l", link("d"));
    note(&mut selection, "h", MemberKind::HardLink(b"./l".to_vec()));
    assert!(note(&mut selection, "d/f", MemberKind::File));
    // Its name becomes one of a file.
    note(&mut selection, "h", MemberKind::HardLink(b"d/f".to_vec()));
    assert!(!note(&mut selection, "d/f", MemberKind::File));
    assert!(note(&mut selection, "h/f", MemberKind::File));
}

// Promises: link-itself
#[test]
fn link_on_the_way_to_its_own_place_is_removed_first() {
    let mut selection = following(&["e/f"]);
    note(&mut selection, "e", link("."));
    note(&mut selection, "h", MemberKind::HardLink(b"e".to_vec()));
    for kind in [
        link(""),
        MemberKind::HardLink(b"e".to_vec()),
        MemberKind::HardLink(b"h".to_vec()),
    ] {
        note(&mut selection, "e/e", kind);
    }
    assert!(note(&mut selection, "f", MemberKind::File));
    note(&mut selection, "e/e", link("d"));
    assert!(!note(&mut selection, "f", MemberKind::File));
    assert!(note(&mut selection, "e/f", MemberKind::File));
    let mut selection = following(&["e/e/f"]);
    note(&mut selection, "e", link("."));
    note(&mut selection, "e/e", link("d"));
    assert!(note(&mut selection, "e/d/f", MemberKind::File));
}

#[test]
fn malformed_member_replaces_no_link() {
    let mut selection = following(&["l/f"]);
    note(&mut selection, "l", link("d"));
    let device = crate::tar::Device {
        major: u32::MAX,
        minor: 0,
    };
    for kind in [
        link(""),
        link(&"x".repeat(5_000)),
        MemberKind::CharDevice(device),
    ] {
        note(&mut selection, "l", kind);
    }
    assert!(note(&mut selection, "d/f", MemberKind::File));
}

// Promises: select-limits
#[test]
fn links_resolve_only_the_paths_that_go_through_them() {
    let names: Vec<_> = (0..5_000).map(|number| format!("d{number}/f")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let mut selection = following(&names);
    for number in 0..30_000 {
        note(&mut selection, &format!("l{number}"), link("d1"));
    }
    note(&mut selection, "d0", link("d00"));
    note(&mut selection, "d00", link("d000"));
    let resolutions: usize = selection.paths.iter().map(|path| path.resolutions).sum();
    assert_eq!(resolutions, 2);
    for number in 1..5_000 {
        assert!(note(
            &mut selection,
            &format!("d{number}/f"),
            MemberKind::File
        ));
    }
    assert!(note(&mut selection, "d000/f", MemberKind::File));
    assert!(selection.paths.iter().all(|path| path.found));
    assert!(
        selection
            .links
            .missing
            .0
            .iter()
            .all(|(path, _)| *path == self::path("d0/f"))
    );
}

// Promises: select-limits
#[test]
fn memory_of_replaced_links_is_free_again() {
    let mut selection = following(&["l/f"]);
    let long = "x".repeat(4_000);
    for number in 0..3 * MAX_LINK_BYTES / long.len() {
        note(
            &mut selection,
            "other",
            link(&format!("{number}{}", &long[8..])),
        );
        note(&mut selection, "other", MemberKind::File);
    }
    for target in ["a", "b/c"] {
        note(&mut selection, "l", link(target));
        assert!(note(
            &mut selection,
            &format!("{target}/f"),
            MemberKind::File
        ));
    }
    note(&mut selection, "l", MemberKind::Directory);
    assert!(!selection.links.is_full);
    assert!(selection.links.targets.is_empty());
    assert!(selection.links.bytes < 1024, "{}", selection.links.bytes);
}

// Promises: select-limits
#[test]
fn links_that_are_replaced_too_often_are_not_followed() {
    let mut selection = following(&["l/f", "k/f"]);
    note(&mut selection, "k", link("d"));
    for number in 0..1_000 {
        note(&mut selection, "l", link(&format!("d{number}")));
    }
    let [l, k] = &selection.paths[..] else {
        panic!("two paths");
    };
    assert_eq!(l.resolved, Some(Err(PathError::TooManyLinks)));
    assert_eq!(k.resolved, Some(Ok(path("d/f"))));
}

// Promises: select-limits
#[test]
fn steps_through_long_links_are_bounded() {
    let mut selection = following(&["l0/f"]);
    let turns = "x/../".repeat(800);
    for number in 0..30 {
        note(
            &mut selection,
            &format!("l{number}"),
            link(&format!("{turns}l{}", number + 1)),
        );
    }
    let first = selection.paths.first();
    let resolved = first.and_then(|first| first.resolved.clone());
    assert_eq!(resolved, Some(Err(PathError::TooManyLinks)));
}

/// Where `wanted` leads after these links, and `None` as target for a directory.
fn place_of(wanted: &str, members: &[(&str, Option<&str>)]) -> Option<Result<String, PathError>> {
    let mut selection = Selection {
        paths: selected(&[wanted]),
        links: PathLinks::followed(),
        ..Selection::default()
    };
    for (name, target) in members {
        let target = target.map(|target| MemberKind::Symlink(target.as_bytes().to_vec()));
        let kind = target.unwrap_or(MemberKind::Directory);
        selection.select_member(&Member::new(*name, kind), &Problems::default());
    }
    let first = selection.paths.first();
    let resolved = first.and_then(|first| first.resolved.clone());
    resolved.map(|found| found.map(|path| path.to_string()))
}

// Promises: select-path
#[test]
fn parent_of_a_link_is_that_of_its_target() {
    let (x, l) = (("x", Some("a/b")), ("l", Some("x/../c")));
    let expected = Some(Ok("a/c/f".to_owned()));
    assert_eq!(place_of("l/f", &[x, l]), expected);
    assert_eq!(place_of("l/f", &[l, x]), expected);
    // The name of the link goes through a link itself.
    let inner = ("x/l", Some("../c"));
    assert_eq!(place_of("x/l/f", &[x, inner]), expected);
    assert_eq!(place_of("a/b/l/f", &[x, inner]), expected);
    // A later member replaces the link.
    let found = place_of("l/f", &[x, l, ("x", None)]);
    assert_eq!(found, Some(Ok("c/f".to_owned())));
    assert_eq!(place_of("l/f", &[x, l, ("l", None)]), None);
}

// Promises: select-limits
#[test]
fn links_that_lead_nowhere_are_errors() {
    let out = place_of("l/f", &[("l", Some("../f"))]);
    assert_eq!(out, Some(Err(PathError::EscapesRoot)));
    let round = place_of("a/x", &[("a", Some("b")), ("b", Some("a"))]);
    assert_eq!(round, Some(Err(PathError::TooManyLinks)));
}

// Promises: select-limits
#[test]
fn no_link_is_followed_once_there_are_too_many() {
    let long = "c".repeat((1 << 20) - 200);
    let names: Vec<_> = (0..65).map(|number| format!("{long}{number}")).collect();
    let names = names.iter().map(|name| (name.as_str(), Some("t")));
    let members: Vec<_> = std::iter::once(("a", Some("b"))).chain(names).collect();
    assert_eq!(place_of("a/x", &members[..2]), Some(Ok("b/x".to_owned())));
    assert_eq!(place_of("a/x", &members), None);
}

// Promises: select-exclude, gnu-include
#[test]
fn exclude_overrides_include() {
    let mut selection = Selection {
        exclude: vec![Glob::new(b"*.o")],
        include: vec![Glob::new(b"src")],
        ..Selection::default()
    };
    assert!(selection.selects(&path("x/src/a.c")));
    assert!(!selection.selects(&path("x/src/a.o")));
    assert!(!selection.selects(&path("x/doc")));
}

// Promises: select-strip
#[test]
fn strip_components_drops_short_paths() {
    let selection = Selection {
        strip_components: 1,
        ..Selection::default()
    };
    assert_eq!(selection.strip_path(path("top/")), None);
    assert_eq!(selection.strip_path(path("top/a/b")), Some(path("a/b")));
}
