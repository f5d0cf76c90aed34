//! Members of archives, and byte ranges, as archives of their own.
//!
//! `tests/mount` has the tests that mount them.

use crate::support::fixture::TestDir;
use crate::support::nested::{inner, outer};
use crate::support::packing::Packing;
use crate::support::raw::Archive;
use crate::support::sha256::sha256;

#[test]
fn nested_sources_nest_and_slices_begin_anywhere() {
    let place = TestDir::new(&["out"]);
    let box_of = |name: &str, bytes: &[u8]| Archive::new().file(name, bytes).end();
    place.put("a.tar", box_of("b.tar", &box_of("c", &outer(Packing::Lz4))));
    let source = "tar:tar:tar:a.tar!/b.tar!/c!/kept/inner";
    assert_eq!(place.succeeds(&["ls", "-R", source]), "d\nd/f\n");
    let packed = inner(Packing::Xz);
    place.put("image", [&[7; 1000], &packed[..], &[9; 500]].concat());
    let (all, rest) = (
        format!("slice:1000+{}:image", packed.len()),
        "slice:512:a.tar",
    );
    assert_eq!(place.succeeds(&["ls", "-R", &all]), "d\nd/f\n");
    assert_eq!(place.succeeds(&["ls", rest]), "c\n");
    let digest = sha256(&packed);
    place.succeeds(&["verify", "-q", "--expect-sha256", &digest, &all]);
}

#[test]
fn missing_nested_member_error_names_its_location() {
    let place = TestDir::new(&["out"]);
    let outer = outer(Packing::Plain);
    place.put("outer", &outer);
    let has = format!("it has only {} bytes", outer.len());
    for (source, words) in [
        (
            "tar:outer!/kept/nothing",
            ["outer: kept/nothing", "not found"],
        ),
        ("tar:outer!/kept", ["outer: kept", "no regular file"]),
        ("tar:outer!/../kept", ["outer: ../kept", "leads out"]),
        ("tar:nowhere!/x", ["nowhere", "not found"]),
        ("tar:-!/x", ["standard input", "store it in a file"]),
        (
            "slice:9000000:outer",
            ["outer: the bytes from 9000000", &has],
        ),
        (
            "slice:0+9000000:outer",
            ["outer: 9000000 bytes from 0", &has],
        ),
        (
            "slice:1+18446744073709551615:outer",
            ["outer: 18446744073709551615 bytes from 1", &has],
        ),
    ] {
        let complaint = place.error_of(&["ls", source]);
        assert!(
            words.iter().all(|word| complaint.contains(word)),
            "{source}: {complaint}"
        );
    }
}
