//! `tarfs find`: prints the files for which an expression is true.

use std::ffi::OsString;
use std::io::{IsTerminal, stdout};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::operands::{Needs, OpenTree, Operands};
use crate::cli::args::{LinkFlags, TreeArgs};
use crate::cli::exit_status;
use crate::cli::ui::output;
use tarfs::index::Ino;
use tarfs::index::store::RowsToLoad;
use tarfs::internal::passwd::Accounts;
use tarfs::list::Finder;
use tarfs::list::find::{Expression, ParseContext};
use tarfs::locate::SourceSpec;
use tarfs::tar::Timestamp;
use tarfs::tree::{FollowedLinks, Item, Tree, followed_metadata_of, metadata_of};

/// Arguments of `tarfs find`.
#[derive(clap::Args, Debug)]
#[command(mut_arg("ignore_zeros", |arg| arg.short(None)), mut_arg("jobs", |arg| arg.short(None)),
          mut_arg("source", |arg| arg.required(false).default_value(".").allow_hyphen_values(true).index(1)))]
pub(crate) struct FindArgs {
    #[command(flatten)]
    tree: TreeArgs,

    #[command(flatten)]
    links: LinkFlags,

    /// Entries of an archive, or more files if SOURCE is a directory, and then an expression as for find(1)
    ///
    /// The expression begins with the first word that starts with -, ! or (. Options of tarfs come before SOURCE.
    /// Primaries that run programs or change files are refused, and times are in UTC. The order of the output is
    /// that of the archive or the directory, except for what threads do at the same time.
    #[arg(
        value_name = "PATH|EXPRESSION",
        index = 2,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    words: Vec<OsString>,
}

pub(crate) fn run(args: &FindArgs) -> anyhow::Result<ExitCode> {
    let is_expression = |word: &OsString| match word.as_bytes() {
        [b'-', _, ..] => true,
        word => matches!(word, b"!" | b"(" | b")" | b","),
    };
    let (mut tree, mut words) = (args.tree.clone(), args.words.clone());
    // Without starting points, the expression comes first.
    if let SourceSpec::Plain(word) = &tree.source.source
        && is_expression(word)
    {
        words.insert(0, word.clone());
        tree.source.source = SourceSpec::Plain(".".into());
    }
    let first = words.iter().position(is_expression);
    let (paths, words) = words.split_at(first.unwrap_or(words.len()));
    let context = ParseContext {
        now: now(),
        accounts: &Accounts::load_system(),
        is_terminal: stdout().is_terminal(),
        links: args.links.followed(FollowedLinks::None),
        metadata: &|path, follows| {
            if follows {
                followed_metadata_of(path)
            } else {
                metadata_of(path)
            }
        },
    };
    let expression = match Expression::parse(words, &context) {
        Ok(expression) => expression,
        Err(error) => {
            output::print_error(error);
            return Ok(ExitCode::from(exit_status::PARTIAL));
        }
    };
    let needs = Needs {
        links: expression.options.links,
        targets: expression.options.examines_targets,
        rows: if expression.needs_metadata() {
            RowsToLoad::All
        } else {
            RowsToLoad::Names
        },
        ..Needs::default()
    };
    let operands = Operands::open(&tree, paths, needs)?;
    if let (OpenTree::Directory { .. }, Some(reason)) = (&operands.tree, &expression.unknown_owner)
    {
        output::print_error(reason);
        return Ok(ExitCode::from(exit_status::PARTIAL));
    }
    match &operands.tree {
        OpenTree::Index(tree) => search(expression, &operands, (tree, tree), &Ino::ROOT),
        OpenTree::Directory { tree, starts, base } => {
            search(expression, &operands, (starts, tree), base);
        }
    }
    Ok(operands.finish(exit_status::PARTIAL))
}

fn now() -> Timestamp {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    Timestamp {
        seconds: now.as_secs().cast_signed(),
        nanoseconds: now.subsec_nanos(),
    }
}

fn search<T: Tree + Send + 'static>(
    expression: Expression,
    operands: &Operands,
    (start_tree, tree): (&Arc<T>, &Arc<T>),
    base: &T::Directory,
) {
    let finder = Finder::new(Arc::clone(tree), expression, Arc::clone(&operands.output));
    let finder = Arc::new(finder);
    for start in &operands.starts {
        let name = start.name();
        let item = Item::at_start(&**start_tree, base, name);
        let state = match finder.start(&item) {
            ControlFlow::Continue(Some(state)) => state,
            ControlFlow::Continue(None) => continue,
            ControlFlow::Break(()) => break,
        };
        let walked = operands.walk(tree, &finder, (&item, name.name), state);
        if walked.is_break() || finder.end(&item).is_break() {
            break;
        }
    }
}
