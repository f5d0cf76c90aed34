//! `tarfs chown`: changes the owners of files.

use std::ffi::OsString;
use std::fs;
use std::process::ExitCode;

use super::change::{self, ChangeFlags};
use tarfs::internal::passwd::{AccountNames, Accounts, parse_lines};
use tarfs::internal::posix_acl::IdResolver;
use tarfs::list::change::{Attributes, Owner};
use tarfs::list::escape;

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

    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

pub(crate) fn run(args: &ChownArgs) -> anyhow::Result<ExitCode> {
    let (mut paths, mut owner) = (args.paths.clone(), args.owner.clone());
    if let Some(found) = args.flags.reference()? {
        paths.insert(0, owner);
        owner = format!("+{}:+{}", found.uid, found.gid).into();
    }
    let parsed = parse(&owner).and_then(|to| Ok((to, args.from.as_ref().map(parse).transpose()?)));
    let ((to, mut names), from) = match parsed {
        Ok(parsed) => parsed,
        Err((what, word)) => return Ok(change::invalid(what, word.as_bytes())),
    };
    let from = from.map_or_else(Owner::default, |from| from.0);
    if args.flags.reference.is_some() {
        let known = AccountNames::load_system();
        let user = to.user.and_then(|id| known.user(id)).map(escape);
        let group = to.group.and_then(|id| known.group(id)).map(escape);
        names = (user.unwrap_or(names.0), group.or(names.1));
    }
    let attributes = Attributes::Owner { to, from, names };
    args.flags.run(attributes, args.no_dereference, &paths)
}

type Names = (String, Option<String>);

/// Parses `OWNER[:GROUP]`. An error tells what is invalid.
fn parse(word: &OsString) -> Result<(Owner, Names), (&'static str, String)> {
    let text = word.to_string_lossy().into_owned();
    let accounts = Accounts::load_system();
    let (user_name, group_name) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (&*text, None),
    };
    let known = |what, name, id: Option<u32>| {
        let id = id.or_else(|| number(name));
        id.ok_or_else(|| (what, text.clone()))
    };
    let user = match user_name {
        "" => None,
        name => Some(known("user", name, accounts.user(name.as_bytes()))?),
    };
    let group_name = match group_name {
        Some("") if user.is_some() => {
            let group = login_group(user_name).ok_or_else(|| ("spec", text.clone()))?;
            let name = AccountNames::load_system().group(group).map(escape);
            Some(name.unwrap_or_else(|| group.to_string()))
        }
        name => name.filter(|name| !name.is_empty()).map(str::to_owned),
    };
    let group = match &group_name {
        None => None,
        Some(name) => Some(known("group", name, accounts.group(name.as_bytes()))?),
    };
    let plain = |name: &str| name.trim_start_matches('+').to_owned();
    let names = (plain(user_name), group_name.as_deref().map(plain));
    Ok((Owner { user, group }, names))
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
