//! `tarfs verify`: reads an archive from start to end and reports damage.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use serde::Serialize;
use tokio::runtime::Handle;

use crate::cli::args::{CacheDirArgs, JsonArg, QuietArg, SourceArgs};
use crate::cli::exit_status;
use crate::cli::open_archive;
use crate::cli::ui::output::{self, UsageError};
use crate::cli::ui::progress::{self, ProgressOptions, Work};
use tarfs::Sha256;
use tarfs::Stats;
use tarfs::archive::scan::{self, Digest, ScanError};
use tarfs::archive::{Error, VerifySink};
use tarfs::index::{self, Builder, Index, MemoryLimit, Origin, Problem, TooMuchMemory, store};
use tarfs::internal::escape::{escape, escape_controls};
use tarfs::layers::{Layer, WhiteoutFormat, merge};
use tarfs::locate::TreeSpec;
use tarfs::source::{local_path, redact};

/// Arguments of `tarfs verify`.
#[derive(clap::Args, Debug)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    cache_dir: CacheDirArgs,

    /// Also compare this index with the archive
    #[arg(long, value_name = "FILE")]
    index: Option<PathBuf>,

    #[command(flatten)]
    json: JsonArg,

    #[command(flatten)]
    quiet: QuietArg,
}

/// Result of a check. Programs read these names. New ones may be added, but none may change or disappear.
#[derive(Serialize, Debug)]
struct Report {
    /// Location without secrets.
    source: String,
    is_good: bool,
    /// `None` if the format is unknown.
    format: Option<String>,
    /// `None` if not all bytes were read.
    packed_bytes: Option<u64>,
    /// `None` if not all bytes could be decoded.
    plain_bytes: Option<u64>,
    /// Members up to the first error.
    members: u64,
    /// `None` if not all compressed bytes could be read.
    sha256: Option<String>,
    problems: Vec<String>,
    warnings: Vec<String>,
}

pub(crate) fn run(args: &VerifyArgs) -> anyhow::Result<ExitCode> {
    // Checked before anything is fetched.
    let index_file = args.index_file()?;
    let limit = MemoryLimit::new(args.source.index_memory.0);
    let index = index_file.as_ref().map(|path| store::read(path, &limit));
    let mut index = index.transpose()?;
    let (stats, quiet) = (Arc::default(), args.quiet.is_set);
    let opened = open_archive::open_context(&args.source, &args.cache_dir, &stats, quiet);
    let (_network, mut context) = opened?;
    context.archive.index_file = index_file;
    let source = TreeSpec::from(args.source.source.clone());
    let sources = context.open_sources(&source)?;
    let scan_options = context.archive_options(&source, sources.is_layered).scan;
    let mut tree = VerifiedTree {
        indexes: Vec::new(),
        limit,
        whiteouts: sources.is_layered.then_some(WhiteoutFormat::Oci),
    };
    let mut reports = Vec::new();
    for layer in sources.layers {
        let stats = Arc::new(Stats::default());
        let index = index.take();
        reports.push(verify(
            args,
            &layer,
            index,
            &mut tree,
            &scan_options,
            &context.network,
            &stats,
        ));
    }
    tree.add_problems(&mut reports);
    for report in &mut reports {
        report.is_good = report.problems.is_empty();
        print_report(report, args.json.is_set)?;
    }
    Ok(if reports.iter().all(|report| report.is_good) {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(exit_status::FAILURE)
    })
}

impl VerifyArgs {
    /// The path of the index, which may be a file URL.
    fn index_file(&self) -> Result<Option<PathBuf>, UsageError> {
        let path = |name: &PathBuf| {
            local_path(name.as_os_str()).ok_or_else(|| {
                let name = redact(&name.to_string_lossy());
                UsageError(format!("--index: {name} is no local file (download it)"))
            })
        };
        self.index.as_ref().map(path).transpose()
    }
}

/// The archive, or the layers of an image, which are verified in sequence.
#[derive(Debug)]
struct VerifiedTree {
    /// Indexes of the verified archives, from the bottom layer.
    indexes: Vec<Index>,
    /// Memory limit for all indexes together.
    limit: MemoryLimit,
    /// Format of whiteouts in the layers of an image.
    whiteouts: Option<WhiteoutFormat>,
}

impl VerifiedTree {
    fn builder(&self) -> Builder {
        let builder = Builder::new(index::Options {
            whiteouts: self.whiteouts,
            ..index::Options::default()
        });
        builder.with_memory_limit(&self.limit)
    }

    /// Adds the members that are not in the tree, for an image those that appear only in the merged one.
    fn add_problems(&self, reports: &mut [Report]) {
        let Some(whiteouts) = self.whiteouts else {
            for (report, index) in reports.iter_mut().zip(&self.indexes) {
                report.add_missing(index.problems(), index.problem_count());
            }
            return;
        };
        let indexes: Vec<_> = self.indexes.iter().collect();
        let merged = match merge(&indexes, whiteouts, &self.limit) {
            Ok(merged) => merged,
            Err(error) => {
                let last = reports.last_mut();
                return last.map_or((), |last| last.problems.push(error.to_string()));
            }
        };
        for (layer, problem) in &merged.problems {
            if let Some(report) = reports.get_mut(*layer) {
                report.problems.push(problem.to_string());
            }
        }
        if let Some(last) = reports.last_mut() {
            let named = merged.problems.len() as u64;
            last.add_missing(&[], merged.index.problem_count().saturating_sub(named));
        }
    }
}

impl Report {
    /// Adds the members that are not in the tree, of which the first are `named`.
    fn add_missing(&mut self, named: &[Problem], count: u64) {
        let texts = named.iter().map(ToString::to_string);
        self.problems.extend(texts);
        let more = count.saturating_sub(named.len() as u64);
        if more > 0 {
            let text = format!("{more} more members are not in the tree");
            self.problems.push(text);
        }
    }
}

/// Verifies `layer`, and compares it with `index` if given. Adds its own index to `tree`.
fn verify(
    args: &VerifyArgs,
    Layer { source, digest, .. }: &Layer,
    index: Option<Index>,
    tree: &mut VerifiedTree,
    scan_options: &scan::Options,
    network: &Handle,
    stats: &Arc<Stats>,
) -> Report {
    let plain_digest = source.fingerprint().plain_sha256();
    let options = scan::Options {
        sha256: Digest::Compute,
        plain_sha256: plain_digest.map_or(Digest::Ignore, |_| Digest::Compute),
        spans: index.is_some(),
        ..scan_options.clone()
    };
    let mut check = index.map_or_else(VerifySink::default, |index| {
        VerifySink::with_index(Arc::new(index))
    });
    check.builder = Some(tree.builder());
    check.needs_builder = tree.whiteouts.is_some();
    let scanned = {
        let task = ProgressOptions {
            verb: "verifying",
            total_bytes: source.fingerprint().len,
            work: Work::Read,
            stats: Arc::clone(stats),
        };
        let _progress = progress::start(task, args.quiet.is_set);
        scan::scan(source, &options, network, stats, &mut check)
    };
    let builder = check.builder.take();
    let (missing, missing_count) = std::mem::take(&mut check.missing);
    let mut report = Report {
        source: source.location().to_owned(),
        is_good: false,
        format: check.compression.map(|format| format.to_string()),
        packed_bytes: None,
        plain_bytes: None,
        members: check.members,
        sha256: None,
        problems: Vec::new(),
        warnings: check.warnings(),
    };
    let sha256 = add_findings(&mut report, scanned, check, plain_digest, stats);
    report.add_missing(&missing, missing_count);
    if let Some(builder) = builder {
        tree.indexes.push(builder.finish(Origin::default()));
    }
    let requested = match *digest {
        Digest::Expect(digest) => Some(digest),
        Digest::Compute | Digest::Ignore => None,
    };
    let expected = source.fingerprint().sha256().or(requested);
    let problem = expected.and_then(|expected| digest_problem(expected, sha256));
    report.problems.extend(problem);
    report.sha256 = sha256.map(|digest| digest.to_string());
    report
}

/// Adds to `report` what the scan found. Returns the digest of the packed bytes, if all were read.
fn add_findings(
    report: &mut Report,
    scanned: Result<scan::Summary, ScanError<TooMuchMemory>>,
    check: VerifySink,
    plain_digest: Option<Sha256>,
    stats: &Stats,
) -> Option<Sha256> {
    match scanned {
        Ok(summary) => {
            report.packed_bytes = Some(summary.packed_len);
            report.plain_bytes = Some(summary.plain_len);
            if summary.damages > 0 {
                report.problems.push(format!(
                    "members may be lost at {} damaged places",
                    summary.damages
                ));
            }
            report.problems.extend(check.differences(&summary));
            let problem = plain_digest_problem(plain_digest, summary.plain_sha256);
            report.problems.extend(problem);
            summary.sha256
        }
        Err(ScanError::Archive {
            error,
            member,
            sha256,
        }) => {
            let mut error = anyhow::Error::new(error);
            if let Some(name) = member {
                error = error.context(format!("in member '{}'", escape(&name)));
            }
            report.problems.push(output::describe(&*error));
            if sha256.is_some() {
                report.packed_bytes = Some(stats.scanned_packed_bytes.get());
            }
            sha256.map(|sha256| *sha256)
        }
        Err(ScanError::Sink(error)) => {
            report.problems.push(error.to_string());
            None
        }
    }
}

/// Returns the problem if the digest `found` is not `expected`, or unknown.
fn digest_problem(expected: Sha256, found: Option<Sha256>) -> Option<String> {
    match found {
        Some(found) if found == expected => None,
        Some(found) => Some(Error::DigestMismatch { expected, found }.to_string()),
        None => Some("its SHA-256 is unknown, because not all bytes could be read".to_owned()),
    }
}

fn plain_digest_problem(expected: Option<Sha256>, found: Option<Sha256>) -> Option<String> {
    let expected = expected?;
    // A missing digest means that its thread has ended, and nothing was compared.
    let error = found.map_or(Error::Interrupted, |found| Error::PlainDigestMismatch {
        expected,
        found,
    });
    (found != Some(expected)).then(|| error.to_string())
}

fn print_report(report: &Report, json: bool) -> anyhow::Result<()> {
    let mut text = if json {
        output::to_json(report)?
    } else {
        to_text(report)
    };
    text.push('\n');
    output::print_text(&text)?;
    if !json {
        for problem in &report.problems {
            output::print_error(format_args!("{}: {problem}", report.source));
        }
        for warning in &report.warnings {
            output::print_warning(format_args!("{}: {warning}", report.source));
        }
    }
    Ok(())
}

fn to_text(report: &Report) -> String {
    let number = |known: Option<u64>| known.map(|number| number.to_string());
    let unknown = || "unknown".to_owned();
    let lines = [
        ("format", report.format.clone()),
        ("packed bytes", number(report.packed_bytes)),
        ("plain bytes", number(report.plain_bytes)),
        ("members", Some(report.members.to_string())),
        ("sha256", report.sha256.clone()),
    ];
    let verdict = if report.is_good { "good" } else { "not good" };
    let mut text = format!("{}: {verdict}", escape_controls(&report.source));
    for (name, value) in lines {
        let value = value.unwrap_or_else(unknown);
        text.extend(["\n", name, &" ".repeat(14 - name.len()), &value]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs read these names. New ones may be added, but none may change or disappear.
    // Promises: verify-checks
    #[test]
    fn verify_json_field_names_are_stable() {
        let report = Report {
            source: "a.tar".to_owned(),
            is_good: true,
            format: Some("gzip".to_owned()),
            packed_bytes: Some(1),
            plain_bytes: None,
            members: 3,
            sha256: None,
            problems: Vec::new(),
            warnings: Vec::new(),
        };
        assert_eq!(
            serde_json::to_string(&report).expect("a report"),
            r#"{"source":"a.tar","is_good":true,"format":"gzip","packed_bytes":1,"#.to_owned()
                + r#""plain_bytes":null,"members":3,"sha256":null,"problems":[],"warnings":[]}"#
        );
        let words = to_text(&report);
        assert!(
            words.starts_with("a.tar: good\nformat        gzip\n"),
            "{words}"
        );
        assert!(words.ends_with("\nsha256        unknown"), "{words}");
    }
}
