//! Order and brevity of the help, and its texts about more than one flag: examples, forms of SOURCE, primaries of find.
//!
//! The flags themselves are declared in [`args`](super::args) and [`commands`](super::commands).

use std::ops::Deref;

use clap::builder::Resettable;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use super::args::heading;
use tarfs::internal::environment;

/// Forms of SOURCE, one a line: two spaces separate it from its meaning, as in all tables here.
pub(crate) const SOURCES: &str = "
  PATH  a file on this machine; a directory if the verb takes one
  -  standard input, if the verb reads SOURCE only once
  file://, http://, https://  a file, or an object of a web server
  s3://, gs://, az://  an object of a cloud, as s3://BUCKET/KEY
  s3a://, gcs://, file:/PATH  Hadoop's names of the same
  oci://REGISTRY/REPOSITORY[:TAG|@DIGEST], docker://NAME  an image in a registry
  oci-archive:FILE[:TAG], docker-archive:FILE[:NAME]  an image in a file, which may be a URL
  oci:DIR[:TAG]  an image in a directory
  tar:SOURCE!/PATH  a file inside another archive
  slice:START[+LEN]:SOURCE  a range of bytes of SOURCE
  join:PART,PART  an archive in parts, each a SOURCE; a comma in a PART is \\,
  join:a.tar.gz.*  the same of local files that match a pattern";

/// Primaries of expressions of `tarfs find`.
pub(crate) const PRIMARIES: &str = "
  ( ) ! -not -a -and -o -or ,  operators, as of find(1); a shell needs quotes around ( and )
  -name PATTERN, -iname  its name matches; other tests with i ignore case, too
  -path PATTERN, -wholename, -ipath, -iwholename  its whole path matches
  -lname PATTERN, -ilname  it is a link, and its target matches
  -regex REGEX, -iregex  its whole path matches a regular expression
  -type LETTER  f, d, l, b, c, p or s; several with commas between them
  -xtype LETTER  the same behind a link, or with -L of the link itself
  -size N[c|w|b|k|M|G]  its size; +N is more, and -N less than N units, as of other numbers
  -empty  it is an empty file or directory
  -perm MODE  its mode; -MODE for all of these bits, /MODE for any of them
  -user NAME, -group NAME, -uid N, -gid N  its owner
  -nouser, -nogroup  its owner has no name
  -links N, -inum N, -samefile FILE  number of links, number of the file, or the same file
  -mtime N, -atime N, -ctime N  days since its change, access or change of status
  -mmin N, -amin N, -cmin N  the same in minutes
  -used N  days from its change of status to its access
  -newer FILE, -anewer, -cnewer  changed later than FILE
  -newerXY FILE  X and Y are a, c or m; Y may be t for a time such as 2026-05-20
  -true, -false  constants
  -maxdepth N, -mindepth N  levels below the starting points
  -follow  follow all links, as -L before SOURCE
  -depth, -d  directories come after their contents
  -xdev, -mount  stay on one file system
  -daystart  count days from midnight
  -regextype NAME  dialect of -regex, such as posix-extended
  -noleaf, -warn, -nowarn, -ignore_readdir_race  accepted, without effect
  -print, -print0  print the path, which is the default; print0 ends it with zero
  -printf FORMAT  print FORMAT, such as '%p %s\\n'
  -ls  print as `ls -dils`
  -prune  do not descend into the directory
  -quit  end the search";

/// The items of a table, and the meaning of each.
pub(crate) fn rows(table: &str) -> impl Iterator<Item = (&str, &str)> {
    table
        .lines()
        .filter_map(|row| row.trim_start().split_once("  "))
}

/// Before the purpose of an example.
const PURPOSE: &str = "\n  # ";

/// Command lines of each verb below their purposes, as the help shows them. `-h` shows the first two.
const EXAMPLES: [(&str, &str); 22] = [
    (
        "mount",
        "
  # mount an archive of a web server
  tarfs mount https://example.com/rootfs.tar.zst mnt
  # keep changes in changes/upper
  tarfs mount --writable --upper changes rootfs.tar root
  # fetch everything in the background
  tarfs mount --prefetch all data.tar.gz mnt
  # mount all layers of an image in a registry
  tarfs mount docker://debian:stable root
  # mount all layers of an image
  tarfs mount oci-archive:image.tar:latest root
  # show every archive below a prefix as a directory
  tarfs mount s3://bucket/datasets/ mnt
  # send headers from a file
  tarfs mount --header @token.txt https://example.com/a.tar mnt",
    ),
    (
        "umount",
        "
  # unmount, unless it is in use
  tarfs umount mnt
  # unmount even if it is in use
  tarfs umount --lazy mnt
  # unmount everything that this user has mounted
  tarfs umount --all",
    ),
    (
        "status",
        "
  # show all mounts of this user
  tarfs status
  # show one mount, with all counters, for programs
  tarfs status --json mnt",
    ),
    (
        "materialize",
        "
  # all or nothing
  tarfs materialize --atomic https://example.com/data.tar.gz -C data
  # only what is below a/b
  tarfs materialize https://example.com/data.tar.gz -C data a/b
  # from a pipe
  curl -s https://example.com/data.tar.xz | tarfs materialize - -C data
  # continue after an interruption
  tarfs materialize --resume https://example.com/data.tar.zst -C data",
    ),
    (
        "sync",
        "
  # bring an older tree to this state, and write only what differs
  tarfs sync --delete https://example.com/data.tar.gz data
  # show what would be done to a copy of a directory
  tarfs sync --delete --dry-run tree copy
  # compare contents, and not only sizes and times
  tarfs sync --checksum data.tar.gz data",
    ),
    (
        "copy",
        "
  # copy a tree with owners, links, holes and attributes
  tarfs copy tree copy
  # without the object files
  tarfs copy --exclude '*.o' tree copy",
    ),
    (
        "shard",
        "
  # show what each of four workers would read
  tarfs shard plan --shards 4 https://example.com/data.tar.gz
  # write the first quarter, on one of four machines
  tarfs shard write https://example.com/data.tar.gz 1/4 -C data
  # end the work of all
  tarfs shard finish https://example.com/data.tar.gz -C data
  # write the second quarter to a pipe, as a tar archive, with the index of another machine
  tarfs shard tar --index data.idx data.tar.gz 2/4",
    ),
    (
        "cat",
        "
  # print a file
  tarfs cat https://example.com/data.tar.gz a/b/README
  # print two files of an image
  tarfs cat docker://debian:stable etc/os-release etc/debian_version",
    ),
    (
        "ls",
        "
  # list one directory
  tarfs ls -l https://example.com/data.tar.gz a/b
  # list all entries, for programs
  tarfs ls -R --json data.tar",
    ),
    (
        "find",
        "
  # print the paths of large files in an archive
  tarfs find https://example.com/data.tar.gz -name '*.json' -size +1M
  # print the files below a directory, for xargs -0
  tarfs find /srv/data -type f -print0",
    ),
    (
        "du",
        "
  # sum the directories of an archive
  tarfs du -h -d 1 https://example.com/data.tar.gz
  # count the files below a directory
  tarfs du -s --inodes /srv/data",
    ),
    (
        "diff",
        "
  # compare two versions by their indexes alone
  tarfs diff data-1.tar.gz https://example.com/data-2.tar.gz
  # compare an archive with a directory, contents included
  tarfs diff --checksum data.tar.gz /srv/data",
    ),
    (
        "chmod",
        "
  # make a tree writable only for its owner
  tarfs chmod -R u+rwX,go-w /srv/data
  # give b the mode of a, and show whether it changes
  tarfs chmod -c --reference a b",
    ),
    (
        "chown",
        "
  # change owner and group of a tree
  tarfs chown -R www-data:www-data /srv/data
  # change only the files of one user, and show them
  tarfs chown -Rc --from 1000 lisa /srv/data",
    ),
    (
        "rm",
        "
  # remove a tree
  tarfs rm -rf /srv/data/old
  # also what is mounted in it
  tarfs rm -r --no-one-file-system /srv/data/old",
    ),
    (
        "image",
        "
  # show the layers and the configuration
  tarfs image oci-archive:image.tar
  # the same for programs
  tarfs image --json docker-archive:https://example.com/image.tar",
    ),
    (
        "bundle",
        "
  # run an image
  tarfs bundle oci-archive:image.tar bundle && crun run -b bundle name
  # run another command on a terminal
  tarfs bundle --terminal oci:image bundle -- sh -l",
    ),
    (
        "index",
        "
  # save the index for later mounts
  tarfs index https://example.com/data.tar.gz
  # write the index to a file, for `--index`
  tarfs index --output data.idx data.tar.gz",
    ),
    (
        "verify",
        "
  # look for damage
  tarfs verify https://example.com/data.tar.gz
  # compare an index with its archive
  tarfs verify --index data.idx data.tar.gz",
    ),
    (
        "profile",
        "
  # merge two profiles
  tarfs profile --output both start.profile stop.profile
  # keep the first 50 MiB
  tarfs profile --max-size 50MiB --output small both",
    ),
    (
        "cache",
        "
  # show what the cache holds
  tarfs cache list
  # remove the oldest data
  tarfs cache prune --max-size 10GiB",
    ),
    (
        "daemon",
        "
  # after an upgrade, continue all mounts by the new program
  tarfs daemon upgrade
  # serve mounts until the service manager stops it
  tarfs daemon run",
    ),
];

/// The purposes and command lines of the examples of `verb`.
pub(crate) fn examples(verb: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let text = EXAMPLES.iter().find(|(name, _)| *name == verb);
    let examples = text.map_or("", |(_, text)| text).split(PURPOSE);
    examples.filter_map(|example| example.split_once("\n  "))
}

/// Adds examples and tables to `command`.
pub(crate) fn arrange(command: Command) -> Command {
    let command = command.after_long_help(format!("Forms of SOURCE:\n{}", format_table(SOURCES)));
    let command = EXAMPLES.iter().fold(command, |command, (verb, examples)| {
        command.mut_subcommand(verb, |verb| add_examples(verb, examples))
    });
    command.mut_subcommand("find", |find| {
        find.before_long_help(format!(
            "Expressions, as of find(1):\n{}",
            format_table(PRIMARIES)
        ))
        .help_template(FIND_TEMPLATE)
    })
}

/// The default template, with expressions before arguments.
const FIND_TEMPLATE: &str =
    "{about-with-newline}\n{usage-heading} {usage}\n\n{before-help}{all-args}{after-help}";

/// Width of the first column of a table.
const COLUMN: usize = 26;

fn format_table(table: &str) -> String {
    let row = |(item, meaning): (&str, &str)| {
        let gap = if item.len() > COLUMN {
            format!("\n{:COLUMN$}    ", "")
        } else {
            " ".repeat(COLUMN + 2 - item.len())
        };
        format!("  {item}{gap}{meaning}")
    };
    rows(table).map(row).collect::<Vec<_>>().join("\n")
}

fn add_examples(verb: Command, examples: &'static str) -> Command {
    let third = examples.match_indices(PURPOSE).nth(2);
    let short = third.map_or(examples, |(third, _)| examples.split_at(third).0);
    verb.after_help(format!("Examples:{short}"))
        .after_long_help(format!("Examples:{examples}"))
}

/// Sorts the flags by their headings, because clap shows a heading where its first flag is.
fn sort_headings(verb: Command) -> Command {
    let mut flags: Vec<_> = verb.get_arguments().cloned().collect();
    let rank = |flag: &Arg| {
        heading::ORDER
            .iter()
            .position(|name| flag.get_help_heading() == Some(name))
    };
    flags.sort_by_key(rank);
    let verb = flags.into_iter().fold(verb, |verb, flag| {
        let flag = match flag.get_env() {
            // An empty variable is unset.
            Some(name) if environment::is_empty(name) => flag.env(Resettable::Reset),
            _ => flag,
        };
        // It is put behind the others.
        verb.mut_arg(flag.get_id().clone(), |_| flag)
    });
    verb.mut_subcommands(sort_headings)
}

/// Arguments of a verb, in the order of their headings.
#[derive(Debug)]
pub(crate) struct Sorted<A>(A);

impl<A> Deref for Sorted<A> {
    type Target = A;

    fn deref(&self) -> &A {
        &self.0
    }
}

impl<A: Args> Args for Sorted<A> {
    fn augment_args(command: Command) -> Command {
        let about = command.get_about().cloned().unwrap_or_default();
        // The type describes itself for readers of the code.
        sort_headings(A::augment_args(command))
            .about(about)
            .long_about(Resettable::Reset)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<A: FromArgMatches> FromArgMatches for Sorted<A> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        A::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::command_line::{Cli, command};

    /// The verbs that users see.
    fn verbs() -> Vec<Command> {
        let mut command = command();
        command.build();
        let seen = command
            .get_subcommands()
            .filter(|verb| !verb.is_hide_set() && verb.get_name() != "help");
        seen.cloned().collect()
    }

    fn help_of(verb: &str) -> (String, String) {
        let mut verbs = verbs();
        let verb = verbs.iter_mut().find(|found| found.get_name() == verb);
        let verb = verb.expect("a verb");
        (
            verb.render_help().to_string(),
            verb.render_long_help().to_string(),
        )
    }

    // Promises: help-short
    #[test]
    fn short_help_has_at_most_40_lines_and_two_examples() {
        for mut verb in verbs() {
            let text = verb.render_help().to_string();
            let examples = text.matches("\n  tarfs ").count() + text.matches("| tarfs ").count();
            assert_eq!(examples, 2, "{text}");
            assert!(text.lines().count() <= 40, "{text}");
        }
    }

    // Promises: help-short
    #[test]
    fn headings_are_known_and_network_flags_last() {
        let is_heading = |line: &&str| line.ends_with(':') && !line.starts_with(' ');
        for mut verb in verbs() {
            let text = verb.render_long_help().to_string();
            let headings = text.lines().filter(is_heading);
            let headings: Vec<_> = headings.map(|line| line.trim_end_matches(':')).collect();
            let known = headings
                .iter()
                .filter_map(|found| heading::ORDER.iter().position(|heading| heading == found));
            assert!(known.is_sorted(), "{headings:?}");
            for found in headings {
                let is_own = ["Arguments", "Options", "Commands", "Examples"].contains(&found)
                    || found.starts_with("Expressions");
                assert!(is_own || heading::ORDER.contains(&found), "{text}");
            }
        }
        let (_, long) = help_of("mount");
        let network = long.find("\nNetwork and cache:").expect("a heading");
        for flag in [
            "--connections ",
            "--cache-dir ",
            "--no-disk-cache\n",
            "--via ",
        ] {
            assert!(long.find(flag) > Some(network), "{flag}: {long}");
        }
    }

    #[test]
    fn help_of_a_verb_begins_as_it_is_listed() {
        let list = command();
        for listed in list.get_subcommands().filter(|verb| !verb.is_hide_set()) {
            let about = listed.get_about().expect("each has one").to_string();
            let (short, long) = help_of(listed.get_name());
            assert!(short.starts_with(&about), "{short}");
            assert!(long.starts_with(&about), "{long}");
        }
    }

    #[test]
    fn flag_of_several_verbs_has_one_help() {
        // Flags that are meant as those of each verb's namesake, or about different files.
        const OWN: [&str; 13] = [
            "all",
            "checksum",
            "dry-run",
            "force",
            "help",
            "index",
            "max-size",
            "no-preserve-root",
            "output",
            "preserve-root",
            "recursive",
            "strip-components",
            "verbose",
        ];
        let mut seen = std::collections::BTreeMap::new();
        let mut other = Vec::new();
        for verb in verbs() {
            let parts = verb.get_subcommands().chain([&verb]);
            for flag in parts.flat_map(Command::get_arguments) {
                let Some(name) = flag.get_long().filter(|name| !OWN.contains(name)) else {
                    continue;
                };
                let text = format!(
                    "{:?} {:?} {:?}",
                    flag.get_help().map(ToString::to_string),
                    flag.get_help_heading(),
                    flag.is_hide_short_help_set(),
                );
                let first = seen.entry(name.to_owned()).or_insert_with(|| text.clone());
                if *first != text {
                    other.push(format!("{} --{name}: {first} {text}", verb.get_name()));
                }
            }
        }
        assert!(other.is_empty(), "{other:#?}");
    }

    #[test]
    fn flags_for_tuning_are_only_in_the_long_help() {
        for verb in ["mount", "materialize"] {
            let (short, long) = help_of(verb);
            for flag in [
                "--connections",
                "--chunk-size",
                "--min-speed",
                "--min-speed-wait",
                "--retries",
            ] {
                assert!(!short.contains(flag), "{short}");
                assert!(long.contains(flag), "{long}");
            }
        }
    }

    #[test]
    fn help_of_find_starts_with_its_primaries() {
        let (_, long) = help_of("find");
        let of = |text: &str| long.find(text).unwrap_or_else(|| panic!("{text}: {long}"));
        assert!(of("  -name PATTERN, -iname") < of("\nArguments:"), "{long}");
        let wide = long.lines().filter(|line| line.len() > 100);
        assert_eq!(wide.count(), 0, "{long}");
        assert!(of("  -quit") < of("\nArguments:"), "{long}");
    }

    // Promises: help-short
    #[test]
    fn examples_are_valid_command_lines() {
        for (verb, _) in EXAMPLES {
            let command_line = Cli::command();
            assert!(command_line.find_subcommand(verb).is_some(), "{verb}");
            for (_, line) in examples(verb) {
                let words = line
                    .split(" && ")
                    .next()
                    .and_then(|line| line.rsplit("| ").next())
                    .expect("a command");
                // A shell expands patterns that are not quoted.
                let is_pattern = |word: &str| word.contains(['*', '?']) && !word.contains('\'');
                assert!(!words.split(' ').any(is_pattern), "{line}");
                let words = words.split(' ').map(|word| word.trim_matches('\''));
                let parsed = command().try_get_matches_from(words);
                // `@token.txt` is read while the flag is parsed.
                assert!(
                    parsed.is_ok() || line.contains("token.txt"),
                    "{line}: {parsed:?}"
                );
            }
        }
    }
}
