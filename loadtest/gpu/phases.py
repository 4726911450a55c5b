"""Defines the phases of a run in order of evidence: correctness, speed, serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from loadtest.gpu.checks.attention import attention_items
from loadtest.gpu.checks.engine import engine_items
from loadtest.gpu.checks.kernels import kernel_items
from loadtest.gpu.checks.steps import step_items
from loadtest.gpu.common.drafts import draft_check_items, draft_speed_items
from loadtest.gpu.common.place import Place, machine_items
from loadtest.gpu.common.results import Item
from loadtest.gpu.serving.items import missing, serving_items
from loadtest.gpu.speed.kernels import kernel_speed_items
from loadtest.gpu.speed.steps import step_speed_items

Plan = Literal["10min", "30min"]
PLANS: tuple[Plan, ...] = ("10min", "30min")


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a GPU run: a process with a time limit. Results before the limit are kept."""

    name: str
    question: str
    limits_s: dict[Plan, float]
    """Time limit of the phase in each plan, in seconds. A plan without an entry skips the phase."""
    items: Callable[[Place, Path], Iterator[Item]]
    """Function that yields the phase's items. The second argument is a folder for the items' files.
    The run removes the folder at its end."""
    describes: bool = False
    """Whether the phase's items can launch their kernels on tensors without values."""
    serves: bool = False
    """Whether the phase needs the packages for serving, which ``missing_packages`` checks."""


def _host_cost_items(place: Place, _: Path) -> Iterator[Item]:
    # It needs packages that a run without serving does not have.
    from loadtest.gpu.speed.host_cost import host_cost_items  # noqa: PLC0415

    return host_cost_items(place)


PHASES: tuple[Phase, ...] = (
    Phase(
        "machine",
        "which versions, and what the device does at best",
        {"10min": 25.0, "30min": 40.0},
        lambda place, _: machine_items(place),
    ),
    Phase(
        "kernels",
        "is every kernel right at real sizes",
        {"10min": 100.0, "30min": 240.0},
        lambda place, _: chain(attention_items(place), kernel_items(place)),
        describes=True,
    ),
    Phase(
        "steps",
        "are whole steps right, captured and not",
        {"10min": 80.0, "30min": 200.0},
        lambda place, _: step_items(place),
        describes=True,
    ),
    Phase(
        "engine",
        "is one whole engine right",
        {"10min": 50.0, "30min": 120.0},
        engine_items,
    ),
    Phase(
        "drafts",
        "do drafts leave the tokens as they are",
        {"30min": 90.0},
        lambda place, _: draft_check_items(place),
    ),
    Phase(
        "kernel speed",
        "how fast are kernels against the best peer",
        {"10min": 60.0, "30min": 200.0},
        lambda place, _: kernel_speed_items(place),
        describes=True,
    ),
    Phase(
        "step speed",
        "how fast are whole steps",
        {"10min": 110.0, "30min": 360.0},
        lambda place, _: step_speed_items(place),
        describes=True,
    ),
    Phase(
        "host cost",
        "what does a decode step cost the host",
        {"30min": 30.0},
        _host_cost_items,
        serves=True,
    ),
    Phase(
        "serving",
        "does it serve, and survive kills and poisoned contexts",
        {"10min": 160.0, "30min": 240.0},
        lambda place, folder: serving_items(place.device.type, small=place.small, folder=folder),
        serves=True,
    ),
    Phase(
        "draft speed",
        "what drafts do to the time of a token",
        {"30min": 150.0},
        lambda place, _: draft_speed_items(place),
    ),
)


def missing_packages(phase: Phase) -> list[str]:
    """Return the distributions that the phase needs and that are not installed."""
    return missing() if phase.serves else []


def phase_of(name: str) -> Phase:
    """Return a phase by its name. Raises KeyError."""
    return {phase.name: phase for phase in PHASES}[name]


def table() -> str:
    """Return the table of phases that ``--list`` prints."""
    lines = [f"{'phase':14}{'10min':>8}{'30min':>8}  question"]
    for phase in PHASES:
        limits = [f"{phase.limits_s[p]:.0f} s" if p in phase.limits_s else "-" for p in PLANS]
        lines.append(f"{phase.name:14}{limits[0]:>8}{limits[1]:>8}  {phase.question}")
    totals = [sum(phase.limits_s.get(plan, 0.0) for phase in PHASES) for plan in PLANS]
    lines.append(f"{'all':14}{totals[0]:>6.0f} s{totals[1]:>6.0f} s")
    return "\n".join(lines)
