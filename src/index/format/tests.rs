//! Tests of the format.

use super::*;
use crate::base::extent::{Extent, Packed, Plain};
use crate::codec::SeekPoint;
use crate::index::storage::row_types::DIRECTORY;
use crate::index::test_support::{self, directory, file, hard_link, symlink};
use crate::index::{Builder, Options};
use crate::tar::{Member, Segment};

fn locator() -> Locator {
    Locator {
        canonical: "https://example.org/a.tar".to_owned(),
        fingerprint: "len=10 etag=\"x\"".to_owned(),
        options: "ignore-zeros".to_owned(),
    }
}

fn sample() -> Index {
    let mut builder = Builder::new(Options::default());
    let sparse = Member {
        sparse: Some(vec![
            Segment { offset: 10, len: 5 },
            Segment { offset: 90, len: 2 },
        ]),
        size: 100,
        xattrs: vec![(b"user.a".to_vec(), b"1".to_vec())],
        user: b"root".to_vec(),
        ..file("d/s", 512..519)
    };
    let members = [
        directory("./", 0o755),
        directory("d", 0o700),
        file("d/f", 2048..2100),
        file("d/f", 4096..4100),
        symlink("l", "d/f"),
        hard_link("d/h", "d/f"),
        sparse,
    ];
    for member in &members {
        builder.add_member(member).unwrap();
    }
    let point = SeekPoint {
        packed: Packed(5),
        bit: 3,
        plain: Plain(4096),
        state: 1,
        window: bytes::Bytes::from_static(b"window"),
    };
    builder.add_span(Extent::with_len(Plain(0), 4096), Some(&[1]), None);
    builder.add_span(Extent::with_len(Plain(4096), 4), Some(&[2]), Some(&point));
    builder.finish(Origin {
        locator: locator(),
        local_path: b"/data/\xff.tar".to_vec(),
        content_id: [7; 32],
        sha256: Some(Sha256([9; 32])),
        plain_sha256: Some(Sha256([8; 32])),
        compression: Compression::Gzip,
        packed_bytes: 10,
        plain_bytes: 4100,
        decoder_bytes: 8 << 20,
        is_truncated: true,
        has_end_marker: true,
    })
}

fn written(index: &Index) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(
        index,
        &index.origin.locator,
        &index.origin.local_path,
        &mut bytes,
    )
    .unwrap();
    bytes
}

fn load(bytes: &[u8]) -> Result<Index, Error> {
    read(bytes, bytes.len() as u64)
}

/// Corrects the checksum, as a hostile file would have it.
fn seal(bytes: &mut [u8]) {
    let end = bytes.len() - size_of::<Footer>();
    let digest = blake3::hash(&bytes[..end]);
    bytes[end..end + 32].copy_from_slice(digest.as_bytes());
}

fn visit(index: &Index) -> usize {
    let mut seen = 0;
    for number in 0..=index.last_ino().0.min(100) {
        let ino = Ino(number);
        let Some(entry) = index.entry(ino) else {
            continue;
        };
        let _kind = entry.kind();
        seen += entry.user().len() + entry.group().len();
        seen += entry.xattrs().take(100).count() + entry.pieces(3, 1000).take(100).count();
        seen += usize::from(index.path(ino).is_some());
        seen += usize::from(index.entry(entry.parent()).is_some());
        seen += usize::try_from(entry.stored_bytes() & 1).unwrap();
        seen += index.children(ino, 0).take(100).count();
        seen += index.names(ino, 0, seen % 2 == 0).take(100).count();
        for child in index.children_by_name(ino, 0).take(100) {
            seen += index
                .lookup(ino, child.name)
                .map_or(0, |_| child.name.len());
        }
    }
    for offset in [0, 4095, 4096, 4099, 4100, u64::MAX] {
        seen += index
            .span_at(Plain(offset))
            .map_or(0, |number| number as usize);
    }
    for number in 0..4 {
        seen += usize::from(index.span(number).is_ok_and(|span| span.is_some()));
    }
    seen
}

// Promises: index-spans
#[test]
fn index_reads_back_as_written() {
    let index = sample();
    let bytes = written(&index);
    let loaded = load(&bytes).unwrap();
    assert_eq!(written(&loaded), bytes);
    assert_eq!(loaded.origin(), index.origin());
    assert_eq!(loaded.totals, index.totals);
    assert_eq!(visit(&loaded), visit(&index));
    assert!(loaded.has_xattrs());
    assert_eq!(loaded.entry_count(), 5);
}

#[test]
fn an_empty_archive_is_written_and_read() {
    let bytes = written(&test_support::index(&[]));
    assert_eq!(load(&bytes).unwrap().entry_count(), 1);
}

// Promises: publish-verb
#[test]
fn digests_of_an_archive_are_optional() {
    let mut index = sample();
    for digests in [(None, Some(Sha256([8; 32]))), (Some(Sha256([9; 32])), None)] {
        (index.origin.sha256, index.origin.plain_sha256) = digests;
        assert_eq!(load(&written(&index)).unwrap().origin(), index.origin());
    }
}

// Promises: index-damaged
#[test]
fn every_changed_index_byte_is_detected() {
    let bytes = written(&sample());
    for position in 0..bytes.len() {
        for bit in [1, 0x80] {
            let mut damaged = bytes.clone();
            damaged[position] ^= bit;
            assert!(load(&damaged).is_err(), "byte {position}");
        }
    }
}

// Promises: index-damaged
#[test]
fn every_truncation_and_appended_byte_is_detected() {
    let mut bytes = written(&sample());
    for len in 0..bytes.len() {
        assert!(load(&bytes[..len]).is_err(), "{len} bytes");
    }
    bytes.push(0);
    assert!(load(&bytes).is_err());
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_an_error() {
    let bytes = written(&sample());
    let cut = &bytes[..bytes.len() - 20];
    assert!(matches!(read(cut, bytes.len() as u64), Err(Error::Io(_))));
}

#[test]
fn hostile_rows_with_a_right_checksum_never_panic() {
    let bytes = written(&sample());
    for position in 0..bytes.len() - size_of::<Footer>() {
        for value in [0, 1, 3, 0x40, 0x7f, 0xff] {
            let mut damaged = bytes.clone();
            damaged[position] = value;
            seal(&mut damaged);
            if let Ok(index) = load(&damaged) {
                visit(&index);
            }
        }
    }
}

#[test]
fn directory_inside_itself_is_not_found() {
    let mut index = sample();
    let hard_link = index
        .find(&crate::base::archive_path::ArchivePath::sanitize(b"d/h").path)
        .unwrap();
    let ino = hard_link.ino().0;
    for dirent in index.arrays.dirents.vec_mut() {
        if dirent.ino.get() == ino {
            dirent.ino = 2.into();
        }
    }
    let directory = index.lookup(Ino::ROOT, b"d").unwrap().ino();
    assert_eq!(directory, Ino(2));
    {
        let mut children = index.children(directory, 0);
        assert!(children.all(|child| child.ino != directory));
        // The name of a file stays that of a file.
        let mut names = index.names(directory, 0, false);
        assert!(names.all(|name| name.ino != directory || name.file_type != DIRECTORY));
    }
    for dirent in index.arrays.dirents.vec_mut() {
        dirent.name = dirent.name.with_kind(DIRECTORY);
    }
    let mut names = index.names(directory, 0, true);
    assert!(names.all(|name| name.ino != directory));
}

#[test]
fn directory_listing_its_own_parent_does_not_recurse() {
    let mut index = sample();
    let directory = index.lookup(Ino::ROOT, b"d").unwrap().ino();
    let siblings = index.arrays.child_numbers(1);
    let inode = &mut index.arrays.inodes[directory.0 as usize];
    inode.data = u64::from(siblings.start).into();
    inode.children = (siblings.end - siblings.start).into();
    assert_eq!(index.children(directory, 0).count(), 0);
    assert_eq!(index.children_by_name(directory, 0).count(), 0);
    assert!(index.lookup(directory, b"d").is_none());
}

#[test]
fn misplaced_dirent_is_not_found() {
    let mut index = sample();
    let all = index.arrays.dirents.len();
    assert!(index.lookup(Ino::ROOT, b"d").is_some());
    for place in [u32::MAX, u32::try_from(all).unwrap()] {
        index.arrays.by_name.fill(place.into());
        assert!(index.lookup(Ino::ROOT, b"d").is_none());
        assert_eq!(index.children_by_name(Ino::ROOT, 0).count(), 0);
    }
    // Every position refers to the first dirent, which belongs to the root.
    index.arrays.by_name.fill(0.into());
    let d = index
        .children(Ino::ROOT, 0)
        .find(|child| child.name == b"d");
    assert_eq!(index.children_by_name(d.unwrap().ino, 0).count(), 0);
    index.arrays.by_name.vec_mut().clear();
    assert!(index.lookup(Ino::ROOT, b"d").is_none());
}

#[test]
fn document_describes_the_current_index_version() {
    let text = include_str!("../../../docs/index-format.md");
    assert!(text.starts_with(&format!("The index file: version {VERSION}.\n")));
    assert!(text.contains(&format!("\n| 8 | 4 | format version, {VERSION} |\n")));
}

#[test]
fn other_index_version_is_distinguished_from_damage() {
    let mut bytes = written(&sample());
    bytes[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
    let Err(Error::Version(found)) = load(&bytes) else {
        panic!("another error, or none");
    };
    assert_eq!(found, VERSION + 1);
    assert!(matches!(load(&[b'x'; 1000]), Err(Error::NotAnIndex)));
    assert!(matches!(load(b""), Err(Error::NotAnIndex)));
}

// Promises: memory-index
#[test]
fn index_entry_takes_at_most_100_bytes_plus_name() {
    let count = 1000;
    let names: Vec<String> = (0..count).map(|number| format!("file-{number}")).collect();
    let members: Vec<Member> = names.iter().map(|name| file(name, 0..1)).collect();
    let name_bytes: usize = names.iter().map(String::len).sum();
    assert!(written(&test_support::index(&members)).len() <= 100 * count + name_bytes);
}

// Promises: index-found
#[test]
fn moving_bytes_between_locator_fields_changes_file_name() {
    let key = |canonical: &str, fingerprint: &str| Locator {
        canonical: canonical.to_owned(),
        fingerprint: fingerprint.to_owned(),
        options: String::new(),
    };
    assert_ne!(key("ab", "c").file_name(), key("a", "bc").file_name());
    assert_eq!(key("ab", "c").file_name(), key("ab", "c").file_name());
    assert_eq!(key("", "").file_name().len(), 68);
}
