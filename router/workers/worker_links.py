"""The router's connections to all workers, kept in sync with the registry.

    connecting ─not in the registry→ closed
    up ─all decode workers' streams break within a moment→ cut off ─back, RETURN_S→ up, connecting

The other states of a link are those of ``router.workers.worker_link``. A worker that the registry
no longer lists is kept while it is up: Redis may have lost the record of a live worker. Owned by
the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import grpc
import grpc.aio

from baton.errors import BatonError, ConfigError, Unauthenticated
from baton.host.background import spawn
from baton.liveness.silence import SilenceWatch
from baton.request import AttemptName, TokenOutput
from baton.rpc import convert
from baton.rpc.grpc_errors import call_errors
from baton.rpc.worker_plane import OPEN_PLANE, WorkerPlane
from baton.store.registry import WorkerRecord
from baton.telemetry.metrics import RouterMetrics
from baton.v1 import decode_pb2, decode_pb2_grpc
from router.workers.worker_link import Abort, TokenStream, WorkerLink, error_from_gone

log = logging.getLogger(__name__)

RECONNECT_S = 0.2
"""Seconds between the break of a token stream and the next try to open it."""
MOMENT_S = 0.05
"""Streams of different workers that break within this many seconds count as broken together.
Sequences migrate only after this time. So if a request makes a second worker fail, the two do not
count as cut off."""
RETURN_S = 1.0
"""Seconds for which requests wait for decode workers whose streams have all broken together. The
fault is then in the network or in this router."""
_RETURN_POLL_S = 0.02
SILENCE_S = 5.0
"""Minimum seconds of silence after which a token stream counts as broken. The limit is
``_SILENT_HEARTBEATS`` heartbeats if that is longer, since a worker sends a message per
heartbeat."""
_SILENT_HEARTBEATS = 3
ABORT_DEADLINE_S = 2.0
"""Timeout in seconds for sending an abort. If it passes, the worker's own deadlines end the
sequence."""


Unsubscribe = Callable[[], None]


OnTokens = Callable[[int, tuple[int, ...]], None]
"""Function that receives tokens of one choice: the first one's output index, and the tokens."""


class _Reader(NamedTuple):
    """Callbacks that receive the outputs, or an error, of one attempt."""

    on_output: Callable[[TokenOutput], None]
    on_lost: Callable[[Exception], None]


class _TokenReader(NamedTuple):
    """Callbacks that receive the packed tokens, or an error, of one choice in one attempt."""

    request_id: str
    on_tokens: OnTokens
    on_lost: Callable[[Exception], None]


class _Listener(NamedTuple):
    """Callbacks that are called when the state of a worker changes."""

    on_broken: Callable[[str, BatonError], None]
    on_draining: Callable[[WorkerLink], None]
    on_granted: Callable[[str, AttemptName], None]


class WorkerLinks:
    """The connections to all workers, by incarnation."""

    def __init__(
        self,
        router_id: str,
        *,
        heartbeat_s: float,
        plane: WorkerPlane = OPEN_PLANE,
        metrics: RouterMetrics | None = None,
    ) -> None:
        """Create an empty set of links to workers. ``plane``: the settings with which this router
        calls workers. ``metrics`` counts what circuit breakers do."""
        self._plane = plane
        self._metrics = metrics
        self._router_id = router_id
        self._readers: dict[tuple[str, int], _Reader] = {}
        self._token_readers: dict[int, _TokenReader] = {}
        """Readers of packed tokens, by the choice's output number."""
        self._listeners: list[_Listener] = []
        self._silence = SilenceWatch[TokenStream](max(SILENCE_S, _SILENT_HEARTBEATS * heartbeat_s))
        # A live worker renews its entry in this time, even after Redis was flushed.
        self._missing_s = _SILENT_HEARTBEATS * heartbeat_s
        self._links: dict[str, WorkerLink] = {}
        self._cut_off: dict[str, tuple[set[str], float]] = {}
        """By fingerprint: the incarnations of decode workers whose streams broke together, so that
        no decode worker of the fingerprint was connected, and the time of that."""
        self._broken_at = float("-inf")
        """Time at which a token stream last broke."""
        self._tasks: set[asyncio.Task[None]] = set()

    def subscribe(
        self,
        *,
        on_broken: Callable[[str, BatonError], None],
        on_draining: Callable[[WorkerLink], None],
        on_granted: Callable[[str, AttemptName], None] = lambda *_: None,
    ) -> Unsubscribe:
        """Register callbacks for changes of workers. Returns a function that removes them.

        ``on_broken`` gets the incarnation of each decode worker whose token stream has ended, and
        the error. The error is WorkerFailed only if the worker is to blame. ``on_draining`` gets
        the link of each draining worker at every read of the registry. ``on_granted`` gets the
        incarnation of a decode worker that now holds room for an attempt that it has refused, and
        the name of the attempt."""
        listener = _Listener(on_broken, on_draining, on_granted)
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def read(
        self,
        request_id: str,
        attempt: int,
        on_output: Callable[[TokenOutput], None],
        on_lost: Callable[[Exception], None],
        on_tokens: Mapping[int, OnTokens] = MappingProxyType({}),
    ) -> Unsubscribe:
        """Register a callback that gets each output of an attempt. Outputs of other attempts are
        dropped.

        ``on_tokens``: by output number, a callback that gets the packed tokens of a choice.
        ``on_lost`` gets the error if an output cannot be processed. Returns a function that removes
        the callbacks.
        """
        name = request_id, attempt
        self._readers[name] = _Reader(on_output, on_lost)
        for number, take in on_tokens.items():
            self._token_readers[number] = _TokenReader(request_id, take, on_lost)

        def unsubscribe() -> None:
            self._readers.pop(name, None)
            for number in on_tokens:
                self._token_readers.pop(number, None)

        return unsubscribe

    def get(self, incarnation: str) -> WorkerLink | None:
        """Return the link to the worker ``incarnation``; None if there is none."""
        return self._links.get(incarnation)

    def is_up(self, link: WorkerLink) -> bool:
        """Return whether new requests may go to the worker."""
        now = time.monotonic()
        if not link.is_up(now, self._missing_s):
            return False
        return link.breaker.allows(now) or link in self.up(link.record.role)

    def is_reliable(self, link: WorkerLink) -> bool:
        """Return whether the worker is up, and its circuit breaker is closed."""
        now = time.monotonic()
        return link.is_up(now, self._missing_s) and link.breaker.allows(now)

    def up(self, role: str, fingerprint: str = "") -> list[WorkerLink]:
        """Return the links to the workers of a role that take new requests. ``fingerprint``: that
        of the workers; empty: any.

        Of a fingerprint whose workers the circuit breakers all exclude, all that are up are
        returned: an unreliable worker is better than none.
        """
        now = time.monotonic()
        ready = [one for one in self._of(role, fingerprint) if one.is_up(now, self._missing_s)]
        return _first_choice([one for one in ready if one.breaker.allows(now)], ready)

    def usable(self, role: str, fingerprint: str = "") -> list[WorkerLink]:
        """Return the links to the workers of a role at which requests may be placed.
        ``fingerprint``: that of the workers; empty: any.

        Of a fingerprint without a worker that is up, these are the workers that hang or have just
        failed. Such a worker may recover in a moment, so a request may wait for it."""
        now = time.monotonic()
        ready = [one for one in self._of(role, fingerprint) if one.is_ready(now, self._missing_s)]
        return _first_choice(self.up(role, fingerprint), ready)

    def _of(self, role: str, fingerprint: str) -> list[WorkerLink]:
        links = [link for link in self._links.values() if link.record.role == role]
        return [one for one in links if one.record.fingerprint == fingerprint or not fingerprint]

    def is_usable(self, link: WorkerLink) -> bool:
        """Return whether a link is among those that ``usable`` returns for its role."""
        return self.is_up(link) or link in self.usable(link.record.role)

    def all(self) -> list[WorkerLink]:
        """Return the links to all workers."""
        return list(self._links.values())

    def is_cut_off(self, fingerprint: str = "") -> bool:
        """Return whether all decode workers of a fingerprint have just disconnected together, and
        may soon be connected again. Empty: whether that is so for every fingerprint.
        """
        if not fingerprint:
            every = {link.record.fingerprint for link in self._links.values()}
            return bool(self._cut_off) and all(self.is_cut_off(one) for one in every)
        names, at = self._cut_off.get(fingerprint, (set[str](), float("-inf")))
        if time.monotonic() - at > RETURN_S:
            self._cut_off.pop(fingerprint, None)
            return False
        away = (link for name in names if (link := self._links.get(name)) is not None)
        prefill = self._of("prefill", fingerprint)
        is_without_prefill = bool(prefill) and not any(link.connected for link in prefill)
        return is_without_prefill or any(not link.connected for link in away)

    def is_dead(self, incarnation: str) -> bool | None:
        """Return whether an unreachable worker has died; None if that is not known yet.

        A worker is dead once the registry does not list it and it cannot be reached."""
        link = self._links.get(incarnation)
        if link is None:
            return True
        return None if not link.connected or link.hangs(time.monotonic()) else False

    async def returned(self, deadline: float, fingerprint: str = "") -> None:
        """Wait while all workers of a fingerprint are cut off (empty: of every one), or no decode
        worker is usable because the last streams have just broken. ``deadline``, on the monotonic
        clock, bounds the wait."""
        # Polling is enough: links come up in many ways, and the wait is short.
        while self._may_return(fingerprint) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_RETURN_POLL_S)

    def _may_return(self, fingerprint: str) -> bool:
        if self.is_cut_off(fingerprint):
            return True
        since = time.monotonic() - RETURN_S
        if self._broken_at < since or self.usable("decode", fingerprint):
            return False
        return any(link.broken_at >= since for link in self._of("decode", fingerprint))

    def _note_break(self, broken: WorkerLink) -> None:
        """Detect whether the streams of all decode workers of a fingerprint broke together."""
        fingerprint = broken.record.fingerprint
        decode = self._of("decode", fingerprint)
        together = {
            link.record.incarnation
            for link in decode
            if abs(link.broken_at - broken.broken_at) < MOMENT_S
        }
        # With a single worker, its death and a network failure look the same.
        is_all = len(together) > 1 or len(decode) == 1
        if is_all and not any(link.connected for link in decode):
            self._cut_off[fingerprint] = together, time.monotonic()

    def _breaker_changed(self, record: WorkerRecord, is_open: bool) -> None:
        if is_open:
            log.warning(
                "streams of worker %s fail repeatedly: new requests avoid it", record.incarnation
            )
        else:
            log.info("worker %s takes requests as before it failed", record.incarnation)
        if self._metrics is not None:
            counted = (
                self._metrics.left_out_workers if is_open else self._metrics.readmitted_workers
            )
            counted.labels(worker=record.slot).inc()

    def update(self, records: dict[str, WorkerRecord]) -> None:
        """Open and close links so that they match ``records``, the workers that the registry
        lists."""
        for incarnation, record in records.items():
            link = self._links.get(incarnation)
            owed: deque[Abort] = deque()
            if link is not None and (link.record.role != record.role or link.shows_old_files()):
                # The worker has changed its role, or this router its certificates.
                owed = link.owed
                self._let_go(incarnation)
                link = None
            if link is None:
                try:
                    link = WorkerLink(record, self._plane, partial(self._breaker_changed, record))
                except ConfigError as error:  # certificates are being replaced: retry later
                    log.warning("worker %s cannot be reached: %s", incarnation, error.message)
                    continue
                log.info("worker %s joins at %s", incarnation, record.address)
                link.owed.extend(owed)
                self._links[incarnation] = link
                follow = self._read_tokens if record.role == "decode" else self._watch_channel
                link.follow(follow(link))
            link.record = record
            link.missing_since = None
            if record.role != "decode":
                link.load = record.load
        for incarnation in self._links.keys() - records.keys():
            link = self._links[incarnation]
            if link.connected:
                if link.record.role != "decode":
                    link.miss(time.monotonic())
                continue
            log.info("worker %s has left", incarnation)
            self._let_go(incarnation)
        for link in self.all():
            if link.is_draining:
                for listener in list(self._listeners):
                    listener.on_draining(link)

    def listen(self, now: float) -> None:
        """End the token streams that have been silent for too long. Call this several times a
        second."""
        open_ones = {
            link.token_stream: link.token_messages
            for link in self._links.values()
            if link.token_stream is not None
        }
        for stream in self._silence.tick(open_ones, now):
            stream.cancel()

    def _let_go(self, incarnation: str) -> None:
        task = spawn(self._links.pop(incarnation).close(), f"close {incarnation}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close the links to all workers."""
        links, self._links = self._links, {}
        await asyncio.gather(*(link.close() for link in links.values()), *self._tasks)

    async def _watch_channel(self, link: WorkerLink) -> None:
        while True:
            state = link.channel.get_state(try_to_connect=True)
            link.connected = state is grpc.ChannelConnectivity.READY
            await link.channel.wait_for_state_change(state)

    async def _read_tokens(self, link: WorkerLink) -> None:
        incarnation = link.record.incarnation
        is_refused = False
        try:
            while True:
                error = await self._read_stream(link)
                if isinstance(error, Unauthenticated) and not is_refused:
                    is_refused = True
                    log.error(
                        "worker %s rejects this router, whose secret differs: set"
                        " BATON_CLUSTER_SECRET to that of the cluster's launcher",
                        incarnation,
                    )
                was_up, link.connected = link.connected, False
                if was_up:
                    link.broken_at = self._broken_at = time.monotonic()
                    await asyncio.sleep(MOMENT_S)
                    self._note_break(link)
                self._report_broken(incarnation, error)
                await asyncio.sleep(RECONNECT_S)
        finally:
            link.connected = False
            self._report_broken(incarnation, error_from_gone(incarnation))

    def _report_broken(self, incarnation: str, error: BatonError) -> None:
        for listener in list(self._listeners):
            try:
                listener.on_broken(incarnation, error)
            except Exception:
                log.exception("worker %s: the end of its stream could not be handled", incarnation)

    async def _read_stream(self, link: WorkerLink) -> BatonError:
        """Read the token stream of a worker to its end, and return the reason why it ended."""
        stub = decode_pb2_grpc.DecodeServiceStub(link.channel)
        call = stub.StreamTokens(decode_pb2.StreamTokensRequest(router_id=self._router_id))
        link.token_stream = call
        try:
            with call_errors(link.record.incarnation):
                while isinstance(message := await call.read(), decode_pb2.StreamTokensResponse):
                    self._take(link, message)
        except BatonError as error:
            return error
        except Exception as error:
            # The worker is not to blame.
            log.exception("worker %s: its stream cannot be read", link.record.incarnation)
            return BatonError(f"internal error: {type(error).__name__}")
        finally:
            link.token_stream = None
            call.cancel()
        return error_from_gone(link.record.incarnation)

    def _take(self, link: WorkerLink, message: decode_pb2.StreamTokensResponse) -> None:
        link.connected = True
        link.token_messages += 1
        if link.owed:
            self._send_owed(link)
        link.load = convert.load_from_proto(message.load)
        for number, index, token_ids in convert.token_runs(message.tokens):
            taker = self._token_readers.get(number)
            if taker is None:
                continue
            try:
                taker.on_tokens(index, token_ids)
            except Exception as error:
                # The error concerns only this request.
                log.exception("tokens of request %s cannot be processed", taker.request_id)
                taker.on_lost(error)
        for output in message.outputs:
            reader = self._readers.get((output.request_id, output.attempt))
            if reader is None:
                continue
            try:
                reader.on_output(convert.output_from_proto(output))
            except Exception as error:
                # The error concerns only this request.
                log.exception("an output of request %s cannot be processed", output.request_id)
                reader.on_lost(error)
        for room in message.granted:
            for listener in list(self._listeners):
                listener.on_granted(link.record.incarnation, (room.request_id, room.attempt))

    async def abort(
        self,
        incarnation: str,
        request_id: str,
        attempt: int,
        *,
        stop: bool,
        choice: int | None = None,
    ) -> None:
        """End a request, or one of its choices, at a decode worker. ``stop``: true if the answer
        has ended well.

        If the worker cannot be reached, the abort is sent again when the worker's next message
        arrives. Never raises."""
        link = self._links.get(incarnation)
        if link is not None:
            await self._abort(link, Abort(request_id, attempt, stop, choice))

    async def _abort(self, link: WorkerLink, abort: Abort) -> None:
        reason = decode_pb2.ABORT_REASON_STOP if abort.stop else decode_pb2.ABORT_REASON_UNSPECIFIED
        request = decode_pb2.AbortRequest(
            request_id=abort.request_id,
            attempt=abort.attempt,
            reason=reason,
            choice=abort.choice,
        )
        try:
            stub = decode_pb2_grpc.DecodeServiceStub(link.channel)
            with call_errors(link.record.incarnation):
                await stub.Abort(request, timeout=ABORT_DEADLINE_S)
        except BatonError as error:
            log.info("abort at %s did not arrive: %s", link.record.incarnation, error.message)
            link.owed.append(abort)

    def _send_owed(self, link: WorkerLink) -> None:
        """Send a worker its pending aborts again, since it is reachable now."""
        owed = list(link.owed)
        link.owed.clear()
        for abort in owed:
            task = spawn(self._abort(link, abort), f"abort {abort.request_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def _first_choice(better: list[WorkerLink], every: list[WorkerLink]) -> list[WorkerLink]:
    """Return the links in ``better``, and all links of the fingerprints that have none there."""
    found = {link.record.fingerprint for link in better}
    return [link for link in every if link in better or link.record.fingerprint not in found]
