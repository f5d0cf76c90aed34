//! The command line: one file per verb, with its arguments and its implementation.

mod args;
mod before_main;
mod command_line;
mod commands;
mod completion;
mod daemon;
mod environment;
mod exit_status;
mod help;
mod malloc;
mod mount_helper;
mod open_archive;
mod shards;
mod startup;
mod ui;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap_complete::CompleteEnv;

use args::headers;
use command_line::Verb;
use commands::list::{chmod, chown, diff, du, find, ls, rm};
use commands::write::{copy, materialize, shard, sync};
use commands::{
    bundle, cache, cat, generate, image, index, mount, profile, status, umount, verify,
};
use daemon::{daemon_process, server_process};
use ui::{output, panic_hook};

/// Runs the program with this process's command line and environment. As a helper of mount(8), the exit codes are those
/// of mount(8).
pub(crate) fn run() -> ExitCode {
    panic_hook::install();
    let completion = CompleteEnv::with_factory(command_line::whole_command);
    let completion = completion.var(environment::COMPLETE);
    let words: Vec<_> = std::env::args_os().collect();
    match completion.try_complete(&words, std::env::current_dir().ok().as_deref()) {
        Ok(false) => {}
        Ok(true) => return ExitCode::SUCCESS,
        Err(error) => return print_usage_error(&error),
    }
    if let Some(words) = mount_helper::helper_arguments(&words) {
        return mount_helper::run(&words);
    }
    let shown = headers::redact_arguments(&words);
    if shown != words {
        before_main::show_arguments(&shown);
    }
    let verb = match command_line::parse(words) {
        Ok(verb) => verb,
        Err(error) => return print_usage_error(&error),
    };
    startup::start(matches!(
        verb,
        Verb::Mount(_) | Verb::ServeMount(_) | Verb::ServeMounts(_)
    ));
    if let Verb::Ls(_) | Verb::Find(_) | Verb::Du(_) | Verb::Diff(_) = verb {
        malloc::keep_freed_memory();
    }
    let result = match verb {
        Verb::Mount(args) => mount::run(&args, false),
        Verb::ServeMount(_) => server_process::run(),
        Verb::ServeMounts(args) => daemon_process::run(&args.socket, args.foreground),
        Verb::Umount(args) => umount::run(&args),
        Verb::Status(args) => status::run(&args),
        Verb::Materialize(args) => materialize::run(&args),
        Verb::Ls(args) => ls::run(&args),
        Verb::Find(args) => find::run(&args),
        Verb::Du(args) => du::run(&args),
        Verb::Chmod(args) => chmod::run(&args),
        Verb::Chown(args) => chown::run(&args),
        Verb::Rm(args) => rm::run(&args),
        Verb::Diff(args) => diff::run(&args),
        Verb::Cat(args) => cat::run(&args),
        Verb::Copy(args) => copy::run(&args),
        Verb::Sync(args) => sync::run(&args),
        Verb::Shard(args) => shard::run(&args),
        Verb::Image(args) => image::run(&args),
        Verb::Bundle(args) => bundle::run(&args),
        Verb::Index(args) => index::run(&args),
        Verb::Verify(args) => verify::run(&args),
        Verb::Profile(args) => profile::run(&args),
        Verb::Cache(args) => cache::run(&args),
        Verb::Daemon(args) => commands::daemon::run(&args),
        Verb::Generate(args) => generate::run(&args, command_line::command()),
    };
    result.unwrap_or_else(|error| output::print_failure(&error))
}

/// Prints the help that the user asked for, or the error in the command line.
fn print_usage_error(error: &clap::Error) -> ExitCode {
    match command_line::print_error(error) {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(exit_status::USAGE),
    }
}
