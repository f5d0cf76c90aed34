//! Places with many archives: a local directory, or the objects of a bucket below a prefix.

mod local;
mod page;
mod s3;

use std::sync::Arc;

use self::s3::S3Place;
use super::credentials::split_bucket;
use super::open::file_path;
use super::{Cause, Error, Options, Source, SourceDirectory, canonical_name, redact};

pub use self::page::{ListedArchive, Listing};

/// A place with archives below it.
#[derive(Debug)]
pub struct ArchivePlace {
    name: String,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Local(SourceDirectory),
    S3(Box<S3Place>),
}

impl ArchivePlace {
    /// Whether `spec` names a place: a local directory, a bucket, or a prefix of its keys that ends in a slash.
    pub fn is_place(spec: &str) -> bool {
        let spec = canonical_name(spec);
        match spec.strip_prefix("s3://") {
            Some(name) => {
                split_bucket(name).is_none_or(|(_, key)| key.is_empty() || key.ends_with('/'))
            }
            None => file_path(&spec).is_ok_and(|path| path.is_dir()),
        }
    }

    /// Opens the place `spec`.
    ///
    /// # Errors
    /// It is malformed or missing.
    pub async fn open(spec: &str, options: Options) -> Result<Self, Error> {
        let spec = &*canonical_name(spec);
        let name = redact(spec);
        let kind = if spec.starts_with("s3://") {
            let place = S3Place::open(spec, &options).await;
            Kind::S3(Box::new(place.map_err(|cause| Error::new(&name, cause))?))
        } else {
            Kind::Local(SourceDirectory::open(&file_path(spec)?, options.stats)?)
        };
        Ok(Self { name, kind })
    }

    /// Name for the user, without secrets.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lists the archives below the place. Blocks on a local disk.
    ///
    /// # Errors
    /// It is unreachable, or refuses the listing.
    pub async fn list(&self) -> Result<Listing, Error> {
        let mut listing = Listing::default();
        let listed = match &self.kind {
            Kind::Local(directory) => local::list(directory, &mut listing).map_err(Cause::from),
            Kind::S3(place) => place.list(&mut listing).await,
        };
        listed.map_err(|cause| Error::new(&self.name, cause))?;
        listing.finish();
        Ok(listing)
    }

    /// Location of the archive at `path`; `None` in a local directory.
    pub fn location(&self, path: &str) -> Option<String> {
        match &self.kind {
            Kind::Local(_) => None,
            Kind::S3(place) => Some(place.location(path)),
        }
    }

    /// Opens the file at `path` of a local directory. An object store has none. Blocks.
    ///
    /// # Errors
    /// It is missing, not regular, or not below the directory.
    pub fn open_file(&self, path: &str) -> Result<Arc<dyn Source>, Error> {
        match &self.kind {
            Kind::Local(directory) => directory.open_file(path),
            Kind::S3(_) => Err(Error::new(&self.name, Cause::NotFound)),
        }
    }

    /// As [`open_file`](Self::open_file), for a file that vouches for the file `archive`. It is an error if users who
    /// are not trusted can write it.
    pub(crate) fn open_beside(&self, archive: &str, path: &str) -> Result<Arc<dyn Source>, Error> {
        match &self.kind {
            Kind::Local(directory) => directory.open_beside(archive, path),
            Kind::S3(_) => Err(Error::new(&self.name, Cause::NotFound)),
        }
    }
}

/// Paths of the archives in `body`, a page of a listing of S3, for tests. `None` if it is none.
#[doc(hidden)]
pub fn paths_of_page(body: &[u8]) -> Option<Vec<String>> {
    let mut listing = Listing::default();
    s3::parse(body, "", &mut listing).ok()?;
    listing.finish();
    let paths = listing.archives.into_iter().map(|archive| archive.path);
    Some(paths.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: archives-place
    #[test]
    fn prefix_and_bucket_are_places_and_keys_are_not() {
        for (spec, expected) in [
            ("s3://bucket", true),
            ("s3://bucket/", true),
            ("s3://bucket/a/", true),
            ("s3://bucket/a.tar", false),
            ("s3a://bucket/a/", true),
            ("s3a://bucket/a.tar", false),
            ("s3://arn:aws:s3:us-east-1:1:accesspoint/p", true),
            ("s3://arn:aws:s3:us-east-1:1:accesspoint/p/a/", true),
            ("s3://arn:aws:s3:us-east-1:1:accesspoint/p/a.tar", false),
            ("https://example.com/", false),
            ("/", true),
            ("-", false),
        ] {
            assert_eq!(ArchivePlace::is_place(spec), expected, "{spec}");
        }
    }
}
