//! `mount.tarfs`: the helper of mount(8) for `mount -t tarfs` and for /etc/fstab.
//!
//! For a type that the kernel does not know, mount(8) calls `/sbin/mount.TYPE SOURCE DIR [-sfnv] [-N
//! NAMESPACE] [-o OPTIONS] [-t TYPE]`, a link to this program. The helper translates the call to arguments of
//! `tarfs mount` and exits with mount(8)'s codes. Without the link `mount.fuse.tarfs` for `-t fuse.tarfs`,
//! mount(8) calls `mount.fuse3`, which starts `tarfs SOURCE DIR -o OPTIONS`.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, Command, Parser};

use super::before_main;
use super::command_line::{self, Verb};
use super::environment;
use super::startup;
use crate::cli::args::{MountArgs, headers};
use crate::cli::commands::mount;
use crate::cli::ui::output;
use tarfs::fuse::{MountOptions, OptionError};

/// Names under which mount(8) calls this program.
const HELPER_NAMES: [&str; 2] = ["mount.tarfs", "mount.fuse.tarfs"];

/// mount(8)'s exit code for an invalid call.
const EX_USAGE: u8 = 1;
/// mount(8)'s exit code for a failed mount.
const EX_FAIL: u8 = 32;

/// Flags of `tarfs mount` that are not available as mount options.
const FLAGS_WITHOUT_OPTION: [&str; 3] = ["foreground", "help", "version"];

/// Arguments of a mount helper, as mount(8) describes them.
#[derive(Parser, Debug)]
#[command(
    name = "mount.tarfs",
    version,
    about = "Mounts an archive for mount(8) and /etc/fstab",
    after_help = "OPTIONS are the flags of `tarfs mount` as NAME or NAME=VALUE without dashes, and \
                  the options of its -o.",
    max_term_width = 100
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
struct HelperArgs {
    /// The archive: a path or a URL
    source: OsString,
    /// The directory to mount on
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Options, separated by commas; a comma in a value needs a backslash or quotes
    #[arg(short = 'o', value_name = "OPTIONS")]
    options: Vec<String>,
    /// Ignore unknown options
    #[arg(short = 's')]
    sloppy: bool,
    /// Check the arguments without mounting
    #[arg(short = 'f')]
    fake: bool,
    /// Ignored, because there is no mtab
    #[arg(short = 'n')]
    no_mtab: bool,
    /// Print the command that is run
    #[arg(short = 'v')]
    verbose: bool,
    /// Mount in this mount namespace
    #[arg(short = 'N', value_name = "NAMESPACE")]
    namespace: Option<PathBuf>,
    /// Ignored, because the program's name contains the type
    #[arg(short = 't', value_name = "TYPE")]
    kind: Option<String>,
}

/// Returns the helper's arguments, its name first, if mount(8) made this call.
pub(crate) fn helper_arguments(words: &[OsString]) -> Option<Vec<OsString>> {
    let program = Path::new(words.first()?).file_name();
    if HELPER_NAMES
        .iter()
        .any(|name| program == Some(OsStr::new(name)))
    {
        return Some(words.to_vec());
    }
    match words {
        [_, source, directory, flag, options]
            if flag == "-o" && !is_verb(source) && !source.as_encoded_bytes().starts_with(b"-") =>
        {
            let options = options.to_str()?;
            let options = strip_mount_fuse_options(options).into();
            let words = [HELPER_NAMES[1].into(), source.clone(), directory.clone()];
            Some([words.as_slice(), &[flag.clone(), options]].concat())
        }
        _ => None,
    }
}

/// Strips `dev` and `suid` from the end, where `mount.fuse3` appends them unless the user denies them.
fn strip_mount_fuse_options(options: &str) -> &str {
    ["suid", "dev"].into_iter().fold(options, |rest, added| {
        let shorter = rest.strip_suffix(added);
        shorter
            .and_then(|rest| rest.strip_suffix(',').or(rest.is_empty().then_some("")))
            .unwrap_or(rest)
    })
}

fn is_verb(word: &OsStr) -> bool {
    let command = command_line::command();
    let mut verbs = command.get_subcommands();
    word == "help"
        || word.to_str().is_some_and(|word| {
            verbs.any(|verb| {
                verb.get_name() == word || verb.get_all_aliases().any(|name| name == word)
            })
        })
}

pub(crate) fn run(words: &[OsString]) -> ExitCode {
    let call = match HelperArgs::try_parse_from(words) {
        Ok(call) => call,
        Err(error) => return print_usage_error(error),
    };
    let translated = match translate(&call, &mount_command()) {
        Ok(translated) => translated,
        Err(error) => {
            output::print_error(&error);
            return ExitCode::from(error.exit_code());
        }
    };
    if call.verbose {
        let words = headers::redact_arguments(&translated.words).join(OsStr::new(" "));
        output::print_error(format_args!("runs tarfs {}", words.display()));
    }
    // Flags report errors in their values and their combinations.
    let words = [&["tarfs".into()], translated.words.as_slice()].concat();
    let args = match command_line::parse(words) {
        Err(error) => return print_usage_error(error),
        Ok(Verb::Mount(args)) => args,
        Ok(_) => return ExitCode::from(EX_USAGE),
    };
    if let Err(error) = args.check() {
        output::print_error(error);
        return ExitCode::from(EX_USAGE);
    }
    if call.fake {
        return ExitCode::SUCCESS;
    }
    let shown = headers::redact_arguments(&translated.words);
    before_main::show_arguments(&[&["tarfs".into()], shown.as_slice()].concat());
    startup::start(true);
    // A mount by root belongs to the system and outlives root's session.
    match mount::run(&args, environment::is_root()) {
        Ok(code) if code == ExitCode::SUCCESS => {
            if translated.wants_to_write {
                output::print_error(format_args!(
                    "{}: WARNING: source write-protected, mounted read-only.",
                    call.directory.display()
                ));
            }
            code
        }
        Ok(_) => ExitCode::from(EX_FAIL),
        Err(error) => {
            output::print_failure(&error);
            ExitCode::from(EX_FAIL)
        }
    }
}

/// Prints the error like that of any command line, and returns mount(8)'s exit code.
fn print_usage_error(error: clap::Error) -> ExitCode {
    match command_line::print_error(&command_line::without_secret(error)) {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(EX_USAGE),
    }
}

fn mount_command() -> Command {
    MountArgs::augment_args(Command::default())
}

/// A helper's call, translated to arguments of `tarfs`.
#[derive(PartialEq, Eq, Debug)]
struct MountArguments {
    words: Vec<OsString>,
    /// Whether the options ask for `rw`, which mount(8) passes by default, but not for --writable.
    wants_to_write: bool,
}

#[derive(PartialEq, Eq, Debug, thiserror::Error)]
enum TranslateError {
    #[error(transparent)]
    Option(#[from] OptionError),
    #[error("a mount cannot be changed: unmount it, and mount it again with other options")]
    Remount,
}

impl TranslateError {
    fn exit_code(&self) -> u8 {
        match self {
            Self::Remount => EX_FAIL,
            Self::Option(_) => EX_USAGE,
        }
    }
}

/// Translates `call` to arguments of `mount`, which is the clap command of that verb.
fn translate(call: &HelperArgs, mount: &Command) -> Result<MountArguments, TranslateError> {
    let mut words: Vec<OsString> = vec!["mount".into()];
    let mut wants_to_write = None;
    let mut is_writable = false;
    for option in call
        .options
        .iter()
        .flat_map(|options| split_options(options))
    {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option.as_str(), None),
        };
        match name {
            "remount" => return Err(TranslateError::Remount),
            "rw" | "ro" => wants_to_write = Some(name == "rw"),
            _ if MountOptions::is_ignored(name) => {}
            _ => match find_flag(mount, name) {
                Some(flag) => {
                    is_writable |= flag == "writable";
                    // clap refuses a missing or a needless value.
                    let value = value.map_or_else(String::new, |value| format!("={value}"));
                    words.push(format!("--{flag}{value}").into());
                }
                None => match MountOptions::default().apply(&MountOptions::escape(&option)) {
                    Ok(()) => {
                        words.push("-o".into());
                        words.push(MountOptions::escape(&option).into());
                    }
                    Err(OptionError::Unknown(_)) if call.sloppy => {}
                    Err(error) => return Err(error.into()),
                },
            },
        }
    }
    if wants_to_write == Some(false) {
        words.extend(["-o".into(), "ro".into()]);
    }
    if let Some(namespace) = &call.namespace {
        let mut word = OsString::from("--namespace=");
        word.push(namespace);
        words.push(word);
    }
    // clap takes no argument after it for a flag.
    words.push("--".into());
    words.push(call.source.clone());
    words.push(call.directory.clone().into());
    Ok(MountArguments {
        words,
        wants_to_write: wants_to_write == Some(true) && !is_writable,
    })
}

/// Returns the flag for the option `name`.
fn find_flag(mount: &Command, name: &str) -> Option<String> {
    let name = name.replace('_', "-");
    let mut flags = mount.get_arguments();
    let is_flag = flags.any(|flag| flag.get_long() == Some(&name));
    (is_flag && !FLAGS_WITHOUT_OPTION.contains(&name.as_str())).then_some(name)
}

/// Splits options at commas that no backslash or quote protects. Removes both, which mount(8) passes on.
fn split_options(options: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut is_quoted = false;
    let mut letters = options.chars();
    while let Some(letter) = letters.next() {
        let letter = match letter {
            '"' => {
                is_quoted = !is_quoted;
                continue;
            }
            ',' if !is_quoted => {
                found.push(String::new());
                continue;
            }
            '\\' => letters.next().unwrap_or('\\'),
            other => other,
        };
        if let Some(last) = found.last_mut() {
            last.push(letter);
        }
    }
    found.retain(|option| !option.is_empty());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &[&str]) -> Vec<OsString> {
        text.iter().map(OsString::from).collect()
    }

    fn translated(text: &[&str]) -> Result<MountArguments, TranslateError> {
        let call = [&["mount.tarfs"], text].concat();
        translate(
            &HelperArgs::try_parse_from(call).expect("a call"),
            &mount_command(),
        )
    }

    fn flags(options: &str) -> Vec<String> {
        let found = translated(&["S", "D", "-o", options]).expect(options).words;
        let found = found.into_iter().skip(1);
        let found = found.take_while(|word| word != "--");
        found
            .map(|word| word.into_string().expect("UTF-8"))
            .collect()
    }

    #[test]
    fn helper_call_is_recognised_by_name_or_mount_fuse() {
        for name in ["/sbin/mount.tarfs", "mount.fuse.tarfs"] {
            let call = words(&[name, "S", "D"]);
            assert_eq!(helper_arguments(&call), Some(call));
        }
        let by_fuse = words(&["tarfs", "http://h/a", "/m", "-o", "rw,dev,suid"]);
        let call = words(&["mount.fuse.tarfs", "http://h/a", "/m", "-o", "rw"]);
        assert_eq!(helper_arguments(&by_fuse), Some(call));
        for other in [
            &["tarfs", "mount", "/m", "-o", "ro"],
            &["tarfs", "extract", "/m", "-o", "ro"],
            &["tarfs", "help", "/m", "-o", "ro"],
            &["tarfs", "--version", "/m", "-o", "ro"],
            &["tarfs", "S", "D", "-f", "ro"],
        ] {
            assert_eq!(helper_arguments(&words(other)), None, "{other:?}");
        }
        assert_eq!(helper_arguments(&words(&["tarfs", "S", "D"])), None);
    }

    // Promises: helper-flags
    #[test]
    fn options_added_by_mount_fuse_are_stripped() {
        assert_eq!(strip_mount_fuse_options("dev,suid"), "");
        assert_eq!(strip_mount_fuse_options("ro,dev,suid"), "ro");
        assert_eq!(strip_mount_fuse_options("dev,suid,dev,suid"), "dev,suid");
        assert_eq!(strip_mount_fuse_options("nodev,suid"), "nodev");
        assert_eq!(strip_mount_fuse_options("nosuid,dev"), "nosuid");
        assert_eq!(strip_mount_fuse_options("nodev,nosuid"), "nodev,nosuid");
    }

    // Promises: helper-flags
    #[test]
    fn each_long_flag_is_a_mount_option() {
        assert_eq!(
            flags("memory=64MiB,wait_index,cache-dir=/c,header=@/etc/h,restart"),
            [
                "--memory=64MiB",
                "--wait-index",
                "--cache-dir=/c",
                "--header=@/etc/h",
                "--restart"
            ]
        );
        let mount = mount_command();
        let mut count = 0;
        for argument in mount.get_arguments() {
            let Some(name) = argument.get_long() else {
                continue;
            };
            let is_option = find_flag(&mount, &name.replace('-', "_")).is_some();
            assert_eq!(is_option, !FLAGS_WITHOUT_OPTION.contains(&name), "{name}");
            count += 1;
        }
        assert!(count > 20, "only {count} flags");
    }

    // Promises: helper-flags
    #[test]
    fn mount_options_are_passed_on_unchanged() {
        assert_eq!(
            flags(r#"allow_other,fsname=a\,b,fsname="c,d",uid=5,nosymfollow"#),
            [
                "-o",
                "allow_other",
                "-o",
                r"fsname=a\,b",
                "-o",
                r"fsname=c\,d",
                "-o",
                "uid=5",
                "-o",
                "nosymfollow"
            ]
        );
    }

    // Promises: helper-unknown
    #[test]
    fn fstab_options_for_other_programs_are_ignored() {
        let options = "_netdev,nofail,noauto,user,users,user=joe,owner,group,defaults,comment=x,iversion,\
                       x-systemd.automount,X-mount.mkdir,x-a=b,strictatime,allow_suid,ro";
        assert_eq!(flags(options), ["-o", "allow_suid", "-o", "ro"]);
        let (mut expected, mut options_of_mount) =
            (MountOptions::default(), MountOptions::default());
        expected.apply("suid,ro").expect("known");
        options_of_mount
            .apply(options)
            .expect("accepted by `tarfs mount`, too");
        assert_eq!(options_of_mount, expected);
        assert_eq!(flags("ro,rw"), [""; 0], "mount(8) adds it by itself");
    }

    // Promises: helper-unknown
    #[test]
    fn invalid_option_fails_and_sloppy_ignores_unknown_ones() {
        let refused = |options: &str| translated(&["S", "D", "-o", options]).expect_err(options);
        for options in ["memory", "restart=yes", "memory,uid=7", "memory,restart"] {
            let words = translated(&["S", "D", "-o", options]).expect("known").words;
            let parsed = command_line::parse([&["tarfs".into()], words.as_slice()].concat());
            let text = parsed
                .expect_err("a value is missing, or one too many")
                .to_string();
            assert!(
                text.contains("--memory <SIZE>") || text.contains("--restart"),
                "{text}"
            );
        }
        assert_eq!(
            refused("foreground"),
            OptionError::Unknown("foreground".into()).into()
        );
        assert_eq!(refused("remount,ro").exit_code(), EX_FAIL);
        let sloppy = translated(&["S", "D", "-s", "-o", "sparkle,uid=7"]).expect("sloppy");
        assert_eq!(
            sloppy.words,
            words(&["mount", "-o", "uid=7", "--", "S", "D"])
        );
        assert!(translated(&["S", "D", "-s", "-o", "uid=x"]).is_err());
    }

    // Promises: helper-writable
    #[test]
    fn last_of_rw_and_ro_decides_whether_to_write() {
        let wants = |options| {
            let translated = translated(&["S", "D", "-o", options]);
            translated.expect("known").wants_to_write
        };
        assert!(wants("rw") && wants("ro,rw") && !wants("rw,ro") && !wants("allow_other"));
    }

    #[test]
    fn header_option_is_redacted_and_its_file_is_not() {
        let call = ["S", "D", "-o", "header=A: secret,header=@/etc/h"];
        let words = translated(&call).expect("known").words;
        let shown = headers::redact_arguments(&words).join(OsStr::new(" "));
        let shown = shown.to_string_lossy();
        assert!(!shown.contains("secret"), "{shown}");
        assert!(shown.contains("--header=@/etc/h"), "{shown}");
    }

    #[test]
    fn each_flag_of_mount_8_is_accepted() {
        let call = [
            "m", "S", "D", "-sfnv", "-N", "/n", "-o", "ro", "-o", "uid=1", "-t", "x",
        ];
        let call = HelperArgs::try_parse_from(call).expect("a call");
        assert!(call.sloppy && call.fake && call.no_mtab && call.verbose);
        assert_eq!(call.namespace.as_deref(), Some(Path::new("/n")));
        assert_eq!(call.options.len(), 2);
        assert_eq!(call.kind.as_deref(), Some("x"));
    }
}
