//! Opens an archive by its published index, instead of a scan.

use std::sync::{Arc, Weak};

use super::opener::{Opener, disk_cache_name_of, is_refused, keep_index_lock};
use crate::archive::error::{OpenError, ReadError};
use crate::archive::index_source::published_index::{
    FindIndex, IndexPlace, PublishedIndex, PublishedIndexError, is_bound, load,
};
use crate::archive::index_source::tree_origin::{TreeOrigin, TreeSource};
use crate::archive::live_index::LiveIndex;
use crate::archive::read::Reader;
use crate::archive::read::checked_headers::HeaderChecks;
use crate::base::error_chain::error_chain;
use crate::base::thread_pool::ThreadPool;
use crate::index::{Index, Locator, format};
use crate::source::{Access, Cause, Class};

/// Longest published index that is loaded as a whole in the background. Of longer ones, only what is used.
const MAX_BACKGROUND_BYTES: u64 = 16 << 20;

impl Opener {
    /// Opens the archive by the first of the published indexes that matches. It fails only if the user requires one
    /// that is missing, unusable or does not match.
    pub(super) fn open_published_index(&self) -> Result<Option<Reader>, OpenError> {
        let Some(published) = &self.options.published_index else {
            return Ok(None);
        };
        if !self.may_trust_published(published.sha256.is_some()) {
            return Ok(None);
        }
        for (origin, place) in &published.places {
            let opened = match place {
                IndexPlace::Index(find, publisher) => {
                    let locator = self.copy_locator(publisher);
                    let copy = self.find_saved_copy(published, *origin, &locator);
                    if let Some(reader) = copy
                        && self.is_within_limits(&reader)?
                    {
                        return Ok(Some(reader));
                    }
                    self.try_published_index(published, find, *origin, &locator)
                }
                IndexPlace::Ztoc(find) => self.try_ztoc(published, find, *origin).map(proven),
                IndexPlace::EstargzToc(find) => self.try_estargz(find, *origin).map(proven),
            };
            // Samples are decoded, so the limits are checked before.
            let checked = match opened {
                Ok(Some((reader, is_proven))) if self.is_within_limits(&reader)? => {
                    let samples = (!is_proven).then(|| compare_samples(&reader));
                    samples.unwrap_or(Ok(())).map(|()| Some(reader))
                }
                Ok(_) => Ok(None),
                Err(error) => Err(error),
            };
            match checked {
                Ok(Some(reader)) => {
                    self.stats.published_indexes.increment();
                    return Ok(Some(reader));
                }
                Ok(None) => {}
                Err(error) if published.is_required => {
                    return Err(OpenError::PublishedIndex(Box::new(error)));
                }
                Err(error) => log_unused(&error),
            }
        }
        Ok(None)
    }

    /// Whether the archive is within the user's limits by its index. The claims of a publisher only make the index
    /// unusable. If the user or the image's manifest names the index, exceeding them is an error.
    fn is_within_limits(&self, reader: &Reader) -> Result<bool, OpenError> {
        let checked = self.check_limits(&reader.live_index.lock());
        match checked.and_then(|()| self.check_decoder_memory(reader)) {
            Ok(()) => Ok(true),
            Err(error) if reader.tree.origin == TreeOrigin::Publisher => {
                let chain = error_chain(&error);
                tracing::warn!("not using the published index: {chain}");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether an index may replace reading the archive. A digest that the user expects must be computed,
    /// unless the user also pins the index. The digest by which a source is known may be claimed by an index.
    fn may_trust_published(&self, is_pinned: bool) -> bool {
        let fingerprint = self.source.fingerprint();
        let scan = &self.options.scan;
        let is_own = scan.sha256.expected() == fingerprint.sha256()
            && scan.plain_sha256.expected() == fingerprint.plain_sha256();
        let is_proven = fingerprint.doubt().is_none() || !self.options.should_rescan_unproven;
        (is_own || is_pinned) && is_proven && self.source.access() == Access::Ranges
    }

    /// A reader by the index that `find` finds, and whether the index is proven to be of the archive's version.
    fn try_published_index(
        &self,
        published: &PublishedIndex,
        find: &FindIndex,
        origin: TreeOrigin,
        copy: &Locator,
    ) -> Result<Option<(Reader, bool)>, PublishedIndexError> {
        let limit = &self.options.index_memory;
        let (index, location) = load(published, find, limit)?;
        let Some(is_bound) = is_bound(&index, self.source.fingerprint(), &self.locator) else {
            return Err(PublishedIndexError::Foreign(location));
        };
        // It names no such option, and so contradicts itself.
        if is_refused(&index, &self.options) {
            return Err(PublishedIndexError::Foreign(location));
        }
        // A pinned index is trusted, but it must have been made from bytes with the expected digest.
        let expected = self.options.scan.sha256.expected();
        if expected.is_some() && index.origin().sha256 != expected {
            return Err(PublishedIndexError::Foreign(location));
        }
        // A layer's diff ID is not compared by a scan, so the index must have been made from such bytes.
        let diff_id = self.options.scan.plain_sha256.expected();
        if diff_id.is_some() && index.origin().plain_sha256 != diff_id {
            return Err(PublishedIndexError::Foreign(location));
        }
        if index.has_global_keywords() && origin < TreeOrigin::User {
            return Err(PublishedIndexError::GlobalHeaders(location));
        }
        let tree = TreeSource { origin, location };
        let reader = self.checking_reader(index, tree, copy, is_bound);
        Ok(Some((reader, is_bound)))
    }

    /// The key of a saved copy of the index of `publisher`, which no other index of the archive has.
    fn copy_locator(&self, publisher: &str) -> Locator {
        let mut locator = self.locator.clone();
        locator.options.push_str(" published-by=");
        locator.options.push_str(publisher);
        locator
    }

    /// Opens the archive by a copy of a published index that another run saved; `None` if the user names or pins one.
    fn find_saved_copy(
        &self,
        published: &PublishedIndex,
        origin: TreeOrigin,
        locator: &Locator,
    ) -> Option<Reader> {
        let is_wanted = !published.is_required && published.sha256.is_none();
        let is_bound = self.source.fingerprint().is_strong();
        let store = self.store.as_ref().filter(|_| is_wanted && is_bound)?;
        let (limit, rows) = (&self.options.index_memory, self.options.index_rows);
        let found = store
            .find_locked(locator, limit, rows)
            .inspect_err(|error| {
                tracing::warn!(error = error_chain(error), "cannot use the saved index");
            });
        let (index, index_lock) = found.ok()??;
        let location = store.path(locator).display().to_string();
        let tree = TreeSource { origin, location };
        let reader = self.checking_reader(index, tree, locator, is_bound);
        keep_index_lock(&reader, index_lock);
        Some(reader)
    }

    /// Builds a reader that compares the entries of `index`, the tree of `tree`, with the archive. If the index is proven
    /// to be of the archive's version, it is saved as `copy`, unless the user names it.
    fn checking_reader(
        &self,
        index: Index,
        tree: TreeSource,
        copy: &Locator,
        is_bound: bool,
    ) -> Reader {
        // Not named by the content ID, which the index may claim, and shared with no other index.
        let disk_cache = self.open_disk_cache_named(&index, &disk_cache_name_of(copy));
        let is_copied = is_bound && tree.origin != TreeOrigin::User;
        let store = self.store.clone().filter(|_| is_copied);
        let saved_copy = store.map(|store| (store, copy.clone()));
        let mut reader = self.build_reader(LiveIndex::complete(index), disk_cache, Some(tree));
        reader.header_checks = Some(HeaderChecks::new(saved_copy));
        reader
    }
}

/// A reader by a table of contents, which belongs to the digest of the layer.
fn proven(reader: Option<Reader>) -> Option<(Reader, bool)> {
    Some((reader?, true))
}

/// Logs why a published index or another program's table of contents is not used.
fn log_unused(error: &PublishedIndexError) {
    let chain = error_chain(error);
    if is_absent(error) {
        tracing::debug!(error = chain, "there is no published index");
    } else {
        tracing::warn!("not using the published index: {chain}");
    }
}

/// Whether there is just no index. Object stores answer so with "forbidden" if a user may not list the bucket, and
/// other servers with a page.
fn is_absent(error: &PublishedIndexError) -> bool {
    match error {
        PublishedIndexError::Source(error) => {
            let class = error.cause.class();
            matches!(error.cause, Cause::Offline)
                || matches!(class, Class::NotFound | Class::AccessDenied)
        }
        PublishedIndexError::Format { error, .. } => matches!(error, format::Error::NotAnIndex),
        PublishedIndexError::NoRanges(_) => true,
        _ => false,
    }
}

/// Compares samples of the archive with an index whose version is not proven.
fn compare_samples(reader: &Reader) -> Result<(), PublishedIndexError> {
    let compared = reader.verify_samples(Reader::verify_source);
    match compared.and_then(|()| reader.verify_header_samples()) {
        Ok(()) => Ok(()),
        Err(ReadError::Damaged { .. } | ReadError::Index | ReadError::IndexMismatch) => {
            Err(PublishedIndexError::Foreign(reader.tree.location.clone()))
        }
        Err(error) => Err(PublishedIndexError::Compare(error.into())),
    }
}

/// Loads all rows of a short published index on `threads`, so that later uses need not wait, and saves it.
pub(super) fn load_in_background(reader: &Arc<Reader>, threads: &Arc<ThreadPool>) {
    let index = reader.live_index.completed();
    let is_saved = reader.index_lock.get().is_some();
    if let Some(index) = index.filter(|index| index.is_published() && !is_saved)
        && index.published_bytes() <= MAX_BACKGROUND_BYTES
    {
        submit_load(threads, Arc::downgrade(reader));
    }
}

/// Loads one request of rows, and then submits itself again. Ends with the archive, and at an error.
fn submit_load(threads: &Arc<ThreadPool>, reader: Weak<Reader>) {
    let weak_threads = Arc::downgrade(threads);
    threads.submit(move || {
        let Some(open) = reader.upgrade() else {
            return;
        };
        let Some(index) = open.live_index.completed() else {
            return;
        };
        match (index.load_next_rows(), weak_threads.upgrade()) {
            (Ok(true), Some(threads)) => submit_load(&threads, reader),
            (Ok(false), _) => {
                if let (Some(checks), Ok(index)) = (&open.header_checks, index.tree()) {
                    checks.save(index);
                }
            }
            _ => {}
        }
    });
}
