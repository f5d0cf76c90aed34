//! Expressions of `find` against GNU find, on the same tree.

use std::ffi::OsString;
use std::fmt::Write;
use std::fs::{self, File, FileTimes, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

use tarfs::internal::passwd::Accounts;
use tarfs::list::find::{Error, Expression, ParseContext};
use tarfs::tar::Timestamp;
use tarfs::tree::{
    Batch, DirectoryTree, FileKind, FollowedLinks, Item, Name, Place, Tree, metadata_of,
};

use crate::support::cli;
use crate::support::rng::Rng;

/// Choices of a generator.
trait Pick {
    /// One of `items`, which are not empty.
    fn pick<T: Copy>(&mut self, items: &[T]) -> T;
}

impl Pick for Rng {
    fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        let number = self.below(items.len() as u64);
        let number = usize::try_from(number).expect("an index");
        *items.get(number).expect("items")
    }
}

struct World {
    directory: tempfile::TempDir,
    accounts: Accounts,
    tree: DirectoryTree,
}

impl World {
    /// A tree of all types of files but devices, with times of a fraction of a day and of a minute ago.
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("valid");
        let mut rng = Rng::new(21);
        let now = SystemTime::now();
        let root = directory.path().join("tree");
        let parents = ["", "Sub", "sub/deep", "a b", "été", "x[1]"];
        let directories = [&parents[..], &["empty"]].concat();
        for name in &directories {
            fs::create_dir_all(root.join(name)).expect("valid");
        }
        let mut files = Vec::new();
        for number in 0..90 {
            let stem = rng.pick(&[
                "a",
                "B",
                "foo",
                "Foo.C",
                "é",
                "a*b",
                "new\nline",
                "-x",
                "q\\",
                "tab\t\"",
                "z]",
            ]);
            let end = rng.pick(&["", ".txt", ".TXT", ".c", "~", "1", "22"]);
            let parent = root.join(rng.pick(&parents));
            let path = parent.join(format!("{stem}{}{end}", number % 7));
            if fs::symlink_metadata(&path).is_ok() {
                continue;
            }
            match number % 9 {
                0 => symlink(rng.pick(&["foo", "../B", "gone/Away.txt"]), &path).expect("valid"),
                1 if let Some(file) = files.get(files.len() / 2) => {
                    fs::hard_link(file, &path).expect("valid");
                }
                2 if number % 4 == 2 => {
                    let fifo = rustix::fs::FileType::Fifo;
                    rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, 0o640.into(), 0)
                        .expect("valid");
                }
                _ => {
                    fs::write(
                        &path,
                        vec![b'x'; rng.pick(&[0, 1, 2, 511, 512, 513, 1024, 1025, 70_000])],
                    )
                    .expect("valid");
                    if number % 10 == 3 {
                        File::options()
                            .write(true)
                            .open(&path)
                            .expect("valid")
                            .set_len(3 << 20)
                            .expect("valid");
                    }
                    files.push(path);
                }
            }
        }
        // A hole alone, a time to come, and one of a leap year.
        for (name, time) in [
            ("hole", now),
            ("Later", now + Duration::from_hours(2400)),
            (
                "leap",
                SystemTime::UNIX_EPOCH + Duration::from_secs(1_711_000_000),
            ),
        ] {
            let file = File::create(root.join(name)).expect("valid");
            file.set_len(4096).expect("valid");
            file.set_modified(time).expect("valid");
        }
        let directories = directories.iter().skip(1).map(|name| root.join(name));
        for path in files.into_iter().chain(directories) {
            let owner = rng.pick(&[None, None, Some(1), Some(54_321)]);
            // Only root gives files away.
            if rustix::process::geteuid().is_root() {
                std::os::unix::fs::chown(&path, owner, owner).expect("valid");
            }
            let age = rng.pick(&[0, 1, 2, 3, 10, 400]) * 86_400
                + rng.pick(&[0, 1, 5, 20]) * 3600
                + rng.pick(&[0, 1, 2, 7]) * 60
                + 30;
            let time = now - Duration::new(age, 123_456_789);
            let times = FileTimes::new()
                .set_modified(time)
                .set_accessed(time + Duration::from_mins(10));
            let mode = if path.is_dir() {
                rng.pick(&[0o755, 0o1777, 0o2750, 0o700])
            } else {
                rng.pick(&[
                    0o644, 0o600, 0o755, 0o4755, 0o2711, 0o6777, 0o666, 0o440, 0o000,
                ])
            };
            let file = File::open(&path).expect("valid");
            file.set_times(times).expect("valid");
            fs::set_permissions(path, Permissions::from_mode(mode)).expect("valid");
        }
        let world = Self {
            directory,
            accounts: Accounts::load_system(),
            tree: DirectoryTree::new(),
        };
        // Directories and links have their times of access from now on.
        world.find(&["tree", "-printf", "%l", "-empty"].map(OsString::from));
        world
    }

    fn find(&self, words: &[OsString]) -> Output {
        let mut find = Command::new("find");
        find.args(words).current_dir(self.directory.path());
        find.env("TZ", "UTC").env("LC_ALL", "C.UTF-8");
        find.output().expect("GNU find")
    }

    fn parse(&self, words: &[OsString]) -> Result<Expression, Error> {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .expect("valid");
        let metadata = |path: &Path, _| metadata_of(&self.directory.path().join(path));
        let context = ParseContext {
            now: Timestamp {
                seconds: now.as_secs().try_into().expect("valid"),
                nanoseconds: now.subsec_nanos(),
            },
            accounts: &self.accounts,
            is_terminal: false,
            links: FollowedLinks::None,
            metadata: &metadata,
        };
        Expression::parse(words, &context)
    }

    /// Evaluates on `item` and the files below it, in the order of GNU find. `false` to end.
    fn walk(
        &self,
        expression: &Expression,
        item: &Item<'_, DirectoryTree>,
        output: &mut Vec<u8>,
    ) -> bool {
        let mut is_pruned = false;
        let is_in_depth = item.depth() >= expression.options.min_depth;
        let mut evaluate = || {
            let (outcome, error) = expression.evaluate(item, output);
            assert!(error.is_none());
            is_pruned = outcome.is_pruned;
            !outcome.is_quit
        };
        let is_last = expression.options.is_depth_first;
        if is_in_depth && !is_last && !evaluate() {
            return false;
        }
        let is_leaf = expression
            .options
            .max_depth
            .is_some_and(|max| item.depth() >= max);
        if item.kind() == FileKind::Directory && !is_pruned && !is_leaf {
            let directory = item.open().expect("valid");
            let place = Place {
                directory: &directory,
                inode: item.inode(),
                path: item.path(),
                start: item.start(),
                depth: item.depth(),
            };
            let (mut names, mut position, mut len) = (Batch::default(), 0, usize::MAX);
            while names.len() != len {
                len = names.len();
                let read = self.tree.read(&directory, &mut position, &mut names);
                read.expect("valid");
            }
            for name in names.iter() {
                let child = Item::in_directory(&self.tree, &place, name);
                if !self.walk(expression, &child, output) {
                    return false;
                }
            }
        }
        !(is_in_depth && is_last) || {
            let (outcome, error) = expression.evaluate(item, output);
            assert!(error.is_none());
            !outcome.is_quit
        }
    }

    fn evaluate(&self, start: &str, words: &[OsString]) -> Vec<u8> {
        let expression = self.parse(words);
        let expression = expression.unwrap_or_else(|error| panic!("{words:?}: {error}"));
        let mut output = Vec::new();
        let base = OwnedFd::from(File::open(self.directory.path()).expect("valid")).into();
        let found = metadata_of(&self.directory.path().join(start)).expect("valid");
        let name = Name {
            name: start.as_bytes(),
            kind: found.kind,
            inode: found.inode,
        };
        self.walk(
            &expression,
            &Item::at_start(&self.tree, &base, name),
            &mut output,
        );
        output
    }

    /// Compares the output of GNU find with ours.
    fn compare(&self, start: &str, words: &[OsString]) {
        let mut ours = self.evaluate(start, words);
        let theirs = self.find(&[&[OsString::from(start)], words].concat());
        let messages = String::from_utf8_lossy(&theirs.stderr);
        assert!(theirs.status.success(), "{words:?}: {messages}");
        if ours != theirs.stdout {
            // A file may have become older by a unit in between.
            ours = self.evaluate(start, words);
        }
        let (ours, theirs) = (ours.escape_ascii(), theirs.stdout.escape_ascii());
        assert_eq!(ours.to_string(), theirs.to_string(), "{words:?}");
    }
}

const TESTS: &[&[&str]] = &[
    &["-name", "-iname", "-lname", "-ilname"],
    &["-path", "-wholename", "-ipath"],
    &["-size"],
    &["-mtime", "-atime", "-ctime"],
    &["-mmin", "-amin", "-cmin"],
    &["-perm"],
    &["-type", "-xtype"],
    &["-user", "-group"],
    &["-uid", "-gid", "-links"],
    &[
        "-newer",
        "-anewer",
        "-cnewer",
        "-newermm",
        "-neweram",
        "-newerma",
        "-newercc",
        "-samefile",
    ],
    &["-newermt", "-newerat"],
    &["-empty", "-true", "-false"],
];

const GLOBS: &[&str] = &[
    "*",
    "a*",
    "*.c",
    "*.[ct]*",
    "?",
    "??",
    "[!a]*",
    "[^a-f]*",
    "*é*",
    "?[0-9]*",
    "\\*",
    "a\\**",
    "[[:digit:]",
    "*\n*",
    "*[]]*",
    "FOO*",
    "*.TXT",
    "*[1-3].txt",
    "*\\\\*",
    "[a-",
    "*-x*",
    "*[B-F]*",
    "foo",
    "../B",
];

const PATHS: &[&str] = &[
    "*/sub/*",
    "tree/*",
    "*",
    "*é/*",
    "*/[a-c]*",
    "tree/Sub",
    "*x\\[1\\]*",
    "*SUB*",
    "tree/?",
    "./*",
    "tree?sub*",
    "*deep",
];

const MODES: &[&str] = &[
    "644",
    "-644",
    "/111",
    "/6000",
    "-4000",
    "000",
    "/000",
    "-000",
    "0755",
    "u=rwx,go=rx",
    "-u+x",
    "/a+x",
    "-g=s",
    "/u=s,g=s",
    "u=rw,g=u,o=g-w",
    "-+t",
    "/o=w",
    "a=r,u+w",
    "-u=rwX",
    "-=444",
    "-+644",
    "/a-w,+4",
    "+x",
    "=",
    "1777",
    "-o=t",
    "ug=rw",
];

const REGEXES: &[(&str, &[&str])] = &[
    (
        "emacs",
        &[
            ".*",
            "tree/.*\\.c",
            ".*[0-9]+",
            ".*\\(txt\\|c\\)",
            "tree/[a-zB]?[^/]*",
            "*tree",
            "+",
            ".*/\\w+",
            ".*\\bfoo.*",
            "tree\\(/[^/]+\\)?",
            ".*\\{2\\}",
            ".*[[:alpha:]]",
            "tree$",
            "^tree",
            "tree/a^b",
            "tree.*",
            "\\(tree\\)*.*\\'",
            ".*\\<B.*",
            "[t][r]ee/\\(a\\|\\)[^/]*",
            ".*/[]z]*.*",
            "tree/.*\\.c\\|tree/Sub",
            "\\`tree",
            ".*\\W.",
            "tree/a++.*",
        ],
    ),
    ("findutils-default", &[".*", ".*line.*", "tree/.*[^0-9]"]),
    (
        "posix-basic",
        &[
            ".*",
            ".*[[:digit:]]",
            "tree/[[:alpha:]]*",
            ".*\\(2\\)\\{2\\}",
            ".*\\.\\(c\\|txt\\)",
            ".*[0-9]\\+",
            "*",
            "tree/.\\?.*",
            "tree/[^/]\\{1,4\\}",
            "\\(*a\\)",
            "tree\\(/.*\\)*",
            ".*[[.a.]b].*",
            ".*2\\{2,\\}.*",
            "a|b",
            "tree+",
            ".*[[:upper:]].*",
        ],
    ),
    (
        "posix-extended",
        &[
            ".*",
            ".*(txt|c)",
            "tree(/[^/]+){1,2}",
            ".*[[:upper:]].*",
            "tree/(a|B|foo)[0-9]*",
            ".*2{2}.*",
            "(tree)?.*",
            "()tree",
            "tree/[^[:space:]]+",
            "tree|tree/Sub",
            "^tree$",
            ".*\\.c",
            ".*a+?.*",
            "tree)",
            ".*[[:lower:]]é?.*",
            "tree/[a-z[:digit:]]*",
            ".*x\\[1].*",
            "tree(/(a|b|[f-h]o*)+[0-9]*)*",
            ".*(é|à).*",
            ".*[[:punct:]]",
            ".*[[:blank:]].*",
            ".*[[:cntrl:]].*",
        ],
    ),
];

fn argument(primary: &str, rng: &mut Rng) -> Option<String> {
    let sign = rng.pick(&["", "+", "-"]);
    Some(match primary {
        "-name" | "-iname" | "-lname" | "-ilname" => (rng.pick(GLOBS)).to_owned(),
        "-path" | "-wholename" | "-ipath" => (rng.pick(PATHS)).to_owned(),
        "-size" => {
            let unit = rng.pick(&["", "c", "w", "b", "k", "M", "G"]);
            format!("{sign}{}{unit}", rng.pick(&[0, 1, 2, 3, 137, 512, 1024]))
        }
        "-mtime" | "-atime" | "-ctime" => {
            format!(
                "{sign}{}",
                rng.pick(&["0", "1", "2", "3", "10", "0.5", "400", "99999999"])
            )
        }
        "-mmin" | "-amin" | "-cmin" => {
            format!(
                "{sign}{}",
                rng.pick(&["0", "1", "5", "1441", "1500", "62", "61.3", "1e3"])
            )
        }
        "-perm" => (rng.pick(MODES)).to_owned(),
        "-type" | "-xtype" => {
            (rng.pick(&["f", "d", "l", "p", "f,d", "l,p,s", "b", "c"])).to_owned()
        }
        "-user" | "-group" => (rng.pick(&["root", "daemon", "1", "0", "54321", "99"])).to_owned(),
        "-uid" | "-gid" | "-links" => format!("{sign}{}", rng.pick(&[0, 1, 2, 3, 60_000])),
        "-newermt" | "-newerat" => (rng.pick(&[
            "@0",
            "2026-01-01",
            "2025-12-31 23:59:59",
            "2030-02-03T04:05:06Z",
            "@4102444800",
        ]))
        .to_owned(),
        name if name.contains("newer") || name == "-samefile" => (rng.pick(&[
            "tree",
            "tree/Sub",
            "tree/sub/deep",
            "tree/empty",
            "tree/été",
        ]))
        .to_owned(),
        _ => return None,
    })
}

fn format(rng: &mut Rng) -> String {
    let mut format = String::new();
    for _ in 0..=rng.below(4) {
        let flags = rng.pick(&["", "", "", "-", "0", "+", " ", "#", "-0"]);
        let width = rng.pick(&["", "", "3", "12", "30", "2.1", ".3", "6.4"]);
        // GNU find refuses some flags for other directives.
        let directive = rng.pick(&[
            "p", "f", "h", "P", "H", "s", "b", "k", "M", "n", "u", "g", "U", "G", "y", "Y", "l",
            "i", "D", "a", "c", "t", "A@", "C+", "T@", "Ta", "TA", "Tb", "TB", "Tc", "Td", "TD",
            "TF", "TH", "TI", "Tj", "Tk", "Tl", "Tm", "TM", "Tp", "Tr", "TS", "TT", "TU", "Tw",
            "TW", "Tx", "TX", "Ty", "TY", "TZ", "T+", "Th", "d", "m",
        ]);
        let is_number = matches!(directive, "d" | "m");
        let flags = if is_number || flags == "-" { flags } else { "" };
        let flags = if directive == "d" {
            flags.replace('#', "")
        } else {
            flags.replace(['+', ' '], "")
        };
        format += rng.pick(&["", "<", "%%", "\\t", "\\101\\0", "é"]);
        write!(format, "%{flags}{width}{directive}").expect("a String takes everything");
    }
    format + rng.pick(&["\\n", "\\0", "|"])
}

fn operand(rng: &mut Rng, depth: usize, words: &mut Vec<String>) {
    let mut push = |word: &str| words.push(word.to_owned());
    match rng.below(14) {
        0 if depth > 0 => {
            push("!");
            operand(rng, depth - 1, words);
        }
        1 | 2 if depth > 0 => {
            push("(");
            expression(rng, depth - 1, words);
            words.push(")".to_owned());
        }
        3 => {
            let (name, patterns) = rng.pick(REGEXES);
            push("-regextype");
            push(name);
            push(rng.pick(&["-regex", "-regex", "-iregex"]));
            push(rng.pick(patterns));
        }
        4 => {
            push("-printf");
            let format = format(rng);
            push(&format);
        }
        5 => push(rng.pick(&["-print", "-print0", "-prune", "-prune"])),
        6 if rng.below(8) == 0 => push("-quit"),
        6 if rng.below(3) == 0 => {
            push(rng.pick(&["-maxdepth", "-mindepth"]));
            push(rng.pick(&["0", "1", "2", "3"]));
        }
        _ => {
            let group = rng.pick(TESTS);
            let primary = rng.pick(group);
            push(primary);
            if let Some(argument) = argument(primary, rng) {
                push(&argument);
            }
        }
    }
}

fn expression(rng: &mut Rng, depth: usize, words: &mut Vec<String>) {
    operand(rng, depth, words);
    for _ in 0..rng.below(3) {
        let operator = rng.pick(&["", "", "-a", "-o", "-or", "-and"]);
        if !operator.is_empty() {
            words.push(operator.to_owned());
        }
        operand(rng, depth, words);
    }
}

#[test]
fn generated_expressions_print_as_in_gnu_find() {
    let world = World::new();
    let mut rng = Rng::new(4);
    for _ in 0..700 {
        let mut words = Vec::new();
        // Within an expression, GNU find takes -daystart for no operand.
        if rng.below(6) == 0 {
            words.push("-daystart".to_owned());
        }
        expression(&mut rng, 3, &mut words);
        // Within parentheses, and those around an expression without an action, GNU find reorders lists.
        if rng.below(5) == 0 {
            words.push(",".to_owned());
            expression(&mut rng, 2, &mut words);
            words.extend(["-print".to_owned()]);
        }
        let words: Vec<_> = words.into_iter().map(OsString::from).collect();
        world.compare(
            rng.pick(&["tree", "tree", "tree/", ".", "./tree/sub"]),
            &words,
        );
    }
}

#[test]
fn each_argument_of_a_primary_matches_as_in_gnu_find() {
    let world = World::new();
    let compare = |words: &[&str]| {
        let words: Vec<_> = words.iter().map(OsString::from).collect();
        world.compare("tree", &words);
    };
    for glob in GLOBS {
        compare(&["-name", glob, "-o", "-ilname", glob]);
        compare(&["-iname", glob]);
    }
    for path in PATHS {
        compare(&["-path", path, "-print0", ",", "-ipath", path]);
    }
    for mode in MODES {
        compare(&["-perm", mode]);
    }
    for (name, patterns) in REGEXES {
        for pattern in *patterns {
            compare(&["-regextype", name, "-regex", pattern]);
            compare(&["-regextype", name, "-iregex", pattern]);
        }
    }
    compare(&[
        "-not",
        "-path",
        "*[^ -~]*",
        "!",
        "-name",
        "*[\"\t\n]*",
        "!",
        "-nouser",
        "-ls",
    ]);
    compare(&["-name", "*[[:upper:]]*"]);
    let sub = fs::metadata(world.directory.path().join("tree/Sub")).expect("valid");
    compare(&["-inum", &sub.ino().to_string()]);
    compare(&["-empty"]);
    compare(&["-newermt", "2024-03-21"]);
    compare(&["-name", "[hlL]*", "-printf", "%Tj %TU %TW %Te\n"]);
    compare(&["-nouser", "-o", "-not", "-nogroup", "-type", "f"]);
    compare(&[]);
}

#[test]
fn refused_expressions_are_those_of_gnu_find() {
    let world = World::new();
    for words in [
        &["-foo"][..],
        &["-name"],
        &["-o", "-name", "x"],
        &["-name", "x", "-o"],
        &["(", ")"],
        &["(", "-name", "a"],
        &["-name", "a", ")"],
        &["!"],
        &["(", "!", ")"],
        &["-name", "a", "x"],
        &["-perm", "zz"],
        &["-perm", "77777"],
        &["-perm", "+644"],
        &["-type", "q"],
        &["-type", "f,"],
        &["-mtime", "zz"],
        &["-maxdepth", "-1"],
        &["-size", "3x"],
        &["-size", ""],
        &["-links", "x"],
        &["-regextype", "zz"],
        &["-regex", "\\(a"],
        &["-regextype", "posix-extended", "-regex", "*a"],
        &["-regextype", "posix-extended", "-regex", "a{2,1}"],
        &["-regextype", "posix-basic", "-regex", "[a"],
        &["-printf", "%"],
        &["-newermt", "zz"],
        &["-newer", "gone"],
        &["-newermz", "tree"],
        &["-a"],
        &["-name", "a", "-a", "-a", "-name", "b"],
        &["-name", "a", ",", ","],
    ] {
        let words: Vec<_> = words.iter().map(OsString::from).collect();
        assert!(world.parse(&words).is_err(), "{words:?}");
        let theirs = world.find(&[&[OsString::from("tree")], &words[..]].concat());
        assert!(!theirs.status.success(), "{words:?}");
    }
}

// Promises: find-gnu
#[test]
fn times_have_all_letters_of_gnu_find() {
    let place = cli::Place::new();
    fs::create_dir(place.path("times")).expect("made");
    // The ends of years have weeks of other years.
    for year in 1969..2030_i64 {
        for (day, second) in [(-4, 1), (-1, 86_399), (0, 0), (3, 43_200), (59, 3600)] {
            let file = File::create(place.path(&format!("times/{year}{day}"))).expect("made");
            let days = (year - 1970) * 365 + (year - 1969).div_euclid(4) + day;
            let time = rustix::fs::Timespec {
                tv_sec: days * 86_400 + second,
                tv_nsec: 5,
            };
            let times = rustix::fs::Timestamps {
                last_access: time,
                last_modification: time,
            };
            rustix::fs::futimens(&file, &times).expect("ours");
        }
    }
    let letters = "@aAbBcCdDeFgGhHIjklmMnpRsStTuUVwWxXyYzZ+";
    let format = letters.chars().fold(String::new(), |format, letter| {
        format + "%T" + &letter.to_string() + "|"
    });
    let words = ["times", "-type", "f", "-printf", &(format + "\\n")];
    let ours = place.succeeds(&[&["find"][..], &words].concat());
    let theirs = place
        .command("find")
        .args(words)
        .envs([("TZ", "UTC0"), ("LC_ALL", "C")])
        .output();
    let theirs = theirs.expect("GNU find").stdout;
    let sorted = |text: &[u8]| {
        let mut lines: Vec<_> = text
            .split(|&byte| byte == b'\n')
            .map(<[u8]>::to_vec)
            .collect();
        lines.sort_unstable();
        lines
    };
    assert!(ours.output.len() > 300 * letters.len());
    assert_eq!(sorted(&ours.output), sorted(&theirs));
}
