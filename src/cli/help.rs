//! Order and brevity of the help: headings, the flags that `-h` shows, and examples.
//!
//! The flags themselves are declared in [`args`](super::args) and [`commands`](super::commands).

use clap::Command;

/// Flags by heading, in the order of the help. A flag of several verbs has the same heading in all.
const HEADINGS: [(&str, &str); 12] = [
    (
        "Source",
        "headers layers whiteouts platform expect_sha256 compression ignore_zeros allow_truncated",
    ),
    (
        "Selection",
        "shard shards include exclude strip_components root xattrs_include xattrs_exclude no_xattrs no_acls",
    ),
    (
        "Output",
        "directory output publish long recursive all directory_itself by_size by_time unsorted reverse inode one_per_line numeric_uid_gid to_stdout dry_run waits_for_disk json format summarize max_depth total apparent_size inodes human_readable changes verbose quiet stats",
    ),
    (
        "Existing files",
        "atomic resume delete checksum keep_old_files skip_old_files force asks asks_once interactive dir preserve_root no_preserve_root one_file_system no_one_file_system",
    ),
    (
        "Ownership",
        "numeric_owner same_owner no_same_owner same_permissions no_same_permissions reference from no_dereference",
    ),
    ("Mount", "options writable upper copy_to namespace lazy"),
    (
        "Process",
        "foreground wait_index restart restart_timeout idle_timeout log_file metrics",
    ),
    ("Container", "terminal cap_add cap_drop security_opt"),
    (
        "Prefetch",
        "prefetch prefetch_rate record replay max_profile_size",
    ),
    (
        "Cache",
        "cache_dir index no_published_index index_sha256 offline cache_size no_disk_cache max_size older_than",
    ),
    (
        "Limits",
        "memory index_memory max_entries max_unpacked_size writers jobs",
    ),
    (
        "Network",
        "timeout endpoint_url mirror_urls via via_credentials hosts_dir cacert cert key allow_insecure_redirects connections chunk_size min_speed min_speed_wait retries",
    ),
];

/// Before the purpose of an example.
const PURPOSE: &str = "\n  # ";

struct VerbHelp {
    verb: &'static str,
    /// Flags that `-h` shows; empty for all.
    short: &'static str,
    /// Command lines below their purposes, as the help shows them. `-h` shows the first two.
    examples: &'static str,
}

const VERBS: [VerbHelp; 21] = [
    VerbHelp {
        verb: "mount",
        short: "headers layers root options writable foreground wait_index restart memory",
        examples: "
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
    },
    VerbHelp {
        verb: "umount",
        short: "",
        examples: "
  # unmount, unless it is in use
  tarfs umount mnt
  # unmount even if it is in use
  tarfs umount --lazy mnt
  # unmount everything that this user has mounted
  tarfs umount --all",
    },
    VerbHelp {
        verb: "status",
        short: "",
        examples: "
  # show all mounts of this user
  tarfs status
  # show one mount, with all counters, for programs
  tarfs status --json mnt",
    },
    VerbHelp {
        verb: "materialize",
        short: "headers directory include exclude strip_components atomic resume keep_old_files to_stdout verbose memory",
        examples: "
  # all or nothing
  tarfs materialize --atomic https://example.com/data.tar.gz -C data
  # only what is below a/b
  tarfs materialize https://example.com/data.tar.gz -C data a/b
  # from a pipe
  curl -s https://example.com/data.tar.xz | tarfs materialize - -C data
  # continue after an interruption
  tarfs materialize --resume https://example.com/data.tar.zst -C data",
    },
    VerbHelp {
        verb: "sync",
        short: "headers delete checksum dry_run verbose quiet",
        examples: "
  # bring an older tree to this state, and write only what differs
  tarfs sync --delete https://example.com/data.tar.gz data
  # show what would be done to a copy of a directory
  tarfs sync --delete --dry-run tree copy
  # compare contents, and not only sizes and times
  tarfs sync --checksum data.tar.gz data",
    },
    VerbHelp {
        verb: "copy",
        short: "include exclude atomic keep_old_files skip_old_files dry_run verbose quiet",
        examples: "
  # copy a tree with owners, links, holes and attributes
  tarfs copy tree copy
  # without the object files
  tarfs copy --exclude '*.o' tree copy",
    },
    VerbHelp {
        verb: "shard",
        short: "headers shards json directory verbose quiet",
        examples: "
  # show what each of four workers would read
  tarfs shard plan --shards 4 https://example.com/data.tar.gz
  # write the first quarter, on one of four machines
  tarfs shard write https://example.com/data.tar.gz 1/4 -C data
  # end the work of all
  tarfs shard finish https://example.com/data.tar.gz -C data
  # write the second quarter to a pipe, as a tar archive, with the index of another machine
  tarfs shard tar --index data.idx data.tar.gz 2/4",
    },
    VerbHelp {
        verb: "cat",
        short: "headers layers",
        examples: "
  # print a file
  tarfs cat https://example.com/data.tar.gz a/b/README
  # print two files of an image
  tarfs cat docker://debian:stable etc/os-release etc/debian_version",
    },
    VerbHelp {
        verb: "ls",
        short: "headers layers long recursive json",
        examples: "
  # list one directory
  tarfs ls -l https://example.com/data.tar.gz a/b
  # list all entries, for programs
  tarfs ls -R --json data.tar",
    },
    VerbHelp {
        verb: "find",
        short: "headers layers",
        examples: "
  # print the paths of large files in an archive
  tarfs find https://example.com/data.tar.gz -name *.json -size +1M
  # print the files below a directory, for xargs -0
  tarfs find /srv/data -type f -print0",
    },
    VerbHelp {
        verb: "du",
        short: "headers all summarize max_depth human_readable inodes",
        examples: "
  # sum the directories of an archive
  tarfs du -h -d 1 https://example.com/data.tar.gz
  # count the files below a directory
  tarfs du -s --inodes /srv/data",
    },
    VerbHelp {
        verb: "diff",
        short: "headers checksum json jobs",
        examples: "
  # compare two versions by their indexes alone
  tarfs diff data-1.tar.gz https://example.com/data-2.tar.gz
  # compare an archive with a directory, contents included
  tarfs diff --checksum data.tar.gz /srv/data",
    },
    VerbHelp {
        verb: "chmod",
        short: "",
        examples: "
  # make a tree writable only for its owner
  tarfs chmod -R u+rwX,go-w /srv/data
  # give b the mode of a, and show whether it changes
  tarfs chmod -c --reference a b",
    },
    VerbHelp {
        verb: "chown",
        short: "",
        examples: "
  # change owner and group of a tree
  tarfs chown -R www-data:www-data /srv/data
  # change only the files of one user, and show them
  tarfs chown -Rc --from 1000 lisa /srv/data",
    },
    VerbHelp {
        verb: "rm",
        short: "",
        examples: "
  # remove a tree
  tarfs rm -rf /srv/data/old
  # also what is mounted in it
  tarfs rm -r --no-one-file-system /srv/data/old",
    },
    VerbHelp {
        verb: "image",
        short: "headers platform json",
        examples: "
  # show the layers and the configuration
  tarfs image oci-archive:image.tar
  # the same for programs
  tarfs image --json docker-archive:https://example.com/image.tar",
    },
    VerbHelp {
        verb: "bundle",
        short: "headers platform force terminal cap_add cap_drop quiet",
        examples: "
  # run an image
  tarfs bundle oci-archive:image.tar bundle && crun run -b bundle name
  # run another command on a terminal
  tarfs bundle --terminal oci:image bundle -- sh -l",
    },
    VerbHelp {
        verb: "index",
        short: "headers output quiet memory",
        examples: "
  # save the index for later mounts
  tarfs index https://example.com/data.tar.gz
  # write the index to a file, for `--index`
  tarfs index --output data.idx data.tar.gz",
    },
    VerbHelp {
        verb: "verify",
        short: "headers expect_sha256 json quiet index",
        examples: "
  # look for damage
  tarfs verify https://example.com/data.tar.gz
  # compare an index with its archive
  tarfs verify --index data.idx data.tar.gz",
    },
    VerbHelp {
        verb: "profile",
        short: "",
        examples: "
  # merge two profiles
  tarfs profile --output both start.profile stop.profile
  # keep the first 50 MiB
  tarfs profile --max-size 50MiB --output small both",
    },
    VerbHelp {
        verb: "cache",
        short: "",
        examples: "
  # show what the cache holds
  tarfs cache list
  # remove the oldest data
  tarfs cache prune --max-size 10GiB",
    },
];

/// The purposes and command lines of the examples of `verb`.
pub(crate) fn examples(verb: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let help = VERBS.iter().find(|help| help.verb == verb);
    help.into_iter().flat_map(VerbHelp::examples)
}

impl VerbHelp {
    fn examples(&self) -> impl Iterator<Item = (&'static str, &'static str)> + use<> {
        let examples = self.examples.split(PURPOSE);
        examples.filter_map(|example| example.split_once("\n  "))
    }
}

/// Adds headings and examples to `command`, and shortens `-h`.
pub(crate) fn arrange(command: Command) -> Command {
    VERBS.iter().fold(command, |command, help| {
        command.mut_subcommand(help.verb, |verb| arrange_verb(verb, help))
    })
}

fn arrange_verb(verb: Command, help: &VerbHelp) -> Command {
    let mut examples = help.examples.match_indices(PURPOSE);
    let short = match examples.nth(2) {
        Some((third, _)) => help.examples.split_at(third).0,
        None => help.examples,
    };
    let verb = verb
        .mut_subcommands(|part| arrange_flags(part, help.short))
        .after_help(format!("Examples:{short}"))
        .after_long_help(format!("Examples:{}", help.examples));
    arrange_flags(verb, help.short)
}

fn arrange_flags(command: Command, short: &str) -> Command {
    command.mut_args(|arg| {
        let id = arg.get_id().as_str();
        let is_hidden = !short.is_empty() && !short.split(' ').any(|flag| flag == id);
        let place = HEADINGS.iter().find_map(|(heading, flags)| {
            let place = flags.split(' ').position(|flag| flag == id)?;
            Some((*heading, place))
        });
        match place {
            Some((heading, place)) if !arg.is_positional() => arg
                .help_heading(heading)
                .display_order(place)
                .hide_short_help(is_hidden),
            _ => arg,
        }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;
    use crate::cli::command_line::{Cli, command};

    /// The verbs that users see, and the parts of `cache`.
    fn verbs() -> Vec<Command> {
        let mut command = command();
        command.build();
        let seen = command
            .get_subcommands()
            .filter(|verb| !verb.is_hide_set() && verb.get_name() != "help");
        seen.cloned().collect()
    }

    #[test]
    fn short_help_has_at_most_40_lines_and_two_examples() {
        for mut verb in verbs() {
            let text = verb.render_help().to_string();
            let examples = text.matches("\n  tarfs ").count() + text.matches("| tarfs ").count();
            assert_eq!(examples, 2, "{text}");
            assert!(text.lines().count() <= 40, "{text}");
        }
    }

    #[test]
    fn every_flag_has_a_heading() {
        let mut seen = BTreeSet::new();
        for verb in verbs() {
            for arg in verb
                .get_subcommands()
                .flat_map(Command::get_arguments)
                .chain(verb.get_arguments())
                .filter(|arg| {
                    !arg.is_positional() && !["help", "version"].contains(&arg.get_id().as_str())
                })
            {
                let heading = arg.get_help_heading().unwrap_or_default();
                assert!(HEADINGS.iter().any(|(name, _)| *name == heading), "{arg}");
                seen.insert(arg.get_id().to_string());
            }
        }
        let known = HEADINGS.iter().flat_map(|(_, flags)| flags.split(' '));
        let unused: Vec<_> = known.filter(|flag| !seen.contains(*flag)).collect();
        assert!(unused.is_empty(), "{unused:?}");
    }

    #[test]
    fn flags_for_tuning_are_only_in_the_long_help() {
        for verb in ["mount", "materialize"] {
            let mut command = command();
            command.build();
            let verb = command.find_subcommand_mut(verb).expect("a verb");
            let (short, long) = (verb.render_help(), verb.render_long_help());
            for flag in [
                "--connections",
                "--chunk-size",
                "--min-speed",
                "--min-speed-wait",
                "--retries",
            ] {
                assert!(!short.to_string().contains(flag), "{short}");
                assert!(long.to_string().contains(flag), "{long}");
            }
        }
    }

    #[test]
    fn examples_are_valid_command_lines() {
        for help in &VERBS {
            let verb = Cli::command();
            assert!(verb.find_subcommand(help.verb).is_some(), "{}", help.verb);
            for (_, line) in help.examples() {
                let words = line
                    .split(" && ")
                    .next()
                    .and_then(|line| line.rsplit("| ").next())
                    .expect("a command");
                let parsed = command().try_get_matches_from(words.split(' '));
                // `@token.txt` is read while the flag is parsed.
                assert!(
                    parsed.is_ok() || line.contains("token.txt"),
                    "{line}: {parsed:?}"
                );
            }
        }
    }
}
