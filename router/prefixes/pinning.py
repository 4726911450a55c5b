"""Pinning of prefixes: one request computes them, its worker keeps them, all routers know them.

    (none) ─pin→ pinned ─pinned again→ pinned, until the later of both times
    pinned ─its time is over, unpin→ (none)

A prefix is computed like any prompt: limits, admission, placement. The worker that computes its
blocks pins them. If the worker dies, its pins are lost. The next request that begins with the
prefix computes it and pins it again (``router.routing.pinned_prefixes``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

import redis

from baton.errors import BatonError, CacheShareExceeded, InvalidRequest, NotFound, Unavailable
from baton.request import Retention, fingerprint_of
from baton.rpc.grpc_errors import call_errors
from baton.store.pin_store import Pin, PinStore
from baton.v1 import cache_pb2, cache_pb2_grpc
from router.core.request import GenerationRequest, ModelBinding, OutputDelta, choices_for
from router.dispatch.dispatcher import ClusterDispatcher
from router.inference.builder import Arrival
from router.inference.service import InferenceService
from router.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)

MAX_PREFIXES = 128
"""Maximum number of prefixes that a tenant may have pinned at a time."""
UNPIN_DEADLINE_S = 2.0
"""Time limit for removing a pin from a worker, in seconds. A worker that does not answer in time
keeps the pin until it expires."""
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Pinned:
    """The result of pinning a prefix: the pin, and the numbers of tokens that were processed for
    it."""

    pin: Pin
    cached_tokens: int
    written_tokens: int


class PrefixPinning:
    """Pins, lists and unpins the prefixes of tenants. Owned by the router's event loop."""

    def __init__(
        self,
        service: InferenceService,
        dispatcher: ClusterDispatcher,
        store: PinStore,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the object that pins prefixes. ``clock`` returns Unix seconds."""
        self._service = service
        self._dispatcher = dispatcher
        self._store = store
        self._clock = clock

    async def pin(
        self, arrival: Arrival, request: GenerationRequest, ttl_s: float, name: str
    ) -> Pinned:
        """Compute a prompt and pin its full blocks for ``ttl_s`` seconds. While workers of several
        fingerprints serve, it is pinned at those of one.

        The answer of ``request`` is discarded. Raises InvalidRequest for a prompt without a full
        block, CacheShareExceeded, and the errors of running a request.
        """
        kv_group, hashes = next(iter(self._dispatcher.block_hashes(request).items()), ("", ()))
        if not hashes:
            self._refuse_unpinnable()
        tenant = arrival.tenant
        pin_id = f"prefix_{hashes[-1].hex()}"
        known = {pin.id: pin for pin in await self.pins(tenant)}
        if pin_id not in known and len(known) >= MAX_PREFIXES:
            raise CacheShareExceeded(
                f"the tenant already has {len(known)} pinned prefixes, which is the maximum: delete"
                " one, or wait until one expires"
            )
        block = self._service.config.block_size
        kept = Retention(len(hashes) * block, ttl_s, pin_id, required=True)
        try:
            pinning = replace(
                request, retentions=(kept,), binding=ModelBinding(fingerprint_of(kv_group))
            )
            cached, written = await self._compute(arrival, pinning)
            now = self._clock()
            before = known.get(pin_id)
            pin = Pin(
                id=pin_id,
                tenant=tenant,
                name=name or ("" if before is None else before.name),
                tokens=len(request.prompt_ids),
                blocks=len(hashes),
                last_hash=hashes[-1].hex(),
                created_at=now if before is None else before.created_at,
                expires_at=max(now + ttl_s, 0.0 if before is None else before.expires_at),
            )
            await self._write(pin)
        except BaseException:
            if pin_id not in known:
                await asyncio.shield(self._unpin_at_workers(tenant, pin_id))
            raise
        return Pinned(pin, cached, written)

    async def pins(self, tenant: str) -> list[Pin]:
        """Return the pins of a tenant, the oldest first. Raises Unavailable without Redis."""
        try:
            every = await self._store.read()
        except redis.RedisError:
            raise _away() from None
        self._dispatcher.pins.show(every)
        return sorted((pin for pin in every if pin.tenant == tenant), key=lambda p: p.created_at)

    async def unpin(self, tenant: str, pin_id: str) -> None:
        """End a pin. Raises NotFound if the tenant has no pin with this id, and Unavailable."""
        if pin_id not in {pin.id for pin in await self.pins(tenant)}:
            raise NotFound("no pinned prefix has this id", param="id")
        try:
            await self._store.remove(pin_id)
        except redis.RedisError:
            raise _away() from None
        await self.pins(tenant)
        await self._unpin_at_workers(tenant, pin_id)

    def _refuse_unpinnable(self) -> NoReturn:
        if not self._dispatcher.context_length:
            raise Unavailable("no worker is ready", retry_after=_RETRY_AFTER_S)
        block = self._service.config.block_size
        raise InvalidRequest(
            f"the prefix has fewer than {block} tokens, but only whole blocks of {block} can be"
            " pinned: send a longer one"
        )

    async def _compute(self, arrival: Arrival, request: GenerationRequest) -> tuple[int, int]:
        """Compute a prompt. Return how many of its tokens were cached, and how many were computed
        and are kept."""
        choices = choices_for([request])

        async def count(_: int, delta: OutputDelta) -> None:
            choices[0].add(delta, keep_text=False)

        await self._service.run(arrival, [request], choices, count)
        return choices[0].cached_tokens, choices[0].written_tokens

    async def _write(self, pin: Pin) -> None:
        try:
            await self._store.write(pin)
        except redis.RedisError:
            raise _away() from None
        await self.pins(pin.tenant)

    async def _unpin_at_workers(self, tenant: str, pin_id: str) -> None:
        links = self._dispatcher.workers.all()
        await asyncio.gather(*(self._unpin_at(link, tenant, pin_id) for link in links))

    async def _unpin_at(self, link: WorkerLink, tenant: str, pin_id: str) -> None:
        stub = cache_pb2_grpc.CacheServiceStub(link.channel)
        slot = link.record.slot
        request = cache_pb2.UnpinRequest(tenant=tenant, name=pin_id)
        try:
            with call_errors(slot):
                await stub.Unpin(request, timeout=UNPIN_DEADLINE_S)
        except BatonError as error:
            log.warning("the pin at %s stays until it expires: %s", slot, error.message)


def _away() -> Unavailable:
    return Unavailable(
        "Redis, which stores the pinned prefixes, cannot be reached", retry_after=_RETRY_AFTER_S
    )
