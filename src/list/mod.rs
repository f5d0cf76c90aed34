//! `ls` as iterators over an index; pure.
