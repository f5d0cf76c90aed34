//! Small random mutations of a seed.

use crate::rng::Rng;

/// Numbers at which code that handles lengths, counts and offsets tends to fail.
const BOUNDARY_VALUES: [u64; 16] = [
    0,
    1,
    7,
    0x7f,
    0x80,
    0xff,
    511,
    512,
    0x7fff,
    0xffff,
    1 << 20,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 40,
    0x7fff_ffff_ffff_ffff,
    u64::MAX,
];

/// A copy of one of `seeds` with up to eight mutations.
pub(crate) fn mutate(seeds: &[Vec<u8>], noise: &mut Rng) -> Vec<u8> {
    let mut bytes = pick(seeds, noise).clone();
    for _ in 0..=noise.below(4) * noise.below(3) {
        apply_mutation(&mut bytes, seeds, noise);
    }
    bytes
}

fn pick<'a>(seeds: &'a [Vec<u8>], noise: &mut Rng) -> &'a Vec<u8> {
    let number = index(noise.below(seeds.len() as u64));
    seeds.get(number).expect("below")
}

fn apply_mutation(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], noise: &mut Rng) {
    let at = index(noise.below(bytes.len() as u64));
    let behind = bytes.len() - at;
    // Most lengths are short.
    let shift = noise.below(12);
    let len = index(1 + noise.below(1 << shift)).min(behind);
    match noise.below(8) {
        0 => write(bytes, at, &[1 << noise.below(8)], |old, new| old ^ new),
        1 => write(bytes, at, &noise.bytes(1), |_, new| new),
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..at + len)),
        4 => {
            let more = noise.bytes(len);
            drop(bytes.splice(at..at, more));
        }
        5 => {
            let again = bytes.iter().copied().skip(at).take(len).collect::<Vec<_>>();
            drop(bytes.splice(at..at, again));
        }
        6 => {
            let other = pick(seeds, noise);
            let from = index(noise.below(other.len() as u64));
            let part = other.iter().copied().skip(from).take(4 * len);
            drop(bytes.splice(at..at + len, part));
        }
        _ => {
            let edge = BOUNDARY_VALUES.get(index(noise.below(BOUNDARY_VALUES.len() as u64)));
            let edge = edge
                .expect("below")
                .wrapping_add(noise.below(3))
                .wrapping_sub(1);
            let width = 1 << noise.below(4);
            let (little, big) = (edge.to_le_bytes(), edge.to_be_bytes());
            let number = match noise.below(2) {
                0 => little.get(..width),
                _ => big.get(8 - width..),
            };
            write(bytes, at, number.expect("up to eight"), |_, new| new);
        }
    }
}

fn write(bytes: &mut [u8], at: usize, new: &[u8], how: impl Fn(u8, u8) -> u8) {
    let places = bytes.iter_mut().skip(at);
    places
        .zip(new)
        .for_each(|(old, &new)| *old = how(*old, new));
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("small")
}
