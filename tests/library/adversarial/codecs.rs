//! Packed streams that are truncated, damaged or inconsistent.

use super::{Case, Tree, case, check};
use crate::support::adversarial::pack;
use crate::support::raw::Archive;
use crate::support::rng::Rng;

/// Option with which GNU tar reads lz4.
const LZ4: &[&str] = &["-Ilz4"];

/// Reason why an empty archive is an error.
const EMPTY: &str = "an archive must begin with a header";

/// Number of empty parts of a stream, far more than any real stream has.
const EMPTY_PARTS: usize = 5000;

fn sample() -> Vec<u8> {
    let mut noise = Rng::new(7);
    Archive::new()
        .directory("d/")
        .file("d/text", noise.text(300_000))
        .file("d/noise", noise.bytes(50_000))
        .file("last", "1")
        .end()
}

/// `bytes` with one byte changed. A negative offset counts from the end.
fn flipped(bytes: &[u8], at: isize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let place = if at < 0 {
        bytes.len() - at.unsigned_abs()
    } else {
        at.unsigned_abs()
    };
    *bytes.get_mut(place).expect("inside") ^= 0x55;
    bytes
}

/// `bytes` with other bytes at an offset.
fn put(bytes: &[u8], at: usize, new: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let place = bytes.get_mut(at..at + new.len()).expect("inside");
    place.copy_from_slice(new);
    bytes
}

fn cut(bytes: &[u8], len: usize) -> Vec<u8> {
    bytes.get(..len).expect("longer").to_vec()
}

fn join(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

fn empty_directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

fn xxh32(bytes: &[u8]) -> u32 {
    xxhash_rust::xxh32::xxh32(bytes, 0)
}

// Promises: hostile-packed, gnu-empty, gnu-garbage
#[test]
fn damaged_or_inconsistent_gzip_streams_end_in_errors() {
    let plain = sample();
    let whole = pack(&["gzip", "-n"], &plain);
    let (first, second) = plain.split_at(100_000);
    let (first, second) = (pack(&["gzip", "-n"], first), pack(&["gzip", "-n"], second));
    let empty = pack(&["gzip", "-n"], b"");
    let end = whole.len();
    let with_header = |header: &[u8]| join(&[header, &whole[10..]]);
    let long_extra = {
        let mut header = b"\x1f\x8b\x08\x04\0\0\0\0\0\x03".to_vec();
        header.extend(65_535_u16.to_le_bytes());
        header.extend(vec![b'e'; 65_535]);
        header
    };
    let deflated = |body: &[u8]| join(&[&whole[..10], body, &whole[end - 8..]]);
    let cases = vec![
        case("gzip: cut in the header", cut(&whole, 7)).refused(""),
        case("gzip: cut after the header", cut(&whole, 10)).refused("truncated"),
        case("gzip: cut in the middle", cut(&whole, end / 2)).refused("truncated"),
        case("gzip: cut before the checksum", cut(&whole, end - 8)).refused("truncated"),
        case("gzip: cut in the length", cut(&whole, end - 1)).refused("truncated"),
        case("gzip: a wrong checksum", flipped(&whole, -8)).refused("checksum"),
        case("gzip: a wrong length", flipped(&whole, -1)).refused(""),
        case("gzip: a wrong byte", flipped(&whole, 40_000)).refused(""),
        case("gzip: another method", put(&whole, 2, &[7])).refused(""),
        case("gzip: reserved flags", put(&whole, 3, &[0xe0])).refused(""),
        case("gzip: a name without an end", {
            join(&[b"\x1f\x8b\x08\x08\0\0\0\0\0\x03", &[b'n'; 100_000]])
        })
        .refused(""),
        case("gzip: a long extra field", with_header(&long_extra)),
        case(
            "gzip: an extra field beyond the end",
            cut(&with_header(&long_extra), 5000),
        )
        .refused(""),
        case(
            "gzip: a wrong header checksum",
            with_header(b"\x1f\x8b\x08\x02\0\0\0\0\0\x03\x12\x34"),
        )
        .refused("checksum"),
        case("gzip: a block of an unknown type", deflated(b"\x07")).refused(""),
        case(
            "gzip: a distance before the beginning",
            deflated(b"\x4b\x04\x12\x00"),
        )
        .refused(""),
        case(
            "gzip: a stored block whose lengths disagree",
            deflated(b"\x01\x05\0\0\0hello"),
        )
        .refused(""),
        case("gzip: an empty file", b"").refused("empty"),
        case("gzip: two members", join(&[&first, &second])),
        case("gzip: another magic in the middle", {
            join(&[&first, &put(&second, 0, b"\x1f\x8c")])
        })
        .refused(""),
        case("gzip: zeros behind the end", join(&[&whole, &[0; 5000]])),
        case(
            "gzip: garbage behind the end",
            join(&[&whole, &[b'g'; 5000]]),
        )
        .laxer(
            Tree::Same,
            "garbage behind the last gzip member is a warning",
        ),
        case(
            "gzip: half a member behind the end",
            join(&[&whole, &cut(&second, 900)]),
        )
        .refused("truncated"),
        case(
            "gzip: thousands of empty members",
            join(&[&empty.repeat(EMPTY_PARTS), &whole]),
        ),
        case("gzip: nothing but empty members", empty.repeat(EMPTY_PARTS))
            .stricter_alike("does not look like", EMPTY),
        case("gzip: members of single bytes", {
            let byte = |byte: &u8| pack_byte(*byte);
            let start: Vec<u8> = plain[..1024].iter().flat_map(byte).collect();
            join(&[&start, &pack(&["gzip", "-n"], &plain[1024..])])
        }),
    ];
    check(empty_directory().path(), cases);
}

/// A gzip member of one stored byte.
fn pack_byte(byte: u8) -> Vec<u8> {
    let mut crc = flate2::Crc::new();
    crc.update(&[byte]);
    let header = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x01\x01\0\xfe\xff";
    join(&[
        header,
        &[byte],
        &crc.sum().to_le_bytes(),
        &1_u32.to_le_bytes(),
    ])
}

/// A BGZF member that claims to be `wrong` bytes longer than it is.
fn bgzf(plain: &[u8], wrong: i32) -> Vec<u8> {
    let stored = u16::try_from(plain.len()).expect("short");
    let mut body = vec![1];
    body.extend(stored.to_le_bytes());
    body.extend((!stored).to_le_bytes());
    body.extend_from_slice(plain);
    let mut crc = flate2::Crc::new();
    crc.update(plain);
    let len = i32::try_from(18 + body.len() + 8 - 1).expect("short") + wrong;
    let len = u16::try_from(len).expect("short");
    let header = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0";
    let size = u32::from(stored);
    join(&[
        header,
        &len.to_le_bytes(),
        &body,
        &crc.sum().to_le_bytes(),
        &size.to_le_bytes(),
    ])
}

// Promises: hostile-packed
#[test]
fn bgzf_members_with_wrong_length_end_in_errors() {
    let plain = sample();
    let members = |wrong: i32| -> Vec<u8> {
        let pieces = plain.chunks(30_000).enumerate();
        let lie = |number: usize| if number == 3 { wrong } else { 0 };
        pieces
            .flat_map(|(number, piece)| bgzf(piece, lie(number)))
            .collect()
    };
    let cases = vec![
        case("bgzf: as it is", members(0)),
        case("bgzf: a byte too long", members(1)),
        case("bgzf: a byte too short", members(-1)),
        case("bgzf: thousands of bytes too long", members(20_000)),
        case("bgzf: thousands of bytes too short", members(-20_000)),
        case("bgzf: shorter than a header", members(-30_030)),
        case("bgzf: cut", cut(&members(0), 100_000)).refused("truncated"),
    ];
    check(empty_directory().path(), cases);
}

/// An lz4 frame of stored blocks, with a valid header checksum.
///
/// `descriptor` follows the magic: flags, block size, and the fields that the flags announce.
fn lz4_frame(descriptor: &[u8], blocks: &[&[u8]], tail: &[u8]) -> Vec<u8> {
    let mut frame = b"\x04\x22\x4d\x18".to_vec();
    frame.extend_from_slice(descriptor);
    frame.extend(xxh32(descriptor).to_le_bytes().get(1));
    for block in blocks {
        let len = u32::try_from(block.len()).expect("short") | 1 << 31;
        frame.extend(len.to_le_bytes());
        frame.extend_from_slice(block);
    }
    frame.extend([0; 4]);
    frame.extend_from_slice(tail);
    frame
}

// Promises: hostile-packed, gnu-lz4-dictionary, gnu-lz4-cut
#[test]
fn damaged_or_inconsistent_lz4_streams_end_in_errors() {
    const INDEPENDENT: u8 = 0x60;
    let plain = sample();
    let whole = pack(&["lz4"], &plain);
    let legacy = pack(&["lz4", "-l"], &plain);
    let end = whole.len();
    let pieces: Vec<&[u8]> = plain.chunks(60_000).collect();
    let frame = |flags: u8, more: &[u8], tail: &[u8]| {
        lz4_frame(&join(&[&[INDEPENDENT | flags, 0x40], more]), &pieces, tail)
    };
    let size = plain.len() as u64;
    let sum = xxh32(&plain).to_le_bytes();
    let empty = lz4_frame(&[INDEPENDENT, 0x40], &[], b"");
    let skipped = b"\x50\x2a\x4d\x18\x03\0\0\0abc";
    let lz4 = |name, bytes: Vec<u8>| case(name, bytes).gnu(LZ4);
    let cases = vec![
        lz4("lz4: as made here", frame(0, b"", b"")),
        lz4("lz4: with a checksum", frame(4, b"", &sum)),
        lz4("lz4: with a size", frame(8, &size.to_le_bytes(), b"")),
        lz4(
            "lz4: a size that is too small",
            frame(8, &(size - 1).to_le_bytes(), b""),
        )
        .refused(""),
        lz4(
            "lz4: a size that is too large",
            frame(8, &(size + 1).to_le_bytes(), b""),
        )
        .refused(""),
        lz4(
            "lz4: a size of an exbibyte",
            frame(8, &(1_u64 << 60).to_le_bytes(), b""),
        )
        .refused(""),
        lz4("lz4: a wrong checksum", frame(4, b"", &[0; 4])).refused("checksum"),
        lz4("lz4: a wrong header checksum", flipped(&whole, 6)).refused("checksum"),
        lz4("lz4: a wrong byte", flipped(&whole, 40_000)).refused(""),
        lz4(
            "lz4: another version",
            lz4_frame(&[0xa0, 0x40], &pieces, b""),
        )
        .refused(""),
        lz4(
            "lz4: a reserved flag",
            lz4_frame(&[0x62, 0x40], &pieces, b""),
        )
        .refused(""),
        lz4(
            "lz4: an unknown block size",
            lz4_frame(&[0x60, 0x30], &pieces, b""),
        )
        .refused(""),
        lz4("lz4: a dictionary", frame(1, &7_u32.to_le_bytes(), b"")).stricter(
            "dictionary",
            "lz4(1) takes no notice of a dictionary's number",
        ),
        lz4("lz4: a block longer than the blocks of its frame", {
            lz4_frame(&[INDEPENDENT, 0x40], &[&plain[..100_000]], b"")
        })
        .refused(""),
        lz4("lz4: a block of two gigabytes", {
            join(&[&empty[..7], &0x7fff_ffff_u32.to_le_bytes(), &[0; 5000]])
        })
        .refused(""),
        lz4("lz4: cut in the header", cut(&whole, 5)).refused(""),
        lz4("lz4: cut in the middle", cut(&whole, end / 2)).refused("truncated"),
        lz4("lz4: cut before the checksum", cut(&whole, end - 4)).refused("truncated"),
        lz4("lz4: cut before the end mark", cut(&whole, end - 8)).refused("truncated"),
        lz4(
            "lz4: thousands of empty frames",
            join(&[&empty.repeat(EMPTY_PARTS), &whole]),
        ),
        lz4(
            "lz4: thousands of skipped frames",
            join(&[&skipped.repeat(EMPTY_PARTS), &whole]),
        ),
        lz4("lz4: a skipped frame of four gigabytes", {
            join(&[&whole, b"\x5f\x2a\x4d\x18\xff\xff\xff\xff", b"abc"])
        })
        .stricter_alike(
            "truncated",
            "a truncated stream is an error, even if its end would be skipped",
        ),
        lz4("lz4: another magic in the middle", {
            join(&[&frame(0, b"", b""), b"\x05\x22\x4d\x18", &[0; 100]])
        })
        .refused(""),
        lz4("lz4: garbage behind the end", join(&[&whole, b"garbage"])).refused(""),
        lz4("lz4: two frames", {
            let (first, second) = plain.split_at(100_000);
            join(&[&pack(&["lz4"], first), &pack(&["lz4"], second)])
        }),
        lz4("legacy lz4: as it is", legacy.clone()),
        lz4("legacy lz4: cut", cut(&legacy, legacy.len() / 2)).refused(""),
        lz4("legacy lz4: a wrong byte", flipped(&legacy, 3000)),
        lz4("legacy lz4: a block of a gigabyte", {
            join(&[
                b"\x02\x21\x4c\x18",
                &(1_u32 << 30).to_le_bytes(),
                &[0; 5000],
            ])
        })
        .refused(""),
        lz4("legacy lz4: a block of nothing", {
            join(&[b"\x02\x21\x4c\x18", &0_u32.to_le_bytes(), &legacy[4..]])
        })
        .refused(""),
        lz4("legacy lz4: a frame behind it", {
            join(&[&legacy, &empty])
        }),
    ];
    check(empty_directory().path(), cases);
}

/// A zstd frame of stored blocks. `header` follows the magic.
fn zstd_frame(header: &[u8], blocks: &[&[u8]], tail: &[u8]) -> Vec<u8> {
    let mut frame = b"\x28\xb5\x2f\xfd".to_vec();
    frame.extend_from_slice(header);
    for (number, block) in blocks.iter().enumerate() {
        let last = u32::from(number + 1 == blocks.len());
        let len = u32::try_from(block.len()).expect("short") << 3 | last;
        frame.extend(&len.to_le_bytes()[..3]);
        frame.extend_from_slice(block);
    }
    frame.extend_from_slice(tail);
    frame
}

// Promises: hostile-packed, memory-decoder, gnu-zstd-window
#[test]
fn damaged_or_inconsistent_zstd_streams_end_in_errors() {
    // An exponent of 10 and no mantissa: a window of 1 MiB.
    const WINDOW: u8 = 10 << 3;
    let plain = sample();
    let whole = pack(&["zstd", "-q"], &plain);
    let end = whole.len();
    let pieces: Vec<&[u8]> = plain.chunks(100_000).collect();
    let size = u32::try_from(plain.len()).expect("short");
    let sum = xxhash_rust::xxh64::xxh64(&plain, 0).to_le_bytes();
    let sum = &sum[..4];
    let sized = |size: u32| {
        let header = join(&[&[0x80, WINDOW], &size.to_le_bytes()]);
        zstd_frame(&header, &pieces, b"")
    };
    let windowed = |window: u8| zstd_frame(&[0, window], &pieces, b"");
    let empty = zstd_frame(&[0, WINDOW], &[b""], b"");
    let skipped = b"\x5a\x2a\x4d\x18\x03\0\0\0abc";
    let cases = vec![
        case("zstd: as made here", windowed(WINDOW)),
        case(
            "zstd: with a checksum",
            zstd_frame(&[4, WINDOW], &pieces, sum),
        ),
        case("zstd: with a size", sized(size)),
        case(
            "zstd: a wrong checksum",
            zstd_frame(&[4, WINDOW], &pieces, &[0; 4]),
        )
        .refused("checksum"),
        case("zstd: a size that is too small", sized(size - 1)).refused(""),
        case("zstd: a size that is too large", sized(size + 1)).refused(""),
        case("zstd: a size of four gigabytes", sized(u32::MAX)).refused(""),
        case("zstd: one segment of four gigabytes", {
            let header = join(&[&[0xa0], &u32::MAX.to_le_bytes()]);
            zstd_frame(&header, &pieces, b"")
        })
        .refused(""),
        case("zstd: a window of two gigabytes", windowed(21 << 3))
            .laxer(Tree::Other, "content that fits into memory needs no window"),
        case("zstd: a window of an exbibyte", windowed(31 << 3)).refused(""),
        case(
            "zstd: a reserved flag",
            zstd_frame(&[8, WINDOW], &pieces, b""),
        )
        .refused(""),
        case(
            "zstd: a dictionary",
            zstd_frame(&[1, WINDOW, 9], &pieces, b""),
        )
        .refused("dictionary"),
        case("zstd: a block of a reserved type", {
            join(&[&empty[..6], &[7, 0, 0], &[0; 100]])
        })
        .refused(""),
        case("zstd: a block of two megabytes", {
            join(&[&empty[..6], &[0xf9, 0xff, 0xff], &[0; 5000]])
        })
        .refused(""),
        case("zstd: a run longer than a block may be", {
            join(&[&empty[..6], &[0xfb, 0xff, 0xff], &[0; 1]])
        })
        .laxer(
            Tree::Same,
            "libzstd allows it in a frame that is decoded at once",
        ),
        case("zstd: a wrong byte", flipped(&whole, 20_000)).refused(""),
        case("zstd: cut in the header", cut(&whole, 5)).refused(""),
        case("zstd: cut in the middle", cut(&whole, end / 2)).refused("truncated"),
        case("zstd: cut before the checksum", cut(&whole, end - 4)).refused("truncated"),
        case(
            "zstd: thousands of empty frames",
            join(&[&empty.repeat(EMPTY_PARTS), &whole]),
        ),
        case(
            "zstd: thousands of skipped frames",
            join(&[&skipped.repeat(EMPTY_PARTS), &whole]),
        )
        .gnu(&["-Izstd"]),
        case("zstd: a skipped frame of four gigabytes", {
            join(&[&whole, b"\x5f\x2a\x4d\x18\xff\xff\xff\xff", b"abc"])
        })
        .refused(""),
        case("zstd: another magic in the middle", {
            join(&[&windowed(WINDOW), b"\x29\xb5\x2f\xfd", &[0; 100]])
        })
        .refused(""),
        case("zstd: garbage behind the end", join(&[&whole, b"garbage"])).refused(""),
        case("zstd: thousands of empty blocks", {
            let blocks = [&[&b""[..]; EMPTY_PARTS][..], &pieces].concat();
            zstd_frame(&[0, WINDOW], &blocks, b"")
        }),
    ];
    check(empty_directory().path(), cases);
}

// Promises: hostile-packed
#[test]
fn damaged_or_inconsistent_xz_streams_end_in_errors() {
    let plain = sample();
    let whole = pack(&["xz", "-0"], &plain);
    let empty = pack(&["xz", "-0"], b"");
    let end = whole.len();
    let blocks = pack(&["xz", "-0", "-T2", "--block-size=100000"], &plain);
    let large = pack(&["xz", "--lzma2=dict=1536MiB,nice=2,mf=hc3,mode=fast"], b"");
    let cases = vec![
        case("xz: blocks", blocks.clone()),
        case("xz: a wrong header checksum", flipped(&whole, 8)).refused(""),
        case("xz: unknown flags", flipped(&whole, 7)).refused(""),
        case("xz: a wrong block header", flipped(&whole, 13)).refused(""),
        case("xz: a wrong byte", flipped(&whole, 20_000)).refused(""),
        case("xz: a wrong index", flipped(&whole, -20)).refused(""),
        case("xz: a wrong length of the index", flipped(&whole, -8)).refused(""),
        case("xz: a wrong footer", flipped(&whole, -12)).refused(""),
        case("xz: a wrong magic at the end", flipped(&whole, -1)).refused(""),
        case("xz: a wrong check", flipped(&whole, -32)).refused(""),
        case("xz: a wrong byte in a block", flipped(&blocks, 60_000)).refused(""),
        case("xz: a wrong index of blocks", flipped(&blocks, -24)).refused(""),
        case("xz: cut in the header", cut(&whole, 8)).refused(""),
        case("xz: cut in the middle", cut(&whole, end / 2)).refused("truncated"),
        case("xz: cut before the index", cut(&whole, end - 28)).refused("truncated"),
        case("xz: cut in the footer", cut(&whole, end - 3)).refused("truncated"),
        case(
            "xz: thousands of empty streams",
            join(&[&empty.repeat(EMPTY_PARTS), &whole]),
        ),
        case(
            "xz: padding of four bytes",
            join(&[&whole, &[0; 4], &empty]),
        ),
        case(
            "xz: padding of three bytes",
            join(&[&whole, &[0; 3], &empty]),
        )
        .refused(""),
        case(
            "xz: another magic in the middle",
            join(&[&whole, &flipped(&empty, 2)]),
        )
        .refused(""),
        case("xz: garbage behind the end", join(&[&whole, b"garbage!"])).refused(""),
        case("xz: nothing in a large dictionary", join(&[&large, &whole])),
    ];
    check(empty_directory().path(), cases);
}

// Promises: hostile-packed, gnu-empty
#[test]
fn damaged_or_inconsistent_bzip2_streams_end_in_errors() {
    let plain = sample();
    let whole = pack(&["bzip2", "-1"], &plain);
    let empty = pack(&["bzip2"], b"");
    let end = whole.len();
    let cases = vec![
        case("bzip2: a wrong byte", flipped(&whole, 20_000)).refused(""),
        case("bzip2: a wrong checksum of a block", flipped(&whole, 11)).refused(""),
        case("bzip2: a wrong checksum at the end", flipped(&whole, -3)).refused(""),
        case("bzip2: a block size of nothing", put(&whole, 3, b"0")).refused(""),
        case("bzip2: blocks larger than they may be", {
            let large = pack(&["bzip2", "-9"], &plain);
            put(&large, 3, b"1")
        })
        .refused(""),
        case("bzip2: a randomised block", flipped(&whole, 14)).refused(""),
        case("bzip2: cut in the header", cut(&whole, 6)).refused(""),
        case("bzip2: cut in the middle", cut(&whole, end / 2)).refused("truncated"),
        case("bzip2: cut in the checksum", cut(&whole, end - 2)).refused("truncated"),
        case(
            "bzip2: thousands of empty streams",
            join(&[&empty.repeat(EMPTY_PARTS), &whole]),
        ),
        case(
            "bzip2: nothing but empty streams",
            empty.repeat(EMPTY_PARTS),
        )
        .stricter_alike("does not look like", EMPTY),
        case("bzip2: another magic in the middle", {
            let (first, second) = plain.split_at(100_000);
            let (first, second) = (pack(&["bzip2"], first), pack(&["bzip2"], second));
            join(&[&first, &put(&second, 0, b"BZi")])
        })
        .refused(""),
        case("bzip2: garbage behind the end", join(&[&whole, b"garbage"])),
        case("bzip2: zeros behind the end", join(&[&whole, &[0; 5000]])),
    ];
    check(empty_directory().path(), cases);
}

// Promises: hostile-packed
#[test]
fn data_packed_twice_or_not_at_all_is_an_error() {
    let plain = sample();
    let gzip = |bytes: &[u8]| pack(&["gzip", "-n"], bytes);
    let cases: Vec<Case> = vec![
        case("packed twice", gzip(&gzip(&plain))).refused(""),
        case("a packed text", gzip(&Rng::new(3).text(100_000))).refused(""),
        case("packed noise", gzip(&Rng::new(3).bytes(100_000))).refused(""),
        case("packed zeros", gzip(&vec![0; 1 << 20])).expecting(super::Expected::Same),
        case("a zip file", b"PK\x03\x04................").refused(""),
        case("one byte", b"\x1f").refused(""),
        case("half a record", plain[..256].to_vec()).refused(""),
    ];
    check(empty_directory().path(), cases);
}
