//! Headers that contradict each other, lie, or demand too much.

use super::{Case, Tree, case, check};
use crate::support::raw::{Archive, GNU, Header, V7, pax_records};

const TWO_TO_63: &str = "9223372036854775808";
const MAX_I64: &str = "9223372036854775807";

/// A complete archive with one file, to hide in a payload.
fn smuggled_archive() -> Vec<u8> {
    Archive::new().file("smuggled", "evil").end()
}

/// A file `x` with a smuggled archive as its content, and another size in its header.
fn carrier(size: u64) -> Archive {
    Archive::new().add(Header::new("x", b'0').size(size), smuggled_archive())
}

fn sized(size: impl AsRef<[u8]>) -> Archive {
    Archive::new().pax(&[("size", size)])
}

/// Appends a file that shows where the reader found the next header.
fn with_next_member(archive: Archive) -> Vec<u8> {
    archive.file("after", "1").end()
}

fn empty_directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

// Promises: hostile-sizes
#[test]
fn conflicting_sizes_smuggle_no_member() {
    let len = smuggled_archive().len() as u64;
    let said = len.to_string();
    let body = |archive: Archive, kind: u8| {
        let header = Header::new("x", kind).link("after").device(1, 3).size(0);
        archive.add(header, smuggled_archive())
    };
    let raw = |archive: Archive, kind: u8| {
        let header = Header::new("x", kind).link("after").device(1, 3);
        archive.add(header, smuggled_archive())
    };
    let plain = || Archive::new().file("after", "0");
    let cases = vec![
        case(
            "pax says all and ustar nothing",
            with_next_member(carry(sized(&said), 0)),
        ),
        case(
            "pax says nothing and ustar all",
            with_next_member(carry(sized("0"), len)),
        ),
        case(
            "pax says one record",
            with_next_member(carry(sized("512"), len)),
        ),
        case(
            "pax says more than there is",
            with_next_member(carry(sized("9999999"), len)),
        )
        .refused("truncated"),
        case("ustar alone says all", with_next_member(carrier(len))),
        case("ustar alone says nothing", with_next_member(carrier(0))),
        case("two sizes, the last counts", {
            let sizes = pax_records(&[("size", "0"), ("size", said.as_str())]);
            with_next_member(carry(Archive::new().add(Header::new("p", b'x'), sizes), 0))
        }),
        case("two pax headers, the last counts", {
            with_next_member(carry(sized("0").pax(&[("size", &said)]), 0))
        }),
        case("a size before another pax header is gone", {
            with_next_member(carry(sized(&said).pax(&[("mtime", "1")]), 0))
        }),
        case("a size before a long name", {
            with_next_member(carry(sized(&said).long(b'L', "long"), 0))
        }),
        case("a size behind a long name", {
            let archive = Archive::new().long(b'L', "long");
            with_next_member(carry(archive.pax(&[("size", &said)]), 0))
        }),
        case("a size around a long link", {
            with_next_member(sized(&said).long(b'K', "target").symlink("x", "y"))
        }),
        case("a size before a long name that is long itself", {
            with_next_member(carry(sized("1").long(b'L', "n".repeat(600)), len))
        }),
        case("a size for all", {
            let archive = Archive::new().global(&[("size", &said)]);
            archive
                .add(Header::new("x", b'0').size(0), smuggled_archive())
                .end()
        }),
        case("a size for all and one for one", {
            let archive = Archive::new().global(&[("size", "0")]);
            let archive = archive.pax(&[("size", &said)]);
            archive
                .add(Header::new("x", b'0').size(0), smuggled_archive())
                .end()
        }),
        case("a size that was for all is deleted", {
            let archive = Archive::new().global(&[("size", "0")]);
            with_next_member(carry(archive.global(&[("size", "")]), len))
        })
        .laxer(Tree::Same, "an empty value deletes, as POSIX has it"),
        case(
            "leading zeros",
            with_next_member(carry(sized(format!("000{said}")), 0)),
        ),
        case(
            "a size with a blank",
            with_next_member(carry(sized(format!(" {said}")), len)),
        ),
        case(
            "a size with a sign",
            with_next_member(carry(sized(format!("+{said}")), len)),
        ),
        case(
            "a size in hexadecimal",
            with_next_member(carry(sized("0x600"), len)),
        ),
        case(
            "a negative size",
            with_next_member(carry(sized("-512"), len)),
        ),
        case(
            "a size with a fraction",
            with_next_member(carry(sized("512.0"), len)),
        ),
        case(
            "a size with a NUL",
            with_next_member(carry(sized(b"512\0"), len)),
        ),
        case(
            "a size of 2^63",
            with_next_member(carry(sized(TWO_TO_63), len)),
        ),
        case("a size of 2^64 and one more", {
            with_next_member(carry(sized("18446744073709551617"), len))
        }),
        case(
            "a size of 2^63 - 1",
            with_next_member(carry(sized(MAX_I64), len)),
        )
        .refused("truncated"),
        case(
            "a hard link with a size in pax",
            with_next_member(body(sized_for(&said), b'1')),
        ),
        case(
            "a directory with a size in pax",
            with_next_member(body(sized(&said), b'5')),
        ),
        case(
            "a symbolic link with a size in pax",
            with_next_member(body(sized(&said), b'2')),
        ),
        case(
            "a device with a size in pax",
            with_next_member(body(sized(&said), b'3')),
        ),
        case(
            "a FIFO with a size in pax",
            with_next_member(body(sized(&said), b'6')),
        ),
        case(
            "a hard link with a size",
            with_next_member(raw(plain(), b'1')),
        ),
        case(
            "a directory with a size",
            with_next_member(raw(plain(), b'5')),
        ),
        case(
            "a symbolic link with a size",
            with_next_member(raw(plain(), b'2')),
        ),
        case("a device with a size", with_next_member(raw(plain(), b'4'))),
        case("a FIFO with a size", with_next_member(raw(plain(), b'6'))),
        case(
            "an unknown type with a size",
            with_next_member(raw(plain(), b'Q')),
        ),
        case(
            "a contiguous file with a size",
            with_next_member(raw(plain(), b'7')),
        ),
        case("a volume label with a size", {
            with_next_member(plain().add(Header::new("label", b'V').magic(GNU), smuggled_archive()))
        }),
        case("a dumpdir with a size", {
            let header = Header::new("d/", b'D').magic(GNU).mode(0o755);
            with_next_member(plain().add(header, smuggled_archive()))
        }),
        case("a continued file", {
            with_next_member(plain().add(Header::new("m", b'M').magic(GNU), smuggled_archive()))
        }),
        case("a file with a slash and a size", {
            with_next_member(plain().add(Header::new("d/", b'0').mode(0o755), smuggled_archive()))
        }),
        case("an old file with a slash and a size", {
            let header = Header::new("d/", 0).magic(V7).mode(0o755);
            with_next_member(plain().add(header, smuggled_archive()))
        }),
    ];
    check(empty_directory().path(), cases);
}

/// A target for hard links, then a size.
fn sized_for(size: &str) -> Archive {
    Archive::new().file("after", "0").pax(&[("size", size)])
}

/// Appends the member of [`carrier`] to `archive`.
fn carry(archive: Archive, size: u64) -> Archive {
    archive.add(Header::new("x", b'0').size(size), smuggled_archive())
}

fn file_with(header: Header) -> Vec<u8> {
    with_next_member(Archive::new().file("before", "1").add(header, "content"))
}

// Promises: hostile-sizes, hostile-device-number
#[test]
fn invalid_numbers_end_as_with_gnu_tar() {
    let header = || Header::new("x", b'0');
    let mut wide = [0xff_u8; 12];
    wide[0] = 0x80;
    let cases = vec![
        case("a size in base 256", file_with(header().binary(124, 12, 7))),
        case(
            "a negative size in base 256",
            file_with(header().binary(124, 12, -7)),
        ),
        case(
            "a huge size in base 256",
            file_with(header().binary(124, 12, i64::MAX)),
        )
        .refused("truncated"),
        case(
            "a size beyond 64 bits",
            file_with(header().size(0).put(124, wide)),
        ),
        case(
            "the largest octal size",
            file_with(header().size(0o777_7777_7777)),
        )
        .refused("truncated"),
        case(
            "a size of letters",
            file_with(header().size(0).put(124, "garbage!")),
        ),
        case(
            "a size of blanks",
            file_with(header().size(0).put(124, [b' '; 12])),
        ),
        case(
            "a size of NULs",
            file_with(header().size(0).put(124, [0; 12])),
        ),
        case(
            "a size of eights",
            file_with(header().size(0).put(124, "88888888888\0")),
        ),
        case("a negative mode", file_with(header().binary(100, 8, -1))),
        case(
            "a mode of letters",
            file_with(header().put(100, "rwxr-xr\0")),
        ),
        case("a negative owner", file_with(header().binary(108, 8, -2)))
            .expecting(super::Expected::Same),
        case(
            "the year 292277026596",
            file_with(header().binary(136, 12, i64::MAX - 1)),
        )
        .expecting(super::Expected::Same),
        case("device numbers beyond 32 bits", {
            let header = Header::new("x", b'3').size(0);
            let header = header.binary(329, 8, 1 << 33).binary(337, 8, 1 << 33);
            with_next_member(Archive::new().file("before", "1").add(header, ""))
        }),
        case("a wrong checksum", file_with(header().damaged())),
        case("a first header with a wrong checksum", {
            with_next_member(Archive::new().add(header().damaged(), ""))
        })
        .other_tree(
            "does not look like",
            "an archive is not searched for its first header",
        ),
        case("all ones", {
            with_next_member(Archive::new().file("before", "1").raw([0xff; 1024]))
        }),
        case("ten thousand records of nothing", {
            let zeros = vec![0; 512 * 10_000];
            with_next_member(Archive::new().file("before", "1").raw(zeros))
        }),
        case("ten thousand records of nothing to be ignored", {
            let zeros = vec![0; 512 * 10_000];
            with_next_member(Archive::new().file("before", "1").raw(zeros))
        })
        .gnu(&["-i"])
        .with(&["--ignore-zeros"]),
    ];
    check(empty_directory().path(), cases);
}

// Promises: hostile-paths, gnu-pax-empty
#[test]
fn invalid_names_end_as_with_gnu_tar() {
    const EMPTY: &str = "an empty name leaves the one in the header in force";
    let file = |archive: Archive| with_next_member(archive.file("x", "1"));
    let unfinished = |archive: Archive| Archive::new().file("x", "1").raw(archive.unfinished());
    let cases = vec![
        case(
            "a name of nothing",
            with_next_member(Archive::new().file("", "1")),
        ),
        case(
            "a name of slashes",
            with_next_member(Archive::new().add(Header::new("///", b'0').mode(0o755), "1")),
        ),
        case(
            "a file called dot",
            with_next_member(Archive::new().file(".", "1")),
        ),
        case(
            "a link called dot",
            with_next_member(Archive::new().symlink(".", "/etc")),
        ),
        case(
            "a long name of nothing",
            file(Archive::new().long(b'L', "")),
        )
        .laxer(Tree::Other, EMPTY),
        case("a long name without a byte", {
            file(Archive::new().add(Header::new("l", b'L').magic(GNU), ""))
        })
        .laxer(Tree::Other, EMPTY),
        case(
            "a long name with a NUL in it",
            file(Archive::new().long(b'L', "a\0b")),
        ),
        case(
            "a pax path with a NUL in it",
            file(Archive::new().pax(&[("path", "a\0b")])),
        ),
        case("a long name of a megabyte", {
            file(
                Archive::new()
                    .file("before", "1")
                    .long(b'L', "n".repeat(1 << 20)),
            )
        })
        .other_tree(
            "more bytes in a name",
            "names have a limit, and stop the archive",
        ),
        case("a long name of a terabyte", {
            let header = Header::new("l", b'L').magic(GNU).binary(124, 12, 1 << 40);
            file(Archive::new().file("before", "1").add(header, "n"))
        })
        .refused("more bytes in a name"),
        case("a pax header of a terabyte", {
            let header = Header::new("p", b'x').binary(124, 12, 1 << 40);
            file(Archive::new().file("before", "1").add(header, "n"))
        })
        .refused("truncated"),
        case(
            "a name of 256 bytes",
            file(Archive::new().pax(&[("path", "n".repeat(256))])),
        ),
        case(
            "control characters",
            with_next_member(Archive::new().file("a\x1b[2Jb", "1")),
        ),
        case(
            "a symbolic link to nothing",
            with_next_member(Archive::new().symlink("s", "")),
        ),
        case("a symbolic link of 5000 bytes", {
            with_next_member(
                Archive::new()
                    .long(b'K', "t".repeat(5000))
                    .symlink("s", "x"),
            )
        }),
        case(
            "a hard link to nothing",
            with_next_member(Archive::new().hard_link("h", "")),
        ),
        case("a long name for the end", {
            unfinished(Archive::new().long(b'L', "long")).end()
        }),
        case("a pax header for the end", {
            unfinished(Archive::new().pax(&[("path", "p")])).end()
        }),
        case("a thousand long names for one file", {
            let archive = (0..1000).fold(Archive::new(), |archive, number| {
                archive.long(b'L', format!("name{number}"))
            });
            file(archive)
        }),
        case("a prefix that climbs", {
            with_next_member(Archive::new().add(Header::new("x", b'0').put(345, ".."), "1"))
        }),
        case("an absolute prefix", {
            with_next_member(Archive::new().add(Header::new("x", b'0').put(345, "/pre"), "1"))
        }),
        case("a prefix in GNU's dialect", {
            with_next_member(
                Archive::new().add(Header::new("x", b'0').magic(GNU).put(345, "../pre"), "1"),
            )
        }),
    ];
    check(empty_directory().path(), cases);
}

// Promises: hostile-sizes
#[test]
fn invalid_extended_headers_end_as_with_gnu_tar() {
    let pax = |body: &[u8]| {
        let archive = Archive::new().file("before", "1");
        with_next_member(archive.add(Header::new("p", b'x'), body).file("x", "1"))
    };
    let many = |count: usize, value: &str| {
        let keys = (0..count).map(|number| (format!("SCHILY.xattr.user.k{number}"), value));
        let keys: Vec<_> = keys.collect();
        Archive::new().file("before", "1").pax(&keys).file("x", "1")
    };
    let cases = vec![
        case("a length that is too long", pax(b"99 path=y\n")),
        case("a length of nothing", pax(b"0 path=y\n")),
        case("a length that is too short", pax(b"5 path=y\n")),
        case(
            "a length beyond 64 bits",
            pax(b"99999999999999999999999 path=y\n"),
        ),
        case("a negative length", pax(b"-9 path=y\n")),
        case("no length", pax(b"path=y\n")),
        case("no newline", pax(b"9 path=yz")),
        case("no equal sign", pax(b"9 pathyz\n")),
        case("no keyword", pax(b"5 =y\n")),
        case("nothing at all", pax(b"")),
        case("nothing but NULs", pax(&[0; 512])),
        case("nothing but blanks", pax(&[b' '; 512])),
        case("a record after a NUL", pax(b"9 path=y\n\09 path=z\n")),
        case("owners that are no numbers", pax(b"9 uid=me\n10 gid=-1\n")),
        case("an owner beyond 32 bits", pax(b"18 uid=4294967296\n")),
        case("a time that is none", pax(b"14 mtime=soon\n")),
        case(
            "a time beyond 64 bits",
            pax(b"30 mtime=9223372036854775808\n"),
        ),
        case(
            "two thousand attributes",
            many(2000, "v").file("y", "1").end(),
        )
        .gnu(&["--xattrs"]),
        case("attributes of five megabytes", {
            many(5, &"v".repeat(1 << 20)).file("y", "1").end()
        })
        .gnu(&["--xattrs"]),
        case("a global header of a hundred kilobytes", {
            let archive = Archive::new().file("before", "1");
            let attribute = |key| (key, "v".repeat(50_000));
            let keys = ["SCHILY.xattr.user.k", "SCHILY.xattr.user.l"];
            with_next_member(archive.global(&keys.map(attribute)))
        })
        .stricter(
            "bytes of global pax",
            "global headers have a limit, and stop the archive",
        ),
        case("a thousand global headers", {
            let archive = (0..1000).fold(Archive::new(), |archive, number| {
                archive.global(&[("mtime", number.to_string())])
            });
            with_next_member(archive)
        }),
        case("a pax header for a global one", {
            let archive = Archive::new().pax(&[("path", "p")]);
            with_next_member(archive.global(&[("mtime", "7")]).file("x", "1"))
        }),
        case("an old Solaris header", {
            let archive = Archive::new().add(Header::new("p", b'X'), b"9 path=y\n");
            with_next_member(archive.file("x", "1"))
        }),
        case(
            "an ACL of garbage",
            pax(b"31 SCHILY.acl.access=user:::::\n"),
        )
        .gnu(&["--acls"]),
    ];
    check(empty_directory().path(), cases);
}

/// A file of GNU's old sparse type with these segments in its header.
fn old_sparse(pieces: &[(&str, &str)], real: &str) -> Header {
    let header = Header::new("x", b'S').magic(GNU).put(483, real);
    pieces
        .iter()
        .enumerate()
        .fold(header, |header, (number, (offset, len))| {
            header
                .put(386 + number * 24, offset)
                .put(398 + number * 24, len)
        })
}

fn sparse(keywords: &[(&str, &str)], payload: impl AsRef<[u8]>) -> Vec<u8> {
    let archive = Archive::new().file("before", "1").pax(keywords);
    with_next_member(archive.file("x", payload))
}

fn sparse_1_0(map: &str, real: &str) -> Vec<u8> {
    let mut payload = map.as_bytes().to_vec();
    payload.resize(payload.len().next_multiple_of(512), 0);
    payload.extend([b'd'; 1024]);
    let keywords = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", "x"),
        ("GNU.sparse.realsize", real),
    ];
    sparse(&keywords, payload)
}

// Promises: hostile-sizes
#[test]
fn invalid_sparse_map_loses_only_its_file() {
    const LOST: &str = "skipped, as ";
    const UNSOUND: &str = "an unsound map loses its file, and the rest goes on";
    let old = |pieces: &[(&str, &str)], real: &str| {
        let archive = Archive::new().file("before", "1");
        with_next_member(archive.add(old_sparse(pieces, real), [b'd'; 1024]))
    };
    let zero_one = |map: &str, size: &str| {
        let keywords = [
            ("GNU.sparse.size", size),
            ("GNU.sparse.numblocks", "2"),
            ("GNU.sparse.map", map),
        ];
        sparse(&keywords, [b'd'; 1024])
    };
    let lost = |case: Case| case.expecting(super::Expected::Refused(LOST));
    let cases = vec![
        case(
            "0.1: a piece beyond the end",
            zero_one("0,512,4096,512", "4096"),
        )
        .stricter(LOST, UNSOUND),
        case(
            "0.1: pieces that overlap",
            zero_one("0,512,256,512", "4096"),
        )
        .stricter(LOST, UNSOUND),
        lost(case(
            "0.1: more than is stored",
            zero_one("0,512,1024,1024", "4096"),
        )),
        case("0.1: a number alone", zero_one("0,512,1024", "4096")).refused(""),
        case("0.1: letters", zero_one("a,b", "4096")).refused(""),
        lost(case(
            "0.1: an offset of 2^63 - 1",
            zero_one(&format!("{MAX_I64},512"), MAX_I64),
        )),
        lost(case("1.0: letters", sparse_1_0("one\n", "4096"))),
        lost(case(
            "1.0: no newline",
            sparse_1_0(&"1".repeat(600), "4096"),
        )),
        lost(case(
            "1.0: a trillion pieces",
            sparse_1_0("1000000000000\n0\n1\n", "4096"),
        )),
        case(
            "1.0: a piece beyond the end",
            sparse_1_0("1\n4096\n1024\n", "4096"),
        )
        .stricter(LOST, UNSOUND),
        lost(case(
            "old: pieces of letters",
            old(&[("garbage", "garbage")], "00000004096\0"),
        )),
        lost(case(
            "old: a size of letters",
            old(&[("00000000000\0", "00000001000\0")], "garb"),
        )),
        case("old: a map without an end", {
            let header = old_sparse(&[("00000000000\0", "00000001000\0")], "00000010000\0");
            let mut record = vec![0; 512];
            for piece in 0..21 {
                let text = format!("{:011o}\0{:011o}\0", 1024 * (piece + 1), 1);
                record.splice(piece * 24..piece * 24 + 24, text.into_bytes());
            }
            record[504] = 1;
            let archive = Archive::new().file("before", "1");
            archive
                .add(header.put(482, [1]), "")
                .raw(record.repeat(50))
                .end()
        })
        .refused(""),
        case("a hole of eight exbibytes", {
            sparse(
                &[("GNU.sparse.map", "0,0"), ("GNU.sparse.size", MAX_I64)],
                "",
            )
        })
        .refused(""),
        case(
            "a real size and no map",
            sparse(&[("GNU.sparse.realsize", "9")], "1234"),
        ),
        case("a number of pieces and no map", {
            sparse(
                &[("GNU.sparse.numblocks", "2"), ("GNU.sparse.size", "9")],
                "1234",
            )
        }),
        case("a real size that hides a member", {
            let archive = Archive::new().file("before", "1");
            let archive = archive.pax(&[("GNU.sparse.realsize", "1500")]);
            archive
                .file("x", "1234")
                .file("y", "hidden")
                .file("z", "1")
                .end()
        }),
        case("a sparse size that bares a member", {
            let archive = Archive::new().file("before", "1");
            let archive = archive.pax(&[("GNU.sparse.size", "0")]);
            with_next_member(archive.file("x", smuggled_archive()))
        }),
        case("a pax size and a real size", {
            let keywords = [("GNU.sparse.realsize", "4"), ("size", "1024")];
            sparse(&keywords, "1234")
        }),
        case("0.1: a map of nothing", {
            let keywords = [("GNU.sparse.map", ""), ("GNU.sparse.size", "512")];
            sparse(&keywords, "1234")
        }),
        case("0.1: a map that ends at a NUL", {
            let keywords = [
                ("GNU.sparse.size", "4"),
                ("GNU.sparse.numblocks", "1"),
                ("GNU.sparse.map", "0,4\0,8,4"),
            ];
            sparse(&keywords, "1234")
        }),
        case("0.0: a length without an offset", {
            let keywords = [("GNU.sparse.size", "9"), ("GNU.sparse.numbytes", "4")];
            sparse(&keywords, "1234")
        })
        .refused(""),
        case("a sparse name that climbs", {
            let keywords = [
                ("GNU.sparse.name", "../decoy/x"),
                ("GNU.sparse.numblocks", "1"),
                ("GNU.sparse.size", "4"),
                ("GNU.sparse.map", "0,4"),
            ];
            sparse(&keywords, "1234")
        })
        .refused("'..'"),
    ];
    check(empty_directory().path(), cases);
}
