//! Seeds of the targets: bytes that are well-formed, or nearly so.

use bytes::Bytes;
use tarfs::codec::{Compression, SeekPoint};
use tarfs::index::{Builder, Locator, Options, Origin, format};
use tarfs::tar::{Event, Options as TarOptions, Parser};
use tarfs::{Extent, Packed, Plain};

use crate::packing::Packing;
use crate::raw::{Archive, GNU, Header, V7, pax_records};
use crate::rng::Rng;

/// Seeds followed by knob bytes: all zero, and some set.
fn with_knobs(seeds: impl IntoIterator<Item = Vec<u8>>) -> Vec<Vec<u8>> {
    let knobs: [[u8; 4]; 2] = [[0, 1, 0, 0], [30, 0, 0xff, 3]];
    let seeds = seeds.into_iter();
    seeds
        .flat_map(|seed| knobs.map(|knobs| [&seed[..], &knobs].concat()))
        .collect()
}

/// Archives in all dialects.
fn archives() -> Vec<Vec<u8>> {
    let basic = Archive::new()
        .directory("d/")
        .file("d/f", "content\n")
        .symlink("d/l", "f")
        .hard_link("h", "d/f")
        .fifo("p")
        .add(Header::new("c", b'3').device(1, 3), "")
        .file("d/f", vec![b'x'; 1300])
        .end();
    let long = "n".repeat(200);
    let deep = ["d".repeat(99), "e".repeat(99), "f".repeat(50)].join("/");
    let gnu = Archive::new()
        .long(b'L', &long)
        .file("x", "1")
        .long(b'L', &deep)
        .long(b'K', &deep)
        .symlink("x", "y")
        .add(
            Header::new("old", b'0')
                .magic(GNU)
                .binary(108, 8, -2)
                .binary(136, 12, -1_000_000),
            "1",
        )
        .add(Header::new("V", b'V').magic(GNU), "")
        .add(Header::new("D", b'D').magic(GNU), "Yf\0\0")
        .end();
    let v7 = Archive::new()
        .add(Header::new("d/", b'\0').magic(V7), "")
        .add(Header::new("d/f", b'\0').magic(V7), "1")
        .unfinished();
    let pax = Archive::new()
        .global(&[("mtime", "12.5"), ("SCHILY.xattr.user.g", "1")])
        .pax(&[
            ("path", &*deep),
            ("mtime", "-1000.25"),
            ("uid", "4000000000"),
            ("uname", "someone"),
            ("SCHILY.xattr.user.a", "value"),
            (
                "SCHILY.acl.access",
                "user::rw-,user:1000:r--,mask::r--,group::r--,other::---",
            ),
        ])
        .file("x", "1")
        .pax(&[("size", "3"), ("comment", "smuggled")])
        .add(Header::new("s", b'0').size(1024), "abc")
        .pax(&[("linkpath", &long)])
        .hard_link("l", "x")
        .end();
    vec![basic, gnu, v7, pax, sparse(), Vec::new(), vec![0; 1024]]
}

/// Sparse files of every format.
fn sparse() -> Vec<u8> {
    let old = Header::new("old", b'S')
        .magic(GNU)
        .octal(386, 12, 1000)
        .octal(398, 12, 5)
        .octal(410, 12, 4000)
        .octal(422, 12, 3)
        .octal(483, 12, 9000);
    let map = |map: &str| [map.as_bytes(), &vec![0; 512 - map.len()], b"12345678"].concat();
    Archive::new()
        .add(old, "12345678")
        .pax(&[
            ("GNU.sparse.size", "9000"),
            ("GNU.sparse.numblocks", "2"),
            ("GNU.sparse.map", "1000,5,4000,3"),
        ])
        .file("one", "12345678")
        .raw([])
        .pax(&[
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.name", "two"),
            ("GNU.sparse.realsize", "9000"),
        ])
        .file("GNUSparseFile.0/two", map("2\n1000\n5\n4000\n3\n"))
        .end()
}

pub(crate) fn tar() -> Vec<Vec<u8>> {
    with_knobs(archives())
}

/// Seeds for every encoder of `compression`.
pub(crate) fn packed(compression: Compression) -> Vec<Vec<u8>> {
    let archive: Bytes = archives().swap_remove(0).into();
    // More than one span, in few packed bytes.
    let zeros: Bytes = vec![0; (1 << 20) + 70_000].into();
    let text: Bytes = Rng::new(7).text(3000).into();
    let packings = Packing::ALL.into_iter();
    let packings = packings.filter(|&packing| packs_as(packing) == compression);
    let seeds = packings.flat_map(|packing| {
        let twice = |plain: &Bytes| [packing.pack(plain), packing.pack(&text)].concat();
        let whole = [&archive, &text, &Bytes::new()].map(|plain| packing.pack(plain).to_vec());
        let many = [twice(&zeros), twice(&archive)];
        whole.into_iter().chain(many)
    });
    with_knobs(seeds)
}

fn packs_as(packing: Packing) -> Compression {
    match packing {
        Packing::Plain => Compression::None,
        Packing::Gzip | Packing::GzipMembers | Packing::Bgzf => Compression::Gzip,
        Packing::Lz4 | Packing::Lz4Linked | Packing::Lz4Frames | Packing::Lz4Legacy => {
            Compression::Lz4
        }
        Packing::Zstd | Packing::ZstdFrames => Compression::Zstd,
        Packing::Xz | Packing::XzBlocks | Packing::XzStreams => Compression::Xz,
        Packing::Bzip2 | Packing::Bzip2Streams => Compression::Bzip2,
    }
}

/// Seek points, followed by the packed bytes of each format.
pub(crate) fn seek_points() -> Vec<Vec<u8>> {
    let seeds = Compression::ALL
        .into_iter()
        .enumerate()
        .flat_map(|(number, format)| {
            let number = u8::try_from(number).expect("six");
            let streams = packed(format).into_iter().step_by(4).take(3);
            streams.flat_map(move |stream| {
                (0..3).map(move |state| {
                    let head = [
                        number, 0, state, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 9, 0, state,
                    ];
                    [&head, &b"a window "[..], &stream].concat()
                })
            })
        });
    with_knobs(seeds)
}

/// Indexes of the archives, with spans and windows.
pub(crate) fn indexes() -> Vec<Vec<u8>> {
    with_knobs(archives().iter().map(|archive| {
        let mut parser = Parser::new(TarOptions::default());
        let mut builder = Builder::new(Options::default());
        let mut input = Some(Bytes::copy_from_slice(archive));
        loop {
            match parser.pull() {
                Ok(Event::NeedInput) => match input.take() {
                    Some(bytes) => parser.push(bytes),
                    None => parser.finish(),
                },
                Ok(Event::Member(member)) => drop(builder.add_member(&member)),
                Ok(Event::End) | Err(_) => break,
                Ok(_) => {}
            }
        }
        let len = archive.len() as u64;
        let cut = len / 2;
        let window = SeekPoint {
            packed: Packed(cut),
            bit: 3,
            plain: Plain(cut),
            state: 0,
            window: Bytes::from_static(b"window"),
        };
        let checksums = vec![7; cut.div_ceil(16 << 10) as usize];
        builder.add_span(Extent::with_len(Plain(0), cut), Some(&checksums), None);
        builder.add_span(Extent::with_len(Plain(cut), len - cut), None, Some(&window));
        let index = builder.finish(Origin {
            compression: Compression::Gzip,
            packed_bytes: len,
            plain_bytes: len,
            ..Origin::default()
        });
        let mut file = Vec::new();
        format::write(&index, &Locator::default(), b"", &mut file).expect("memory");
        file
    }))
}

pub(crate) fn profiles() -> Vec<Vec<u8>> {
    let lines = [
        "10 20 gr\\374n\\n",
        "0 100 dir/b\\ c",
        "0 5 a",
        "# a remark",
        "90 500 a",
        "18446744073709551615 18446744073709551615 dir/\\\\",
        "0 1 gone",
    ];
    let whole = format!("# tarfs profile 1\n{}\n", lines.join("\n"));
    vec![whole.into_bytes(), b"# tarfs profile 1\r\n0 1 a".to_vec()]
}

pub(crate) fn answers() -> Vec<Vec<u8>> {
    [
        "206\ncontent-range: bytes 5-9/100\netag: \"a\"\ncontent-length: 5",
        "206\ncontent-range: Bytes 0-0/*\netag: W/\"a\"",
        "416\ncontent-range: bytes */7",
        "200\ncontent-length: 100\nlast-modified: Sun, 06 Nov 1994 08:49:37 GMT\ncontent-encoding: gzip",
        "503\nretry-after: Sun, 06 Nov 1994 08:49:37 GMT\ndate: Sun, 06 Nov 1994 08:48:37 GMT",
        "429\nretry-after: 120",
        "302\nlocation: https://example.org/a?b",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}

pub(crate) fn packets() -> Vec<Vec<u8>> {
    [
        r#"{"serve":{"mountpoint":[47,109,255],"device":[0,45],"overlay":null,"namespace":null}}"#,
        r#"{"ready":[{"capabilities":18446744073709551615,"version":"etag","is_strong":true},
            {"phase":"scanning","scanned_bytes":7,"of_bytes":9}]}"#,
        r#"{"take_over":{"target":{"mountpoint":[47],"device":[0,1],"overlay":["Overlayfs",[0,2]],
            "namespace":null},"state":{"capabilities":0,"version":"","is_strong":false},"overlay":null}}"#,
        r#"{"failed":{"text":"no","is_usage_error":false,"is_outage":true}}"#,
        r#"{"progress":[9,7,2]}"#,
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}

pub(crate) fn images() -> Vec<Vec<u8>> {
    let digest = "ab".repeat(32);
    let descriptor = |kind: &str, more: &str| {
        format!(
            r#"{{"mediaType":"application/vnd.{kind}","digest":"sha256:{digest}","size":7{more}}}"#
        )
    };
    let platform = r#","platform":{"os":"linux","architecture":"arm","variant":"v7"},
        "annotations":{"org.opencontainers.image.ref.name":"v1"}"#;
    let index = format!(
        r#"{{"schemaVersion":2,"manifests":[{},{}]}}"#,
        descriptor("oci.image.manifest.v1+json", platform),
        descriptor("oci.image.index.v1+json", ""),
    );
    let manifest = format!(
        r#"{{"schemaVersion":2,"config":{},"layers":[{},{}]}}"#,
        descriptor("oci.image.config.v1+json", ""),
        descriptor("oci.image.layer.v1.tar+gzip", ""),
        descriptor("docker.image.rootfs.diff.tar.gzip", ""),
    );
    let docker = format!(
        r#"[{{"Config":"{digest}.json","RepoTags":["a:1"],"Layers":["{digest}/layer.tar"]}}]"#
    );
    let config = format!(
        r#"{{"os":"linux","architecture":"amd64","created":"2000-01-01T00:00:00Z","config":{{
            "User":"www:users","Env":["A=b"],"Entrypoint":["/e"],"Cmd":["c"],"WorkingDir":"w",
            "Labels":{{"l":"m"}},"StopSignal":"SIGTERM","Hostname":"h-","ExposedPorts":{{"80/tcp":{{}}}}
            }},"rootfs":{{"type":"layers","diff_ids":["sha256:{digest}"]}}}}"#
    );
    let mut seeds: Vec<_> = [index, manifest, docker, config]
        .map(String::into_bytes)
        .into();
    let names = [
        r#"{"defaultAction":"A","archMap":[{"architecture":"SCMP_ARCH_ARM","subArchitectures":null}],
            "syscalls":[{"names":["read"],"action":"A","includes":{"minKernel":"4.8","caps":["CAP_KILL"]}}]}"#,
        "oci:dir:tag",
        "oci-archive:https://user@example.org:80/a.tar?b=c:v1",
        "docker-archive:a.tar:example.org/a/b:1",
        "linux/arm/v7",
        "root:users\nroot:x:0:0:root:/root:/bin/sh\nusers:x:100:root,other\nmore:x:7:root\n",
    ];
    seeds.extend(names.map(|name| name.as_bytes().to_vec()));
    seeds
}

pub(crate) fn texts() -> Vec<Vec<u8>> {
    let texts = [
        "a/./b//../c/",
        "/absolute/../..",
        "user::rw-,user:1000:r--,group::r--,mask::r--,other::---",
        "user::rwx\nuser:name:r-x:1001\ngroup::r-x # effective\nmask::rwx\nother::---",
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\nroot:x:0:\nusers:x:100:a,b\n",
        "https://user:s3cret@example.org/a.tar?token=s3cret",
        "W/\"tag\"\nSun, 06 Nov 1994 08:49:37 GMT",
        "Tue, 29 Feb 2000 23:59:60 GMT",
        "Fri, 31 Dec 9999 23:59:59 GMT",
        "<ListBucketResult><Contents><Key>a/../b.tar</Key><Size>1</Size></Contents>\
         <Contents><Key>a/b.tar</Key><ETag>&quot;1&quot;</ETag><Size>2</Size>\
         <LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>\
         <Contents><Key>a/b.tar/c.tgz</Key></Contents>\
         <NextContinuationToken>2</NextContinuationToken></ListBucketResult>",
    ];
    let mut seeds: Vec<_> = texts.map(|text| text.as_bytes().to_vec()).into();
    seeds.push(pax_records(&[("path", "x")]));
    let entries = [
        (1, 6, u32::MAX),
        (2, 6, 1000),
        (4, 4, u32::MAX),
        (16, 6, u32::MAX),
        (32, 0, u32::MAX),
    ];
    let entries =
        entries.map(|(tag, permissions, id)| u64::from(id) << 32 | permissions << 16 | tag);
    seeds.push(
        [
            &b"\x02\0\0\0"[..],
            entries.map(u64::to_le_bytes).as_flattened(),
        ]
        .concat(),
    );
    seeds.push(b"\x50\x2a\x4d\x18\x04\0\0\0aaaa\x04\x22\x4d\x18".to_vec());
    seeds.push(b"\x5d\0\0\x80\0\xff\xff\xff\xff\xff\xff\xff\xff".to_vec());
    seeds
}
