//! Files, and an archive of them made by GNU tar.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;

use super::rng::Rng;

/// Names and contents, in archive order, and the plain archive.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) files: Vec<(String, Vec<u8>)>,
    pub(crate) tar: Bytes,
}

impl Tree {
    /// Text and noise, empty and sparse, small and large: 15 MB, which pack to about 9 MB.
    pub(crate) fn mixed() -> Arc<Self> {
        static MIXED: LazyLock<Arc<Tree>> = LazyLock::new(|| Arc::new(Tree::packed(mixed(1), 8)));
        Arc::clone(&MIXED)
    }

    /// Files with the lengths and names of [`Tree::mixed`], but other contents.
    pub(crate) fn other() -> Arc<Self> {
        static OTHER: LazyLock<Arc<Tree>> = LazyLock::new(|| Arc::new(Tree::packed(mixed(2), 8)));
        Arc::clone(&OTHER)
    }

    /// 64 MB of noise in 256 files of 4 KiB and 63 of 1 MiB, in an order far from the order of names.
    pub(crate) fn large() -> Arc<Self> {
        static LARGE: LazyLock<Arc<Tree>> = LazyLock::new(|| Arc::new(Tree::packed(large(), 0)));
        Arc::clone(&LARGE)
    }

    /// One file of `content`, called `a`.
    pub(crate) fn single(content: Vec<u8>) -> Self {
        Self::packed(vec![("a".to_owned(), content)], 0)
    }

    /// These files, in this order.
    pub(crate) fn of(files: Vec<(String, Vec<u8>)>) -> Self {
        Self::packed(files, 0)
    }

    /// Packs `files`. The file `sparse` has holes.
    fn packed(files: Vec<(String, Vec<u8>)>, sparse: usize) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        for (number, (name, content)) in files.iter().enumerate() {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            if number == sparse && sparse > 0 {
                write_sparse(&path, content);
            } else {
                fs::write(&path, content).expect("written");
            }
        }
        // In this order, and with the same bytes in every run.
        let packed = Command::new("tar")
            .args([
                "--create",
                "--sparse",
                "--format=gnu",
                "--mtime=@1000000000",
            ])
            .args(["--owner=0", "--group=0", "--numeric-owner", "--mode=0644"])
            .arg("--directory")
            .arg(directory.path())
            .args(files.iter().map(|(name, _)| name))
            .output()
            .expect("GNU tar");
        assert!(packed.status.success(), "{packed:?}");
        Self {
            files,
            tar: packed.stdout.into(),
        }
    }
}

fn mixed(seed: u64) -> Vec<(String, Vec<u8>)> {
    let mut noise = Rng::new(seed);
    let mut files = Vec::new();
    for number in 0..8_usize {
        let name = format!("first/text-{number}");
        files.push((name, noise.text(number * 700)));
    }
    let mut sparse = vec![0; 8 << 20];
    for start in [300_000, 5_000_000] {
        let data = noise.bytes(70_000);
        let place = sparse.get_mut(start..start + data.len()).expect("within");
        place.copy_from_slice(&data);
    }
    files.push(("first/sparse".to_owned(), sparse));
    files.push(("first/empty".to_owned(), Vec::new()));
    files.push(("large-text".to_owned(), noise.text(4_500_000)));
    files.push(("large-noise".to_owned(), noise.bytes(3 << 20)));
    for number in 0..120_usize {
        let content = match number % 3 {
            0 => noise.bytes(17 * number),
            1 => noise.text(10_000 + 7 * number),
            _ => noise.text(512 * (number / 3)),
        };
        files.push((format!("many/of/them/{number}"), content));
    }
    files.push(("last-text".to_owned(), noise.text(2_500_000)));
    files.push(("last-noise".to_owned(), noise.bytes(4_000_000)));
    files.push(("z".to_owned(), b"the end".to_vec()));
    files
}

fn large() -> Vec<(String, Vec<u8>)> {
    let mut noise = Rng::new(7);
    let name = |number: u64| format!("{}/{:03}", number / 160, number * 97 % 319);
    let lens =
        (0..319_u64).map(|number| (name(number), if number % 5 == 4 { 1 << 20 } else { 4096 }));
    lens.map(|(name, len)| (name, noise.bytes(len))).collect()
}

/// Writes nonzero bytes and leaves the rest as holes.
fn write_sparse(path: &Path, content: &[u8]) {
    let file = fs::File::create(path).expect("made");
    file.set_len(content.len() as u64).expect("long enough");
    for (number, block) in content.chunks(4096).enumerate() {
        if block.iter().any(|&byte| byte != 0) {
            file.write_all_at(block, number as u64 * 4096)
                .expect("written");
        }
    }
}
