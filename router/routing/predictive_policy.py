"""The default policy. It picks the pair of workers, or the single decode worker, that is predicted
to answer first.

The candidates are those with room whose predicted TPOT meets the SLO; those that also meet the TTFT
SLO come first. If none meets the TPOT SLO, the candidate that uses the least of both SLOs wins. The
score of a candidate is its predicted TTFT plus its cost for other requests:

    score = ttft + 4*compute + 5*full*(work - mean)/(mean + 6*full) + 32*tpot

- ``compute``: milliseconds of computing, for which the next request waits too. If two workers would
  answer at the same time, the one with the longer prefix is better, though its queue is longer.
- A request with a cache key has a preferred worker among those that compute prompts, by rendezvous
  hashing. That worker wins among the best candidates, unless another one holds more of the prompt.
  So requests with the same beginning go to one worker even before their prefix is cached.
- ``work``: the worker's work of the last minutes (``HALF_LIFE_MS``), compared with the mean of its
  role, in units of this prompt without any cache (``full``). If no request waits, TTFT alone would
  send all prompts with one beginning to one worker: its cache fills while the others stay empty.
  With 5 = 1 + 4, a worker that holds a tenth of the prompt gets it as long as its work is at most a
  tenth above the mean.
- ``tpot``: a step's milliseconds for each of 32 tokens.
- A prefill worker that takes turns with a decode worker, on CPU cores or on one GPU, is no
  candidate if decode workers may compute prompts. It would slow the decode worker as much as the
  prompt itself does there, or more: in a step with a chunk of a prompt, sequences decode for a
  tenth of what a step of their own costs, since the weights are read once for both.
- If a decode worker computes the prompt, each sequence that runs there waits for it too. At least
  the mean number of sequences per decode worker is counted. A worker that is idle now does not stay
  idle, and a long prompt would delay later requests.

Replays of Mooncake's conversation trace chose the weights (docs/lab-notes/routing.md). As the
weight of ``compute`` rises to 4, more of the prompts are found in a cache, and the mean TTFT stays
within a hundredth of its minimum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from router.routing.cost_model import TransferCosts
from router.routing.policy import (
    Decision,
    Predictions,
    RouteRequest,
    RouteSettings,
    local,
    predict,
    remote,
)
from router.routing.worker_table import Floats, Group, Rows, WorkerTable, preferred_row

MIN_TTFT = "least_ttft"
PREFIX = "prefix"
PULL = "pull"
NO_ROOM = "no_room"
CACHE_KEY = "cache_key"
MIN_HARM = "least_harm"
DEADLINE = "deadline"

OTHERS_WEIGHT = 4.0
"""Assumed number of other requests that wait while the prompt of the routed request is computed."""
SPREAD_WEIGHT = 5.0
SPREAD_PROMPTS = 6.0
"""Scale of differences in recent work between workers, in multiples of the prompt's work. Larger
differences clearly affect the score."""
ANSWER_TOKENS = 32.0
"""Weight of the time of a decode step in the score: the step counts once for each of this many
output tokens."""
TIE = 0.01
"""Two scores count as equal if they differ by less than this fraction of the time to compute the
prompt without a cache."""
SHORTLIST = 8
"""Number of workers per role that are compared in pairs. They are the ones with the best scores by
themselves."""
_SHORTLIST_BY_TTFT = 4
_MIN_MS = 1e-6
_PER_SLO_MS, _FULL_MS = 1e6, 1e12
"""Penalties that exceed any score: for a worker that misses the TPOT SLO, and for a worker without
room."""


@dataclass(slots=True)
class _Candidates:
    """The candidates as columns: pairs of workers, or single decode workers that compute the prompt
    themselves.
    """

    source: Rows
    target: Rows
    ttft: Floats
    tpot: Floats
    score: Floats


class PredictivePolicy:
    """The default policy. Implements ``router.routing.policy.Policy``."""

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
        seen = predict(self._settings, request, table, held, now_ms, devices_apart=True)
        prefill, decode = seen.prefill, seen.decode
        work = table.recent_work(now_ms)
        full = seen.full_ms
        found: list[_Candidates] = []
        sources = _Sources(seen, work, full, transfers, pulls=self._settings.pulls)
        if seen.remote:
            found.append(_pairs(seen, sources, transfers))
        if seen.route.local_prefill != "never":
            found.append(_alone(seen, work, full))
        every = found[0] if len(found) == 1 else _joined(*found)
        place, reason = _choose(every, seen, work, full, sources.own)
        source, target = int(every.source[place]), int(every.target[place])
        if reason == MIN_TTFT and seen.held[source] > 0:
            rows = decode.rows if source == target else prefill.rows
            if seen.queue_ms[source] > seen.queue_ms[rows].min():
                reason = PREFIX
        shed = reason == DEADLINE
        if source == target:
            return local(seen, source, reason, shed=shed)
        decision = remote(seen, transfers, source, target, reason, shed=shed)
        return sources.with_fetch(decision, source)


class _Sources:
    """The workers that may compute the prompt for a decode worker. The columns have each row's TTFT
    and score, without the costs of the transfer and of decoding."""

    def __init__(
        self,
        seen: Predictions,
        work: Floats,
        full: Floats,
        transfers: TransferCosts,
        *,
        pulls: bool,
    ) -> None:
        self._seen = seen
        self.compute = seen.prefill_ms
        self.fetch: Floats | None = None
        if pulls:
            self._price_fetches(transfers)
        self.ttft = seen.queue_ms + self.compute
        if self.fetch is not None:
            self.ttft = self.ttft + self.fetch
        self.own = _own_row(seen)
        """Row of the worker preferred by the request's cache key; -1 if there is no key, or if
        another worker holds more of the prompt."""
        self.score = _spread(work, full, seen.prefill)
        self.score += self.ttft
        self.score += OTHERS_WEIGHT * self.compute

    def _price_fetches(self, transfers: TransferCosts) -> None:
        """In each row where a fetch of blocks from another worker is faster than computing them,
        include the fetch in the times."""
        seen = self._seen
        depth = seen.fetchable
        if isinstance(depth, float) and depth <= 0:
            return
        lacking = depth - seen.held
        if lacking.max() <= 0:
            return
        a, b = transfers.usual
        fetch = a + b * lacking
        compute = seen.prefill_from(depth * seen.hash_block)
        pays = fetch + compute < seen.prefill_ms
        pays &= lacking > 0
        self.compute = np.where(pays, compute, seen.prefill_ms)
        self.fetch = np.where(pays, fetch, 0.0)

    def shortlist(self, limit_ms: float) -> Rows:
        """Return the rows with the best scores. If all their TTFTs exceed ``limit_ms``, add the
        rows with the best TTFT."""
        rows = self._seen.prefill.rows
        if len(rows) <= SHORTLIST:
            return rows
        best = rows[_least(self.score[rows], SHORTLIST)]
        if self.own >= 0:
            best = np.union1d(best, [self.own])
        if (self.ttft[best] <= limit_ms).any():
            return best
        return np.concatenate((best, rows[_least(self.ttft[rows], _SHORTLIST_BY_TTFT)]))

    def with_fetch(self, decision: Decision, row: int) -> Decision:
        """Return the decision. If the worker in ``row`` fetches blocks from another worker, its
        times are adjusted."""
        if self.fetch is None or self.fetch[row] <= 0:
            return decision
        spent = float(self.compute[row] + self.fetch[row])
        prompt = self._seen.request.prompt_tokens
        return replace(
            decision,
            uncached_tokens=prompt - self._seen.fetchable_at(row) * self._seen.hash_block,
            prefill_ms=spent,
            ttft_ms=decision.ttft_ms - decision.prefill_ms + spent,
            reason=PULL if decision.reason == MIN_TTFT else decision.reason,
        )


def _own_row(seen: Predictions) -> int:
    key, rows = seen.request.cache_key, (seen.prefill if seen.remote else seen.decode).rows
    if not key:
        return -1
    row = preferred_row(seen.table, rows, key)
    return row if seen.held[row] >= seen.held[rows].max() else -1


def _spread(work: Floats, full: Floats, group: Group) -> Floats:
    """Return what each row's recent work adds to its score; infinity for rows outside the group."""
    mean = group.mean(work)
    scale = SPREAD_PROMPTS * full
    scale += mean + _MIN_MS
    cost = work - mean
    cost *= full
    cost /= scale
    cost *= SPREAD_WEIGHT
    cost += group.closed
    return cost


def _pairs(seen: Predictions, sources: _Sources, transfers: TransferCosts) -> _Candidates:
    limit_ms = min(seen.route.slo_ttft_ms, seen.request.deadline_ms)
    p, d = sources.shortlist(limit_ms), seen.decode.rows
    if len(d) > SHORTLIST:
        tpot = seen.tpot_ms[d]
        rank = transfers.usual[1] * seen.missing[d] + ANSWER_TOKENS * tpot
        rank += _penalty(seen, tpot, d)
        d = d[_least(rank, SHORTLIST)]
    source = p.repeat(len(d))
    target = d[np.newaxis].repeat(len(p), axis=0).ravel()
    transfer = _transfer(seen, transfers, source, target)
    tpot = seen.tpot_ms[target]
    score = sources.score[source] + transfer + ANSWER_TOKENS * tpot
    return _Candidates(source, target, sources.ttft[source] + transfer, tpot, score)


def _penalty(seen: Predictions, tpot: Floats, rows: Rows) -> Floats:
    """Return a penalty for each of ``rows``, whose workers would have the TPOT ``tpot``. It ranks
    workers that miss the TPOT SLO after others, and those without room last.
    """
    over = tpot * (_PER_SLO_MS / seen.route.slo_tpot_ms)
    over -= _PER_SLO_MS
    np.maximum(over, 0.0, out=over)
    over += _FULL_MS * ~seen.fits[rows]
    return over


def _least(values: Floats, count: int) -> Rows:
    """Return the places of the ``count`` smallest ``values``, which are finite, and are changed."""
    # A few passes in vector instructions take a tenth of a partition of the values.
    places = []
    for _ in range(count):
        place = int(values.argmin())
        values[place] = np.inf
        places.append(place)
    return np.array(places, dtype=np.intp)


def _transfer(seen: Predictions, transfers: TransferCosts, source: Rows, target: Rows) -> Floats:
    missing = seen.missing[target]
    if not transfers.has_pairs:
        a, b = transfers.usual
        return a + b * missing
    names = seen.table.names
    pairs = zip(source.tolist(), target.tolist(), strict=True)
    lines = np.array([transfers.line(names[p], names[d]) for p, d in pairs])
    return lines[:, 0] + lines[:, 1] * missing


def _alone(seen: Predictions, work: Floats, full: Floats) -> _Candidates:
    decode, table = seen.decode, seen.table
    rows = decode.rows
    took, tpot = seen.local()
    took += seen.queue_ms
    # The steps run anyway, so the fixed cost ``prefill_a`` takes no time from other sequences.
    harm = seen.prefill_ms - table.prefill_a
    harm *= np.maximum(table.running, decode.mean(table.running))
    score = _spread(work, full, decode)
    score += took
    score += harm
    score += OTHERS_WEIGHT * seen.prefill_ms
    score += ANSWER_TOKENS * seen.tpot_ms
    if len(rows) > SHORTLIST:
        rows = rows[_least(score[rows] + _penalty(seen, tpot[rows], rows), SHORTLIST)]
    return _Candidates(rows, rows, took[rows], tpot[rows], score[rows])


def _joined(one: _Candidates, other: _Candidates) -> _Candidates:
    return _Candidates(
        np.concatenate((one.source, other.source)),
        np.concatenate((one.target, other.target)),
        np.concatenate((one.ttft, other.ttft)),
        np.concatenate((one.tpot, other.tpot)),
        np.concatenate((one.score, other.score)),
    )


def _choose(
    found: _Candidates, seen: Predictions, work: Floats, full: Floats, own: int
) -> tuple[int, str]:
    """Return the index of the best candidate, and the reason. ``own``: row of the worker that the
    request's cache key prefers, or -1."""
    route = seen.route
    slow = found.tpot > route.slo_tpot_ms
    tier = np.where(slow, 2, found.ttft > route.slo_ttft_ms) + 3 * ~seen.fits[found.target]
    if seen.request.deadline_ms < np.inf:
        late = found.ttft > seen.request.deadline_ms
        if late.all():
            return int(found.ttft.argmin()), DEADLINE
        tier = tier + 6 * late
    best = int(tier.min())
    if best % 3 == 2:
        harm = found.ttft / route.slo_ttft_ms + found.tpot / route.slo_tpot_ms
        reason, value, margin = MIN_HARM, harm, 0.0
    else:
        margin = TIE * float(full[found.source].min())
        reason, value = MIN_TTFT, found.score
        mine = (tier == best) & (found.source == own)
        if mine.any():
            tier, reason = np.where(mine, best, best + 1), CACHE_KEY
    value = np.where(tier == best, value, np.inf)
    equal = np.flatnonzero(value <= value.min() + margin)
    if len(equal) > 1:
        equal = equal[_order(found, seen.table, work, equal)]
    return int(equal[0]), NO_ROOM if best >= 3 else reason


def _order(
    found: _Candidates, table: WorkerTable, work: Floats, places: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    """Sort ``places``, indexes of equally good candidates, by the recent work of their workers, the
    least first."""
    source, target = found.source[places], found.target[places]
    return np.lexsort(
        (
            target,
            source,
            table.placed[target],
            table.sequences[target],
            table.placed[source],
            work[source],
        )
    )
