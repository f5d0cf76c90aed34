//! Extension headers: names, and keywords of one member or of all that follow.

use std::sync::Arc;

use super::{Extension, MAX_SAVED_GLOBAL_BYTES, Parser, State, error, padding};
use crate::base::extent::Plain;
use crate::tar::assemble::Extensions;
use crate::tar::error::Error;
use crate::tar::header::text;
use crate::tar::sparse::SparseKeywords;
use crate::tar::{Limit, pax};

impl Parser {
    pub(super) fn extension_header(&mut self, flag: u8, at: Plain, size: u64) -> Result<(), Error> {
        let limits = &self.options.limits;
        let is_name = matches!(flag, b'L' | b'K');
        if is_name {
            // A NUL follows the name.
            Limit::NameBytes
                .check(limits, size.saturating_sub(1))
                .map_err(|cause| error(at, cause))?;
        }
        self.state = State::Extension(Extension {
            flag,
            at,
            left: size,
            padding: padding(size),
            body: pax::Body::new(size, !is_name, &self.options.limits),
        });
        Ok(())
    }

    pub(super) fn extension(&mut self, piece: &[u8]) -> Result<(), Error> {
        let State::Extension(extension) = &mut self.state else {
            return Ok(());
        };
        let len = usize::try_from(extension.left).unwrap_or(usize::MAX);
        let (body, padding) = piece.split_at(len.min(piece.len()));
        let (flag, at) = (extension.flag, extension.at);
        extension
            .body
            .push(body, &self.options.limits)
            .map_err(|cause| error(at, cause))?;
        extension.left -= body.len() as u64;
        extension.padding -= padding.len() as u64;
        if extension.left + extension.padding > 0 {
            return Ok(());
        }
        let State::Extension(extension) = std::mem::take(&mut self.state) else {
            return Ok(());
        };
        let (body, notes) = extension.body.finish();
        self.report_notes(at, notes);
        let name = || Some(text(&body).to_vec()).filter(|name| !name.is_empty());
        match flag {
            b'g' => return self.apply_global_header(at, &body),
            b'L' => self.extensions.long_name = name(),
            b'K' => self.extensions.long_link = name(),
            _ => {
                let mut keywords = Box::new(self.global_keywords.clone());
                self.read_keywords(&mut keywords, at, &body)?;
                self.extensions.keywords = Some(keywords);
                self.extensions.body = body;
                self.extensions.is_stale = false;
            }
        }
        self.extensions.start.get_or_insert(at);
        Ok(())
    }

    pub(super) fn apply_global_header(&mut self, at: Plain, body: &[u8]) -> Result<(), Error> {
        let mut keywords = std::mem::take(&mut self.global_keywords);
        let is_clean = self.read_keywords(&mut keywords, at, body)?;
        self.save_global_header(body, is_clean);
        // A map belongs to one file.
        keywords.sparse = SparseKeywords::default();
        Limit::GlobalBytes
            .check(&self.options.limits, keywords.bytes())
            .map_err(|cause| error(at, cause))?;
        self.global_keywords = keywords;
        // Not immediately, because each global header would apply it again.
        self.extensions.is_stale = true;
        Ok(())
    }

    /// Keywords of the pax header before a member, on top of the global ones.
    pub(super) fn local_keywords(
        &self,
        at: Plain,
        extensions: &mut Extensions,
    ) -> Result<Option<Box<pax::Keywords>>, Error> {
        let local = extensions.keywords.take();
        if local.is_none() || !extensions.is_stale {
            return Ok(local);
        }
        let mut keywords = Box::new(self.global_keywords.clone());
        keywords
            .read(&extensions.body, &self.options.limits, &mut Vec::new())
            .map_err(|cause| error(at, cause))?;
        Ok(Some(keywords))
    }

    fn save_global_header(&mut self, body: &[u8], is_clean: bool) {
        let Some(globals) = &mut self.globals else {
            return;
        };
        let bytes = globals.iter().map(Vec::len).sum::<usize>() + body.len();
        if is_clean && bytes <= MAX_SAVED_GLOBAL_BYTES {
            Arc::make_mut(globals).push(body.to_vec());
        } else {
            self.globals = None;
        }
    }

    /// Applies the body of a pax header. Returns whether all of it is valid.
    fn read_keywords(
        &mut self,
        keywords: &mut pax::Keywords,
        at: Plain,
        body: &[u8],
    ) -> Result<bool, Error> {
        let mut notes = Vec::new();
        let read = keywords.read(body, &self.options.limits, &mut notes);
        let is_clean = notes.is_empty();
        self.report_notes(at, notes);
        read.map_err(|cause| error(at, cause))?;
        Ok(is_clean)
    }
}
