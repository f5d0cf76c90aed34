use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{Error, Expression, Outcome, ParseContext};
use crate::base::passwd::Accounts;
use crate::tar::Timestamp;
use crate::tree::{Batch, FileKind, FollowedLinks, Item, Metadata, Name, Place, Tree};

/// 2026-05-20 16:27:29 UTC.
const NOW: i64 = 1_779_294_449;

struct Fake {
    path: &'static [u8],
    user: Option<&'static [u8]>,
    /// `None` if they cannot be read.
    metadata: Option<Metadata>,
}

const FILE: Metadata = Metadata {
    kind: FileKind::File,
    mode: 0o4750,
    links: 2,
    uid: 7,
    gid: 8,
    size: 513,
    blocks: 3,
    device: (0, 0),
    inode: 42,
    file_system: 1,
    atime: at(NOW - 90),
    mtime: at(NOW - 3 * 86_400 - 5),
    ctime: at(NOW + 5),
};

const fn at(seconds: i64) -> Timestamp {
    Timestamp {
        seconds,
        nanoseconds: 5,
    }
}

fn file(path: &'static [u8]) -> Fake {
    Fake {
        path,
        user: Some(b"lisa"),
        metadata: Some(FILE),
    }
}

impl Fake {
    /// Evaluates on a file with these attributes.
    fn evaluate(&self, expression: &Expression, output: &mut Vec<u8>) -> io::Result<Outcome> {
        let slash = self.path.iter().rposition(|&byte| byte == b'/');
        let (path, name) = self.path.split_at(slash.map_or(0, |slash| slash + 1));
        let place = Place {
            directory: &(),
            inode: 1,
            path,
            start: b"top",
            depth: 1,
        };
        let name = Name {
            name,
            kind: self.metadata.map_or(FileKind::File, |file| file.kind),
            inode: FILE.inode,
        };
        let item = Item::in_directory(self, &place, name);
        let (outcome, error) = expression.evaluate(&item, output);
        error.map_or(Ok(outcome), Err)
    }
}

/// A tree in which each file has these attributes.
impl Tree for Fake {
    type Directory = ();

    fn open(&self, (): &(), _: Name<'_>) -> io::Result<()> {
        Ok(())
    }

    fn read(&self, (): &(), _: &mut u64, _: &mut Batch) -> io::Result<()> {
        Ok(())
    }

    fn metadata(&self, (): &(), _: Name<'_>) -> io::Result<Metadata> {
        self.metadata
            .ok_or_else(|| io::ErrorKind::PermissionDenied.into())
    }

    fn target(&self, (): &(), _: Name<'_>) -> io::Result<Cow<'_, [u8]>> {
        Ok(b"Target"[..].into())
    }

    fn user(&self, _: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>> {
        Ok(self.user.map(Cow::Borrowed))
    }

    fn group(&self, _: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>> {
        Ok(None)
    }
}

fn parse_words(words: &[OsString]) -> Result<Expression, Error> {
    let accounts = Accounts::parse(b"lisa:x:7:8:::\nbob:x:9:9:::\n", b"staff:x:8:\n");
    let metadata = |path: &Path, _| match path.to_str() {
        Some("newest") => Ok(Metadata {
            mtime: at(NOW),
            ..FILE
        }),
        Some("same") => Ok(FILE),
        _ => Err(io::ErrorKind::NotFound.into()),
    };
    let context = ParseContext {
        now: at(NOW),
        accounts: &accounts,
        is_terminal: false,
        links: FollowedLinks::None,
        metadata: &metadata,
    };
    Expression::parse(words, &context)
}

fn parse(text: &str) -> Result<Expression, Error> {
    let words: Vec<_> = text.split_whitespace().map(OsString::from).collect();
    parse_words(&words)
}

fn run(text: &str, candidate: &Fake) -> (Outcome, String) {
    let mut output = Vec::new();
    let expression = parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let outcome = candidate.evaluate(&expression, &mut output).unwrap();
    (outcome, output.escape_ascii().to_string())
}

fn is_true(text: &str, candidate: &Fake) -> bool {
    !run(text, candidate).1.is_empty()
}

fn check(candidate: &Fake, accepted: &[&str], rejected: &[&str]) {
    for text in accepted {
        assert!(is_true(text, candidate), "{text}");
    }
    for text in rejected {
        assert!(!is_true(text, candidate), "{text}");
    }
}

#[test]
fn times_at_both_ends_of_their_range_are_formatted() {
    for seconds in [i64::MIN, i64::MAX] {
        for letter in *b"@aAbBcCdDeFgGhHIjklmMnprRsStTuUVwWxXyYzZ+" {
            assert!(
                super::strftime::format(at(seconds), letter).is_some(),
                "{letter}"
            );
        }
    }
}

#[test]
fn and_binds_closer_than_or_and_or_than_comma() {
    let file = file(b"top/a/b.txt");
    check(
        &file,
        &[
            "",
            "-true -o -false -false",
            "-false -a -false -o -true",
            "! -false -a -true",
            "! ( -false -o -false )",
            "! ! -true",
            "-false , -true",
            "-true -a ! -not -true",
        ],
        &[
            "-true , -false",
            "( -true -o -true ) -false",
            "! -true -o -false",
            "-false -o -false , -false",
        ],
    );
    let (_, text) = run(
        "-printf 1 -o -printf 2 , -false -printf 3 , -printf 4",
        &file,
    );
    assert_eq!(text, "14");
}

#[test]
fn only_prune_and_quit_leave_the_implicit_print() {
    let file = file(b"top/a");
    let pruned = Outcome {
        is_pruned: true,
        is_quit: false,
    };
    assert_eq!(run("-prune", &file), (pruned, "top/a\\n".to_owned()));
    assert_eq!(run("-depth -prune", &file).0, Outcome::default());
    let (outcome, text) = run("-print -quit -print0", &file);
    assert!(outcome.is_quit && text == "top/a\\n");
    assert_eq!(run("-quit", &file).1, "");
    assert_eq!(run("-false -o -print0", &file).1, "top/a\\x00");
}

#[test]
fn names_are_matched_by_bytes_and_by_characters() {
    check(
        &file(b"top/Gr\xfcn.TXT"),
        &[
            "-name Gr?n.*",
            "-iname *.txt",
            "-path top*",
            "-ipath TOP/*N.txt",
            "-regex top/Gr.n[.]TXT",
            "-iregex .*txt",
        ],
        &[
            "-name *.txt",
            "-path Gr*",
            "-regex Gr.*",
            "-regex top",
            "-lname *",
        ],
    );
    let words = [OsStr::new("-name"), OsStr::from_bytes(b"*\xfc*")].map(OsStr::to_owned);
    let mut output = Vec::new();
    let expression = parse_words(&words).unwrap();
    file(b"top/Gr\xfcn")
        .evaluate(&expression, &mut output)
        .unwrap();
    assert_eq!(output, b"top/Gr\xfcn\n");
    let mut link = file(b"top/l");
    link.metadata.as_mut().unwrap().kind = FileKind::Symlink;
    check(
        &link,
        &["-lname T*", "-ilname t*", "-type l"],
        &["-lname t*", "-type f,d"],
    );
}

#[test]
fn hostile_patterns_take_linear_time() {
    let name: &'static [u8] = Box::leak(vec![b'a'; 4000].into_boxed_slice());
    let stars = "*a".repeat(500) + "b";
    let groups = format!("{}.*{}b", "(".repeat(60), ")*".repeat(60));
    let extended = "-regextype posix-extended -regex";
    check(
        &file(name),
        &[],
        &[
            &format!("-name {stars}"),
            &format!("-iname {stars}"),
            &format!("{extended} (a*)*(a|a)*b"),
            &format!("{extended} {groups}"),
            &format!("{extended} (a?){{100}}a{{100}}b"),
        ],
    );
    for pattern in [
        "((a{1000}){1000}){1000}".to_owned(),
        "(".repeat(100_000),
        format!("a{}", "*".repeat(100_000)),
        "a{99999}".to_owned(),
    ] {
        assert!(parse(&format!("{extended} {pattern}")).is_err());
    }
    assert!(parse(&"( ".repeat(100_000)).is_err());
    assert!(is_true(
        &format!("{}-true", "! ".repeat(100_000)),
        &file(b"top/a")
    ));
}

#[test]
fn sizes_round_up_to_units() {
    check(
        &file(b"top/a"),
        &[
            "-size 2",
            "-size 513c",
            "-size 257w",
            "-size 1k",
            "-size 1M",
            "-size -2G",
            "-size +1b",
        ],
        &["-size 1", "-size 0k", "-size -1M", "-size +513c", "-empty"],
    );
}

#[test]
fn permissions_match_exactly_or_in_each_or_in_any_bit() {
    check(
        &file(b"top/a"),
        &[
            "-perm 4750",
            "-perm -700",
            "-perm /o=rwx,u+s",
            "-perm u=rwxs,g=rx",
            "-perm -g=r",
            "-perm /000",
            "-perm -u=s",
        ],
        &["-perm 750", "-perm -o=r", "-perm /002", "-perm -a=x"],
    );
}

#[test]
fn owners_are_names_of_the_archive_before_those_of_the_machine() {
    let mut file = file(b"top/a");
    check(
        &file,
        &[
            "-user lisa",
            "-user 7",
            "-uid 7",
            "-uid -8",
            "-gid +7",
            "-group staff",
            "-group 8",
            "-nogroup",
        ],
        &["-user bob", "-user 9", "-nouser", "-user unknown"],
    );
    file.user = Some(b"unknown");
    check(&file, &["-user unknown"], &["-user lisa"]);
    file.user = None;
    check(&file, &["-user lisa", "-nouser"], &["-user unknown"]);
}

#[test]
fn ages_count_whole_days_and_minutes() {
    check(
        &file(b"top/a"),
        &[
            "-mtime 3",
            "-mtime +2",
            "-mtime -4",
            "-amin 2",
            "-amin +1",
            "-cmin -1",
            "-newermt 2026-05-17",
            "-atime 0",
        ],
        &[
            "-mtime 2",
            "-mtime +3",
            "-mtime -3",
            "-amin 1",
            "-newer newest",
            "-newermt @1779294449",
            "-ctime +0",
        ],
    );
    check(
        &file(b"top/a"),
        &[
            "-cnewer newest",
            "-daystart -mtime 3",
            "-newermt 2026-05-17T16:27 -links 2",
            "-samefile same -inum 42",
        ],
        &[
            "-anewer newest",
            "-newermt 2026-05-17T16:27:30+00:00",
            "-links +2",
        ],
    );
    for age in [
        "-mtime 99999999999999999999",
        "-mtime +99999999999999999999",
        "-mmin 0.5",
    ] {
        assert!(!is_true(age, &file(b"top/a")), "{age}");
    }
}

#[test]
fn formats_lay_out_values_as_printf_does() {
    let printf = |format| run(&format!("-printf {format}"), &file(b"top/a/b")).1;
    assert_eq!(
        printf("%p|%f|%h|%P|%H|%d|%y|%l|"),
        "top/a/b|b|top/a|a/b|top|2|f||"
    );
    assert_eq!(
        printf("%s|%b|%k|%m|%#m|%M|%n|%i|%D|"),
        "513|3|2|4750|04750|-rwsr-x---|2|42|1|"
    );
    assert_eq!(
        printf("%u|%g|%U|%G|%6s|%-6s|%.2p|%04d|%+d|%+04d|"),
        "lisa|8|7|8|   513|513   |to|0002|+2|+002|"
    );
    assert_eq!(printf("%t|"), "Sun May 17 16:27:24.0000000050 2026|");
    assert_eq!(
        printf("%T@|%AS|%TY-%Tm-%Td|%Tj|%CF|"),
        "1779035244.0000000050|59.0000000050|2026-05-17|137|2026-05-20|"
    );
    assert_eq!(printf("\\101\\n\\t\\0%%\\cx"), "A\\n\\t\\x00%");
    for format in ["%", "%q", "%T", "%TQ", "\\q", "\\", "%99999p"] {
        assert!(parse(&format!("-printf {format}")).is_err(), "{format}");
    }
    let line = run("-ls", &file(b"top/a")).1;
    assert_eq!(
        line,
        "       42      2 -rwsr-x---   2 lisa     8             513 May 17 16:27 top/a\\n"
    );
}

#[test]
fn attributes_are_read_only_when_they_are_needed() {
    for text in [
        "-name a",
        "-type f -regex x -prune",
        "-printf %p%d%y",
        "-maxdepth 1",
    ] {
        assert!(!parse(text).unwrap().needs_metadata(), "{text}");
    }
    for text in [
        "! -size 1",
        "( -empty )",
        "-name a , -printf %s",
        "-false -o -ls",
        "-user lisa",
    ] {
        assert!(parse(text).unwrap().needs_metadata(), "{text}");
    }
    let unreadable = Fake {
        metadata: None,
        ..file(b"top/a")
    };
    check(&unreadable, &["-name a -o -size 1"], &["-name b -size 1"]);
    let mut output = Vec::new();
    let expression = parse("-print -size 1").unwrap();
    let error = unreadable.evaluate(&expression, &mut output);
    assert_eq!(error.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(output, b"top/a\n");
}

#[test]
fn options_are_of_the_whole_walk() {
    let expression = parse("-name a -o -maxdepth 3 -mindepth 1 -depth -xdev").unwrap();
    assert_eq!(
        (expression.options.max_depth, expression.options.min_depth),
        (Some(3), 1)
    );
    assert!(expression.options.is_depth_first && expression.options.is_one_file_system);
    let expression = parse("").unwrap();
    assert_eq!(
        (expression.options.max_depth, expression.options.min_depth),
        (None, 0)
    );
    assert!(!expression.options.is_depth_first && !expression.options.is_one_file_system);
}

#[test]
fn errors_name_the_word_and_the_reason() {
    for (text, message) in [
        ("-foo", "unknown predicate '-foo'"),
        ("-name", "missing argument to '-name'"),
        ("a\u{1b}", "paths must precede expression: 'a\\033'"),
        (
            "-o -true",
            "invalid expression: expected an expression before '-o'",
        ),
        (
            "-true -o",
            "invalid expression: expected an expression after '-o'",
        ),
        (
            "( )",
            "invalid expression: expected an expression before ')'",
        ),
        (
            "( ! )",
            "invalid expression: expected an expression before ')'",
        ),
        (
            "( -true",
            "invalid expression: I was expecting to find a ')' somewhere but did not see one",
        ),
        ("-true )", "invalid expression: you have too many ')'"),
        (
            "-delete",
            "'-delete' is not supported: tarfs find changes nothing",
        ),
        (
            "-exec rm",
            "'-exec' is not supported: tarfs find runs no programs; write -print0 into `xargs -0`",
        ),
        (
            "-newerBm x",
            "'-newerBm' is not supported: times of birth are not examined",
        ),
        ("-newer gone", "cannot examine 'gone': entity not found"),
        (
            "-regex \\(a\\)\\1",
            "invalid argument '\\\\(a\\\\)\\\\1' to '-regex': back-references are not supported",
        ),
        (
            "-printf %",
            "invalid argument '%' to '-printf': % at its end",
        ),
    ] {
        assert_eq!(parse(text).unwrap_err().to_string(), message);
    }
}
