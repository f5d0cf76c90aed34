//! Members of archives, and byte ranges, as archives of their own.
//!
//! `tests/mount` has the tests that mount them.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;

use crate::support::cli::{Outcome, Place};
use crate::support::fixture::TestDir;
use crate::support::http::{Fault, Resource, Server};
use crate::support::nested::{inner, outer};
use crate::support::packing::Packing;
use crate::support::raw::{Archive, random_bytes};
use crate::support::sha256::sha256;

// Promises: nested-slice, nested-tar
#[test]
fn nested_sources_nest_and_slices_begin_anywhere() {
    let place = TestDir::new(&["out"]);
    let box_of = |name: &str, bytes: &[u8]| Archive::new().file(name, bytes).end();
    place.put("a.tar", box_of("b.tar", &box_of("c", &outer(Packing::Lz4))));
    let source = "tar:tar:tar:a.tar!/b.tar!/c!/kept/inner";
    assert_eq!(place.succeeds(&["ls", "-R", source]), "d\nd/f\n");
    let packed = inner(Packing::Xz);
    place.put("image", [&[7; 1000], &packed[..], &[9; 500]].concat());
    let (all, rest) = (
        format!("slice:1000+{}:image", packed.len()),
        "slice:512:a.tar",
    );
    assert_eq!(place.succeeds(&["ls", "-R", &all]), "d\nd/f\n");
    assert_eq!(place.succeeds(&["ls", rest]), "c\n");
    let digest = sha256(&packed);
    place.succeeds(&["verify", "-q", "--expect-sha256", &digest, &all]);
}

// Promises: source-bytes
#[test]
fn paths_of_sources_may_have_any_bytes() {
    let place = TestDir::new(&["out"]);
    let directory = place.path(OsStr::from_bytes(b"caf\xe9"));
    fs::create_dir(&directory).expect("made");
    let packed = inner(Packing::Gzip);
    for (name, bytes) in [
        ("outer", &outer(Packing::Gzip)),
        ("inner.a", &packed.slice(..9)),
    ] {
        fs::write(directory.join(name), bytes).expect("space");
    }
    fs::write(directory.join("inner.b"), &packed[9..]).expect("space");
    let sources = [
        &b"tar:caf\xe9/outer!/kept/inner"[..],
        b"join:caf\xe9/inner.a,caf\xe9/inner.b",
        b"join:caf\xe9/inner.?",
    ];
    for source in sources {
        for verb in [
            &["ls", "-R"][..],
            &["verify", "-q"],
            &["materialize", "-q", "-C", "out"],
        ] {
            let mut command = place.command(verb);
            let output = command.arg(OsStr::from_bytes(source)).output();
            let output = output.expect("started");
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{verb:?}: {text}");
        }
    }
    // An archive that is missing is named by its URL, so that the error shows its bytes.
    let mut command = place.command(&["ls"]);
    let output = command.arg(OsStr::from_bytes(b"caf\xe9/none.tar")).output();
    let text = String::from_utf8_lossy(&output.expect("started").stderr).into_owned();
    assert!(text.contains("/caf%E9/none.tar: not found"), "{text}");
}

// Promises: nested-join
#[test]
fn joined_parts_are_one_archive() {
    let (server, place) = (Server::start(), TestDir::new(&["out"]));
    let whole = outer(Packing::Gzip);
    let third = whole.len() / 3;
    let parts = [&whole[..third], &whole[third..=third], &whole[third + 1..]];
    for (part, name) in parts.iter().zip(["aa", "ab", "ac"]) {
        place.put(format!("x.tar.gz.{name}"), part);
        place.put(format!("with,comma.{name}"), part);
        let etag = format!("\"{name}\"");
        server.serve(
            &format!("/{name}"),
            Resource::new(part.to_vec()).etag(&etag),
        );
    }
    place.put("x.tar.gz", &whole);
    let urls = format!(
        "join:{},{},x.tar.gz.ac",
        server.url("/aa"),
        server.url("/ab")
    );
    let listed = place.succeeds(&["ls", "-R", "x.tar.gz"]);
    let digest = sha256(&whole);
    for source in [
        "join:x.tar.gz.aa,x.tar.gz.ab,x.tar.gz.ac",
        "join:x.tar.gz.*",
        "join:with\\,comma.a?",
        "join:x.tar.gz.a[ab],slice:0:x.tar.gz.ac",
        "join:join:x.tar.gz.aa\\,x.tar.gz.ab,x.tar.gz.ac",
        &urls,
    ] {
        assert_eq!(place.succeeds(&["ls", "-R", source]), listed, "{source}");
        place.succeeds(&["verify", "-q", "--expect-sha256", &digest, source]);
        let nested = format!("tar:{source}!/kept/inner");
        assert_eq!(place.succeeds(&["ls", "-R", &nested]), "d\nd/f\n");
    }
    // Each part is fetched by requests of its own.
    let sent = ["/aa", "/ab"].map(|path| server.requests(path).len());
    assert!(sent.iter().all(|&requests| requests > 0), "{sent:?}");
}

// Promises: nested-join
#[test]
fn error_of_a_joined_source_names_the_part() {
    let (server, place) = (Server::start(), TestDir::new(&["out"]));
    let whole = outer(Packing::Gzip);
    place.put("part", &whole[..1000]);
    let rest = Resource::new(whole[1000..].to_vec()).without_ranges();
    server.serve("/rest", rest);
    let url = server.url("/rest");
    for (source, words) in [
        ("join:part,missing".to_owned(), ["missing", "not found"]),
        ("join:part,none.*".to_owned(), ["none.*", "not found"]),
        (
            "join:part,-".to_owned(),
            ["standard input", "store it in a file"],
        ),
        (format!("join:part,{url}"), [&*url, "read only once"]),
        (
            "join:part,,part".to_owned(),
            ["SOURCE is empty", "path or a URL"],
        ),
    ] {
        let complaint = place.error_of(&["ls", &source]);
        let has_all = words.iter().all(|word| complaint.contains(word));
        assert!(has_all, "{source}: {complaint}");
    }
}

// Promises: nested-join
#[test]
fn part_that_changes_is_named() {
    let (server, place) = (Server::start(), TestDir::new(&["out"]));
    let whole = Archive::new().file("a", random_bytes(1 << 20)).end();
    place.put("part", &whole[..1000]);
    let version = |tag| Resource::new(whole[1000..].to_vec()).etag(tag);
    let other = version("\"2\"");
    server.serve_with_faults("/rest", version("\"1\""), move |request| {
        let is_first = request.range().is_some_and(|(start, _)| start == 0);
        (!is_first).then(|| Fault::Other(other.clone()))
    });
    let (url, source) = (
        server.url("/rest"),
        format!("join:part,{}", server.url("/rest")),
    );
    let complaint = place.error_of(&["materialize", "-q", &source, "-C", "out"]);
    assert!(complaint.contains(&url), "{complaint}");
    assert!(complaint.contains("has changed"), "{complaint}");
}

// Promises: disk-limit
#[test]
fn cache_size_of_environment_is_for_all_verbs_and_may_be_empty() {
    let place = Place::new();
    place.put("outer.tar.gz", outer(Packing::Gzip));
    let source = "tar:outer.tar.gz!/kept/inner";
    let run = |size: &str, words: &[&str]| {
        Outcome::of(place.tarfs().args(words).env("TARFS_CACHE_SIZE", size))
    };
    for words in [
        &["ls", source][..],
        &["verify", "-q", source],
        &["materialize", "-q", source, "-C", "out"],
        &["sync", "-q", source, "copy"],
    ] {
        let outcome = run("much", words);
        assert_eq!(outcome.code, 64, "{words:?}: {}", outcome.complaints);
        assert!(outcome.complaints.contains("'much'"));
        let outcome = run("", words);
        assert_eq!(outcome.code, 0, "{words:?}: {}", outcome.complaints);
    }
    let outcome = Outcome::of(
        place
            .tarfs()
            .args(["ls", "outer.tar.gz"])
            .env("TARFS_CACHE_DIR", "")
            .env("XDG_CACHE_HOME", place.path("cache")),
    );
    assert_eq!(outcome.code, 0, "{}", outcome.complaints);
}

// Promises: nested-everywhere
#[test]
fn missing_nested_member_error_names_its_location() {
    let place = TestDir::new(&["out"]);
    let outer = outer(Packing::Plain);
    place.put("outer", &outer);
    let has = format!("it has only {} bytes", outer.len());
    for (source, words) in [
        (
            "tar:outer!/kept/nothing",
            ["outer: kept/nothing", "not found"],
        ),
        ("tar:outer!/kept", ["outer: kept", "no regular file"]),
        ("tar:outer!/../kept", ["outer: ../kept", "leads out"]),
        ("tar:nowhere!/x", ["nowhere", "not found"]),
        ("tar:-!/x", ["standard input", "store it in a file"]),
        (
            "slice:9000000:outer",
            ["outer: the bytes from 9000000", &has],
        ),
        (
            "slice:0+9000000:outer",
            ["outer: 9000000 bytes from 0", &has],
        ),
        (
            "slice:1+18446744073709551615:outer",
            ["outer: 18446744073709551615 bytes from 1", &has],
        ),
    ] {
        let complaint = place.error_of(&["ls", source]);
        assert!(
            words.iter().all(|word| complaint.contains(word)),
            "{source}: {complaint}"
        );
    }
}
