//! Spans of plain bytes: in memory, in a spool, filled once however many wait.
