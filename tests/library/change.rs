//! `chmod`, `chown` and `rm` against the programs of the same names.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::support::cli::Place;
use crate::support::fixture::PROGRAM;
use crate::support::program::stderr_text;

/// Makes the tree that is changed, and a link to it.
fn make_tree(place: &Place) {
    let root = place.path("t");
    for name in ["d/e", "x y", "it's", "s", "closed", "shut", "x y/shut"] {
        fs::create_dir_all(root.join(name)).expect("new");
    }
    let files: [&[u8]; 10] = [
        b"f",
        b"d/g",
        b"d/e/h",
        b"x y/n\nl",
        b"it's/a$b",
        b"\xff",
        b"s/id",
        b"closed/q",
        b"x y/shut/r",
        b"../g",
    ];
    for name in files {
        fs::write(root.join(OsStr::from_bytes(name)), "content").expect("space");
    }
    for (target, name) in [
        ("f", "t/l"),
        ("none", "t/dangling"),
        ("d", "t/dl"),
        ("t", "tl"),
    ] {
        symlink(target, place.path(name)).expect("new");
    }
    mknodat(CWD, root.join("p"), FileType::Fifo, Mode::from(0o644), 0).expect("new");
    for (name, mode) in [
        ("s", 0o2755),
        ("s/id", 0o4755),
        ("d/g", 0o600),
        ("closed", 0),
        ("shut", 0),
        ("x y/shut", 0),
    ] {
        fs::set_permissions(root.join(name), PermissionsExt::from_mode(mode)).expect("ours");
    }
    if rustix::process::geteuid().is_root() {
        chown(root.join("d/g"), Some(1), Some(1)).expect("root");
        chown(root.join("x y"), Some(2), Some(2)).expect("root");
    }
}

/// Paths below `root` with mode, owner and group.
fn state(root: &Path) -> Vec<(PathBuf, u32, u32, u32)> {
    let mut states = Vec::new();
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let Ok(found) = path.symlink_metadata() else {
            continue;
        };
        if let (true, Ok(names)) = (found.is_dir(), fs::read_dir(&path)) {
            left.extend(names.flatten().map(|name| name.path()));
        }
        let path = path.strip_prefix(root).expect("below").to_owned();
        states.push((path, found.mode(), found.uid(), found.gid()));
    }
    states.sort();
    states
}

fn sorted_lines(text: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().filter(|line| !line.starts_with("Try '"));
    // Behind the program's name.
    let error = |line: &str| match line.split_once(": ") {
        Some(("tarfs" | "chmod" | "chown" | "rm", error)) => error.to_owned(),
        _ => line.to_owned(),
    };
    let mut lines: Vec<_> = lines.map(error).collect();
    lines.sort_unstable();
    lines
}

/// Runs `words` by the system's program and by tarfs, each on a new tree, and compares all that they do.
#[track_caller]
fn assert_same(words: &str) {
    compare(words, |place, is_ours| {
        if is_ours {
            place.tarfs()
        } else {
            place.command("env")
        }
    });
}

/// Likewise, by the commands that `command` makes in the place of a tree.
#[track_caller]
fn compare(words: &str, command: impl Fn(&Place, bool) -> Command) {
    let [theirs, ours] = [false, true].map(|is_ours| {
        let place = Place::new();
        make_tree(&place);
        let mut command = command(&place, is_ours);
        let output = command
            .args(words.split(' '))
            .current_dir(place.path(""))
            .env("LC_ALL", "C")
            .output()
            .expect("installed");
        let facts = (
            output.status.code(),
            sorted_lines(&output.stdout),
            sorted_lines(&output.stderr),
            state(&place.path("t")),
        );
        for name in [
            "t",
            "t/closed",
            "t/shut",
            "t/x y/shut",
            "t/d",
            "t/d/e",
            "t/s",
        ] {
            // So that it can be removed. It may be gone.
            drop(fs::set_permissions(
                place.path(name),
                PermissionsExt::from_mode(0o755),
            ));
        }
        facts
    });
    assert_eq!(ours, theirs, "{words}");
}

// Promises: change-gnu, change-needed, rm-others
#[test]
fn chmod_does_what_gnu_chmod_does() {
    for words in [
        "chmod -R u+rwX,go-w t",
        "chmod -Rc 700 tl",
        "chmod -v 644 t/l",
        "chmod -v 755 t/s t/s/id",
        "chmod -v 00755 t/s",
        "chmod -v g=rx t/s",
        "chmod -v u+s,g-s t/s t/f",
        "chmod -v =r t/f t/s",
        "chmod -v a-x,+644 t/f t/s",
        "chmod -v =2755 t/f t/s",
        "chmod -v -- -0700 t/f t/s",
        "chmod -v u+7 t/f",
        "chmod -v +7-1 t/f",
        "chmod -v u=rwx,go=,a+X t/f t/d/g",
        "chmod -v +w t/f t/d/g",
        "chmod -rwx t/f t/d",
        "chmod -v -w,u+x t/f t/p",
        "chmod -v -- -w t/f",
        "chmod -v a+w,o=u,g-x t/f t/d",
        "chmod -R -v u+rwx,o-x t",
        "chmod -R -v g+s,o-x t/d/e t/d t",
        "chmod -v g=u,o= t/d/g t/none",
        "chmod -c u=rwX,g=rX,o=t t/d t/f",
        "chmod -v --reference=t/d/g t/s t/f",
        "chmod -f 644 t/none",
        "chmod -v 644 t/dangling",
        "chmod --reference=t/none t/f",
        "chmod u+q t",
        "chmod 8 t",
        "chmod -R --preserve-root 755 /",
    ] {
        assert_same(words);
    }
}

// Promises: change-closed
#[test]
fn chmod_that_forbids_reading_still_reaches_all_files() {
    let place = Place::new();
    fs::create_dir_all(place.path("t/d")).expect("new");
    fs::write(place.path("t/d/f"), "").expect("space");
    place.give_to_user();
    for words in ["-R a-rwx t", "u+rwx t", "u+rwx t/d"] {
        let mut command = place.command_of_user("./tarfs");
        let status = command.arg("chmod").args(words.split(' ')).status();
        assert!(status.expect("started").success(), "{words}");
    }
    let found = place.path("t/d/f").symlink_metadata().expect("there");
    assert_eq!(found.mode() & 0o7777, 0);
}

#[test]
fn closed_directories_are_changed_as_by_gnu_programs() {
    for words in [
        "chmod -Rv u+rwX t",
        "chmod -Rv o-w,g+s t",
        "chmod -Rv o+t t/closed",
        "rm -rv t",
        "rm -rv t/closed t/shut",
        "rm -rf t/closed",
    ] {
        compare(words, |place, is_ours| {
            place.give_to_user();
            place.command_of_user(if is_ours { "./tarfs" } else { "env" })
        });
    }
}

// Promises: change-gnu, change-needed
#[test]
fn chown_does_what_gnu_chown_does() {
    let mut cases = vec![
        "chown nosuch t",
        "chown 4294967295 t",
        "chown :4294967295 t",
        "chown nosuch: t",
        "chown nosuch:nosuch t",
        "chown root.nosuch t",
        "chown --reference=t/none t",
        "chown root:nosuch t",
        "chown -v root t/none",
        "chown -fv root t/none",
        "chown -R --preserve-root root /",
        "chown -R --preserve-root --from=4242 root /.",
    ];
    if rustix::process::geteuid().is_root() {
        cases.extend([
            "chown -Rv daemon t",
            "chown -v daemon:bin t/l t/f",
            "chown -hv daemon:bin t/l t/f t/dangling",
            "chown -v :bin t/f t/d/g",
            "chown -v bin: t/f",
            "chown -v : t/f",
            "chown -v :2 t/f t/none",
            "chown -Rv :020 t",
            "chown -v 010:020 t/f",
            "chown -v 010 t/f",
            "chown -v 1.2 t/f",
            "chown -v daemon.bin t/f",
            "chown -cv 0 t/f",
            "chown -vc 0 t/f",
            "chown -Rc 1:1 t",
            "chown -Rv --from=daemon root:root t",
            "chown -Rv --from=:bin 5 t",
            "chown -Rv --from=daemon:daemon +77:+78 t",
            "chown -Rv --reference=t/d/g t",
            "chown -R 1 tl",
            "chown 1 tl",
        ]);
    }
    for words in cases {
        assert_same(words);
    }
}

// Promises: rm-asks
#[test]
fn rm_asks_about_each_file_as_gnu_rm_does() {
    // Directories hold one name each, because GNU rm sorts them.
    let script = r#"mkdir -p d/e/f empty; touch d/e/f/x a; echo 1 > c; ln -s a l; mkfifo p
        printf "$1" | "$0" rm $2 2>errors; echo $? "$(find . | sort)"; cat errors"#;
    for operands in [
        "-i a c l p",
        "-iv a none c",
        "-ri d",
        "-ri d/",
        "-ri empty a",
        "-di empty d",
        "--interactive a",
        "--interactive=always a",
        "--interactive=once a c l p",
        "--interactive=never a",
        "-i -f a none",
        "-f -i a none",
        "-I -i a",
        "-i -I a c l p",
    ] {
        for answers in [
            "y\ny\ny\ny\ny\ny\ny\ny\n",
            "y\nn\ny\n",
            "y\ny\ny\nn\n",
            "y\ny\ny\ny\nn\n",
            "n\n",
            "",
        ] {
            // env(1) runs GNU rm by its name.
            let said = [PROGRAM, "env"].map(|program| {
                let place = tempfile::tempdir().expect("a directory");
                let mut shell = Command::new("bash");
                shell.args(["-c", script, program, answers, operands]);
                let ended = shell.current_dir(place.path()).output().expect("bash");
                let said = String::from_utf8_lossy(&ended.stdout).into_owned();
                let questions = said.replace("tarfs: ", "rm: ");
                let questions = questions.split("rm: ").map(str::to_owned);
                questions.collect::<Vec<_>>()
            });
            let [said, mut expected] = said;
            let all_agree = !answers.contains('n') && !answers.is_empty();
            // GNU rm also asks about a directory in which a file stays, and then cannot remove it.
            expected.retain(|question| {
                !question.starts_with("remove directory") || said.contains(question) || all_agree
            });
            assert_eq!(said, expected, "{operands}, {answers}");
        }
    }
}

// Promises: rm-asks
#[test]
fn rm_removes_no_closed_directory_without_an_answer() {
    let place = Place::new();
    place.give_to_user();
    let script = r#"mkdir -p closed above/closed; chmod 0 closed above/closed
        "$0" rm -di closed </dev/null; printf 'y\n' | "$0" rm -ri closed; printf 'y\ny\n' | "$0" rm -ri above
        ls -d closed above/closed"#;
    let mut shell = place.command_of_user("bash");
    let ended = shell
        .args(["-c", script, "./tarfs"])
        .output()
        .expect("bash");
    let told = stderr_text(&ended);
    assert_eq!(
        String::from_utf8_lossy(&ended.stdout),
        "above/closed\nclosed\n",
        "{told}"
    );
    assert!(
        told.contains("remove write-protected directory 'closed'? "),
        "{told}"
    );
}

// Promises: rm-asks
#[test]
fn rm_asks_about_write_protected_directories_as_gnu_rm_does() {
    let script = r#"mkdir -p d/e d/closed; touch d/e/f; chmod 555 d/e; chmod 0 d/closed
        mkdir last; touch last/f; chmod 555 last
        for question in 1 2 3 4 5 6 7 8 9; do echo y; done | "$0" rm -ri d/e d/closed last 2>&1; chmod -R 755 d last"#;
    let said = ["./tarfs", "env"].map(|program| {
        let place = Place::new();
        place.give_to_user();
        let mut shell = place.command_of_user("bash");
        let ended = shell.args(["-c", script, program]).env("LC_ALL", "C");
        let said = ended.output().expect("bash").stdout;
        let said = String::from_utf8_lossy(&said).replace("tarfs: ", "rm: ");
        said.replace("? rm: ", "?\nrm: ")
    });
    assert!(said[1].contains("descend into write-protected directory 'd/e'?"));
    assert_eq!(said[0], said[1]);
}

// Promises: rm-asks
#[test]
fn rm_reads_an_answer_of_any_length_in_little_memory() {
    let place = Place::new();
    place.put("f", "kept");
    let script = r#"ulimit -v 400000; head -c 500000000 /dev/zero | "$0" rm -i f; echo $?; ls f"#;
    let mut shell = place.command("bash");
    let ended = shell.args(["-c", script, PROGRAM]).output().expect("bash");
    assert_eq!(
        String::from_utf8_lossy(&ended.stdout),
        "0\nf\n",
        "{}",
        stderr_text(&ended)
    );
}

// Promises: rm-asks
#[test]
fn rm_asks_once_when_gnu_rm_does() {
    let script = r#"mkdir -p d/e; touch a b c d/f g; echo "$1" | "$0" rm -I $2 2>errors; echo $? "$(find . | sort)"; cat errors"#;
    for operands in [
        "a b c g",
        "a b c",
        "a",
        "-r d",
        "-r d a",
        "-f a b c g",
        "-rf d",
        "-I -I a b c g",
        "-f -I -r d",
    ] {
        for answer in ["y", "Yes", "n", ""] {
            // env(1) runs GNU rm by its name.
            let said = [PROGRAM, "env"].map(|program| {
                let place = tempfile::tempdir().expect("a directory");
                let mut shell = Command::new("bash");
                shell.args(["-c", script, program, answer, operands]);
                let ended = shell.current_dir(place.path()).output().expect("bash");
                let said = String::from_utf8_lossy(&ended.stdout).into_owned();
                said.replace("tarfs: ", "rm: ")
            });
            assert_eq!(said[0], said[1], "{operands}, {answer}");
        }
    }
}

// Promises: rm-gnu, rm-others
#[test]
fn rm_does_what_gnu_rm_does() {
    for words in [
        "rm t",
        "rm -d t/d",
        "rm -dv t/d/e",
        "rm -v t/f t/none t/l t/p",
        "rm -fv t/none t/f/x t/f",
        "rm t/f/x",
        "rm -rv t/d t/s",
        "rm -rfv t/d g none",
        "rm -rv tl",
        "rm -rf . ..",
        "rm -rv t/. t/..",
        "rm -rv t/d/",
        "rm -v t/f/",
        "rm -r t/./d t//s",
        "rm -rv t/d/e t/d",
        "rm -rv t/d t/d/e t/d",
        "rm -rfv t/d t/d/e t/./d t/d",
        "rm -rf /",
    ] {
        assert_same(words);
    }
}

// Promises: rm-gnu
#[test]
fn rm_follows_no_link_with_a_slash() {
    let place = Place::new();
    make_tree(&place);
    let told = place.run(&["rm", "-r", "tl/"]);
    assert_eq!(told.code, 1);
    assert!(told.complaints.contains("'tl/': Not a directory"));
    assert!(place.path("t/d/e/h").exists());
}

/// Runs `rm`, which prints more lines than its pipe holds, and calls `change` before the last ones.
fn is_success_after(mut rm: Command, change: impl FnOnce()) -> bool {
    rm.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut rm = rm.spawn().expect("started");
    let mut output = rm.stdout.take().expect("a pipe");
    output.read_exact(&mut [0]).expect("a line");
    change();
    io::copy(&mut output, &mut io::sink()).expect("lines");
    rm.wait().expect("ended").success()
}

// Promises: rm-others
#[test]
fn rm_removes_a_large_directory_completely() {
    let place = Place::new();
    fs::create_dir(place.path("out/below")).expect("new");
    for number in 0..20_000 {
        let name = format!("out/below/{number:0>60}");
        fs::write(place.path(&name), "").expect("space");
    }
    let mut rm = place.tarfs();
    rm.args(["rm", "-rv", "-j", "7", "out"]);
    let add = || fs::write(place.path("out/late"), "").expect("space");
    // Only `out` itself was read to its end then.
    assert!(is_success_after(rm, add));
    assert!(!place.path("out").exists());
}

// Promises: rm-others
#[test]
fn rm_beside_another_removal_of_the_same_tree_succeeds() {
    let place = Place::new();
    for number in 0..3000 {
        let name = format!("out/{}/{number:0>60}", number % 7);
        fs::create_dir_all(place.path(&name)).expect("new");
        fs::write(place.path(&name).join("f"), "").expect("space");
    }
    let mut rm = place.tarfs();
    rm.args(["rm", "-rfv", "-j", "3", "out"]);
    let remove = || fs::remove_dir_all(place.path("out")).expect("ours");
    assert!(is_success_after(rm, remove));
}

// Promises: rm-others
#[test]
fn rm_removes_nothing_where_a_directory_was_moved_to() {
    let place = Place::new();
    let deep = format!("t{}", "/d".repeat(40));
    fs::create_dir_all(place.path(&deep)).expect("new");
    fs::create_dir(place.path("d")).expect("new");
    for number in 0..2000 {
        let name = format!("{deep}/{number:0>60}");
        fs::write(place.path(&name), "").expect("space");
    }
    let mut rm = place.command("sh");
    // Upper directories are closed, and opened again from below.
    let line = format!("ulimit -n 64; exec {PROGRAM} rm -rv -j 1 t");
    rm.args(["-c", &line]);
    let move_out = || fs::rename(place.path("t/d/d"), place.path("moved")).expect("ours");
    assert!(!is_success_after(rm, move_out));
    assert!(place.path("d").exists() && !place.path("moved/d").exists());
}
