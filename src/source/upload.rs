//! Uploads: a local file is stored at a path, a URL, or as an object.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use reqwest::Method;
use url::Url;

use super::client::{Message, Sender, UploadContent};
use super::location::shown_path;
use super::network::NetworkTransport;
use super::open::{file_path, http_target};
use super::{Cause, Error, Options, redact};
use crate::base::publish::publish;

/// Statuses of a successful PUT.
pub(super) const STORED: &[u16] = &[200, 201, 204];

/// Stores `content` at `spec`: a path, a URL (`file://`, `http://`, `https://`), or an object.
///
/// It replaces a file or object of that name without a question, because it is for files that can be made
/// again. A failed upload leaves the earlier file or object. A local file is written under a temporary name
/// beside it, and then renamed. A server gets a PUT request, with the headers, credentials, retries and
/// timeouts of reads, which follows redirects (307 and 308) only within the host.
///
/// # Errors
/// `spec` is malformed or names a version, or the upload fails. The error names the permission that is missing.
pub async fn put(spec: &str, content: UploadContent, options: Options) -> Result<(), Error> {
    let stored = store(spec, content, options).await;
    stored.map_err(Error::of_upload)
}

async fn store(spec: &str, content: UploadContent, options: Options) -> Result<(), Error> {
    let failed = |cause| Error::new(redact(spec), cause);
    let Some((target, options)) = http_target(spec, &options).await? else {
        return write_file(file_path(spec)?, content).await;
    };
    let mut message = match &target.upload_url {
        Some(url) => Message::new(Method::POST, url.clone()),
        None => Message::new(Method::PUT, target.url.clone()),
    };
    message.content = Some(&content);
    let is_object = !Url::parse(spec).is_ok_and(|url| url.scheme().starts_with("http"));
    if is_object {
        if target.url.query().is_some() {
            let refused = "an upload makes a version, and cannot name one";
            return Err(failed(Cause::Malformed(refused.to_owned())));
        }
        message.sha256 = Some(content.sha256().await.map_err(failed)?);
    }
    let transport = NetworkTransport::new(&target.url, &options).map_err(failed)?;
    let sender = Sender::new(&target, Box::new(transport), options)?;
    sender.request(message, STORED).await?;
    Ok(())
}

async fn write_file(path: PathBuf, content: UploadContent) -> Result<(), Error> {
    let name = shown_path(&path);
    let writing = tokio::task::spawn_blocking(move || replace_file(&path, &content));
    // The task fails only if the runtime ends.
    let written = writing.await.unwrap_or(Err(Cause::Cancelled));
    written.map_err(|cause| Error::new(name, cause))
}

fn replace_file(path: &Path, content: &UploadContent) -> Result<(), Cause> {
    if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
        let refused = "an upload replaces only regular files";
        return Err(Cause::Malformed(refused.to_owned()));
    }
    publish(path, |temporary| -> io::Result<()> {
        let mut file = File::create_new(temporary)?;
        content.for_each_piece(|piece| file.write_all(piece))
    })?;
    Ok(())
}
