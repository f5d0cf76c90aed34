//! The mount options of `-o`; pure.

use serde::{Deserialize, Serialize};

use crate::fuse::attr::Ownership;

/// Options of a mount. The default is `ro,nosuid,nodev`, for this user alone, without permission checks.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an option of mount(8), in its own word"
)]
pub struct MountOptions {
    /// Lets other users enter. Implies `default_permissions`, or every user could read every file.
    pub allow_other: bool,
    /// Makes the kernel check modes and ACLs.
    pub default_permissions: bool,
    /// Honours set-user-id, set-group-id and file capabilities.
    pub suid: bool,
    /// Allows devices to be opened.
    pub dev: bool,
    /// Forbids programs to be run.
    pub noexec: bool,
    /// Forbids symbolic links to be followed; they can still be read.
    pub nosymfollow: bool,
    /// The owners and modes that are shown.
    pub ownership: Ownership,
    /// Whether changes fail; `None` without `ro` or `rw`. Only an overlay accepts changes.
    pub read_only: Option<bool>,
    /// The source that mount(8) lists, instead of the archive's location.
    pub fsname: Option<String>,
}

/// An invalid mount option.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OptionError {
    /// The option is unknown.
    #[error("unknown mount option `{0}`")]
    Unknown(String),
    /// The value is missing or malformed.
    #[error("mount option `{name}` takes {takes}, not `{value}`")]
    Value {
        /// The option's name.
        name: &'static str,
        /// The values that are allowed.
        takes: &'static str,
        /// The value that was given.
        value: String,
    },
}

type SetFlag = fn(&mut MountOptions);

type SetValue = fn(&mut MountOptions, &str) -> Result<(), OptionError>;

const FLAGS: [(&str, SetFlag); 14] = [
    ("allow_other", |options| options.allow_other = true),
    ("default_permissions", |options| {
        options.default_permissions = true;
    }),
    ("suid", |options| options.suid = true),
    // mount(8) takes `suid` and `dev` for its defaults and drops them, but not these two.
    ("allow_suid", |options| options.suid = true),
    ("nosuid", |options| options.suid = false),
    ("dev", |options| options.dev = true),
    ("allow_dev", |options| options.dev = true),
    ("nodev", |options| options.dev = false),
    ("exec", |options| options.noexec = false),
    ("noexec", |options| options.noexec = true),
    ("symfollow", |options| options.nosymfollow = false),
    ("nosymfollow", |options| options.nosymfollow = true),
    ("rw", |options| options.read_only = Some(false)),
    ("ro", |options| options.read_only = Some(true)),
];

const VALUES: [(&str, SetValue); 4] = [
    ("uid", |options, value| {
        options.ownership.uid = Some(number("uid", value)?);
        Ok(())
    }),
    ("gid", |options, value| {
        options.ownership.gid = Some(number("gid", value)?);
        Ok(())
    }),
    ("umask", |options, value| {
        let mask = u32::from_str_radix(value, 8).ok();
        let mask = mask.filter(|&mask| mask <= 0o777);
        let mask = mask.ok_or_else(|| invalid("umask", "an octal number up to 777", value));
        options.ownership.umask = mask?;
        Ok(())
    }),
    ("fsname", |options, value| {
        options.fsname = Some(value.to_owned());
        Ok(())
    }),
];

/// Options for mount(8) or systemd, which pass them on, and those without effect on a read-only mount.
const IGNORED_OPTIONS: &str = "defaults auto noauto nofail _netdev user nouser users nousers owner noowner group \
    nogroup async sync dirsync atime noatime diratime nodiratime relatime norelatime strictatime nostrictatime \
    lazytime nolazytime silent loud mand nomand iversion noiversion nonempty comment";

impl MountOptions {
    /// Applies an argument of `-o`: options separated by commas. A later one overrides an earlier one. As for
    /// fusermount3, `\,` is a comma inside a value, and `\\` a backslash.
    ///
    /// # Errors
    /// At the first option that is unknown or malformed. The options before it have been applied.
    pub fn apply(&mut self, argument: &str) -> Result<(), OptionError> {
        let options = split(argument);
        let mut options = options.iter().filter(|option| !option.is_empty());
        options.try_for_each(|option| match option.split_once('=') {
            _ if Self::is_ignored(option) => Ok(()),
            Some((name, value)) => self.apply_value(name, value, option),
            None => self.apply_flag(option),
        })
    }

    /// Whether `option` is accepted without effect, with or without a value.
    pub fn is_ignored(option: &str) -> bool {
        let name = option.split_once('=').map_or(option, |(name, _)| name);
        let is_comment = name.starts_with("x-") || name.starts_with("X-");
        is_comment || IGNORED_OPTIONS.split(' ').any(|ignored| ignored == name)
    }

    /// Names of the options without a value that change a default.
    pub fn flag_names() -> impl Iterator<Item = &'static str> {
        let is_change = |set: SetFlag| {
            let mut options = Self::default();
            set(&mut options);
            options != Self::default()
        };
        let flags = FLAGS.into_iter().filter(move |&(_, set)| is_change(set));
        flags.map(|(name, _)| name)
    }

    /// Names of the options with a value.
    pub fn value_names() -> impl Iterator<Item = &'static str> {
        VALUES.into_iter().map(|(name, _)| name)
    }

    fn apply_flag(&mut self, option: &str) -> Result<(), OptionError> {
        let flag = FLAGS.iter().find(|(name, _)| *name == option);
        let (_, set) = flag.ok_or_else(|| OptionError::Unknown(option.to_owned()))?;
        set(self);
        Ok(())
    }

    fn apply_value(&mut self, name: &str, value: &str, option: &str) -> Result<(), OptionError> {
        let known = VALUES.iter().find(|(known, _)| *known == name);
        let (_, set) = known.ok_or_else(|| OptionError::Unknown(option.to_owned()))?;
        set(self, value)
    }

    /// Escapes commas and backslashes, so that [`apply`](Self::apply) and fusermount3 read one option.
    pub fn escape(option: &str) -> String {
        option.replace('\\', "\\\\").replace(',', "\\,")
    }

    pub(in crate::fuse) fn checks_permissions(&self) -> bool {
        self.default_permissions || self.allow_other
    }
}

fn number(name: &'static str, value: &str) -> Result<u32, OptionError> {
    value.parse().map_err(|_| invalid(name, "a number", value))
}

fn invalid(name: &'static str, takes: &'static str, value: &str) -> OptionError {
    let value = value.to_owned();
    OptionError::Value { name, takes, value }
}

fn split(argument: &str) -> Vec<String> {
    let mut options = vec![String::new()];
    let mut letters = argument.chars();
    while let Some(letter) = letters.next() {
        let letter = match letter {
            ',' => {
                options.push(String::new());
                continue;
            }
            '\\' => letters.next().unwrap_or('\\'),
            other => other,
        };
        if let Some(last) = options.last_mut() {
            last.push(letter);
        }
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<MountOptions, OptionError> {
        let mut options = MountOptions::default();
        for argument in arguments {
            options.apply(argument)?;
        }
        Ok(options)
    }

    #[test]
    fn later_option_overrides_earlier_one() {
        let options = parsed(&["allow_other,suid,dev", "nosuid,,uid=7,umask=027"]);
        let options = options.expect("all known");
        assert!(options.allow_other && options.dev && !options.suid);
        assert_eq!(options.ownership.uid, Some(7));
        assert_eq!(options.ownership.umask, 0o027);
    }

    // Promises: option-unknown
    #[test]
    fn options_of_mount_and_systemd_are_ignored() {
        let plain = MountOptions::default();
        assert_eq!(
            parsed(&["defaults,_netdev,nofail,x-systemd.automount,x-a=b"]),
            Ok(plain)
        );
        let read_only = |words: &str| parsed(&[words]).expect("known").read_only;
        assert_eq!(read_only("rw,ro"), Some(true));
        assert_eq!(read_only("ro,rw"), Some(false));
    }

    #[test]
    fn unknown_or_malformed_option_fails() {
        assert_eq!(
            parsed(&["ro,sparkle"]),
            Err(OptionError::Unknown("sparkle".into()))
        );
        assert_eq!(
            parsed(&["size=5"]),
            Err(OptionError::Unknown("size=5".into()))
        );
        assert!(matches!(
            parsed(&["uid=root"]),
            Err(OptionError::Value { name: "uid", .. })
        ));
        assert!(matches!(
            parsed(&["umask=9"]),
            Err(OptionError::Value { name: "umask", .. })
        ));
        assert!(matches!(
            parsed(&["umask=1000"]),
            Err(OptionError::Value { name: "umask", .. })
        ));
    }

    #[test]
    fn escaped_comma_belongs_to_value() {
        let argument = format!("fsname={},suid", MountOptions::escape("a,b\\c"));
        let options = parsed(&[&argument]).expect("known");
        assert_eq!(options.fsname.as_deref(), Some("a,b\\c"));
        assert!(options.suid);
    }

    // Promises: option-permissions
    #[test]
    fn allow_other_implies_permission_checks() {
        assert!(
            parsed(&["allow_other"])
                .expect("known")
                .checks_permissions()
        );
        assert!(!parsed(&[]).expect("empty").checks_permissions());
    }
}
