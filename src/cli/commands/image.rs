//! `tarfs image`: shows the content and configuration of an image.

use std::io::{IsTerminal, stderr};
use std::process::ExitCode;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::cli::args::{CacheDirArgs, JsonArg, SourceArgs};
use crate::cli::open_archive;
use crate::cli::ui::output;
use crate::cli::ui::units::format_bytes;
use tarfs::image::{Image, Layer};
use tarfs::internal::escape::escape_controls;

/// Arguments of `tarfs image`.
#[derive(clap::Args, Debug)]
pub(crate) struct ImageArgs {
    #[command(flatten)]
    source: SourceArgs,

    #[command(flatten)]
    cache_dir: CacheDirArgs,

    #[command(flatten)]
    json: JsonArg,
}

/// JSON about an image. Programs read these names. New ones may be added, but none may change or disappear.
#[derive(Serialize, Debug)]
struct Report<'a> {
    /// Location without secrets.
    source: &'a str,
    names: &'a [String],
    /// Digest of the manifest, or of the configuration if there is no manifest.
    digest: String,
    config_digest: String,
    /// OS/ARCH or OS/ARCH/VARIANT.
    platform: String,
    /// Layers, the lowest first.
    layers: Vec<LayerReport<'a>>,
    /// The image's configuration, on one line.
    config: Box<RawValue>,
}

#[derive(Serialize, Debug)]
struct LayerReport<'a> {
    /// `None` if the image does not contain it.
    digest: Option<String>,
    size_bytes: u64,
    media_type: Option<&'a str>,
}

pub(crate) fn run(args: &ImageArgs) -> anyhow::Result<ExitCode> {
    let quiet = !stderr().is_terminal();
    let image = open_archive::open_image(&args.source, &args.cache_dir, quiet)?;
    let mut text = if args.json.is_set {
        output::to_json(&report(&image)?)?
    } else {
        to_text(&image)
    };
    text.push('\n');
    output::print_text(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn report(image: &Image) -> anyhow::Result<Report<'_>> {
    let layers = image.layers.iter().map(|layer| LayerReport {
        digest: digest(layer),
        size_bytes: layer.size,
        media_type: layer.media_type.as_deref(),
    });
    let config = compact_json(image.config.document.get());
    Ok(Report {
        source: &image.location,
        names: &image.names,
        digest: format!("sha256:{}", image.digest),
        config_digest: format!("sha256:{}", image.config_digest),
        platform: image.config.platform.to_string(),
        layers: layers.collect(),
        config: RawValue::from_string(config)?,
    })
}

/// Removes whitespace between the tokens of the JSON in `text`.
fn compact_json(text: &str) -> String {
    let (mut is_text, mut is_escaped) = (false, false);
    let is_kept = |letter: &char| {
        let is_blank = !is_text && letter.is_ascii_whitespace();
        if !is_escaped && *letter == '"' {
            is_text = !is_text;
        }
        is_escaped = is_text && !is_escaped && *letter == '\\';
        !is_blank
    };
    text.chars().filter(is_kept).collect()
}

fn digest(layer: &Layer) -> Option<String> {
    layer.digest.map(|digest| format!("sha256:{digest}"))
}

fn to_text(image: &Image) -> String {
    let execution = &image.config.execution;
    let bytes = image.layers.iter().map(|layer| layer.size);
    let bytes = bytes.fold(0, u64::saturating_add);
    let count = image.layers.len();
    let mut lines = vec![("image", image.location.clone())];
    let mut line = |name, value: String| {
        if !value.is_empty() {
            lines.push((name, value));
        }
    };
    line("names", image.names.join(" "));
    line("digest", format!("sha256:{}", image.digest));
    let platform = &image.config.platform;
    if !platform.os.is_empty() {
        line("platform", platform.to_string());
    }
    line("created", image.config.created.clone().unwrap_or_default());
    line("layers", format!("{count}, {} packed", format_bytes(bytes)));
    for layer in &image.layers {
        let digest = digest(layer).unwrap_or_else(|| "without a digest".to_owned());
        line("", format!("{digest} {}", format_bytes(layer.size)));
    }
    line("entry point", shell_quote(&execution.entrypoint));
    line("command", shell_quote(&execution.cmd));
    for variable in &execution.env {
        line("environment", variable.clone());
    }
    line("user", execution.user.clone());
    line("directory", execution.working_dir.clone());
    line("stop signal", execution.stop_signal.clone());
    for volume in &execution.volumes {
        line("volume", volume.clone());
    }
    for (name, value) in &execution.labels {
        line("label", format!("{name}={value}"));
    }
    let lines = lines.iter().map(|(name, value)| {
        // The image's text must not control the terminal.
        format!("{name:13} {}", escape_controls(value))
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Quotes words so that their boundaries are visible.
fn shell_quote(words: &[String]) -> String {
    let quoted = words.iter().map(|word| {
        let is_plain = |letter: char| letter.is_ascii_graphic() && !"'\"\\".contains(letter);
        if !word.is_empty() && word.chars().all(is_plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use tarfs::Sha256;
    use tarfs::image::Config;
    use tarfs::source::MemorySource;

    fn image(config: &str) -> Image {
        Image {
            location: "x.tar".to_owned(),
            names: vec!["one".to_owned()],
            digest: Sha256([1; 32]),
            config_digest: Sha256([2; 32]),
            config: Config::parse(config.as_bytes()).expect("a config"),
            layers: vec![Layer {
                source: Arc::new(MemorySource::new("layer", "")),
                digest: None,
                size: 7,
                media_type: None,
            }],
        }
    }

    /// Programs read these names. New ones may be added, but none may change or disappear.
    // Promises: image-verb
    #[test]
    fn image_json_field_names_are_stable() {
        let image = image(
            r#" { "os":"linux",
            "architecture" : "a\"\\ b" } "#,
        );
        let (ones, twos) = ("01".repeat(32), "02".repeat(32));
        assert_eq!(
            serde_json::to_string(&report(&image).expect("JSON")).expect("a report"),
            format!(
                r#"{{"source":"x.tar","names":["one"],"digest":"sha256:{ones}","config_digest":"sha256:{twos}","platform":"linux/a\"\\ b","layers":[{{"digest":null,"size_bytes":7,"media_type":null}}],"config":{{"os":"linux","architecture":"a\"\\ b"}}}}"#
            )
        );
    }

    // Promises: image-verb
    #[test]
    fn control_characters_of_an_image_are_escaped() {
        let config = r#"{"config":{"Cmd":["a b","c'd","","\u001b[2J"],"Env":["A=\u0007"],
            "Volumes":{"/v\u001b":{}},"Labels":{"l\u001b":"\u001b"}}}"#;
        let text = to_text(&image(config));
        assert!(
            text.contains(r"command       'a b' 'c'\''d' '' '\u{1b}[2J'"),
            "{text}"
        );
        assert!(
            !text
                .chars()
                .any(|letter| letter.is_control() && letter != '\n'),
            "{text:?}"
        );
    }
}
