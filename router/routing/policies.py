"""The policies by name, and those that judge workers one by one.

These serve comparisons, and operators that know their load. Each picks a worker of each role: for
decoding one with room, where there is any. ``router.routing.predictive_policy`` has the default.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from baton.config.choices import PolicyName
from router.routing.cost_model import TransferCosts
from router.routing.policy import (
    Decision,
    Policy,
    Predictions,
    RouteRequest,
    RouteSettings,
    local,
    predict,
    remote,
)
from router.routing.predictive_policy import PredictivePolicy
from router.routing.worker_table import Floats, Rows, WorkerTable, preferred_row


class SimplePolicy(ABC):
    """Computes a prompt on a decode worker only where ``local_prefill`` is ``always``, or where no
    prefill worker is up and it is not ``never``. Implements ``router.routing.policy.Policy``."""

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
        seen = predict(self._settings, request, table, held, now_ms)
        target = self._pick(_with_room(seen), seen, self.decode_load(seen))
        if not seen.remote:
            return local(seen, target, self.reason)
        source = self._pick(seen.prefill.rows, seen, seen.queue_ms)
        return remote(seen, transfers, source, target, self.reason)

    def decode_load(self, seen: Predictions) -> Floats:
        """How busy each decode worker is: its sequences against the most that it takes."""
        return seen.table.sequences / seen.table.max_sequences

    @abstractmethod
    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        """One of ``rows``, of which there is at least one."""


def _with_room(seen: Predictions) -> Rows:
    """The decode workers with room; all where there is none anywhere."""
    rows = seen.decode.rows
    fitting = rows[seen.fits[rows]]
    return fitting if len(fitting) else rows


def _least(rows: Rows, seen: Predictions, *keys: Floats) -> int:
    """The row that is least by the first key, then by the next, then by what it was given."""
    order = np.lexsort((rows, seen.table.placed[rows], *(key[rows] for key in reversed(keys))))
    return int(rows[order[0]])


class RoundRobin(SimplePolicy):
    """Each worker in turn."""

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
    """The worker that holds the most of the prompt; of equals the least loaded.

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
        return preferred_row(seen.table, rows, seen.request.session)


def make_policy(name: PolicyName, settings: RouteSettings, seed: int | None = None) -> Policy:
    """Make the policy ``name``. ``seed`` is for the one that draws at random; None draws a seed."""
    match name:
        case "predictive":
            return PredictivePolicy(settings)
        case "round_robin":
            return RoundRobin(settings)
        case "least_loaded":
            return LeastLoaded(settings)
        case "prefix":
            return LongestPrefix(settings)
        case "power_of_two":
            return PowerOfTwo(settings, seed)
        case "session":
            return Session(settings)
