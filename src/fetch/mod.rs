//! Ordered, parallel, bounded prefetch: a source's bytes as one stream of chunks.
