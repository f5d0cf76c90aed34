#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tarfs_fuzz::run("estargz", bytes));
