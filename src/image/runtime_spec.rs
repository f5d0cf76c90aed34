//! Converts an image's configuration to a bundle's `config.json`; pure.
//!
//! Without a value in the image, the result is like that of `runc spec`, except:
//! - Capabilities and the filter of system calls are nearly those of Docker and Podman. Programs may gain the
//!   privileges of their files, because many entry points change owners and users.
//! - The tree is writable, HOME is set, the host name is the bundle's name, and there are no `rlimits`.
//! - A terminal and TERM exist only if the caller wants them.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::config::{Config, Execution};
use super::error::Cause;
use super::seccomp::SeccompProfile;
use super::user_lookup::User;
use crate::source::documents::Platform;

const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The `TERM` of Docker and `runc spec`.
const DEFAULT_TERM: &str = "TERM=xterm";

/// Default capabilities of root: Docker's without `CAP_MKNOD` and `CAP_NET_RAW`, which few images need.
pub const DEFAULT_CAPABILITIES: [&str; 12] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

const MASKED_PATHS: [&str; 12] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/proc/scsi",
];

const READONLY_PATHS: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// The directory of a bundle that holds the contents of volumes.
pub const VOLUMES_DIR: &str = "volumes";

const MAX_HOSTNAME_LEN: usize = 63;

/// Options of a bundle that the image does not define.
#[derive(Clone, Debug)]
pub struct BundleOptions {
    /// The user of the process.
    pub user: User,
    /// Arguments instead of the image's.
    pub args: Vec<String>,
    /// Name of the bundle.
    pub name: String,
    /// Whether it has a terminal.
    pub terminal: bool,
    /// Capabilities of root and of programs with file capabilities.
    pub capabilities: Vec<String>,
    /// The filter of system calls; `None` allows all.
    pub seccomp: Option<SeccompProfile>,
    /// The image's volumes, as paths without links, each after those that contain it.
    pub volumes: Vec<String>,
    /// User and group of the caller, if it is not root. They become root in the container.
    pub rootless: Option<(u32, u32)>,
}

/// The text of `config.json` for a bundle, with its writable tree at `rootfs` beside it.
///
/// # Errors
/// When the configuration has no command.
pub fn runtime_spec(config: &Config, bundle: &BundleOptions) -> Result<String, Cause> {
    let execution = &config.execution;
    let args = args(execution, &bundle.args)?;
    let user = &bundle.user;
    let mut user_object = json!({ "uid": user.uid, "gid": user.gid });
    if !user.groups.is_empty() && bundle.rootless.is_none() {
        insert_field(&mut user_object, "additionalGids", json!(user.groups));
    }
    // Other users start without capabilities, and may get those of a program file.
    let own: &[String] = if user.uid == 0 {
        &bundle.capabilities
    } else {
        &[]
    };
    let mut linux = linux(bundle.rootless);
    if let Some(profile) = &bundle.seccomp {
        let architecture = match config.platform.architecture.as_str() {
            "" => Platform::host().architecture,
            architecture => architecture.to_owned(),
        };
        let filter = profile.filter(&architecture, &bundle.capabilities);
        insert_field(&mut linux, "seccomp", filter);
    }
    let mut document = json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": bundle.terminal,
            "user": user_object,
            "args": args,
            "env": env(execution, user, bundle.terminal),
            // Absolute, because the runtime requires it.
            "cwd": format!("/{}", execution.working_dir.trim_start_matches('/')),
            "capabilities": {
                "bounding": bundle.capabilities,
                "effective": own,
                "permitted": own,
            },
            "noNewPrivileges": false,
        },
        "root": { "path": "rootfs", "readonly": false },
        "hostname": hostname(execution, &bundle.name),
        "mounts": mounts(&bundle.volumes, bundle.rootless.is_some()),
        "linux": linux,
    });
    let annotations = annotations(config);
    if !annotations.is_empty() {
        insert_field(&mut document, "annotations", json!(annotations));
    }
    let mut text = serde_json::to_string_pretty(&document)
        .map_err(|error| Cause::Malformed(error.to_string()))?;
    text.push('\n');
    Ok(text)
}

fn insert_field(object: &mut Value, name: &str, value: Value) {
    if let Some(object) = object.as_object_mut() {
        object.insert(name.to_owned(), value);
    }
}

fn args(execution: &Execution, arguments: &[String]) -> Result<Vec<String>, Cause> {
    let rest = if arguments.is_empty() {
        &execution.cmd
    } else {
        arguments
    };
    let args = [execution.entrypoint.as_slice(), rest].concat();
    (!args.is_empty()).then_some(args).ok_or(Cause::NoCommand)
}

fn env(execution: &Execution, user: &User, has_terminal: bool) -> Vec<String> {
    let mut env = execution.env.clone();
    let has = |env: &[String], name: &str| env.iter().any(|word| word.starts_with(name));
    if !has(&env, "PATH=") {
        env.push(DEFAULT_PATH.to_owned());
    }
    if has_terminal && !has(&env, "TERM=") {
        env.push(DEFAULT_TERM.to_owned());
    }
    if !has(&env, "HOME=") {
        env.push(format!("HOME={}", user.home.as_deref().unwrap_or("/")));
    }
    env
}

/// Directories where the runtime mounts file systems, which no volume may hide.
const SYSTEM_DIRECTORIES: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Whether a volume at `path`, absolute and without links, would hide a mount of the runtime.
pub fn hides_system_directory(path: &str) -> bool {
    let is_at_or_below = |directory: &&str| {
        let rest = path.strip_prefix(directory);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    path == "/" || SYSTEM_DIRECTORIES.iter().any(is_at_or_below)
}

fn hostname(execution: &Execution, name: &str) -> String {
    let wanted = match execution.hostname.as_str() {
        "" => name,
        hostname => hostname,
    };
    let letters = wanted
        .chars()
        .filter(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '.'));
    let hostname: String = letters.take(MAX_HOSTNAME_LEN).collect();
    let hostname = hostname.trim_matches(['-', '.']);
    let hostname = Some(hostname).filter(|hostname| !hostname.is_empty());
    hostname.unwrap_or("container").to_owned()
}

/// Prefix of labels that become annotations. The image specification wants all labels, but runtimes treat
/// some annotations as commands. Examples are `org.criu.*`, `org.systemd.property.*`, and crun's `run.oci.*`,
/// one of which loads libraries outside of the container.
const ALLOWED_LABEL_PREFIX: &str = "org.opencontainers.image.";

/// Harmless annotations by the image specification: labels, and fields without a place of their own.
fn annotations(config: &Config) -> BTreeMap<String, String> {
    let execution = &config.execution;
    let ports: Vec<_> = execution.exposed_ports.iter().cloned().collect();
    let platform = &config.platform;
    let metadata = [
        ("os", platform.os.clone()),
        ("architecture", platform.architecture.clone()),
        ("variant", platform.variant.clone().unwrap_or_default()),
        ("author", config.author.clone().unwrap_or_default()),
        ("created", config.created.clone().unwrap_or_default()),
        ("stopSignal", execution.stop_signal.clone()),
        ("exposedPorts", ports.join(",")),
    ];
    let metadata = metadata
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| (format!("org.opencontainers.image.{name}"), value));
    // Explicit labels override derived annotations.
    let labels = execution.labels.clone().into_iter();
    let labels = labels.filter(|(name, _)| name.starts_with(ALLOWED_LABEL_PREFIX));
    metadata.chain(labels).collect()
}

/// Path in the bundle of volume `number`, outside of the tree, where a container could make it a link.
pub fn volume_directory(number: usize) -> String {
    format!("{VOLUMES_DIR}/{number}")
}

fn mounts(volumes: &[String], is_rootless: bool) -> Value {
    let sys = if is_rootless {
        // A new `/sys` cannot be mounted for another network namespace.
        json!({ "destination": "/sys", "type": "none", "source": "/sys",
                "options": ["rbind", "nosuid", "noexec", "nodev", "ro"] })
    } else {
        json!({ "destination": "/sys", "type": "sysfs", "source": "sysfs",
                "options": ["nosuid", "noexec", "nodev", "ro"] })
    };
    let mut pts = vec![
        "nosuid",
        "noexec",
        "newinstance",
        "ptmxmode=0666",
        "mode=0620",
    ];
    if !is_rootless {
        pts.push("gid=5");
    }
    let mut mounts = vec![
        json!({ "destination": "/proc", "type": "proc", "source": "proc" }),
        json!({ "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
                "options": ["nosuid", "strictatime", "mode=755", "size=65536k"] }),
        json!({ "destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": pts }),
        json!({ "destination": "/dev/shm", "type": "tmpfs", "source": "shm",
                "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"] }),
        json!({ "destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue",
                "options": ["nosuid", "noexec", "nodev"] }),
        sys,
    ];
    if !is_rootless {
        mounts.push(
            json!({ "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup",
                            "options": ["nosuid", "noexec", "nodev", "relatime", "ro"] }),
        );
    }
    let volumes = volumes.iter().enumerate().map(|(number, path)| {
        json!({ "destination": path, "type": "none", "source": volume_directory(number),
                "options": ["bind", "rw", "nosuid", "nodev"] })
    });
    mounts.extend(volumes);
    Value::Array(mounts)
}

fn linux(rootless: Option<(u32, u32)>) -> Value {
    let last = rootless.map_or("network", |_| "user");
    let namespaces = ["pid", "ipc", "uts", "mount", "cgroup", last];
    let namespaces = namespaces.map(|kind| json!({ "type": kind }));
    let mut linux = json!({
        "namespaces": namespaces,
        "maskedPaths": MASKED_PATHS,
        "readonlyPaths": READONLY_PATHS,
    });
    if let Some((uid, gid)) = rootless {
        let mapping = |id| json!([{ "containerID": 0, "hostID": id, "size": 1 }]);
        insert_field(&mut linux, "uidMappings", mapping(uid));
        insert_field(&mut linux, "gidMappings", mapping(gid));
    } else {
        let devices = json!({ "devices": [{ "allow": false, "access": "rwm" }] });
        insert_field(&mut linux, "resources", devices);
    }
    linux
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> BundleOptions {
        BundleOptions {
            user: User {
                uid: 0,
                gid: 0,
                groups: vec![6],
                home: Some("/root".to_owned()),
            },
            args: Vec::new(),
            name: "the_bundle".to_owned(),
            terminal: false,
            capabilities: DEFAULT_CAPABILITIES.map(str::to_owned).to_vec(),
            seccomp: None,
            volumes: Vec::new(),
            rootless: None,
        }
    }

    fn made(config: &str, bundle: &BundleOptions) -> Value {
        let config = Config::parse(config.as_bytes()).expect("a config");
        let text = super::runtime_spec(&config, bundle).expect("something to run");
        serde_json::from_str(&text).expect("JSON")
    }

    // Promises: bundle-content, bundle-labels
    #[test]
    fn runtime_spec_runs_the_command_of_the_image() {
        let config = r#"{"os":"linux","architecture":"amd64","config":{"Entrypoint":["/e","-x"],
            "Cmd":["c"],"Env":["A=b","PATH=/p"],"WorkingDir":"w/x","StopSignal":"SIGQUIT",
            "Labels":{"run.oci.seccomp.plugins":"rootfs/evil.so","org.criu.config":"/x",
            "org.systemd.property.ExecStart":"x","l":"m","org.opencontainers.image.os":"mine"},
            "ExposedPorts":{"80/tcp":{},"53/udp":{}}}}"#;
        let document = made(config, &root());
        let process = &document["process"];
        assert_eq!(process["args"], json!(["/e", "-x", "c"]));
        assert_eq!(process["env"], json!(["A=b", "PATH=/p", "HOME=/root"]));
        assert_eq!(process["cwd"], "/w/x");
        assert_eq!(
            process["user"],
            json!({ "uid": 0, "gid": 0, "additionalGids": [6] })
        );
        assert_eq!(
            process["capabilities"]["effective"],
            json!(DEFAULT_CAPABILITIES)
        );
        assert_eq!(
            document["root"],
            json!({ "path": "rootfs", "readonly": false })
        );
        assert_eq!(document["hostname"], "thebundle");
        let annotations = &document["annotations"];
        let names = annotations.as_object().expect("an object").keys();
        let orders: Vec<_> = names
            .filter(|name| !name.starts_with(ALLOWED_LABEL_PREFIX))
            .collect();
        assert!(orders.is_empty(), "{orders:?}");
        assert_eq!(annotations["org.opencontainers.image.os"], "mine");
        assert_eq!(
            annotations["org.opencontainers.image.stopSignal"],
            "SIGQUIT"
        );
        assert_eq!(
            annotations["org.opencontainers.image.exposedPorts"],
            "53/udp,80/tcp"
        );
    }

    // Promises: bundle-content
    #[test]
    fn arguments_replace_cmd_after_the_entrypoint() {
        let mut bundle = root();
        bundle.args = vec!["-c".to_owned(), "true".to_owned()];
        let config = r#"{"config":{"Entrypoint":["/bin/sh"],"Cmd":["gone"]}}"#;
        let document = made(config, &bundle);
        assert_eq!(
            document["process"]["args"],
            json!(["/bin/sh", "-c", "true"])
        );
        let path = document["process"]["env"][0].as_str().expect("a word");
        assert!(path.starts_with("PATH=/usr/local/sbin:"), "{path}");

        let empty = Config::parse(b"{}").expect("a config");
        let nothing = super::runtime_spec(&empty, &root());
        assert!(matches!(nothing, Err(Cause::NoCommand)));
        assert!(super::runtime_spec(&empty, &bundle).is_ok());
    }

    // Promises: bundle-labels
    #[test]
    fn term_is_set_for_a_terminal_unless_the_image_sets_it() {
        let mut bundle = root();
        let env =
            |config: &str, bundle: &BundleOptions| made(config, bundle)["process"]["env"].clone();
        let (silent, named) = (
            r#"{"config":{"Cmd":["c"],"Env":["PATH=/p"]}}"#,
            r#"{"config":{"Cmd":["c"],"Env":["PATH=/p","TERM=linux"]}}"#,
        );
        assert_eq!(env(silent, &bundle), json!(["PATH=/p", "HOME=/root"]));
        bundle.terminal = true;
        assert_eq!(
            env(silent, &bundle),
            json!(["PATH=/p", "TERM=xterm", "HOME=/root"])
        );
        assert_eq!(
            env(named, &bundle),
            json!(["PATH=/p", "TERM=linux", "HOME=/root"])
        );
    }

    // Promises: volume-content
    #[test]
    fn volumes_are_mounted_from_outside_the_root() {
        for rootless in [None, Some((1000, 1000))] {
            let volumes = vec!["/data".to_owned(), "/data/x".to_owned()];
            let bundle = BundleOptions {
                rootless,
                volumes: volumes.clone(),
                ..root()
            };
            let mounts = made(r#"{"config":{"Cmd":["c"]}}"#, &bundle)["mounts"].clone();
            let mounts = mounts.as_array().expect("a list");
            let mounted = mounts.iter().skip(mounts.len() - 2);
            for (number, (mount, path)) in mounted.zip(volumes).enumerate() {
                assert_eq!(
                    *mount,
                    json!({ "destination": path, "type": "none", "source": format!("volumes/{number}"),
                            "options": ["bind", "rw", "nosuid", "nodev"] })
                );
            }
        }
        let many: Vec<_> = (0..1001)
            .map(|number| format!("\"/{number}\":{{}}"))
            .collect();
        let config = format!(r#"{{"config":{{"Volumes":{{{}}}}}}}"#, many.join(","));
        assert!(Config::parse(config.as_bytes()).is_err());
    }

    // Promises: volume-refused
    #[test]
    fn volumes_never_hide_system_directories() {
        for path in [
            "/",
            "/proc",
            "/proc/1",
            "/sys/fs/cgroup",
            "/dev",
            "/dev/shm",
        ] {
            assert!(hides_system_directory(path), "{path}");
        }
        for path in ["/process", "/devices/dev", "/srv/proc"] {
            assert!(!hides_system_directory(path), "{path}");
        }
    }

    // Promises: bundle-users
    #[test]
    fn process_of_non_root_user_has_no_effective_capabilities() {
        let mut bundle = root();
        bundle.user.uid = 33;
        let document = made(r#"{"config":{"Cmd":["c"]}}"#, &bundle);
        let capabilities = &document["process"]["capabilities"];
        assert_eq!(capabilities["effective"], json!([]));
        assert_eq!(capabilities["permitted"], json!([]));
        assert_eq!(capabilities["bounding"], json!(DEFAULT_CAPABILITIES));
    }

    // Promises: bundle-rootless
    #[test]
    fn rootless_bundle_maps_the_user_in_a_user_namespace() {
        let mut bundle = root();
        bundle.rootless = Some((1000, 1001));
        let document = made(r#"{"config":{"Cmd":["c"]}}"#, &bundle);
        let linux = &document["linux"];
        assert_eq!(linux["uidMappings"][0]["hostID"], 1000);
        assert_eq!(linux["gidMappings"][0]["hostID"], 1001);
        let kinds = linux["namespaces"].as_array().expect("a list");
        assert!(kinds.contains(&json!({ "type": "user" })));
        assert!(
            !kinds.contains(&json!({ "type": "network" })),
            "it could not be set up"
        );
        assert_eq!(linux["resources"], Value::Null);
        assert_eq!(document["process"]["user"], json!({ "uid": 0, "gid": 0 }));
    }
}
