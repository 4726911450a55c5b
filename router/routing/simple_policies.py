"""Policies that judge workers one by one, for comparison and for those who know their load.

Each picks a worker of each role, for decoding one with room where there is any.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from router.routing.policy import Decision, RouteRequest, RouteSettings, no_worker
from router.routing.predictions import Predictions, local, predict, remote
from router.routing.rendezvous import hash_of, scores
from router.routing.transfer_costs import TransferCosts
from router.routing.worker_table import Floats, Group, Rows, WorkerTable


class SimplePolicy(ABC):
    """Implements ``router.routing.policy.Policy``: computes on a decode worker only where the
    configuration
    says ``always``, or where no prefill worker is up and it does not say ``never``."""

    reason: str
    """The policy's name."""

    def __init__(self, settings: RouteSettings) -> None:
        self._settings = settings

    def decide(
        self,
        request: RouteRequest,
        table: WorkerTable,
        transfers: TransferCosts,
        held: Mapping[str, int],
        now_ms: float,
    ) -> Decision:
        """See ``router.routing.policy.Policy``."""
        route = self._settings.of(request)
        prefill = table.group("prefill", route.prefill)
        decode = table.group("decode", route.decode)
        if not len(decode):
            raise no_worker("decode")
        alone = route.local_prefill == "always" or not len(prefill)
        if alone and route.local_prefill == "never":
            raise no_worker("prefill")
        seen = predict(request, table, held, now_ms, self._settings.hash_block)
        target = self._pick(_with_room(seen, decode), seen, self.decode_load(seen))
        if alone:
            return local(seen, route, target, self.reason)
        source = self._pick(prefill.rows, seen, seen.queue_ms)
        return remote(seen, transfers, source, target, self.reason)

    def decode_load(self, seen: Predictions) -> Floats:
        """How busy each decode worker is: its sequences against the most that it takes."""
        return seen.table.sequences / seen.table.max_sequences

    @abstractmethod
    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        """One of ``rows``, of which there is at least one."""


def _with_room(seen: Predictions, group: Group) -> Rows:
    """Those with room; all where there is none anywhere."""
    fitting = group.rows[seen.fits[group.rows]]
    return fitting if len(fitting) else group.rows


def _least(rows: Rows, seen: Predictions, *keys: Floats) -> int:
    """The row that is least by the first key, then by the next, then by what it was given."""
    order = np.lexsort((rows, seen.table.placed[rows], *(key[rows] for key in reversed(keys))))
    return int(rows[order[0]])


class RoundRobin(SimplePolicy):
    """Everybody in turn."""

    reason = "round_robin"

    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        # Whose turn is furthest back; a newcomer begins where the others are.
        return _least(rows, seen)


class LeastLoaded(SimplePolicy):
    """The shortest queue, the emptiest batch."""

    reason = "least_loaded"

    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        return _least(rows, seen, load)


class LongestPrefix(SimplePolicy):
    """Who holds the most of the prompt, of equals the least loaded.

    It herds: what begins alike goes to one worker.
    """

    reason = "prefix"

    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        return _least(rows, seen, -seen.held, load)


class PowerOfTwo(SimplePolicy):
    """The less loaded of two drawn at random. Mitzenmacher, The Power of Two Choices in Randomized
    Load Balancing, IEEE Transactions on Parallel and Distributed Systems 12(10), 2001."""

    reason = "power_of_two"

    def __init__(self, settings: RouteSettings, seed: int | None = None) -> None:
        """``seed`` None draws one."""
        super().__init__(settings)
        self._dice = random.Random(seed)  # noqa: S311 - a choice of workers, no secret

    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        drawn = self._dice.sample(range(len(rows)), min(2, len(rows)))
        return _least(rows[drawn], seen, load)


class Session(SimplePolicy):
    """The same workers for all requests of a session, by rendezvous hashing of the slots' names.

    A request that names no session goes to the least loaded.
    """

    reason = "session"

    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        if not seen.request.session:
            return _least(rows, seen, load)
        found = scores(seen.table.slot_hash[rows], hash_of(seen.request.session))
        return int(rows[found.argmax()])
