"""The grid of ratios: predicted goodput with a few workers more or less of each role.

The recent requests are simulated with the present workers first. Figures of this simulation that
differ from the measured ones by more than ``MAX_DIFFERENCE`` show that the simulator does not
describe this cluster now, so that no ratio is recommended. Plain data and pure functions; the
simulations are those of ``router.console.what_if``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from baton.config.choices import Role
from baton.config.cluster import Config
from baton.store.registry import WorkerRecord
from baton.store.supervision import MAX_WORKERS
from router.console.what_if import Shape, ShapeAnswer
from router.core.recent_requests import RecentRequest

REACH = 2
"""Maximum difference of a cell's workers of each role from the present number."""
MAX_REQUESTS = 200
"""Latest requests that each cell simulates. They are fewer than for a single what-if question,
since there are up to 25 cells."""
DEADLINE_S = 120.0
"""Maximum time of the simulations of all cells, in seconds."""
MAX_DIFFERENCE = 0.3
"""Maximum relative difference of a simulated figure from the measured one."""
TIE = 0.01
"""Shares of good requests that differ by less count as equal: a few requests make that
difference."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Grid(_Data):
    """What a grid shows, before any cell is simulated."""

    prefill: tuple[int, ...]
    """Numbers of prefill workers, ascending."""
    decode: tuple[int, ...]
    present: Shape
    requests: int
    """Number of requests that each cell simulates."""
    seconds: float
    """Time from the first of these requests to the last, in seconds."""
    autoscales: bool
    """Whether an autoscaler may undo a change of the ratio."""


class Check(_Data):
    """A figure of the present workers, as simulated and as measured with the same requests."""

    figure: Literal["ttft_p95", "tpot_p95", "good_share"]
    simulated: float | None
    """Seconds, or the share of requests that met every SLO; None if unknown."""
    measured: float | None
    ratio: float | None
    """``simulated`` divided by ``measured``; None if that has no value."""
    agrees: bool


class Choice(_Data):
    """A cell that may be chosen, and how to get there."""

    shape: Shape
    good_share: float
    commands: tuple[str, ...]
    """Shell commands that lead from the present workers to those of the cell; empty if they are the
    present ones."""


class Advice(_Data):
    """The result of a grid."""

    is_complete: bool
    """Whether all cells were simulated before the deadline."""
    best: Choice | None
    """The cell with the most good requests, with the fewest workers that reach it; None if the
    simulator does not describe the cluster."""
    best_same: Choice | None
    """The best cell with the present number of workers."""


def grid_of(
    present: Shape, recent: Sequence[RecentRequest], config: Config, *, share: float
) -> Grid:
    """Return the grid around the ``present`` workers. ``recent`` has the requests that are
    simulated, by arrival, and ``share`` is their fraction of the cluster's requests."""
    least = 1 if config.needs_prefill else 0
    return Grid(
        prefill=_around(present.prefill, least),
        decode=_around(present.decode, 1),
        present=present,
        requests=len(recent),
        seconds=(recent[-1].received_at - recent[0].received_at) * share if recent else 0.0,
        autoscales=config.autoscaler.enabled and not config.autoscaler.dry_run,
    )


def _around(count: int, least: int) -> tuple[int, ...]:
    wanted = range(max(least, count - REACH), min(MAX_WORKERS, count + REACH) + 1)
    return tuple(sorted({*wanted, count}))


def shapes_of(grid: Grid) -> tuple[Shape, ...]:
    """Return the grid's cells in the order of their simulation: the present one, then its
    neighbors."""
    here = grid.present

    def distance(shape: Shape) -> int:
        return abs(shape.prefill - here.prefill) + abs(shape.decode - here.decode)

    cells = (Shape(prefill=p, decode=d) for p in grid.prefill for d in grid.decode)
    return tuple(sorted(cells, key=distance))


def checks_of(present: ShapeAnswer, recent: Sequence[RecentRequest]) -> tuple[Check, ...]:
    """Compare the simulation of the present workers with what was measured of the same requests."""
    judged = [one.is_good for one in recent if one.is_good is not None]
    return (
        _check("ttft_p95", present.ttft_s.p95, _p95(one.ttft_s for one in recent)),
        _check("tpot_p95", present.tpot_s.p95, _p95(one.tpot_s for one in recent)),
        _check("good_share", present.good_share, sum(judged) / len(judged) if judged else None),
    )


def _check(
    figure: Literal["ttft_p95", "tpot_p95", "good_share"],
    simulated: float | None,
    measured: float | None,
) -> Check:
    ratio: float | None = None
    if simulated is None or measured is None:
        # Without a second token no request has a TPOT, in either.
        agrees = simulated is measured is None
    elif measured > 0:
        ratio = simulated / measured
        agrees = abs(ratio - 1) <= MAX_DIFFERENCE
    else:
        agrees = simulated == measured
    return Check(figure=figure, simulated=simulated, measured=measured, ratio=ratio, agrees=agrees)


def _p95(values: Iterable[float | None]) -> float | None:
    """Return the 95th percentile, interpolated between neighbors; None without values."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    place, part = divmod(0.95 * (len(known) - 1), 1)
    low, high = known[int(place)], known[min(int(place) + 1, len(known) - 1)]
    return low + (high - low) * part


def advice_of(
    grid: Grid,
    cells: Sequence[ShapeAnswer],
    checks: Sequence[Check],
    workers: Sequence[WorkerRecord],
    config: Config,
) -> Advice:
    """Return the best of the simulated ``cells``. ``workers`` are the present ones."""
    is_complete = len(cells) == len(grid.prefill) * len(grid.decode)
    if not cells or not all(one.agrees for one in checks):
        return Advice(is_complete=is_complete, best=None, best_same=None)
    here = grid.present
    total = here.prefill + here.decode
    same = [one for one in cells if one.prefill + one.decode == total]

    def choice(among: Sequence[ShapeAnswer]) -> Choice:
        best = _best(among, here)
        shape = Shape(prefill=best.prefill, decode=best.decode)
        return Choice(
            shape=shape,
            good_share=best.good_share,
            commands=commands(here, shape, workers, config),
        )

    return Advice(is_complete=is_complete, best=choice(cells), best_same=choice(same))


def _best(cells: Sequence[ShapeAnswer], here: Shape) -> ShapeAnswer:
    """Return the cell with the most good requests. Of those that are equal it is the one with the
    fewest workers, the present one before others."""
    most = max(one.good_share for one in cells)

    def order(cell: ShapeAnswer) -> tuple[int, bool, float]:
        is_here = (cell.prefill, cell.decode) == (here.prefill, here.decode)
        return cell.prefill + cell.decode, not is_here, cell.ttft_s.p95 or 0.0

    return min((one for one in cells if one.good_share > most - TIE), key=order)


def commands(
    present: Shape, wanted: Shape, workers: Sequence[WorkerRecord], config: Config
) -> tuple[str, ...]:
    """Return the commands that lead from the ``present`` workers to the ``wanted`` numbers: changes
    of roles first, which are the fastest, then sizes of pools."""
    change: dict[Role, int] = {
        "prefill": wanted.prefill - present.prefill,
        "decode": wanted.decode - present.decode,
    }
    roles = {one.slot: one.role for one in workers}
    pools: dict[str, list[str]] = {pool.name: [] for pool in config.pools}
    for one in sorted(workers, key=lambda one: _number(one.slot)):
        pools.setdefault(one.pool or one.role, []).append(one.slot)
    found: list[str] = []
    giver: Role
    taker: Role
    for giver, taker in (("prefill", "decode"), ("decode", "prefill")):
        turned = max(0, min(-change[giver], change[taker]))
        own = [one for one in workers if one.role == giver]
        # Workers of the other role's pool go first: they return to it.
        own.sort(key=lambda one: (one.pool == giver, one.load.running + one.load.waiting, one.slot))
        for worker in own[:turned]:
            found.append(f"baton role {worker.slot} {taker}")
            roles[worker.slot] = taker
            change[giver] += 1
            change[taker] -= 1
    return (*found, *_scaling(change, roles, pools, config))


def _scaling(
    change: Mapping[Role, int],
    roles: Mapping[str, str],
    pools: Mapping[str, Sequence[str]],
    config: Config,
) -> list[str]:
    """Return the commands that change the sizes of pools. ``change`` has how many workers each role
    gains, ``roles`` the role of each slot, and ``pools`` the slots of each pool, by number."""
    left = {name: list(slots) for name, slots in pools.items()}
    sizes = {name: len(slots) for name, slots in pools.items()}
    impossible: list[str] = []
    for role, count in change.items():
        own = [pool.name for pool in config.pools if pool.role == role]
        if count > 0 and own:
            sizes[max(own, key=lambda name: sizes[name])] += count
        elif count > 0:
            impossible.append(f"# {count} more: the configuration has no pool of {role} workers")
        for _ in range(-count):
            # A pool loses the worker with its highest number, whatever its role.
            last = (name for name, slots in left.items() if slots and roles[slots[-1]] == role)
            name = next(last, "")
            if not name:
                impossible.append(f"# one {role} worker less: drain it by hand")
                continue
            left[name].pop()
            sizes[name] -= 1
    # Workers that something else places are scaled there.
    command = config.scale_command or "baton scale {pool} {count}"
    scaled = [
        command.replace("{pool}", name).replace("{count}", str(size))
        for name, size in sizes.items()
        if size != len(pools[name])
    ]
    return scaled + impossible


def _number(slot: str) -> int:
    number = slot.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
