//! Names of sources: URLs of files, and names as Hadoop, Spark and AWS write them.

use std::fs;
use std::process::Output;

use tarfs::locate::SourceSpec;

use crate::support::fixture::TestDir;
use crate::support::http::{Resource, Response, Server};
use crate::support::program::stderr_text;
use crate::support::raw::Archive;
use crate::support::tree::Tree;

/// A store with the archive `a.tar`, as an object of each cloud.
struct Store {
    server: Server,
    place: TestDir,
}

impl Store {
    fn new() -> Self {
        let (server, place) = (Server::start(), TestDir::new(&["cache", "out"]));
        let tar = &Tree::mixed().tar;
        for path in ["/bucket/a.tar", "/bucket/dir/a.tar"] {
            server.serve(path, Resource::new(tar.clone()).etag("\"1\""));
        }
        place.put("a b.tar", tar.clone());
        let outer = Archive::new().file("inner.tar", tar).end();
        server.serve("/bucket/outer.tar", Resource::new(outer).etag("\"2\""));
        Self { server, place }
    }

    fn run(&self, words: &[&str]) -> Output {
        let url = self.server.url("");
        let connection = format!("AccountName=me;BlobEndpoint={url}");
        let mut command = self.place.command(words);
        command
            .env("HOME", self.place.root())
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .env("AWS_ENDPOINT_URL", &url)
            .env("STORAGE_EMULATOR_HOST", &url)
            .env("AZURE_STORAGE_CONNECTION_STRING", connection);
        command.output().expect("started")
    }

    #[track_caller]
    fn output(&self, words: &[&str]) -> String {
        let done = self.run(words);
        assert!(done.status.success(), "{words:?}: {}", stderr_text(&done));
        String::from_utf8(done.stdout).expect("UTF-8")
    }

    /// The file URL of a local file, as Java writes it.
    fn file(&self, name: &str) -> String {
        let path = self.place.path(name).display().to_string();
        format!("file:{}", path.replace(' ', "%20"))
    }
}

// Promises: store-hadoop
#[test]
fn names_of_hadoop_are_sources() {
    let store = Store::new();
    let expected = store.output(&["ls", "-R", "s3://bucket/a.tar"]);
    let file = store.file("a b.tar");
    for source in [
        "s3a://bucket/a.tar",
        "s3n://bucket/a.tar",
        &file,
        "tar:s3a://bucket/outer.tar!/inner.tar",
        "slice:0:s3a://bucket/a.tar",
        "wasbs://bucket@me.blob.core.windows.net/a.tar",
        "wasb://bucket@me.blob.core.windows.net/a.tar",
        "abfs://bucket@me.dfs.core.windows.net/a.tar",
        "abfss://bucket@me.blob.core.windows.net/a.tar",
    ] {
        assert_eq!(store.output(&["ls", "-R", source]), expected, "{source}");
    }
    // The saved index of one name is that of the other.
    let before = store.server.requests("/bucket/a.tar").len();
    store.output(&["index", "s3a://bucket/a.tar"]);
    let indexed = store.server.requests("/bucket/a.tar").len();
    store.output(&["ls", "-R", "s3n://bucket/a.tar"]);
    let listed = store.server.requests("/bucket/a.tar").len();
    assert!(
        indexed >= before && listed <= indexed + 1,
        "{before} {indexed} {listed}"
    );
}

// Promises: store-hadoop
#[test]
fn names_of_hadoop_are_indexes_and_layers() {
    let store = Store::new();
    let expected = store.output(&["ls", "-R", "s3://bucket/a.tar"]);
    store.output(&["index", "s3://bucket/a.tar", "--output", "a.idx"]);
    let bytes = std::fs::read(store.place.path("a.idx")).expect("written");
    store
        .server
        .serve("/bucket/a.idx", Resource::new(bytes).etag("\"3\""));
    let file = store.file("a.idx");
    for index in ["s3a://bucket/a.idx", &file] {
        let listed = store.output(&["ls", "-R", "--index", index, "s3://bucket/a.tar"]);
        assert_eq!(listed, expected, "{index}");
    }
    let layer = store.file("a b.tar");
    for over in ["s3a://bucket/dir/a.tar", &layer] {
        let listed = store.output(&["ls", "-R", "--layer", over, "s3a://bucket/a.tar"]);
        assert_eq!(listed, expected, "{over}");
    }
    let parts = format!("join:s3a://bucket/a.tar,{layer}");
    assert_eq!(
        SourceSpec::from(&*parts).to_string(),
        parts.replace("s3a:", "s3:").replace("file:", "file://")
    );
}

#[test]
fn unknown_schemes_are_still_refused() {
    let store = Store::new();
    for source in ["hdfs://host/a.tar", "wasbs://bucket@me.example.com/a.tar"] {
        let done = store.run(&["ls", source]);
        assert_eq!(done.status.code(), Some(2), "{}", stderr_text(&done));
    }
}

// Promises: source-kinds
#[test]
fn file_url_with_query_or_fragment_is_refused() {
    let place = TestDir::new(&["fr", "fr#1", "fr?1", "out", "cache"]);
    place.put("fr/wrong", "");
    place.put("fr#1/right", "");
    place.put("fr?1/right", "");
    place.put("out/kept", "");
    place.put("t.tar", Archive::new().file("f", "").end());
    let url = |name: &str| format!("file://{}/{name}", place.root().display());
    for name in ["fr#1", "fr?1"] {
        for words in [
            &["sync", "--delete", &url(name), "out"][..],
            &["copy", &url(name), "new"],
            &["ls", &url(name)],
        ] {
            let text = place.error_of(words);
            assert!(text.contains("%3F") && text.contains("%23"), "{text}");
        }
        assert!(place.path("out/kept").exists(), "{name}");
        assert!(!place.path("new").exists(), "{name}");
    }
    for name in ["t.tar?x", "t.tar#x"] {
        let text = place.error_of(&["ls", &url(name)]);
        assert!(text.contains("%3F") && text.contains("%23"), "{text}");
    }
    for name in ["fr%231", "fr%3F1"] {
        fs::write(place.path("out/kept"), "").expect("space");
        place.succeeds(&["sync", "-q", "--delete", &url(name), "out"]);
        assert!(place.path("out/right").exists(), "{name}");
        assert!(!place.path("out/kept").exists(), "{name}");
        fs::remove_file(place.path("out/right")).expect("written");
    }
}

// Promises: secret-hidden
#[test]
fn url_after_blank_or_misspelled_has_no_secrets_in_errors() {
    let place = TestDir::new(&["out", "cache", "mnt"]);
    place.put("t.tar", Archive::new().file("f", "").end());
    let secret = "u:hunter2@127.0.0.1:1/x.tar?token=hunter3";
    for start in [
        " http://",
        "\nhttp://",
        "\thttps://",
        "ht_tp://",
        " ht_tp://",
        "ht\ntp://",
        "slice:0: http://",
        "join:http://127.0.0.1:1/t1, http://",
        "oci-archive: http://",
    ] {
        let source = &*format!("{start}{secret}");
        let member = &*format!("tar:{source}!/f");
        for words in [
            &["ls", source][..],
            &["ls", member],
            &["mount", source, "mnt"],
            &["materialize", "-q", source, "-C", "out"],
            &["ls", "--layer", source, "t.tar"],
            &["ls", "--index", source, "t.tar"],
            &["ls", "out", source],
            &["copy", source, "new"],
            &["index", "-q", "t.tar", "--output", source],
        ] {
            let mut command = place.command(words);
            if !words.contains(&"copy") {
                command.args(["--retries", "0"]);
            }
            let done = command.output();
            let text = stderr_text(&done.expect("started"));
            assert!(!text.contains("hunter"), "{words:?}: {text}");
        }
    }
}

// Promises: secret-hidden
#[test]
fn url_in_any_operand_has_no_secrets_in_errors() {
    let place = TestDir::new(&["d", "cache"]);
    place.put("t.tar", Archive::new().file("f", "").end());
    for (url, shown) in [
        (
            "abfss://data:hunter2@acc.dfs.core.windows.net/k",
            "data@acc",
        ),
        ("https://127.0.0.1:1/a?hunter2", "127.0.0.1:1/a?…"),
        ("https://u:hunter1 hunter2@h/k", "h/k"),
        ("https://hunter1:hun/hunter2@h/a?x=hunter3", "h/a?…"),
        ("http:/me:hunter2@h/x", "h/x"),
        ("http//me:hunter2@h/x", "h/x"),
        ("s3:/k:hunter2@b", "b"),
        (
            "https://me:hunter2@127.0.0.1:1/a?m=x@y&sig=hunter3",
            "127.0.0.1:1/a?…",
        ),
        (
            "join:http:/me:hunter2@h/b,http://127.0.0.1:1/a",
            "http:/h/b",
        ),
        (
            "https://127.0.0.1:1/https://me:hunter2@h/k",
            "1/https://h/k",
        ),
        ("/a.tar,https://me:hunter2@h/b", "/h/b"),
    ] {
        for words in [
            &["copy", url, "new"][..],
            &["mount", url, "d"],
            &["ls", "d", url],
            &["ls", "t.tar", url],
            &["cat", "t.tar", url],
            &["rm", url],
            &["sync", "-q", "--dry-run", "t.tar", url],
            &["ls", "--retries", url, "t.tar"],
        ] {
            let done = place.tarfs(words);
            let text = stderr_text(&done);
            assert!(!done.status.success(), "{words:?}");
            assert!(!text.contains("hunter"), "{words:?}: {text}");
            assert!(text.contains(shown), "{words:?}: {text}");
        }
    }
    // The message behind the URL stays.
    let text = place.error_of(&["copy", "https://127.0.0.1:1/a?x", "new"]);
    assert!(text.contains("/a?…: names no directory"), "{text}");
}

// Promises: error-line
#[test]
fn absolute_path_that_looks_like_a_url_is_shown() {
    let place = TestDir::new(&["cache"]);
    place.put("t.tar", Archive::new().file("f", "").end());
    let root = place.root().display();
    let name = format!("{root}/x://nosuch@b.tar");
    let text = place.error_of(&["ls", &name]);
    assert!(text.contains("nosuch@b.tar: "), "{text}");
    let directory = format!("{root}/y://u@b/c?d=e");
    let text = place.error_of(&["materialize", "-q", "t.tar", "-C", &directory]);
    assert!(text.contains(&directory), "{text}");
    for url in ["http://127.0.0.1:1/b@2.tar", "http://localhost:1/@b/c.tar"] {
        let text = place.error_of(&["ls", "--retries", "0", url]);
        assert!(text.contains(url), "{text}");
    }
}

// Promises: source-kinds
#[test]
fn url_after_blank_is_read() {
    let store = Store::new();
    let url = store.server.url("/bucket/a.tar");
    let expected = store.output(&["ls", "-R", &url]);
    for start in [" ", "\n", "slice:0: ", "join: "] {
        assert_eq!(
            store.output(&["ls", "-R", &format!("{start}{url}")]),
            expected,
            "{start:?}"
        );
    }
}

// Promises: source-kinds
#[test]
fn prefix_after_blank_is_that_of_a_source() {
    let store = Store::new();
    let expected = store.output(&["ls", "-R", "s3://bucket/a.tar"]);
    for source in [
        " s3a://bucket/a.tar",
        &format!(" {}", store.file("a b.tar")),
        " tar:s3://bucket/outer.tar!/inner.tar",
        "slice:0: tar:s3://bucket/outer.tar!/inner.tar",
        "\tjoin:s3://bucket/a.tar",
    ] {
        assert_eq!(store.output(&["ls", "-R", source]), expected, "{source:?}");
    }
    for name in ["oci://127.0.0.1:1/a", "oci:missing:tag"] {
        let blank = format!(" {name}");
        let [plain, blank] = [name, &blank].map(SourceSpec::from);
        assert_eq!(plain, blank);
    }
    for (nested, plain) in [
        (
            "oci-archive: tar:s3://b/o!/i:t",
            "oci-archive:tar:s3://b/o!/i:t",
        ),
        (
            "docker-archive:slice:0: https://h:1/x:t",
            "docker-archive:slice:0:https://h:1/x:t",
        ),
        ("oci-archive: join:a,b:t", "oci-archive:join:a,b:t"),
    ] {
        assert_eq!(SourceSpec::from(nested), SourceSpec::from(plain));
    }
    let done = store.run(&["ls", "--retries", "0", " oci://127.0.0.1:1/a"]);
    let text = stderr_text(&done);
    assert!(!text.contains("is not a known scheme"), "{text}");
    // A blank before a path belongs to its name.
    store.place.put(" a.tar", Tree::mixed().tar.clone());
    assert_eq!(store.output(&["ls", "-R", " a.tar"]), expected);
    assert_eq!(SourceSpec::from(" a:b").to_string(), " a:b");
}

// Promises: source-kinds
#[test]
fn file_url_is_each_operand_of_a_listing() {
    let place = TestDir::new(&["a b", "c"]);
    place.put("a b/one", "1");
    place.put("c/two", "2");
    let root = place.root().display();
    let paths = ["a b", "c"].map(|name| format!("{root}/{name}"));
    let urls = ["a%20b", "c"].map(|name| format!("file://{root}/{name}"));
    for verb in ["ls", "find", "du"] {
        let [expected, listed, mixed] = [
            [&paths[0], &paths[1]],
            [&urls[0], &urls[1]],
            [&paths[0], &urls[1]],
        ]
        .map(|[first, second]| place.succeeds(&[verb, first, second]));
        assert_eq!(listed, expected, "{verb}");
        assert_eq!(mixed, expected, "{verb}");
        let missing = place.tarfs(&[verb, "missing", &urls[1]]);
        assert!(!missing.stdout.is_empty(), "{verb}");
    }
}

// Promises: archives-place
#[test]
fn archives_of_a_bucket_are_listed_in_reverse() {
    let store = Store::new();
    let contents = ["a.tar", "b.tar"]
        .map(|key| format!("<Contents><Key>p/{key}</Key><Size>1</Size></Contents>"));
    let page = format!("<ListBucketResult>{}</ListBucketResult>", contents.concat());
    store.server.route("/bucket", move |_| {
        Response::new(200).with_body(page.clone())
    });
    assert_eq!(store.output(&["ls", "s3://bucket/p/"]), "a.tar\nb.tar\n");
    let reversed = store.output(&["ls", "-r", "s3://bucket/p/"]);
    assert_eq!(reversed, "b.tar\na.tar\n");
}
