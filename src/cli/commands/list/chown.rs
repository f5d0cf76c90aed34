//! `tarfs chown`: changes the owners of files.

use std::ffi::OsString;
use std::fs;
use std::process::ExitCode;

use super::change::{self, ChangeFlags};
use crate::cli::args::LongHelpArg;
use crate::cli::ui::output;
use tarfs::change::{Attributes, Owner, quote};
use tarfs::internal::escape::escape;
use tarfs::internal::passwd::{Accounts, parse_lines};

/// Number of the field with the group of a user in `/etc/passwd`.
const GROUP_FIELD: usize = 3;

/// Arguments of `tarfs chown`.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true)]
pub(crate) struct ChownArgs {
    /// Names or numbers as OWNER, OWNER:GROUP, OWNER: for the owner's group, or :GROUP; with --reference, the first
    /// PATH
    #[arg(value_name = "OWNER[:GROUP]")]
    owner: OsString,

    /// Files to change
    #[arg(value_name = "PATH", required_unless_present = "reference")]
    paths: Vec<OsString>,

    #[command(flatten)]
    flags: ChangeFlags,

    /// Change symbolic links instead of their targets, as -R does
    #[arg(short = 'h', long)]
    no_dereference: bool,

    /// Change only files with this owner and group
    #[arg(long, value_name = "OWNER[:GROUP]")]
    from: Option<OsString>,

    #[command(flatten)]
    help: LongHelpArg,
}

pub(crate) fn run(args: &ChownArgs) -> anyhow::Result<ExitCode> {
    let (mut paths, mut owner) = (args.paths.clone(), args.owner.clone());
    match args.flags.reference() {
        Err(code) => return Ok(code),
        Ok(Some(found)) => {
            paths.insert(0, owner);
            owner = format!("+{}:+{}", found.uid, found.gid).into();
        }
        Ok(None) => {}
    }
    let parsed = parse(&owner).and_then(|to| Ok((to, args.from.as_ref().map(parse).transpose()?)));
    let ((to, mut names), from) = match parsed {
        Ok(parsed) => parsed,
        Err((what, word)) => return Ok(change::invalid(what, word.as_bytes())),
    };
    let from = from.map_or_else(Owner::default, |from| from.0);
    // GNU chown tells of the group alone if it is a number.
    let mut is_group =
        to.user.is_none() && names.1.as_deref().is_some_and(|id| number(id).is_some());
    if args.flags.reference.is_some() {
        let known = Accounts::load_system();
        let user = to.user.and_then(|id| known.user_name(id)).map(escape);
        let group = to.group.and_then(|id| known.group_name(id)).map(escape);
        names = (user.unwrap_or(names.0), group.or(names.1));
        is_group = false;
    }
    let attributes = Attributes::Owner {
        to,
        from,
        names,
        is_group,
    };
    args.flags.run(attributes, args.no_dereference, &paths)
}

type Names = (String, Option<String>);

/// Parses `OWNER[:GROUP]`, or with a warning `OWNER.GROUP`. An error tells what is invalid.
fn parse(word: &OsString) -> Result<(Owner, Names), (&'static str, String)> {
    let text = word.to_string_lossy().into_owned();
    let accounts = Accounts::load_system();
    let invalid = |what| (what, text.clone());
    if let Some((user, group)) = text.split_once(':') {
        return parse_names(&accounts, user, Some(group)).map_err(invalid);
    }
    parse_names(&accounts, &text, None).or_else(|what| {
        let (user, group) = text.split_once('.').ok_or_else(|| invalid(what))?;
        let parsed = parse_names(&accounts, user, Some(group)).map_err(|_| invalid(what))?;
        let text = quote(text.as_bytes());
        output::print_warning(format_args!("'.' should be ':': {text}"));
        Ok(parsed)
    })
}

fn parse_names(
    accounts: &Accounts,
    user: &str,
    group: Option<&str>,
) -> Result<(Owner, Names), &'static str> {
    let needs_login_group = group == Some("") && !user.is_empty();
    let (user_id, user_name) = match user {
        "" => (None, String::new()),
        name => {
            let id = accounts.user(name.as_bytes());
            let (id, name) =
                named(name, id).ok_or(if needs_login_group { "spec" } else { "user" })?;
            (Some(id), name)
        }
    };
    let group = match group {
        Some("") if needs_login_group => {
            let id = login_group(user).ok_or("spec")?;
            let name = accounts.group_name(id).map(escape);
            Some((id, name.unwrap_or_else(|| id.to_string())))
        }
        Some("") | None => None,
        Some(name) => Some(named(name, accounts.group(name.as_bytes())).ok_or("group")?),
    };
    let (group_id, group_name) = group.unzip();
    let owner = Owner {
        user: user_id,
        group: group_id,
    };
    Ok((owner, (user_name, group_name)))
}

/// The number that `name` has or is, and how messages show it.
fn named(name: &str, id: Option<u32>) -> Option<(u32, String)> {
    match id {
        Some(id) => Some((id, name.to_owned())),
        None => number(name).map(|id| (id, id.to_string())),
    }
}

/// An ID. The largest number is none.
fn number(text: &str) -> Option<u32> {
    let number = text.strip_prefix('+').unwrap_or(text).parse().ok();
    number.filter(|&number| number != u32::MAX)
}

fn login_group(user: &str) -> Option<u32> {
    let text = fs::read("/etc/passwd").ok()?;
    let mut lines = parse_lines(&text);
    let line = lines.find(|line| line.name() == user.as_bytes())?;
    line.number(GROUP_FIELD)
}
