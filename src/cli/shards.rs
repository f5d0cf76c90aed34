//! Shards of an opened archive.

use std::sync::Arc;

use anyhow::Context;

use tarfs::archive::{Archive, Volume};
use tarfs::index::{Index, ShardPlan};
use tarfs::materialize::EntryError;

/// Cuts `volume` into `count` shards.
pub(crate) fn plan_of(
    volume: &dyn Volume,
    count: u32,
) -> anyhow::Result<(&Archive, Arc<Index>, ShardPlan)> {
    let archive = volume.as_archive().context(
        "SOURCE has layers, and only a single archive has shards (use `tarfs materialize`, or name the blob of one layer \
         as SOURCE)",
    )?;
    let index = volume
        .complete_index()
        .context("the archive is not indexed")?;
    let index = index.into_tree().context("cannot list the tree")?;
    let plan = ShardPlan::new(&index, count);
    Ok((archive, index, plan))
}

/// Whether entries that were read had no damage.
pub(crate) fn whether_complete(
    read: Result<u64, EntryError<tarfs::materialize::Error>>,
) -> anyhow::Result<bool> {
    match read {
        Ok(damaged) => Ok(damaged == 0),
        Err(EntryError::Sink(error)) => Err(error.into()),
        Err(EntryError::Read(path, error)) => {
            Err(anyhow::Error::new(error).context(format!("{path}: cannot read it")))
        }
    }
}
