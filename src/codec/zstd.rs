use super::{Context, Error, Pull, SeekPoint};
use bytes::Bytes;
#[derive(Debug)]
pub(super) struct Decoder {}
impl Decoder {
    pub(super) fn start(_context: Context) -> Self {
        todo!()
    }
    pub(super) fn resume(_context: Context, _seek_point: &SeekPoint) -> Result<Self, Error> {
        todo!()
    }
}
impl super::Decoder for Decoder {
    fn push(&mut self, _packed: Bytes) {}
    fn finish(&mut self) {}
    fn pull(&mut self) -> Result<Pull, Error> {
        todo!()
    }
}
