"""Kinds of workers and of clusters that a search tries, and the price of their GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.config.cluster import Config
from baton.errors import ConfigError
from planning.planner.cluster_kind import (
    AS_MEASURED,
    MACHINE_GPUS,
    TRANSPORTS,
    ClusterKind,
    Transport,
    WorkerKind,
)
from planning.planner.lower_bound import timely_answers, timely_prompts
from planning.planner.traffic import PlannedTraffic
from planning.simulator.costs.hardware import ACCELERATORS
from planning.simulator.costs.worker_profile import read_profile

ASSUMED_PRICES: Mapping[str, float] = {
    "a100": 1.40,
    "h100": 2.30,
    "h200": 3.00,
    "b200": 5.00,
    "l40s": 0.90,
}
"""US dollars per GPU and hour, including the GPU's share of machine, network and power. These are
assumptions of the size of on-demand prices at the end of 2025, which differ by a factor of two or
three."""


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """Parse GPU prices such as ``h200=3.2``; a text may have several, separated by commas. They
    override the assumed prices.

    A number without a GPU has the key ``""``, and is the price of all other GPUs. Raises
    ConfigError.
    """
    prices = dict(ASSUMED_PRICES)
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, _, value = part.rpartition("=")
        prices[name.strip()] = _number(value, part)
    return prices


def price_of(prices: Mapping[str, float], name: str) -> float:
    """Return the price of a GPU, in dollars per hour. Raises ConfigError if the price is
    unknown."""
    price = prices.get(name, prices.get(""))
    if price is None:
        raise ConfigError(f"the price of {name} is unknown: give --price {name}=DOLLARS")
    return price


def _number(value: str, text: str) -> float:
    try:
        price = float(value)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise ConfigError(
            f"{text!r} is not a price: give one such as h200=3.2, in dollars per GPU and hour"
        )
    return price


_DEGREES = (1, 2, 4, 8)
_OF_EACH = 2
"""Default number of degrees of tensor parallelism that are tried for each GPU in each role."""


@dataclass(frozen=True, slots=True)
class Roles:
    """For each role, the kinds of workers that meet the SLOs when they are otherwise idle. Also
    reasons why other kinds cannot."""

    prefill: tuple[WorkerKind, ...]
    decode: tuple[WorkerKind, ...]
    dropped: tuple[str, ...]
    """Reasons why other kinds of workers are not tried."""
    reachable: bool
    """Whether a sufficient number of workers can meet the target in both roles. If false, the kinds
    that come closest are used."""


def worker_kinds(
    gpus: Sequence[str], model: str, degrees: Sequence[int], prices: Mapping[str, float]
) -> tuple[list[WorkerKind], list[str]]:
    """Return all kinds of workers that can hold the model, and why others cannot. Raises
    ConfigError if none can.

    ``gpus`` are accelerators' names, or files of `baton calibrate`, which have a fixed degree.
    ``degrees`` are the degrees of tensor parallelism to try. If empty, they are 1 to 8.
    """
    found, dropped = [], []
    for gpu in gpus:
        price = price_of(prices, gpu)
        for degree in (degrees or _DEGREES) if gpu in ACCELERATORS else (1,):
            if not 1 <= degree <= MACHINE_GPUS:
                raise ConfigError(f"a worker has 1 to {MACHINE_GPUS} GPUs, not {degree}")
            try:
                profile = read_profile(gpu, model, tensor_parallel=degree)
            except ConfigError as error:
                if gpu not in ACCELERATORS:
                    raise
                dropped.append(error.message)
            else:
                found.append(WorkerKind(gpu, profile, price))
    if not found:
        raise ConfigError("; ".join(dropped) or "no GPU is given")
    return found, dropped


def roles(
    kinds: Sequence[WorkerKind],
    traffic: Sequence[PlannedTraffic],
    config: Config,
    target: float,
    *,
    every: bool,
) -> Roles:
    """Return the worker kinds that are suitable for each role: all of them, or the smallest two of
    each GPU."""

    def prompts(kind: WorkerKind) -> float:
        return min(timely_prompts(kind.profile, one, config) for one in traffic)

    def answers(kind: WorkerKind) -> float:
        return min(timely_answers(kind.profile, one, config) for one in traffic)

    dropped: list[str] = []
    chosen, reachable = [], True
    for role, bound, of in (("prompts", "TTFT", prompts), ("answers", "TPOT", answers)):
        shares = {kind: of(kind) for kind in kinds}
        able = [kind for kind in kinds if shares[kind] >= target]
        dropped += [
            f"one {kind.name} that is otherwise idle meets the {bound} of {shares[kind]:.1%} of "
            f"the {role}"
            for kind in kinds
            if kind not in able
        ]
        if not able:
            reachable, able = False, [max(kinds, key=lambda kind: shares[kind])]
        chosen.append(tuple(able if every else _smallest(able)))
    return Roles(chosen[0], chosen[1], tuple(dropped), reachable)


def cluster_kinds(found: Roles, transport: Transport) -> list[ClusterKind]:
    """Return all combinations of a prefill and a decode worker as kinds of clusters. Measured
    profiles keep their own bandwidth.
    """
    return [
        ClusterKind(prefill, decode, transport_of(prefill, decode, transport))
        for prefill in found.prefill
        for decode in found.decode
    ]


def transport_of(prefill: WorkerKind, decode: WorkerKind, transport: Transport) -> Transport:
    """Return ``transport`` if both workers' GPUs are in the table of accelerators. Otherwise return
    the transport of their measured profiles."""
    is_known = prefill.gpu in ACCELERATORS and decode.gpu in ACCELERATORS
    return transport if is_known else AS_MEASURED


def transports(names: Iterable[str]) -> list[Transport]:
    """Return transports by name, in order of their requirements, lowest first.

    Raises ConfigError.
    """
    wanted = set(names)
    unknown = wanted - set(TRANSPORTS)
    if unknown or not wanted:
        raise ConfigError(
            f"unknown transport between GPUs: {', '.join(sorted(unknown)) or repr('')}; known: "
            f"{', '.join(TRANSPORTS)}"
        )
    return [one for name, one in TRANSPORTS.items() if name in wanted]


def _smallest(kinds: Sequence[WorkerKind]) -> list[WorkerKind]:
    """Return the first kinds of each GPU. ``kinds`` are in order of rising degree of tensor
    parallelism.
    """
    found: dict[str, list[WorkerKind]] = {}
    for kind in kinds:
        found.setdefault(kind.gpu, []).append(kind)
    return [kind for alike in found.values() for kind in alike[:_OF_EACH]]
