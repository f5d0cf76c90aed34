//! Tests of the store.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::super::Origin;
use super::super::test_support::file;
use super::super::{Builder, Options};
use super::*;
use crate::base::lock::{LockKind, RETRY_INTERVAL, lock};
use crate::base::shared_dir::STALE_TEMPORARY_AGE;

fn locator(options: &str) -> Locator {
    Locator {
        canonical: "file".to_owned(),
        fingerprint: "len=1".to_owned(),
        options: options.to_owned(),
    }
}

fn index(locator: Locator) -> Index {
    let mut builder = Builder::new(Options::default());
    builder.add_member(&file("a", 0..1)).unwrap();
    builder.finish(Origin {
        locator,
        ..Origin::default()
    })
}

fn find(store: &Store, locator: &Locator) -> Result<Option<Index>, Error> {
    let found = store.find_locked(locator, &MemoryLimit::default(), RowsToLoad::All)?;
    Ok(found.map(|(index, _)| index))
}

fn publish(store: &Store, options: &str) -> PathBuf {
    let locator = locator(options);
    drop(store.publish(&locator, &index(locator.clone())).unwrap());
    store.path(&locator)
}

fn held(store: &Store, options: &str) -> IndexLock {
    let found = store
        .find_locked(&locator(options), &MemoryLimit::none(), RowsToLoad::All)
        .unwrap();
    found.expect("published").1.expect("not locked")
}

fn cause(found: Result<Option<Index>, Error>) -> Cause {
    found.expect_err("nothing usable").cause
}

#[test]
fn published_index_is_found_by_its_locator_only() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    assert!(find(&store, &locator("")).unwrap().is_none());
    let path = publish(&store, "");
    assert_eq!(
        find(&store, &locator("")).unwrap().unwrap().entry_count(),
        2
    );
    assert!(find(&store, &locator("x")).unwrap().is_none());
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(
        fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777,
        0o700
    );
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn an_index_can_be_published_under_another_locator() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    drop(
        store
            .publish(&locator("new"), &index(locator("old")))
            .unwrap(),
    );
    let found = find(&store, &locator("new")).unwrap().unwrap();
    assert_eq!(found.origin().locator, locator("new"));
}

#[test]
fn a_file_for_another_source_is_not_used() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let path = publish(&store, "a");
    fs::rename(path, store.path(&locator("b"))).unwrap();
    assert!(matches!(
        cause(find(&store, &locator("b"))),
        Cause::Mismatch
    ));
}

// Promises: index-damaged
#[test]
fn damaged_index_file_is_detected_and_replaced() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let path = publish(&store, "");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert!(matches!(cause(find(&store, &locator(""))), Cause::Checksum));
    fs::write(&path, b"").unwrap();
    assert!(matches!(
        cause(find(&store, &locator(""))),
        Cause::NotAnIndex
    ));
    publish(&store, "");
    assert!(find(&store, &locator("")).unwrap().is_some());
}

#[test]
fn index_store_does_not_follow_symlinks() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let elsewhere = cache.path().join("elsewhere");
    write(&elsewhere, &index(locator(""))).unwrap();
    let before = fs::read(&elsewhere).unwrap();
    let path = store.path(&locator(""));
    fs::create_dir(path.parent().unwrap()).unwrap();
    symlink(&elsewhere, &path).unwrap();
    assert!(matches!(
        cause(find(&store, &locator(""))),
        Cause::Untrusted(_)
    ));
    publish(&store, "");
    assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
    assert_eq!(fs::read(&elsewhere).unwrap(), before);
}

// Promises: check-cache, index-damaged
#[test]
fn a_file_that_others_can_write_is_not_used() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let path = publish(&store, "");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(matches!(
        cause(find(&store, &locator(""))),
        Cause::Untrusted(_)
    ));
}

#[test]
fn a_directory_in_its_place_is_an_error() {
    let cache = tempfile::tempdir().unwrap();
    assert!(matches!(
        read(cache.path(), &MemoryLimit::none()).unwrap_err().cause,
        Cause::NotAFile
    ));
    let error = write(cache.path(), &index(locator(""))).unwrap_err();
    assert!(matches!(error.cause, Cause::Io(_)));
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
}

// Promises: cache-in-use
#[test]
fn temporary_files_of_dead_writers_are_removed() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let path = publish(&store, "");
    let temporary = |name: &str| path.with_file_name(format!("{TEMPORARY_PREFIX}{name}"));
    for (name, age) in [("old", STALE_TEMPORARY_AGE * 2), ("new", Duration::ZERO)] {
        let file = File::create(temporary(name)).unwrap();
        file.set_modified(std::time::SystemTime::now() - age)
            .unwrap();
    }
    publish(&store, "");
    assert!(!temporary("old").exists());
    assert!(temporary("new").exists());
}

/// In a container the next process may have the same number as the one before.
#[test]
fn temporary_file_of_dead_writer_with_same_pid_is_no_obstacle() {
    let names: Vec<_> = (0..100).map(|_| temporary_name()).collect();
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let path = publish(&store, "");
    for number in 0..100 {
        let left = format!("{TEMPORARY_PREFIX}{}-{number}", std::process::id());
        File::create(path.with_file_name(left)).unwrap();
    }
    publish(&store, "");
    let again: Vec<_> = (0..100).map(|_| temporary_name()).collect();
    assert!(again.iter().all(|name| !names.contains(name)));
}

// Promises: index-expiry
#[test]
fn long_unused_index_is_removed_on_next_publish() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let long_ago = SystemTime::now() - RETENTION_POLICY.max_age - Duration::from_mins(1);
    let names = ["old", "used", "marked"];
    for name in names {
        publish(&store, name);
    }
    let _mark = held(&store, "marked");
    // Only now, because otherwise saving the next one would remove each.
    for name in names {
        let file = File::open(store.path(&locator(name))).unwrap();
        file.set_modified(long_ago).unwrap();
    }
    held(&store, "used").touch();
    fs::write(store.directory.path().join("foreign"), b"").unwrap();
    File::open(store.directory.path().join("foreign"))
        .unwrap()
        .set_modified(long_ago)
        .unwrap();
    publish(&store, "new");
    let left = |name: &str| store.path(&locator(name)).exists();
    assert!(!left("old"));
    assert!(left("used") && left("marked") && left("new"));
    assert!(
        store.directory.path().join("foreign").exists(),
        "it is not ours"
    );
}

// Promises: cache-list
#[test]
fn index_file_reports_origin_and_is_removable_when_unused() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    assert!(store.files().unwrap().is_empty());
    publish(&store, "a");
    let files = store.files().unwrap();
    let [file] = &files[..] else { panic!("one") };
    assert_eq!(origin(file).unwrap().locator, locator("a"));
    let mark = held(&store, "a");
    assert!(file.is_in_use());
    assert!(!remove(file).unwrap());
    drop(mark);
    assert!(!file.is_in_use());
    // Replaces the file under the same name, which must then not be removed.
    publish(&store, "a");
    assert!(!remove(file).unwrap());
    assert!(remove(&store.files().unwrap()[0]).unwrap());
    assert!(find(&store, &locator("a")).unwrap().is_none());
}

// Promises: cache-in-use
#[test]
fn published_index_is_in_use_at_once() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let in_use = store.publish(&locator(""), &index(locator(""))).unwrap();
    let files = store.files().unwrap();
    assert!(files[0].is_in_use() && !remove(&files[0]).unwrap());
    drop(in_use.expect("not locked"));
    assert!(remove(&files[0]).unwrap());
}

// Promises: index-shared-cache
#[test]
fn locks_use_descriptors_that_nfs_accepts() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let published = store.publish(&locator(""), &index(locator(""))).unwrap();
    let shared = published.expect("not locked");
    let can = |file: &File, access| {
        let mode = rustix::fs::fcntl_getfl(file).unwrap() & OFlags::RWMODE;
        mode == OFlags::RDWR || mode == access
    };
    assert!(can(&shared.locked, OFlags::RDONLY), "a shared lock reads");
    drop(shared);
    let alone = store.files().unwrap()[0].lock_exclusive().unwrap();
    let alone = alone.expect("an index of ours");
    assert!(can(&alone, OFlags::WRONLY), "an exclusive lock writes");
}

// Promises: cache-in-use
#[test]
fn locked_temporary_file_stays_at_any_age() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let path = publish(&store, "").with_file_name(format!("{TEMPORARY_PREFIX}old"));
    let written = File::create(&path).unwrap();
    written
        .set_permissions(fs::Permissions::from_mode(0o600))
        .unwrap();
    written
        .set_modified(SystemTime::now() - STALE_TEMPORARY_AGE * 2)
        .unwrap();
    lock(&written, LockKind::Shared, Duration::ZERO).unwrap();
    let files = store.files().unwrap();
    let file = files.iter().find(|file| !is_finished(&file.name)).unwrap();
    assert!(file.is_in_use() && !remove(file).unwrap());
    publish(&store, "");
    assert!(path.exists());
    drop(written);
    assert!(!file.is_in_use() && remove(file).unwrap());
}

// Promises: cache-in-use
#[test]
fn find_succeeds_while_lock_is_probed() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let path = publish(&store, "");
    let looking = File::open(path).unwrap();
    lock(&looking, LockKind::Exclusive, Duration::ZERO).unwrap();
    std::thread::scope(|scope| {
        let taking = scope.spawn(|| held(&store, ""));
        std::thread::sleep(10 * RETRY_INTERVAL);
        drop(looking);
        taking.join().unwrap();
    });
}

// Promises: cache-in-use
#[test]
fn find_retries_when_index_is_replaced_before_lock() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    for is_replaced in [false, true] {
        let path = publish(&store, "");
        // Acts like a process that is about to remove the file.
        let removing = File::open(&path).unwrap();
        lock(&removing, LockKind::Exclusive, Duration::ZERO).unwrap();
        let found = std::thread::scope(|scope| {
            let taking = scope.spawn(|| {
                store
                    .find_locked(&locator(""), &MemoryLimit::none(), RowsToLoad::All)
                    .unwrap()
            });
            std::thread::sleep(10 * RETRY_INTERVAL);
            fs::remove_file(&path).unwrap();
            if is_replaced {
                publish(&store, "");
            }
            drop(removing);
            taking.join().unwrap()
        });
        assert_eq!(found.is_some(), is_replaced);
        if let Some((_, in_use)) = found {
            let _in_use = in_use.expect("not locked");
            let files = store.files().unwrap();
            assert!(files[0].is_in_use(), "the new one");
        }
    }
}

// Promises: cache-in-use
#[test]
fn index_in_use_survives_concurrent_removal() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    for round in 0..200 {
        publish(&store, "");
        let files = store.files().unwrap();
        std::thread::scope(|scope| {
            let removing = scope.spawn(|| remove(&files[0]).unwrap());
            let taken = store
                .find_locked(&locator(""), &MemoryLimit::none(), RowsToLoad::All)
                .unwrap();
            let is_removed = removing.join().unwrap();
            let is_there = store.path(&locator("")).exists();
            let is_held = taken.is_some_and(|(_, in_use)| in_use.is_some());
            assert_eq!((is_held, is_there), (!is_removed, !is_removed), "{round}");
        });
    }
}

// Promises: cache-in-use
#[test]
fn remove_waits_for_directory_lock() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    publish(&store, "");
    let files = store.files().unwrap();
    let naming = lock_directory(&store.directory.open().unwrap()).expect("not locked");
    assert!(!remove(&files[0]).unwrap());
    drop(naming);
    assert!(remove(&files[0]).unwrap());
}

#[test]
fn cut_index_file_has_no_origin_and_is_damaged() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let path = publish(&store, "");
    assert_eq!(
        origin(&store.files().unwrap()[0]).unwrap().locator,
        locator("")
    );
    let bytes = fs::read(&path).unwrap();
    for end in 0..bytes.len() {
        fs::write(&path, &bytes[..end]).unwrap();
        assert!(origin(&store.files().unwrap()[0]).is_none(), "{end}");
        assert!(find(&store, &locator("")).is_err(), "{end}");
    }
}

#[test]
fn changed_bit_of_an_index_file_changes_nothing_or_is_an_error() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let path = publish(&store, "");
    let bytes = fs::read(&path).unwrap();
    let mut unnoticed = 0;
    for bit in 0..8 * bytes.len() {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &changed).unwrap();
        if let Ok(found) = find(&store, &locator("")) {
            publish_again(&store, &found.unwrap());
            assert_eq!(fs::read(&path).unwrap(), bytes, "{bit}");
            unnoticed += 1;
        }
    }
    assert!(
        50 * unnoticed < 8 * bytes.len(),
        "few bits of zstd: {unnoticed}"
    );
}

fn publish_again(store: &Store, index: &Index) {
    drop(store.publish(&locator(""), index).unwrap());
}

// Promises: index-damaged
#[test]
fn damage_of_any_part_is_found_when_only_names_are_loaded() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let mut builder = Builder::new(Options::default());
    for number in 0..20_000 {
        let name = format!("d/{number}");
        builder.add_member(&file(&name, 0..1)).unwrap();
    }
    let index = builder.finish(Origin::default());
    store.publish(&Locator::default(), &index).unwrap();
    let path = store.path(&Locator::default());
    let bytes = fs::read(&path).unwrap();
    let find = || {
        let limit = MemoryLimit::none();
        store.find_locked(&Locator::default(), &limit, RowsToLoad::Names)
    };
    for place in (0..bytes.len()).step_by(bytes.len() / 200) {
        let mut damaged = bytes.clone();
        damaged[place] ^= 0x55;
        fs::write(&path, &damaged).unwrap();
        assert!(find().is_err(), "byte {place} of {}", bytes.len());
    }
    fs::write(&path, &bytes).unwrap();
    assert!(find().unwrap().unwrap().0.is_on_demand());
}

#[test]
fn index_that_is_loaded_for_its_names_has_no_other_rows_in_memory() {
    let cache = tempfile::tempdir().unwrap();
    let store = Store::new(cache.path());
    let mut builder = Builder::new(Options::default());
    let names: Vec<_> = (0..20_000).map(|number| format!("d/{number}")).collect();
    for name in &names {
        builder.add_member(&file(name, 0..1)).unwrap();
    }
    let index = builder.finish(Origin::default());
    store.publish(&Locator::default(), &index).unwrap();
    let open = |rows| {
        let found = store.find_locked(&Locator::default(), &MemoryLimit::none(), rows);
        found.unwrap().unwrap().0
    };
    let (all, some) = (open(RowsToLoad::All), open(RowsToLoad::Names));
    assert!(!all.is_on_demand() && some.is_on_demand());
    assert!(some.memory_bytes() < all.memory_bytes() * 2 / 3);
    let list = |index: &Index| {
        let directory = index.lookup(super::super::Ino::ROOT, b"d").unwrap().ino();
        let names = index.names(directory, 0, true);
        names
            .map(|child| (child.name.to_vec(), child.file_type))
            .collect::<Vec<_>>()
    };
    assert_eq!(list(&all), list(&some));
    assert!(some.is_on_demand(), "the listing loads no more");
}
