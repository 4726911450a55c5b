"""The router's connections to the workers of the registry.

A link's states:

    connecting ─first message of the token stream→ up ─stream broken→ connecting (tries again)
    connecting ─not in the registry→ closed
    up ─suspected of hanging→ suspected ─a message, SUSPECT_S→ up
    up ─its engine stands still→ stalled ─a step ends→ up
    up ─all decode workers' streams break within a moment→ cut off ─back, RETURN_S→ up, connecting
    up ─streams break again and again→ left out, and tried (``router.workers.breaker``) → up

A prefill worker's link has no stream: it is up while its channel is connected. A worker that the
registry has lost is kept while it is up: Redis may have forgotten what is alive. Owned by the event
loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from baton.errors import BatonError, ConfigError, WorkerFailed
from baton.host.background import end_tasks, spawn
from baton.liveness.silence import SilenceWatch
from baton.request import LoadSnapshot, TokenOutput
from baton.rpc import convert
from baton.rpc.grpc_channel import open_channel
from baton.rpc.grpc_errors import call_errors
from baton.security.tls import Renewal, TlsFiles
from baton.store.registry import DRAINING, WorkerRecord
from baton.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from router.workers.breaker import Breaker
from router.workers.prefill_stream import PrefillStream

log = logging.getLogger(__name__)

RECONNECT_S = 0.2
"""Between a broken token stream and the next try."""
MOMENT_S = 0.05
"""Streams that break within this time count as broken together. Sequences are moved only after it,
so that another worker that fails under the same request does not count as cut off."""
RETURN_S = 1.0
"""Where the streams of all decode workers break together, the fault is in the network or in this
router. Requests wait this many seconds for them to come back."""
_RETURN_POLL_S = 0.02
SILENCE_S = 5.0
"""A token stream sends a message every heartbeat; one that is silent this long is broken, or for
``_SILENT_HEARTBEATS`` heartbeats where that is longer."""
_SILENT_HEARTBEATS = 3
ABORT_DEADLINE_S = 2.0
"""An abort that does not arrive in this time is left to the worker's own deadlines."""
_COOL_DOWN_S = 1.0
SUSPECT_S = 5.0
"""A worker that is suspected of hanging, and of which nothing is heard, is tried again after this:
one that has nothing to do has nothing to say."""
_MAX_OWED = 4096
"""Aborts that are kept for a worker that cannot be reached; those of sequences are bounded by its
places, and by how often these can be filled meanwhile."""


TokenStream = grpc.aio.UnaryStreamCall[
    decode_pb2.StreamTokensRequest, decode_pb2.StreamTokensResponse
]


@dataclass(frozen=True, slots=True)
class _Abort:
    """What is to end at a decode worker."""

    request_id: str
    attempt: int
    stop: bool
    choice: int | None


def error_from_gone(incarnation: str) -> WorkerFailed:
    """What a request is told whose worker is no longer there."""
    return WorkerFailed(f"worker {incarnation} is gone", retry_after=1.0)


class WorkerLink:
    """A connection to one incarnation."""

    def __init__(self, record: WorkerRecord, tls: TlsFiles | None = None) -> None:
        """``tls``: what this router shows the worker. Raises ConfigError."""
        self.record = record
        self._renewal = None if tls is None else Renewal(tls)
        self.channel = open_channel(record.address, tls, "worker")
        self.prefills = PrefillStream(self.channel, record.incarnation)
        self.load: LoadSnapshot = record.load
        self.follower: asyncio.Task[None] | None = None
        """Reads the token stream of a decode worker, watches the channel of a prefill worker."""
        self.connected = False
        self.missing_since: float | None = None
        """Since when neither the registry, which can be read, nor the stream of its prefills knows
        of a prefill worker. A decode worker's stream is always there."""
        self._heard_missing = 0
        self.token_stream: TokenStream | None = None
        """The one that is read now."""
        self.token_messages = 0
        """That have come on the token stream, those that say nothing included."""
        self.owed: deque[_Abort] = deque(maxlen=_MAX_OWED)
        """Aborts that have not arrived: they are sent again when the worker is heard."""
        self.breaker = Breaker()
        self.broken_at = float("-inf")
        """When its token stream last broke after it had been up."""
        self._suspected_until = float("-inf")
        self._suspected_at = 0
        self._stalled_at: int | None = None
        self._failed_at = float("-inf")

    def shows_old_files(self) -> bool:
        """Whether it has lost its connection, and others have what it showed replaced meanwhile.

        Its channel would show the old ones for ever. True once.
        """
        return not self.connected and self._renewal is not None and self._renewal.came()

    @property
    def messages(self) -> int:
        """How many messages have come of the worker."""
        return self.token_messages + self.prefills.messages

    def miss(self, now: float) -> None:
        """The registry does not list it, maybe since nobody can write there: it is listened to."""
        if self.missing_since is None or self.messages != self._heard_missing:
            self.missing_since, self._heard_missing = now, self.messages
        self.prefills.open()

    def suspect(self, now: float) -> None:
        """It is silent, and should not be: nothing more goes there until it is heard."""
        self._suspected_until = now + SUSPECT_S
        self._suspected_at = self.messages

    def is_suspected(self, now: float) -> bool:
        """Whether it is taken to hang."""
        return now < self._suspected_until and self.messages == self._suspected_at

    @property
    def engine_load(self) -> LoadSnapshot | worker_pb2.LoadSnapshot:
        """The latest that a stream has told, or the registry where there is none; both kinds have

        what the engine does.
        """
        if self.record.role == "decode" or self.prefills.load is None:
            return self.load
        return self.prefills.load

    def stall(self) -> None:
        """Its engine ends no step: nothing more goes there until one has ended."""
        self._stalled_at = self.engine_load.engine_steps

    def is_stalled(self) -> bool:
        """Whether it says that it lives, and still computes the step at which it was found."""
        if self._stalled_at is None:
            return False
        load = self.engine_load
        return load.steps_in_flight > 0 and load.engine_steps == self._stalled_at

    def hangs(self, now: float) -> bool:
        """Whether it is to be left."""
        return self.is_suspected(now) or self.is_stalled()

    def is_up(self, now: float, missing_s: float) -> bool:
        """Whether new requests may go there; not to one that was missing for ``missing_s``."""
        well = not self.hangs(now) and now - self._failed_at > _COOL_DOWN_S
        return well and self.is_ready(now, missing_s)

    def is_ready(self, now: float, missing_s: float) -> bool:
        """Whether it is connected, and says that it takes requests."""
        if self.missing_since is not None and now - self.missing_since > missing_s:
            return False
        return self.record.state == "ready" and self.connected

    def lends(self, now: float) -> bool:
        """Whether its cached blocks may be fetched: also while it is drained."""
        known = self.record.state in ("ready", DRAINING)
        return known and self.connected and not self.is_suspected(now)

    @property
    def is_draining(self) -> bool:
        """Whether what runs there is to go elsewhere."""
        return self.record.state == DRAINING and self.connected

    def failed(self, now: float) -> None:
        """A call could not be made: leave the worker alone for a moment."""
        self._failed_at = now


class WorkerLinks:
    """All links by incarnation, kept in step with the registry."""

    def __init__(
        self,
        router_id: str,
        on_output: Callable[[TokenOutput], None],
        on_broken: Callable[[str, BatonError], None],
        on_unheard: Callable[[str, int, Exception], None],
        *,
        heartbeat_s: float,
        tls: TlsFiles | None = None,
    ) -> None:
        """``on_output`` gets each output; ``on_broken`` an incarnation whose stream ended;

        ``on_unheard`` a request and its attempt of which an output could not be taken in.
        ``tls``: what this router shows workers.
        """
        self._tls = tls
        self._router_id = router_id
        self._on_output = on_output
        self._on_broken = on_broken
        self._on_unheard = on_unheard
        self._silence = SilenceWatch[TokenStream](max(SILENCE_S, _SILENT_HEARTBEATS * heartbeat_s))
        # A worker that lives renews its entry in this time, also after Redis was flushed.
        self._missing_s = _SILENT_HEARTBEATS * heartbeat_s
        self._links: dict[str, WorkerLink] = {}
        self._cut_off: set[str] = set()
        """Decode workers whose streams broke together, the last ones that were up."""
        self._cut_off_at = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, incarnation: str) -> WorkerLink | None:
        return self._links.get(incarnation)

    def is_up(self, link: WorkerLink) -> bool:
        """Whether new requests may go there."""
        now = time.monotonic()
        if not link.is_up(now, self._missing_s):
            return False
        return link.breaker.allows(now) or link in self.up(link.record.role)

    def up(self, role: str) -> list[WorkerLink]:
        """The links of a role that take requests.

        Where no breaker allows any, all do: a worker that breaks is better than none.
        """
        now = time.monotonic()
        links = [link for link in self._links.values() if link.record.role == role]
        ready = [link for link in links if link.is_up(now, self._missing_s)]
        return [link for link in ready if link.breaker.allows(now)] or ready

    def usable(self, role: str) -> list[WorkerLink]:
        """The links of a role at which requests are placed.

        Where none is up, these are workers that hang or have just failed: such a worker may go on
        in a moment, and a request that waits for it has lost nothing.
        """
        now = time.monotonic()
        return self.up(role) or [
            link
            for link in self._links.values()
            if link.record.role == role and link.is_ready(now, self._missing_s)
        ]

    def is_usable(self, link: WorkerLink) -> bool:
        """Whether it is among the ``usable`` ones of its role."""
        return self.is_up(link) or link in self.usable(link.record.role)

    def all(self) -> list[WorkerLink]:
        return list(self._links.values())

    def is_cut_off(self) -> bool:
        """Whether all decode workers went away together just now, and may be back in a moment."""
        if time.monotonic() - self._cut_off_at > RETURN_S:
            return False
        away = (link for name in self._cut_off if (link := self._links.get(name)) is not None)
        prefill = [link for link in self._links.values() if link.record.role == "prefill"]
        is_without_prefill = bool(prefill) and not any(link.connected for link in prefill)
        return is_without_prefill or any(not link.connected for link in away)

    async def returned(self, deadline: float) -> None:
        """Wait while the workers are cut off, until ``deadline`` on the monotonic clock."""
        # Links come up in many ways, and the wait is short: polling is simple enough.
        while self.is_cut_off() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_RETURN_POLL_S)

    def _note_break(self, broken: WorkerLink) -> None:
        """See whether others have broken together with it, and none is left."""
        decode = [link for link in self._links.values() if link.record.role == "decode"]
        together = {
            link.record.incarnation
            for link in decode
            if abs(link.broken_at - broken.broken_at) < MOMENT_S
        }
        # With a single worker, its end and a cut-off look the same.
        is_all = len(together) > 1 or len(decode) == 1
        if is_all and not any(link.connected for link in decode):
            self._cut_off, self._cut_off_at = together, time.monotonic()

    def update(self, records: dict[str, WorkerRecord]) -> None:
        """Take over the registry's view."""
        for incarnation, record in records.items():
            link = self._links.get(incarnation)
            owed: deque[_Abort] = deque()
            if link is not None and (link.record.role != record.role or link.shows_old_files()):
                # The same worker with other services, or this router with other certificates.
                owed = link.owed
                self._let_go(incarnation)
                link = None
            if link is None:
                try:
                    link = WorkerLink(record, self._tls)
                except ConfigError as error:  # certificates that are being replaced: later
                    log.warning("worker %s cannot be reached: %s", incarnation, error.message)
                    continue
                log.info("worker %s joins at %s", incarnation, record.address)
                link.owed.extend(owed)
                self._links[incarnation] = link
                follow = self._read_tokens if record.role == "decode" else self._watch_channel
                link.follower = spawn(follow(link), f"follow {incarnation}")
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

    def listen(self, now: float) -> None:
        """Break the token streams on which nothing comes; to be called several times a second."""
        open_ones = {
            link.token_stream: link.token_messages
            for link in self._links.values()
            if link.token_stream is not None
        }
        for stream in self._silence.tick(open_ones, now):
            stream.cancel()

    def _let_go(self, incarnation: str) -> None:
        task = spawn(self._close(self._links.pop(incarnation)), f"close {incarnation}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close every link."""
        links, self._links = self._links, {}
        await asyncio.gather(*(self._close(link) for link in links.values()), *self._tasks)

    async def _close(self, link: WorkerLink) -> None:
        if link.follower is not None:
            await end_tasks([link.follower])
        await link.prefills.close()
        await link.channel.close()

    async def _watch_channel(self, link: WorkerLink) -> None:
        while True:
            state = link.channel.get_state(try_to_connect=True)
            link.connected = state is grpc.ChannelConnectivity.READY
            await link.channel.wait_for_state_change(state)

    async def _read_tokens(self, link: WorkerLink) -> None:
        incarnation = link.record.incarnation
        try:
            while True:
                error = await self._read_stream(link)
                was_up, link.connected = link.connected, False
                if was_up:
                    link.broken_at = time.monotonic()
                    await asyncio.sleep(MOMENT_S)
                    self._note_break(link)
                self._tell_broken(incarnation, error)
                await asyncio.sleep(RECONNECT_S)
        finally:
            link.connected = False
            self._tell_broken(incarnation, error_from_gone(incarnation))

    def _tell_broken(self, incarnation: str, error: BatonError) -> None:
        try:
            self._on_broken(incarnation, error)
        except Exception:
            log.exception("worker %s: the end of its stream could not be handled", incarnation)

    async def _read_stream(self, link: WorkerLink) -> BatonError:
        """Read a token stream to its end; returns why it has ended."""
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
        for output in message.outputs:
            try:
                self._on_output(convert.output_from_proto(output))
            except Exception as error:
                # Only this request fails.
                log.exception("an output of request %s cannot be taken in", output.request_id)
                self._on_unheard(output.request_id, output.attempt, error)

    async def abort(
        self,
        incarnation: str,
        request_id: str,
        attempt: int,
        *,
        stop: bool,
        choice: int | None = None,
    ) -> None:
        """End a request at a decode worker, or one of its choices. ``stop``: it has ended well.

        A worker that cannot be reached is told when it is heard again. Never raises.
        """
        link = self._links.get(incarnation)
        if link is not None:
            await self._abort(link, _Abort(request_id, attempt, stop, choice))

    async def _abort(self, link: WorkerLink, abort: _Abort) -> None:
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
        """The worker is heard again."""
        owed = list(link.owed)
        link.owed.clear()
        for abort in owed:
            task = spawn(self._abort(link, abort), f"abort {abort.request_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
