"""The routing policies by name, and those that score each worker alone.

The latter serve comparisons, and operators that know their load. Each picks one worker per role;
for decoding, a worker with room if there is one. The default is
``router.routing.predictive_policy``.
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
    """Base class of policies that pick a prefill and a decode worker independently.

    A decode worker computes the prompt only if ``local_prefill`` is ``always``, or if no prefill
    worker is up and it is not ``never``. Implements ``router.routing.policy.Policy``.
    """

    reason: str
    """Name of the policy. Its decisions state it as their reason."""

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
        """Choose the workers of a request, as ``router.routing.policy.Policy`` specifies."""
        seen = predict(self._settings, request, table, held, now_ms)
        target = self._pick(_with_room(seen), seen, self.decode_load(seen))
        if not seen.remote:
            return local(seen, target, self.reason)
        source = self._pick(seen.prefill.rows, seen, seen.queue_ms)
        return remote(seen, transfers, source, target, self.reason)

    def decode_load(self, seen: Predictions) -> Floats:
        """Return the load of each decode worker: its number of sequences as a fraction of its
        maximum.
        """
        return seen.table.sequences / seen.table.max_sequences

    @abstractmethod
    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        """Pick one of ``rows``, which must not be empty. ``load``: the load of the worker in each
        row of the table."""


def _with_room(seen: Predictions) -> Rows:
    """Return the rows of the decode workers with room, or of all decode workers if none has
    room.
    """
    rows = seen.decode.rows
    fitting = rows[seen.fits[rows]]
    return fitting if len(fitting) else rows


def _least(rows: Rows, seen: Predictions, *keys: Floats) -> int:
    """Return the row with the smallest value in the first of ``keys``. Ties are broken by the next
    key, and at last by the fewest requests placed."""
    order = np.lexsort((rows, seen.table.placed[rows], *(key[rows] for key in reversed(keys))))
    return int(rows[order[0]])


class RoundRobin(SimplePolicy):
    """Picks the workers of each role in turn."""

    reason = "round_robin"

    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        # The worker with the fewest placements is next. A new worker starts at the others' minimum.
        return _least(rows, seen)


class LeastLoaded(SimplePolicy):
    """Picks the prefill worker with the shortest queue and the decode worker with the emptiest
    batch.
    """

    reason = "least_loaded"

    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        return _least(rows, seen, load)


class LongestPrefix(SimplePolicy):
    """Picks the worker that holds the longest prefix of the prompt; ties go to the least loaded.

    All prompts with the same beginning go to one worker, even if it is overloaded.
    """

    reason = "prefix"

    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        return _least(rows, seen, -seen.held, load)


class PowerOfTwo(SimplePolicy):
    """Picks the less loaded of two random workers.

    Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, IEEE Transactions on
    Parallel and Distributed Systems 12(10), 2001.
    """

    reason = "power_of_two"

    def __init__(self, settings: RouteSettings, seed: int | None = None) -> None:
        """Create the policy. ``seed``: the seed of its random choices; None draws one."""
        super().__init__(settings)
        self._dice = random.Random(seed)  # noqa: S311 - a choice of workers, no secret

    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        drawn = self._dice.sample(range(len(rows)), min(2, len(rows)))
        return _least(rows[drawn], seen, load)


class Session(SimplePolicy):
    """Picks the same workers for all requests of a session, by rendezvous hashing of slot names.

    A request without a session goes to the least loaded worker.
    """

    reason = "session"

    def _pick(self, rows: Rows, seen: Predictions, load: Floats) -> int:
        if not seen.request.session:
            return _least(rows, seen, load)
        return preferred_row(seen.table, rows, seen.request.session)


def make_policy(name: PolicyName, settings: RouteSettings, seed: int | None = None) -> Policy:
    """Create the policy ``name``. ``seed``: the seed if the policy makes random choices; None draws
    one."""
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
