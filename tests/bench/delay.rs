//! A network link with high latency: a TCP proxy on 127.0.0.1 that delays every byte, in both
//! directions, and does not limit the rate.
//!
//! ```text
//! delay LISTEN_PORT TARGET_PORT MILLISECONDS
//! ```
//!
//! With 0 for `LISTEN_PORT` the system chooses a port. The port is printed when connections are
//! accepted. Connecting has no delay, and there is no slow start, so each request costs one round
//! trip.

#![expect(clippy::print_stdout, reason = "the port")]

use std::env;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// Maximum number of delayed bytes in one direction of a connection: 200 MB a second with 20 ms.
const MAX_IN_FLIGHT: usize = 4 << 20;
/// Maximum number of bytes read at once.
const PIECE_LEN: u16 = u16::MAX;

fn main() -> anyhow::Result<()> {
    // Cargo adds a word of its own, which is not a number.
    let numbers: Vec<u16> = env::args()
        .skip(1)
        .filter_map(|word| word.parse().ok())
        .collect();
    let &[listen, target, milliseconds] = &numbers[..] else {
        anyhow::bail!("usage: delay LISTEN_PORT TARGET_PORT MILLISECONDS");
    };
    let delay = Duration::from_millis(milliseconds.into());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(listen_on(listen, target, delay))
}

async fn listen_on(port: u16, target: u16, delay: Duration) -> anyhow::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .await
        .with_context(|| format!("port {port} cannot be listened on"))?;
    println!("{}", listener.local_addr()?.port());
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (client, _) = accepted?;
                connections.spawn(connect(client, target, delay));
            }
            // Either side may close the connection at any time.
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connect(client: TcpStream, target: u16, delay: Duration) -> io::Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::try_join!(
        forward(from_client, to_server, delay),
        forward(from_server, to_client, delay)
    )?;
    Ok(())
}

/// Forwards each piece of data, and the end of the stream, `delay` after it arrived.
async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    delay: Duration,
) -> io::Result<()> {
    let room = Arc::new(Semaphore::new(MAX_IN_FLIGHT));
    let (sender, mut arrivals) = mpsc::unbounded_channel();
    let read = async move {
        loop {
            let permit = Arc::clone(&room).acquire_many_owned(PIECE_LEN.into()).await;
            let mut permit = permit.map_err(io::Error::other)?;
            let mut piece = BytesMut::with_capacity(PIECE_LEN.into());
            let len = from.read_buf(&mut piece).await?;
            drop(permit.split(usize::from(PIECE_LEN) - len));
            // The receiver is gone after a write failed, and reports that error.
            if sender
                .send((Instant::now() + delay, piece, permit))
                .is_err()
                || len == 0
            {
                return Ok(());
            }
        }
    };
    let write = async move {
        while let Some((due, piece, permit)) = arrivals.recv().await {
            sleep_until(due).await;
            to.write_all(&piece).await?;
            drop(permit);
        }
        to.shutdown().await
    };
    tokio::try_join!(read, write)?;
    Ok(())
}
