//! A simulated server and link.

use std::collections::VecDeque;

use super::*;

#[derive(Clone, Copy)]
pub(super) struct Simulation {
    /// Milliseconds of a round trip.
    pub(super) round_trip: u64,
    /// Bytes per millisecond: of a connection, of all together, and of the reader.
    pub(super) connection_rate: u64,
    pub(super) total_rate: u64,
    pub(super) reader: u64,
    pub(super) len: u64,
    pub(super) server: Server,
}

/// Cost of a request for the server.
#[derive(Clone, Copy)]
pub(super) enum Server {
    Ready,
    /// Milliseconds, in parallel for all requests.
    Parallel(u64),
    /// Milliseconds, for one request after another. Answers begin when no request is left.
    Serial(u64),
    /// The time to unpack all bytes, after the header. Two shared processors unpack this many a ms.
    Unpacking(u64),
}

/// A transfer, in steps of a millisecond.
pub(super) struct Transfer {
    pub(super) simulation: Simulation,
    pub(super) concurrency: AdaptiveConcurrency,
    /// Fixed number of requests and chunk length, instead of the adaptive ones.
    pub(super) fixed: Option<(usize, u64)>,
    pub(super) requests: VecDeque<Request>,
    pub(super) requested_bytes: u64,
    /// End of the response that may be streamed.
    pub(super) stream_end: u64,
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) read: u64,
    pub(super) now: u64,
    pub(super) waited: u64,
    pub(super) max_requests: usize,
    /// Time at which the number of requests reached its maximum.
    pub(super) grown: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) began: u64,
    /// Whether it continues the response of the one before.
    pub(super) is_continued: bool,
    pub(super) is_streaming: bool,
    /// Time at which its answer begins.
    pub(super) answered: u64,
    /// Bytes that the server must unpack before it begins.
    pub(super) before: u64,
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) received: u64,
    pub(super) read: u64,
}

impl Request {
    pub(super) fn is_in_flight(&self) -> bool {
        self.received < self.len
    }
}

impl Simulation {
    pub(super) fn prior_cost(self) -> Option<Duration> {
        match self.server {
            Server::Parallel(cost) | Server::Serial(cost) => Some(ms(cost)),
            Server::Ready | Server::Unpacking(_) => None,
        }
    }

    pub(super) fn transfer(self, fixed: Option<(usize, u64)>) -> Transfer {
        let mut transfer = Transfer {
            simulation: self,
            concurrency: AdaptiveConcurrency::new(16, 8 * MIB, BUDGET, self.prior_cost()),
            fixed,
            requests: VecDeque::new(),
            requested_bytes: 0,
            stream_end: 0,
            sent: 0,
            received: 0,
            read: 0,
            now: 0,
            waited: 0,
            max_requests: 0,
            grown: 0,
        };
        while transfer.read < self.len {
            assert!(transfer.now < 1_000_000, "it ends");
            transfer.request();
            transfer.now += 1;
            transfer.receive();
            transfer.consume();
        }
        transfer
    }

    /// Runs the controller. Returns how much longer it takes than the best fixed setting, in percent.
    pub(super) fn run(self) -> (Transfer, u64) {
        let settings = [1, 2, 4, 8, 16]
            .into_iter()
            .flat_map(|most| [MIB, 2 * MIB, 3 * MIB, 4 * MIB, 8 * MIB].map(move |len| (most, len)));
        let best = settings.map(|fixed| self.transfer(Some(fixed)).now).min();
        let transfer = self.transfer(None);
        let best = best.expect("there are some");
        let longer = (transfer.now * 100 / best).saturating_sub(100);
        (transfer, longer)
    }
}

impl Transfer {
    pub(super) fn sample(&self) -> Sample {
        Sample {
            now: ms(self.now),
            received: self.received,
            read: self.read,
            waited: ms(self.waited),
            in_flight: self.in_flight(),
            is_cheap: self.is_cheap(),
        }
    }

    pub(super) fn is_cheap(&self) -> bool {
        let mut in_flight = self
            .requests
            .iter()
            .filter(|request| request.is_in_flight());
        in_flight.all(|request| {
            let cost = request.answered
                - request.began
                - self
                    .simulation
                    .round_trip
                    .min(request.answered - request.began);
            request.received > 0 && self.now - request.answered >= cost * u64::from(CHEAP_FACTOR)
        })
    }

    pub(super) fn requests_without_trial(&self) -> usize {
        let trial = self.concurrency.trial.as_ref();
        trial.map_or(self.concurrency.requests, |trial| trial.requests)
    }

    pub(super) fn in_flight(&self) -> usize {
        let requests = self.requests.iter();
        requests.filter(|request| request.is_in_flight()).count()
    }

    pub(super) fn request(&mut self) {
        self.concurrency.update(self.sample());
        if self.concurrency.requests() > self.max_requests {
            (self.max_requests, self.grown) = (self.concurrency.requests(), self.now);
        }
        loop {
            let chosen = (self.concurrency.requests(), self.concurrency.chunk_len());
            let (most, len) = self.fixed.unwrap_or(chosen);
            let len = len.min(self.simulation.len - self.requested_bytes);
            let held: u64 = self.requests.iter().map(|request| request.len).sum();
            let is_streaming = self.fixed.is_none() && self.concurrency.is_streaming();
            // A streamed request starts beside those in flight.
            let is_counted =
                |request: &&Request| request.is_in_flight() && request.is_streaming >= is_streaming;
            let in_flight = self.requests.iter().filter(is_counted).count();
            if len == 0 || in_flight >= most || held + len > BUDGET {
                return;
            }
            let is_continued = is_streaming && self.requested_bytes < self.stream_end;
            self.stream_end = match (is_streaming, is_continued) {
                (true, true) => self.stream_end,
                (true, false) => {
                    let end =
                        (self.requested_bytes + len).saturating_add(self.concurrency.stream_len);
                    self.concurrency.on_stream_started();
                    end
                }
                (false, _) if self.concurrency.serial_probe.is_some() => self.stream_end,
                (false, _) => 0,
            };
            self.sent += u64::from(!is_continued);
            let answered = self.answered(is_continued);
            self.requests.push_back(Request {
                began: self.now,
                is_continued,
                is_streaming,
                answered,
                before: match self.simulation.server {
                    Server::Unpacking(_) if !is_continued => self.requested_bytes,
                    _ => 0,
                },
                start: self.requested_bytes,
                len,
                received: 0,
                read: 0,
            });
            self.concurrency.on_sent();
            self.requested_bytes += len;
        }
    }

    /// Time at which the answer to a request sent now begins; also set for requests that wait with it.
    pub(super) fn answered(&mut self, is_continued: bool) -> u64 {
        let sent = self.now + self.simulation.round_trip;
        if is_continued {
            return self.now;
        }
        match self.simulation.server {
            Server::Ready | Server::Unpacking(_) => sent,
            Server::Parallel(cost) => sent + cost,
            Server::Serial(cost) => {
                let now = self.now;
                let is_waiting =
                    |request: &&mut Request| !request.is_continued && request.answered > now;
                let waiting: Vec<_> = self.requests.iter_mut().filter(is_waiting).collect();
                let last = waiting.iter().map(|request| request.answered).max();
                let answered = last.unwrap_or(sent) + cost;
                for request in waiting {
                    request.answered = answered;
                }
                answered
            }
        }
    }

    /// Unpacks for a millisecond; returns the unpacked bytes for each request in transfer.
    pub(super) fn unpack(&mut self) -> u64 {
        let Server::Unpacking(speed) = self.simulation.server else {
            return u64::MAX;
        };
        let now = self.now;
        let share = speed.min(speed * 2 / (self.in_flight() as u64).max(1));
        for request in self
            .requests
            .iter_mut()
            .filter(|request| request.before > 0)
        {
            request.before = request.before.saturating_sub(share);
            request.answered = now;
        }
        share
    }

    pub(super) fn receive(&mut self) {
        let unpacked = self.unpack();
        let (simulation, now) = (self.simulation, self.now);
        let flows = |request: &Request| request.is_in_flight() && now > request.answered;
        let mut flowing = self
            .requests
            .iter()
            .filter(|request| flows(request))
            .count();
        let (mut left, mut completed_chunks) = (simulation.total_rate, Vec::new());
        for request in self.requests.iter_mut().filter(|request| flows(request)) {
            let share = (left / flowing as u64)
                .min(simulation.connection_rate)
                .min(unpacked);
            let completed = share.min(request.len - request.received);
            (left, flowing) = (left - completed, flowing - 1);
            request.received += completed;
            self.received += completed;
            if !request.is_in_flight() {
                completed_chunks.push(CompletedChunk {
                    start: request.start,
                    len: request.len,
                    duration: ms(now - request.began),
                    latency: Some(ms(request.answered - request.began)),
                    cost: Some(ms(
                        (request.answered - request.began).saturating_sub(simulation.round_trip)
                    )),
                });
            }
        }
        for chunk in completed_chunks {
            self.concurrency.on_completed(self.sample(), chunk);
        }
    }

    pub(super) fn consume(&mut self) {
        let mut wanted = self.simulation.reader;
        while wanted > 0 {
            let Some(front) = self
                .requests
                .front_mut()
                .filter(|front| !front.is_in_flight())
            else {
                self.waited += u64::from(wanted == self.simulation.reader);
                return;
            };
            let consumed = wanted.min(front.len - front.read);
            front.read += consumed;
            wanted -= consumed;
            self.read += consumed;
            if front.read == front.len {
                self.requests.pop_front();
            }
        }
    }
}
