//! Seccomp profiles of Docker and Podman, and the filters for runtimes; pure.
//!
//! The format is that of the runtime specification, but rules may depend on capabilities, architecture and
//! kernel, and architectures may be a map.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::Cause;
use crate::base::escape::escape;

const DEFAULT_PROFILE: &str = include_str!("seccomp.json");

/// Keys that runtimes do not know.
const FOREIGN_KEYS: [&str; 3] = ["comment", "defaultErrno", "errno"];

/// A seccomp profile.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SeccompProfile {
    default_action: String,
    arch_map: Option<Vec<Architecture>>,
    syscalls: Option<Vec<Rule>>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// An architecture, and others whose programs its kernels can run.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Architecture {
    architecture: String,
    sub_architectures: Option<Vec<String>>,
}

#[derive(Clone, Debug, Deserialize)]
struct Rule {
    name: Option<String>,
    #[serde(default)]
    includes: Condition,
    #[serde(default)]
    excludes: Condition,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Condition {
    arches: Option<Vec<String>>,
    caps: Option<Vec<String>>,
    min_kernel: Option<String>,
}

impl SeccompProfile {
    /// The built-in profile, with the effect of Docker's.
    ///
    /// # Errors
    /// None, because the profile is part of this program.
    pub fn built_in() -> Result<Self, Cause> {
        Self::parse(DEFAULT_PROFILE.as_bytes(), (0, 0))
    }

    /// Parses the profile `text`, with only the rules for Linux `kernel`.
    ///
    /// # Errors
    /// When it is no profile.
    pub fn parse(text: &[u8], kernel: (u32, u32)) -> Result<Self, Cause> {
        let malformed = |error: serde_json::Error| Cause::Malformed(error.to_string());
        let mut profile: Self = serde_json::from_slice(text).map_err(malformed)?;
        let mut rules = Vec::new();
        for rule in profile.syscalls.take().unwrap_or_default() {
            let is_reached = |condition: &Condition| {
                let least = condition.min_kernel.as_deref().map(parse_kernel_version);
                Ok::<_, Cause>(least.transpose()?.map(|least| kernel >= least))
            };
            if is_reached(&rule.includes)? != Some(false)
                && is_reached(&rule.excludes)? != Some(true)
            {
                rules.push(rule);
            }
        }
        profile.syscalls = Some(rules);
        Ok(profile)
    }

    /// The filter for a container in the runtime specification's format. `architecture` is in Go's words.
    pub(super) fn filter(&self, architecture: &str, capabilities: &[String]) -> Value {
        let rules = self.syscalls.iter().flatten();
        let rules = rules.filter(|rule| rule.applies(architecture, capabilities));
        let mut filter = without_foreign_keys(&self.rest);
        filter.insert("defaultAction".to_owned(), json!(self.default_action));
        if let Some(architectures) = self.architectures(architecture) {
            filter.insert("architectures".to_owned(), json!(architectures));
        }
        let rules: Vec<_> = rules.map(Rule::to_json).collect();
        // An empty list is an error.
        if !rules.is_empty() {
            filter.insert("syscalls".to_owned(), json!(rules));
        }
        Value::Object(filter)
    }

    /// Architectures of system calls for programs of `architecture`. Without any, only the machine's own.
    fn architectures(&self, architecture: &str) -> Option<Vec<String>> {
        let name = libseccomp_name(architecture)?;
        self.arch_map.iter().flatten().find_map(|entry| {
            let others = entry.sub_architectures.iter().flatten();
            let all: Vec<_> = std::iter::once(&entry.architecture)
                .chain(others)
                .cloned()
                .collect();
            all.iter().any(|known| known == name).then_some(all)
        })
    }
}

impl Rule {
    fn applies(&self, architecture: &str, capabilities: &[String]) -> bool {
        let is_this = |arch: &String| arch == architecture;
        let is_granted = |capability: &String| capabilities.contains(capability);
        let arches = self.includes.arches.as_deref().unwrap_or_default();
        let caps = self.includes.caps.as_deref().unwrap_or_default();
        let no_arches = self.excludes.arches.as_deref().unwrap_or_default();
        let no_caps = self.excludes.caps.as_deref().unwrap_or_default();
        (arches.is_empty() || arches.iter().any(is_this))
            && caps.iter().all(is_granted)
            && !no_arches.iter().any(is_this)
            && !no_caps.iter().any(is_granted)
    }

    /// Converts to the format of the runtime specification.
    fn to_json(&self) -> Value {
        let mut rule = without_foreign_keys(&self.rest);
        if let Some(name) = &self.name {
            rule.insert("names".to_owned(), json!([name]));
        }
        Value::Object(rule)
    }
}

fn without_foreign_keys(object: &Map<String, Value>) -> Map<String, Value> {
    let mut object = object.clone();
    object.retain(|key, value| !value.is_null() && !FOREIGN_KEYS.contains(&key.as_str()));
    object
}

fn parse_kernel_version(text: &str) -> Result<(u32, u32), Cause> {
    let numbers = text.split_once('.');
    let numbers =
        numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    numbers
        .ok_or_else(|| Cause::Malformed(format!("'{}' is no minKernel", escape(text.as_bytes()))))
}

/// libseccomp's name of an architecture in Go's words.
fn libseccomp_name(architecture: &str) -> Option<&'static str> {
    Some(match architecture {
        "386" => "SCMP_ARCH_X86",
        "amd64" => "SCMP_ARCH_X86_64",
        "arm" => "SCMP_ARCH_ARM",
        "arm64" => "SCMP_ARCH_AARCH64",
        "loong64" => "SCMP_ARCH_LOONGARCH64",
        "mips64" => "SCMP_ARCH_MIPS64",
        "mips64le" => "SCMP_ARCH_MIPSEL64",
        "ppc64le" => "SCMP_ARCH_PPC64LE",
        "riscv64" => "SCMP_ARCH_RISCV64",
        "s390x" => "SCMP_ARCH_S390X",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The actions for a system call, with the index of the argument on which they depend.
    fn actions(filter: &Value, call: &str) -> Vec<(String, Option<u64>)> {
        let rules = filter["syscalls"].as_array().expect("rules");
        let names = |rule: &Value| rule["names"].as_array().expect("names").clone();
        let rules = rules
            .iter()
            .filter(|rule| names(rule).contains(&json!(call)));
        let action = |rule: &Value| {
            let action = rule["action"].as_str().expect("an action");
            (action.to_owned(), rule["args"][0]["index"].as_u64())
        };
        rules.map(action).collect()
    }

    // Promises: bundle-seccomp
    #[test]
    fn seccomp_rules_depend_on_capabilities_and_architecture() {
        let profile = SeccompProfile::built_in().expect("a profile");
        let (allow, refuse) = ("SCMP_ACT_ALLOW".to_owned(), "SCMP_ACT_ERRNO".to_owned());
        let filter = profile.filter("amd64", &[]);
        assert_eq!(actions(&filter, "read"), [(allow.clone(), None)]);
        assert_eq!(actions(&filter, "keyctl"), [(refuse.clone(), None)]);
        assert_eq!(actions(&filter, "mount"), [(refuse, None)]);
        assert_eq!(actions(&filter, "clone3"), []);
        assert_eq!(actions(&filter, "clone"), [(allow.clone(), Some(0))]);
        let mainframe = profile.filter("s390x", &[]);
        assert_eq!(actions(&mainframe, "clone"), [(allow.clone(), Some(1))]);
        let admin = profile.filter("amd64", &["CAP_SYS_ADMIN".to_owned()]);
        for call in ["mount", "clone", "clone3", "bpf"] {
            assert_eq!(actions(&admin, call), [(allow.clone(), None)], "{call}");
        }
    }

    // Promises: bundle-seccomp
    #[test]
    fn seccomp_filter_has_the_architectures_of_the_kernel() {
        let profile = SeccompProfile::built_in().expect("a profile");
        let of = |architecture| profile.filter(architecture, &[])["architectures"].clone();
        let x86 = json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"]);
        assert_eq!(of("amd64"), x86);
        assert_eq!(of("386"), x86);
        assert_eq!(of("arm64"), json!(["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"]));
        assert_eq!(of("riscv64"), Value::Null);
        assert_eq!(of("x\n"), Value::Null);
    }

    // Promises: bundle-seccomp
    #[test]
    fn seccomp_filter_keeps_only_keys_that_runtimes_know() {
        let text = r#"{"defaultAction":"SCMP_ACT_ALLOW","comment":"x","defaultErrno":"EPERM","archMap":null,
            "architectures":["SCMP_ARCH_ARM"],"flags":["SECCOMP_FILTER_FLAG_LOG"],"syscalls":[
            {"name":"a","action":"A","args":null,"comment":"x","includes":{"minKernel":"4.8"}},
            {"names":["b"],"action":"A","includes":{"minKernel":"4.9"}},
            {"names":["c"],"action":"A","excludes":{"minKernel":"4.8"}}]}"#;
        let profile = SeccompProfile::parse(text.as_bytes(), (4, 8)).expect("a profile");
        let expected = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": ["SCMP_ARCH_ARM"],
            "flags": ["SECCOMP_FILTER_FLAG_LOG"],
            "syscalls": [{ "names": ["a"], "action": "A" }],
        });
        assert_eq!(profile.filter("amd64", &[]), expected);
        for bad in [
            "[]",
            "{}",
            r#"{"defaultAction":"A","syscalls":[{"includes":{"x":1}}]}"#,
            r#"{"defaultAction":"A","syscalls":[{"includes":{"minKernel":"4"}}]}"#,
        ] {
            assert!(
                SeccompProfile::parse(bad.as_bytes(), (4, 8)).is_err(),
                "{bad}"
            );
        }
    }
}
