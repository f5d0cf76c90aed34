//! Shards: their entries, their cost, and the tree that all of them write.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use bytes::Bytes;
use tarfs::Plain;
use tarfs::archive::scan::Sink;
use tarfs::archive::{Archive, ReadError, Version, Volume};
use tarfs::index::{EntryKind, Index, Ino, ShardPlan};
use tarfs::materialize::read_entries;
use tarfs::tar::{Member, MemberKind};

use crate::support::archive_env::TestEnv;
use crate::support::cli::Place;
use crate::support::http::{Resource, Server};
use crate::support::image::{self, Image};
use crate::support::packing::Packing;
use crate::support::raw::{self, Header};
use crate::support::rng::Rng;
use crate::support::tree::Tree;

const COUNTS: [u32; 3] = [2, 7, 64];

const PACKINGS: [Packing; 9] = [
    Packing::Plain,
    Packing::Gzip,
    Packing::Lz4Linked,
    Packing::Lz4Frames,
    Packing::Zstd,
    Packing::ZstdFrames,
    Packing::Xz,
    Packing::XzBlocks,
    Packing::Bzip2,
];

/// Contents of all files, by name.
type Files = BTreeMap<String, Vec<u8>>;

/// Files of about 20 kB that pack evenly, 8 MB together, with links after each tenth.
fn archive() -> (Files, Bytes) {
    let mut noise = Rng::new(3);
    let mut files = Files::new();
    let mut archive = raw::Archive::new().directory("top/");
    for number in 0..400_u64 {
        let name = format!("top/{}/{number:03}", number / 100);
        let content = noise.text(20_000 + usize::try_from(number % 13).expect("small") * 100);
        archive = archive.file(&name, &content);
        if number % 10 == 0 {
            archive = archive.hard_link(&format!("links/{number:03}"), &name);
            archive = archive.symlink(&format!("links/to-{number:03}"), "nowhere");
        }
        files.insert(name, content);
    }
    (files, archive.end().into())
}

/// Collects members.
#[derive(Default)]
struct Collector {
    names: Vec<String>,
    files: Files,
    current: String,
}

impl Sink for Collector {
    type Error = std::convert::Infallible;

    fn member(&mut self, member: Member) -> Result<(), Self::Error> {
        self.current = String::from_utf8(member.name).expect("UTF-8");
        self.names.push(self.current.clone());
        if member.kind == MemberKind::File {
            self.files.insert(self.current.clone(), Vec::new());
        }
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Self::Error> {
        let file = self.files.get_mut(&self.current).expect("a file");
        file.extend_from_slice(&bytes);
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        panic!("{text}");
    }

    fn damage(&mut self, _offset: Plain, text: &str) {
        panic!("{text}");
    }
}

fn collect(archive: &Archive, index: &Index, plan: &ShardPlan, number: u32) -> Collector {
    let mut collector = Collector::default();
    let damaged = read_entries(archive, index, plan.entries(number), &mut collector).expect("read");
    assert_eq!(damaged, 0);
    collector
}

/// Largest distance of neighbouring seek points, in plain and in packed bytes.
fn seek_distance(index: &Index) -> (u64, u64) {
    let seekable = |number: &u32| index.seek_offset(*number).is_some();
    let origin = index.origin();
    let points = (0..index.span_count()).filter(seekable).map(|number| {
        let plain = index.span_extent(number).expect("a span").start().0;
        (plain, index.seek_offset(number).expect("a seek point").0)
    });
    let points: Vec<_> = points
        .chain([(origin.plain_bytes, origin.packed_bytes)])
        .collect();
    let distance = |part: fn(&(u64, u64)) -> u64| {
        let next = points.iter().skip(1);
        let distances = points
            .iter()
            .zip(next)
            .map(|(one, next)| part(next) - part(one));
        distances.max().expect("at least one")
    };
    (distance(|point| point.0), distance(|point| point.1))
}

/// Plain bytes from the seek point before the first content of the shard to the end of its last.
fn plain_cost(index: &Index, plan: &ShardPlan, number: u32) -> u64 {
    let entries = plan.entries(number).iter();
    let entries = entries.filter_map(|ino| index.entry(*ino));
    let files = entries.filter(|entry| entry.kind() == EntryKind::File && entry.size() > 0);
    let extents: Vec<_> = files
        .map(|file| file.pieces(0, u64::MAX).next().expect("content").plain)
        .collect();
    let (Some(first), Some(last)) = (extents.first(), extents.last()) else {
        return 0;
    };
    let span = index.span_at(first.start()).expect("a span");
    let seekable = (0..=span)
        .rev()
        .find(|number| index.seek_offset(*number).is_some());
    let seekable = seekable.and_then(|number| index.span_extent(number));
    last.end().0 - seekable.expect("a seek point").start().0
}

// Promises: shard-entries, shard-cost
#[test]
fn union_of_shards_is_the_tree_and_each_decodes_its_part() {
    let (files, tar) = archive();
    let env = TestEnv::new();
    for packing in PACKINGS {
        let archive = env.open_bytes(packing.pack(&tar), &env.options_without_disk_cache());
        let archive = archive.expect("an archive");
        let index = archive
            .complete_index()
            .expect("complete")
            .into_tree()
            .expect("rows");
        let (plain_distance, packed_distance) = seek_distance(&index);
        let origin = index.origin();
        // Each shard decodes from the front, if there are no seek points.
        let counts = if packing.is_unseekable() {
            1
        } else {
            COUNTS.len()
        };
        for count in COUNTS.into_iter().take(counts) {
            let plan = ShardPlan::new(&index, count);
            let (mut names, mut found) = (Vec::new(), Files::new());
            for shard in plan.shards() {
                let what = format!("{packing:?} {shard:?} of {count}");
                let before = archive.stats().decoded_bytes.get();
                let part = collect(&archive, &index, &plan, shard.number);
                let decoded = archive.stats().decoded_bytes.get() - before;
                let allowed = origin.plain_bytes / u64::from(count) + plain_distance;
                // Text packs almost evenly.
                assert!(decoded <= allowed + 100_000, "{what}: {decoded}");
                assert_eq!(decoded, plain_cost(&index, &plan, shard.number), "{what}");
                let packed = shard.packed_end - shard.packed_start;
                let allowed = origin.packed_bytes / u64::from(count) + packed_distance;
                assert!(packed <= allowed, "{what}: {packed}");
                names.extend(part.names);
                found.extend(part.files);
            }
            let total = names.len();
            names.sort();
            names.dedup();
            // Files, links of both kinds, and the directory; others are implied.
            assert_eq!((total, names.len()), (481, 481), "{packing:?} {count}");
            assert_eq!(found.len(), files.len(), "{packing:?} {count}");
            assert!(found == files, "{packing:?} {count}");
        }
    }
}

// Promises: shard-cuts
#[test]
fn shards_are_the_same_on_every_machine() {
    let (_, tar) = archive();
    let packed = Packing::Gzip.pack(&tar);
    let env = TestEnv::new();
    let entries = || {
        let options = env.options_without_disk_cache();
        let archive = env.open_bytes(packed.clone(), &options).expect("opened");
        let index = archive
            .complete_index()
            .expect("complete")
            .into_tree()
            .expect("rows");
        let plan = ShardPlan::new(&index, 7);
        let numbers = 1..=index.last_ino().0;
        numbers
            .map(|ino| plan.shard_of(Ino(ino)))
            .collect::<Vec<_>>()
    };
    let first = entries();
    assert_eq!(first, entries());
    assert!((1..=7).all(|number| first.contains(&Some(number))));
}

// Promises: shard-tar
#[test]
fn file_with_several_stored_pieces_is_read_whole() {
    let env = TestEnv::new();
    let tree = Tree::mixed();
    let packed = Packing::Gzip.pack(&tree.tar);
    let archive = env.open_bytes(packed, &env.options_without_disk_cache());
    let archive = archive.expect("an archive");
    let index = archive
        .complete_index()
        .expect("complete")
        .into_tree()
        .expect("rows");
    let plan = ShardPlan::new(&index, 3);
    let parts = (1..=3).map(|number| collect(&archive, &index, &plan, number));
    let mut found = Files::new();
    parts.for_each(|part| found.extend(part.files));
    for (name, content) in &tree.files {
        let found = &found[name];
        if name == "first/sparse" {
            assert_eq!(
                found.iter().filter(|&&byte| byte != 0).count(),
                content.iter().filter(|&&byte| byte != 0).count()
            );
        } else {
            assert!(found == content, "{name}");
        }
    }
}

// Promises: shard-damaged
#[test]
fn damaged_content_is_cut_and_the_others_are_read() {
    let (files, tar) = archive();
    let env = TestEnv::with_archive(tar.clone());
    drop(env.open_with(&env.options_without_disk_cache()));
    let mut damaged = tar.to_vec();
    let middle = damaged.len() / 2;
    damaged[middle..middle + 100_000].fill(b'?');
    let resource = Resource::new(Bytes::from(damaged)).etag("\"1\"");
    env.serve(resource);
    let archive = env.open_with(&env.options_without_disk_cache());
    let index = archive
        .complete_index()
        .expect("complete")
        .into_tree()
        .expect("rows");
    let plan = ShardPlan::new(&index, 2);
    let mut damaged = 0;
    let mut whole = 0;
    for number in 1..=2 {
        let mut collector = DamageCollector::default();
        damaged +=
            read_entries(&archive, &index, plan.entries(number), &mut collector).expect("read");
        let found = collector.collector.files;
        whole += found
            .iter()
            .filter(|(name, found)| files[*name] == **found)
            .count();
    }
    assert!(damaged > 0, "nothing was damaged");
    assert_eq!(whole + usize::try_from(damaged).expect("few"), files.len());
}

#[derive(Default)]
struct DamageCollector {
    collector: Collector,
}

impl Sink for DamageCollector {
    type Error = std::convert::Infallible;

    fn member(&mut self, member: Member) -> Result<(), Self::Error> {
        self.collector.member(member)
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Self::Error> {
        self.collector.payload(bytes)
    }

    fn warning(&mut self, _text: &str) {}

    fn damage(&mut self, _offset: Plain, text: &str) {
        let (_, extent) = text.split_once(": plain bytes ").expect(text);
        let has_numbers = extent.starts_with(|first: char| first.is_ascii_digit());
        assert!(has_numbers && text.contains("damaged"), "{text}");
    }
}

/// A small tree with every kind of entry that an ordinary user can make, and 3 MB of noise.
fn sample() -> Vec<u8> {
    let long = format!("dir/{}/name", "n".repeat(150));
    let mut archive = raw::Archive::new()
        .add(Header::new("dir/", b'5').mode(0o750), "")
        .add(Header::new("dir/closed/", b'5').mode(0o555), "")
        .file("dir/closed/file", "inside")
        .symlink("dir/link", "closed/file")
        .pax(&[("mtime", "1000000000.123456789")])
        .add(Header::new("dir/precise", b'0').mode(0o4755), "")
        .fifo("dir/fifo")
        .file("implied/file", "below")
        .pax(&[("path", long.as_str())])
        .file("short", "long name");
    for number in 0..30 {
        let noise = raw::random_bytes(100_000 + number);
        archive = archive.file(&format!("dir/noise-{number}"), noise);
    }
    archive
        .hard_link("dir/hard", "dir/noise-3")
        .hard_link("implied/hard", "dir/noise-3")
        .file("last", "end")
        .end()
}

/// Later times are those of writing, which directories have that no member describes.
const LATEST_MEMBER_TIME: i64 = 1_600_000_000;

/// All visible facts of the entries below `top`. Times of directories only with `directory_times`.
fn facts(top: &Path, directory_times: bool) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::new();
    let mut first_names = BTreeMap::new();
    let mut pending = vec![top.to_owned()];
    let mut paths = Vec::new();
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if fs::symlink_metadata(&path).expect("there").is_dir() {
                pending.push(path.clone());
            }
            paths.push(path);
        }
    }
    paths.sort();
    for path in paths {
        let stat = fs::symlink_metadata(&path).expect("there");
        let name = path.strip_prefix(top).expect("below").display().to_string();
        let first = first_names
            .entry(stat.ino())
            .or_insert_with(|| name.clone());
        let content = match stat.file_type() {
            kind if kind.is_file() => fs::read(&path).expect("readable").len().to_string(),
            kind if kind.is_symlink() => format!("{:?}", fs::read_link(&path)),
            _ => String::new(),
        };
        let has_time = directory_times && stat.mtime() <= LATEST_MEMBER_TIME || !stat.is_dir();
        let time = has_time.then(|| (stat.mtime(), stat.mtime_nsec()));
        let fact = format!("{:o} {time:?} {first} {content}", stat.mode());
        facts.insert(name, fact);
    }
    facts
}

/// A place with the sample as `a.tar`.
fn place() -> Place {
    let place = Place::new();
    place.put("a.tar", sample());
    for name in ["whole", "unpacked"] {
        fs::create_dir(place.path(name)).expect("made");
    }
    place
}

/// Writes the archive without shards.
const WHOLE: [&str; 6] = ["materialize", "-q", "-p", "a.tar", "-C", "whole"];
/// Finishes the tree of all shards.
const FINISH: [&str; 7] = ["shard", "finish", "-q", "-p", "a.tar", "-C", "out"];

/// Writes one shard.
fn write(shard: &'static str) -> [&'static str; 8] {
    ["shard", "write", "-q", "-p", "a.tar", shard, "-C", "out"]
}

// Promises: shard-entries, shard-finish
#[test]
fn shards_and_finish_write_the_tree_of_one_run() {
    let place = place();
    place.succeeds(&WHOLE);
    let start = |shard| {
        let mut program = place.tarfs();
        program.args(write(shard)).spawn().expect("a program")
    };
    for mut running in ["3/3", "1/3", "2/3"].map(start) {
        assert!(running.wait().expect("a program").success());
    }
    place.succeeds(&write("1/3"));
    // A directory that no member describes keeps its mode.
    for name in ["whole/implied", "out/implied"] {
        let mode = fs::Permissions::from_mode(0o711);
        fs::set_permissions(place.path(name), mode).expect("ours");
    }
    let time = || {
        fs::metadata(place.path("out/implied"))
            .expect("there")
            .modified()
            .ok()
    };
    let written = time();
    for _ in 0..2 {
        place.succeeds(&FINISH);
        assert_eq!(
            facts(&place.path("out"), true),
            facts(&place.path("whole"), true)
        );
        assert_eq!(time(), written, "of a directory that no member describes");
    }
}

// Promises: shard-damaged, truncated-allowed
#[test]
fn damaged_file_counts_once() {
    let (_, tar) = archive();
    let packed = Packing::Gzip.pack(&tar);
    let server = Server::start();
    let serve = |bytes| server.serve("/a.tar.gz", Resource::new(bytes).etag("\"1\""));
    serve(packed.clone());
    let place = Place::new();
    let url = server.url("/a.tar.gz");
    place.succeeds(&["index", "-q", &url]);
    place.succeeds(&["index", "-q", "--allow-truncated", &url]);
    let mut damaged = packed.to_vec();
    let middle = damaged.len() / 2;
    damaged[middle..middle + 64].fill(0);
    serve(Bytes::from(damaged));
    let write = ["shard", "write", &url, "1/1", "-C", "out"];
    let lenient = [&write[..], &["--allow-truncated"]].concat();
    for words in [&["sync", &url, "out"][..], &write, &lenient] {
        let outcome = place.run(words);
        assert_eq!(outcome.code, 2, "{}", outcome.complaints);
        let named = outcome.complaints.matches("are damaged").count();
        let counted = format!("{named} entries are missing or incomplete");
        assert!(
            named > 1 && outcome.complaints.contains(&counted),
            "{}",
            outcome.complaints
        );
        assert!(
            !outcome.complaints.contains("ends in the middle"),
            "{}",
            outcome.complaints
        );
    }
}

// Promises: shard-version
#[test]
fn shards_of_two_versions_make_no_tree() {
    let place = Place::new();
    let version = |digit: &str| {
        let files = (0..10).fold(raw::Archive::new(), |archive, number| {
            archive.file(&format!("f{number}"), digit.repeat(100_000))
        });
        place.put("a.tar", files.end());
    };
    let shard = |shard| ["shard", "write", "-q", "a.tar", shard, "-C", "out"];
    let finish = ["shard", "finish", "-q", "a.tar", "-C", "out"];
    version("1");
    place.succeeds(&shard("1/2"));
    version("2");
    let words = ["shards of another version", "an empty directory"];
    place.fails(&shard("2/2"), &words);
    place.fails(&finish, &words);
    // A new file with the old bytes is the old version.
    version("1");
    place.succeeds(&shard("2/2"));
    place.succeeds(&finish);
    let mut names = fs::read_dir(place.path("out")).expect("there");
    assert!(names.all(|name| name.expect("readable").file_name().len() == 2));
    let read = |number: u32| fs::read(place.path(&format!("out/f{number}"))).expect("there");
    assert!((0..10).all(|number| read(number).iter().all(|byte| *byte == b'1')));
}

/// The records of shards in the directory.
fn records(directory: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let paths = entries.map(|entry| entry.expect("readable").path());
    let is_record = |path: &std::path::PathBuf| {
        let name = path.file_name().expect("a name");
        name.as_encoded_bytes().starts_with(b".tarfs-shards-")
    };
    paths.filter(is_record).collect()
}

// Promises: shard-version
#[test]
fn shard_fails_if_another_version_comes_while_it_runs() {
    let place = Place::new();
    let archive = |digit: &str| raw::Archive::new().file("f", digit.repeat(100_000)).end();
    place.put("other.tar", archive("2"));
    fs::create_dir(place.path("other")).expect("made");
    let words = ["shard", "write", "-q", "-C"];
    place.succeeds(&[&words[..], &["other", "other.tar", "1/1"]].concat());
    let [other] = &records(&place.path("other"))[..] else {
        panic!("one record");
    };
    let server = Server::start();
    let resource = Resource::new(archive("1")).etag("\"1\"");
    let out = place.path("out");
    let planted = out.join(other.file_name().expect("a name"));
    server.route("/a.tar", move |request| {
        // The content is asked for after the version is recorded.
        if !records(&out).is_empty() {
            fs::write(&planted, "").expect("space");
        }
        resource.answer(request)
    });
    let url = server.url("/a.tar");
    place.succeeds(&["index", "-q", &url]);
    let shard = [&words[..], &["out", &url, "1/1"]].concat();
    place.fails(&shard, &["shards of another version"]);
    assert_eq!(records(&place.path("out")).len(), 2);
}

// Promises: shard-version
#[test]
fn record_of_a_version_that_is_no_file_is_an_error() {
    let place = place();
    let shard = ["shard", "write", "-q", "a.tar", "1/2", "-C", "out"];
    place.succeeds(&shard);
    for record in records(&place.path("out")) {
        fs::remove_file(&record).expect("ours");
        let made = place.command("mkfifo").arg(&record).status();
        assert!(made.expect("coreutils").success());
    }
    place.fails(&shard, &["cannot record the version"]);
}

// Promises: shard-version
#[test]
fn version_is_checked_when_an_archive_is_opened_again() {
    let archive = |digit: &str| Bytes::from(raw::Archive::new().file("f", digit).end());
    let env = TestEnv::with_archive(archive("1"));
    let version_of = |env: &TestEnv| Version::of(&env.open());
    let scanned = version_of(&env);
    assert!(scanned.is_same(&scanned.to_string().parse().expect("a version")));
    // With the saved index, and elsewhere with another tag.
    assert_eq!(version_of(&env), scanned);
    let elsewhere = TestEnv::new();
    elsewhere.serve(Resource::new(archive("1")).etag("\"x\""));
    let there = version_of(&elsewhere);
    assert!(scanned.is_same(&there) && scanned != there);
    scanned.check(&elsewhere.open()).expect("the same bytes");
    elsewhere.serve(Resource::new(archive("2")).etag("\"1\""));
    let error = scanned.check(&elsewhere.open()).expect_err("other bytes");
    assert!(matches!(error, ReadError::Changed(_)), "{error:?}");
}

// Promises: shard-missing, shard-finish
#[test]
fn finish_makes_lost_links_again_and_names_missing_entries() {
    let place = place();
    for shard in ["1/2", "2/2"] {
        place.succeeds(&write(shard));
    }
    fs::remove_file(place.path("out/implied/hard")).expect("there");
    place.succeeds(&FINISH);
    let inode = |name: &str| fs::metadata(place.path(name)).expect("there").ino();
    assert_eq!(inode("out/implied/hard"), inode("out/dir/noise-3"));

    let open = fs::Permissions::from_mode(0o700);
    fs::set_permissions(place.path("out/dir"), open).expect("ours");
    fs::remove_file(place.path("out/last")).expect("there");
    fs::write(place.path("out/dir/noise-5"), "short").expect("ours");
    let outcome = place.run(&FINISH);
    assert_eq!(outcome.code, 2);
    assert!(
        outcome.complaints.contains("last: missing"),
        "{}",
        outcome.complaints
    );
    assert!(
        outcome.complaints.contains("noise-5: of another"),
        "{}",
        outcome.complaints
    );
    // The directory stays open for the shard that must run again.
    let mode = fs::metadata(place.path("out/dir")).expect("there").mode();
    assert_eq!(mode & 0o7777, 0o700);
}

// Promises: shard-tar
#[test]
fn gnu_tar_unpacks_shards_to_the_same_tree() {
    let place = place();
    place.succeeds(&WHOLE);
    let unpack = |shard: &str, name: &str| {
        let archive = place.succeeds(&["shard", "tar", "a.tar", shard]);
        place.put(name, archive.output);
        let mut tar = Command::new("tar");
        tar.args(["-x", "-p", "--no-same-owner", "-C"]);
        tar.arg(place.path("unpacked"))
            .arg("-f")
            .arg(place.path(name));
        assert!(tar.status().expect("GNU tar").success());
    };
    for (shard, name) in [("1/3", "1.tar"), ("2/3", "2.tar"), ("3/3", "3.tar")] {
        unpack(shard, name);
    }
    let whole = facts(&place.path("whole"), false);
    let mut unpacked = facts(&place.path("unpacked"), false);
    // GNU tar gives implied directories the umask's mode.
    let implied = |facts: &mut BTreeMap<String, String>| {
        facts
            .retain(|name, _| !["implied", &format!("dir/{}", "n".repeat(150))].contains(&&**name));
    };
    implied(&mut unpacked);
    let mut expected = whole;
    implied(&mut expected);
    assert_eq!(unpacked, expected);
}

// Promises: shard-entries
#[test]
fn listings_of_shards_are_the_listing() {
    let place = place();
    place.succeeds(&["index", "--output", "a.idx", "a.tar"]);
    let all = place.succeeds(&["ls", "-R", "a.tar"]);
    let mut expected = all.lines();
    expected.sort_unstable();
    for source in ["a.tar", "a.idx"] {
        let mut found = Vec::new();
        for shard in ["1/3", "2/3", "3/3"] {
            let part = place.succeeds(&["ls", "-R", "--shard", shard, source]);
            let names: Vec<_> = part.lines().iter().map(ToString::to_string).collect();
            assert!(names.len() > 5, "{names:?}");
            found.extend(names);
        }
        found.sort();
        assert_eq!(found, expected);
    }
}

// Promises: shard-plan
#[test]
fn plan_as_json_has_one_object_a_shard() {
    let place = place();
    let plan = place.succeeds(&["shard", "plan", "--shards", "3", "--json", "a.tar"]);
    let rows: Vec<serde_json::Value> = plan
        .lines()
        .iter()
        .map(|line| serde_json::from_str(line).expect("an object"))
        .collect();
    let sum = |field: &str| -> u64 {
        rows.iter()
            .map(|row| row[field].as_u64().expect("a number"))
            .sum()
    };
    assert_eq!((rows.len(), sum("shard")), (3, 6));
    let all = place.succeeds(&["ls", "-R", "--json", "a.tar"]);
    let inodes: BTreeSet<_> = all
        .lines()
        .iter()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).expect("an object")["fileid"].as_u64()
        })
        .collect();
    // With the root.
    assert_eq!(sum("entries"), inodes.len() as u64 + 1);
    assert_eq!(rows[0]["packed_start"], 0);
}

// Promises: shard-refused
#[test]
fn shards_of_layers_and_pipes_are_refused() {
    let place = place();
    place.put("b.tar", sample());
    let layered = ["ls", "--shard", "1/2", "--layer", "b.tar", "a.tar"];
    assert_ne!(place.run(&layered).code, 0);
    place.fails(
        &["shard", "write", "-", "1/2", "-C", "out"],
        &["standard input"],
    );
    let image = Image::new("image", vec![sample(), sample()]);
    image::oci(&[image]).write(&place.path("image"));
    place.fails(
        &["shard", "plan", "--shards", "2", "oci:image"],
        &["SOURCE has layers"],
    );
}
