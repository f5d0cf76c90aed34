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

use crate::cli::environment::{
    CACHE_DIR, CACHE_SIZE, LOG_LEVEL, RUNTIME_DIR, SYSTEM_CACHE_DIR, SYSTEM_RUNTIME_DIR,
};
use crate::cli::{environment, exit_status, help};
use tarfs::internal::environment::HEADERS;

/// Completion scripts: the file's name, and the shell.
const COMPLETIONS: [(&str, &dyn EnvCompleter); 3] = [
    ("tarfs.bash", &Bash),
    ("_tarfs", &Zsh),
    ("tarfs.fish", &Fish),
];

/// Variables that the program or its libraries read, as a table.
fn environment_table() -> String {
    format!("
  {CACHE_DIR}  default of --cache-dir
  {CACHE_SIZE}  default of --cache-size
  {HEADERS}  more headers or @FILE for SOURCE's host, one per line, as --header takes them
  {LOG_LEVEL}  log level: error, warn, info, debug or trace
  XDG_CACHE_HOME, HOME  place of the cache directory tarfs: $XDG_CACHE_HOME, or $HOME/.cache
  {RUNTIME_DIR}  directory of the sockets that serve status and umount
  TMPDIR  directory of the changes of a writable mount without --upper [default: /var/tmp or /tmp]
  NETRC  file of logins for hosts, as of curl [default: ~/.netrc]
  REGISTRY_AUTH_FILE, DOCKER_CONFIG, XDG_CONFIG_HOME  logins for registries: the file, or the directories of \
      Docker's and Podman's
  SSL_CERT_FILE, SSL_CERT_DIR  certificates of trusted authorities instead of the system's, as of OpenSSL
  HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY  proxies, also in small letters, as curl reads them
  AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN  credentials for objects of S3, as the AWS CLI \
      reads them, and all others that begin with AWS_
  AWS_PROFILE, AWS_DEFAULT_PROFILE, AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE  profile in the files of the \
      AWS CLI, and these files
  AWS_REGION, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3, AWS_IGNORE_CONFIGURED_ENDPOINT_URLS, \
      AWS_USE_FIPS_ENDPOINT, AWS_USE_DUALSTACK_ENDPOINT, AWS_CA_BUNDLE  region, endpoint and authorities of S3
  AWS_ROLE_ARN, AWS_ROLE_SESSION_NAME, AWS_EXTERNAL_ID, AWS_WEB_IDENTITY_TOKEN_FILE, \
      AWS_STS_REGIONAL_ENDPOINTS  role that is assumed for S3, with the token of a file
  AWS_CONTAINER_CREDENTIALS_RELATIVE_URI, AWS_CONTAINER_CREDENTIALS_FULL_URI, \
      AWS_CONTAINER_AUTHORIZATION_TOKEN, AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE, AWS_EC2_METADATA_DISABLED, \
      AWS_EC2_METADATA_SERVICE_ENDPOINT  credentials of a container or a machine of AWS
  GOOGLE_APPLICATION_CREDENTIALS, CLOUDSDK_CONFIG, GCE_METADATA_HOST, STORAGE_EMULATOR_HOST  credentials and \
      endpoint of objects of Google Cloud Storage, as Google's libraries read them
  AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT, AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, \
      AZURE_STORAGE_SERVICE_ENDPOINT  credentials and endpoint of objects of Azure, as the Azure CLI reads them
  AZURE_STORAGE_SAS_TOKEN_FILE  file with a SAS token, which is read again when the server refuses the token
  AZURE_TENANT_ID, AZURE_CLIENT_ID, AZURE_CLIENT_SECRET, AZURE_CLIENT_CERTIFICATE_PATH, \
      AZURE_FEDERATED_TOKEN_FILE, AZURE_AUTHORITY_HOST, IDENTITY_ENDPOINT, IDENTITY_HEADER  identity for Azure, \
      as the Azure SDKs read it
  NOTIFY_SOCKET, JOURNAL_STREAM  set by systemd: the socket for messages about the state, and the stream of the \
      journal
  LC_ALL, LC_CTYPE, LANG  the locale, which says whether ls --tree draws lines or ASCII
  PATH  the directories of fusermount3, fuse-overlayfs and credential helpers
  RUST_BACKTRACE  1 for a backtrace in the log after a bug")
}

/// Section FILES of a man page, as a table.
fn files_table() -> String {
    format!(
        "
  ~/.cache/tarfs  indexes and decoded data of a user's mounts
  {SYSTEM_CACHE_DIR}  the same of the system's mounts, which are those of fstab and systemd
  $XDG_RUNTIME_DIR/tarfs  sockets of a user's mounts; without the variable, a directory in /tmp
  {SYSTEM_RUNTIME_DIR}  sockets of the system's mounts"
    )
}

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
    let exit_status = exit_status::rows((!verb.is_empty()).then_some(verb));
    let exit_status = exit_status.iter();
    let exit_status = exit_status.map(|(status, meaning)| (*status, meaning.as_str()));
    let (environment, files) = (environment_table(), files_table());
    let table = match name.as_str() {
        "tarfs" => Some(("SOURCES", help::SOURCES)),
        "tarfs-find" => Some(("EXPRESSIONS", help::PRIMARIES)),
        _ => None,
    };
    let table = table.map(|(title, table)| (title, help::rows(table).collect::<Vec<_>>()));
    for (title, items) in table.into_iter().chain([
        ("EXIT STATUS", exit_status.collect()),
        ("ENVIRONMENT", help::rows(&environment).collect()),
        ("FILES", help::rows(&files).collect()),
    ]) {
        roff.control("SH", [title]);
        for (item, meaning) in items {
            roff.control("TP", []);
            roff.text([bold(item)]);
            roff.text([roman(meaning)]);
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
