//! `tarfs generate`: man pages and shell completions for packages.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command, ValueEnum};
use clap_complete::env::{Bash, EnvCompleter, Fish, Zsh};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::cli::{environment, help};

/// Completion scripts: the file's name, and the shell.
const COMPLETIONS: [(&str, &dyn EnvCompleter); 3] = [
    ("tarfs.bash", &Bash),
    ("_tarfs", &Zsh),
    ("tarfs.fish", &Fish),
];

/// Sections EXIT STATUS, ENVIRONMENT and FILES of a man page.
const EXIT_STATUS: [(&str, &str); 3] = [
    ("0", "success"),
    ("2", "a failure, or damaged members"),
    ("64", "an invalid command line"),
];

const ENVIRONMENT: [(&str, &str); 11] = [
    (environment::CACHE_DIR, "default of --cache-dir"),
    (environment::CACHE_SIZE, "default of --cache-size"),
    (
        environment::HEADERS,
        "more headers or @FILE for SOURCE's host, one per line, as --header takes them",
    ),
    (
        environment::LOG_LEVEL,
        "log level: error, warn, info, debug or trace",
    ),
    (
        "XDG_CACHE_HOME",
        "directory of the cache directory tarfs [default: ~/.cache]",
    ),
    (
        environment::RUNTIME_DIR,
        "directory of the sockets that serve status and umount",
    ),
    (
        "HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY",
        "proxies, as curl reads them",
    ),
    (
        "AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_REGION, …",
        "credentials, region and endpoint of objects of S3, as the AWS CLI reads them",
    ),
    (
        "GOOGLE_APPLICATION_CREDENTIALS, CLOUDSDK_CONFIG, GCE_METADATA_HOST, STORAGE_EMULATOR_HOST",
        "credentials and endpoint of objects of Google Cloud Storage, as Google's libraries read them",
    ),
    (
        "AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_CLIENT_ID, …",
        "credentials and endpoint of objects of Azure, as the Azure CLI and the Azure SDKs read them",
    ),
    (
        "AZURE_STORAGE_SAS_TOKEN_FILE",
        "file with a SAS token, which is read again when the server refuses the token",
    ),
];

const FILES: [(&str, &str); 4] = [
    (
        "~/.cache/tarfs",
        "indexes and decoded data of a user's mounts",
    ),
    (
        environment::SYSTEM_CACHE_DIR,
        "the same of the system's mounts, which are those of fstab and systemd",
    ),
    (
        "$XDG_RUNTIME_DIR/tarfs",
        "sockets of a user's mounts; without the variable, a directory in /tmp",
    ),
    (
        environment::SYSTEM_RUNTIME_DIR,
        "sockets of the system's mounts",
    ),
];

/// Writes additional files for a package of this program.
#[derive(Clone, Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Kind of files to write
    pub what: Artifact,
    /// Directory to write to, created if it is missing
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}

/// Kinds of files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Artifact {
    /// A man page for the program and each verb
    Man,
    /// Completions for bash, zsh and fish
    Completions,
}

pub(crate) fn run(args: &GenerateArgs, command: Command) -> anyhow::Result<ExitCode> {
    let directory = &args.directory;
    fs::create_dir_all(directory)
        .and_then(|()| match args.what {
            Artifact::Man => write_manuals(command, directory),
            Artifact::Completions => write_completions(directory),
        })
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a script for each shell. It calls the program for the completions.
fn write_completions(directory: &Path) -> io::Result<()> {
    for (name, shell) in COMPLETIONS {
        let mut file = File::create(directory.join(name))?;
        shell.write_registration(environment::COMPLETE, "tarfs", "tarfs", "tarfs", &mut file)?;
    }
    Ok(())
}

fn write_manuals(command: Command, directory: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let verbs: Vec<_> = command
        .get_subcommands()
        .filter(|verb| !verb.is_hide_set())
        .cloned()
        .collect();
    let pages: Vec<_> = verbs
        .iter()
        .filter_map(Command::get_display_name)
        .map(str::to_owned)
        .collect();
    for verb in verbs {
        // `tarfs cache` has verbs of its own.
        let name = verb.get_name().to_owned();
        for part in verb.get_subcommands().cloned() {
            write_manual(part, &name, &pages, directory)?;
        }
        write_manual(verb, &name, &pages, directory)?;
    }
    write_manual(command, "", &pages, directory)
}

/// Writes the page of `command`, which belongs to `verb`. It refers to `pages`.
fn write_manual(
    command: Command,
    verb: &str,
    pages: &[String],
    directory: &Path,
) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or("tarfs").to_owned();
    let has_verbs = command.has_subcommands();
    let man = Man::new(command);
    let mut file = BufWriter::new(File::create(directory.join(man.get_filename()))?);
    man.render_title(&mut file)?;
    man.render_name_section(&mut file)?;
    man.render_synopsis_section(&mut file)?;
    man.render_description_section(&mut file)?;
    man.render_options_section(&mut file)?;
    if has_verbs {
        man.render_subcommands_section(&mut file)?;
    }
    let mut roff = Roff::new();
    let examples = help::examples(if verb.is_empty() { "mount" } else { verb });
    roff.control("SH", ["EXAMPLES"]);
    for (purpose, line) in examples {
        roff.control("TP", []);
        roff.text([roman(capitalized(purpose))]);
        roff.text([bold(line)]);
    }
    let table = match name.as_str() {
        "tarfs" => Some(("SOURCES", help::SOURCES.as_slice())),
        "tarfs-find" => Some(("EXPRESSIONS", help::PRIMARIES.as_slice())),
        _ => None,
    };
    for (title, items) in table.into_iter().chain([
        ("EXIT STATUS", EXIT_STATUS.as_slice()),
        ("ENVIRONMENT", &ENVIRONMENT),
        ("FILES", &FILES),
    ]) {
        roff.control("SH", [title]);
        for (item, meaning) in items {
            roff.control("TP", []);
            roff.text([bold(*item)]);
            roff.text([roman(*meaning)]);
        }
    }
    roff.control("SH", ["SEE ALSO"]);
    let all = ["tarfs".to_owned()];
    let others = all.iter().chain(pages).filter(|page| **page != name);
    let others = others.map(|page| format!("{page}(1)"));
    let others: Vec<_> = others
        .chain(["mount.tarfs(8)", "tar(1)", "fuse(4)"].map(str::to_owned))
        .collect();
    roff.text([roman(others.join(", "))]);
    roff.to_writer(&mut file)?;
    file.flush()
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters).collect()
    })
}
