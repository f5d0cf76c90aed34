//! The party that vouches for the tree of an archive.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use tarfs::Stats;
use tarfs::archive::{Archive, FindIndex, IndexPlace, OpenOptions, PublishedIndex, TreeOrigin};
use tarfs::index::store;
use tarfs::source::{self, Cause, MemorySource, Source, Validator};
use tokio::runtime::Runtime;

use crate::support::raw;
use crate::support::wait;

fn archive() -> Arc<dyn Source> {
    let bytes = raw::Archive::new().file("a", [7; 512]).end();
    let version = Validator::StrongEtag("\"1\"".to_owned());
    Arc::new(MemorySource::new("a.tar", bytes).with_validator(version))
}

/// Options with the index that `find` finds, of `publisher`.
fn options(cache: &Path, find: FindIndex, publisher: &str, network: &Runtime) -> OpenOptions {
    OpenOptions {
        cache_dir: Some(cache.to_owned()),
        published_index: Some(PublishedIndex {
            places: vec![(
                TreeOrigin::Publisher,
                IndexPlace::Index(find, publisher.to_owned()),
            )],
            network: network.handle().clone(),
            stats: Arc::default(),
            is_required: false,
            sha256: None,
        }),
        ..OpenOptions::default()
    }
}

#[test]
fn saved_copy_of_an_index_is_only_for_its_publisher() {
    let (network, directory) = (Runtime::new().expect("threads"), tempfile::tempdir());
    let directory = directory.expect("a directory");
    let (cache, published) = (
        directory.path().join("cache"),
        directory.path().join("index"),
    );
    let open = |options: &OpenOptions| {
        let stats = Arc::<Stats>::default();
        let opened = Archive::open(archive(), options, network.handle(), &stats);
        (opened.expect("an archive"), stats.scans.get())
    };
    let (scanned, _) = open(&OpenOptions::default());
    store::write(&published, &scanned.index()).expect("written");
    let handle = network.handle().clone();
    let text = published.display().to_string();
    let find: FindIndex =
        Arc::new(move || handle.block_on(source::open(&text, source::Options::default())));
    let none: FindIndex = Arc::new(|| Err(source::Error::new("index", Cause::NotFound)));
    let (first, scans) = open(&options(&cache, find, "one", &network));
    assert_eq!((first.tree_origin(), scans), (TreeOrigin::Publisher, 0));
    let saved = || {
        let files = fs::read_dir(cache.join("index")).into_iter().flatten();
        let names = files.map(|file| file.expect("a name").file_name());
        names
            .filter(|name| name.to_string_lossy().ends_with(".idx"))
            .count()
    };
    wait::wait_until("the copy is saved", || saved() == 1);
    let (again, scans) = open(&options(&cache, Arc::clone(&none), "one", &network));
    assert_eq!((again.tree_origin(), scans), (TreeOrigin::Publisher, 0));
    let (other, scans) = open(&options(&cache, none, "other", &network));
    assert_eq!((other.tree_origin(), scans), (TreeOrigin::Archive, 1));
}
