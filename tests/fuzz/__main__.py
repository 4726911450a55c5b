"""Fuzzes Baton's entrances one after another, and says what came of it.

make fuzz MINUTES=5; or python -m tests.fuzz --minutes 5 gguf sse

``answers`` fuzzes no entrance: it compares the answers of a cluster under faults with those of one
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import router
from tests.fuzz.answers import main as answers
from tests.fuzz.answers.faults import KINDS as FAULTS
from tests.fuzz.openapi import fuzz_openapi, router_model
from tests.fuzz.router_inputs import KINDS
from tests.fuzz.targets import TARGETS

OPENAPI, ROUTER, ANSWERS = "openapi", "router", "answers"
NAMES = (*TARGETS, OPENAPI, ROUTER, ANSWERS)

_TIMEOUT_S = 120
"""A single input that takes longer is a fault, in seconds. CPU time has its own bound
(``Target``)."""
_MEMORY_MIB = 3072
_START_S = 180
_SHOWN = 5
"""Faults of answers that are printed; all are in the target's folder."""
_EDGES = re.compile(r"cov: (\d+)")
_RUNS = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
_LAST_RUN = re.compile(r"^#(\d+)\s", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one target's run came to; of ``openapi`` cases and operations.

    Of ``router``: inputs and the longest hold of its event loop, in milliseconds of CPU time. Of
    ``answers``: answers and faults.
    """

    name: str
    minutes: float
    executions: int
    edges: int
    fault: str
    """Where its input and its log lie; empty where there is none."""


def fuzz(name: str, minutes: float, out: Path) -> Figures:
    """Run one target but ``answers``; what it finds stays in ``out``."""
    folder = out / name
    if name == OPENAPI:
        executions, edges, faulty = fuzz_openapi(minutes, folder)
        return Figures(name, minutes, executions, edges, str(folder) if faulty else "")
    if name == ROUTER:
        return _fuzz_router(minutes, folder)
    target = TARGETS[name]
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    log = folder / "log"
    command = [
        *(sys.executable, "-m", "tests.fuzz.child", name, str(corpus)),
        f"-max_total_time={int(minutes * 60)}",
        f"-timeout={_TIMEOUT_S}",
        f"-rss_limit_mb={_MEMORY_MIB}",
        f"-max_len={target.max_bytes}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
    ]
    with log.open("wb") as file:
        # The time is libFuzzer's to keep; this ends one that does not.
        done = subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=minutes * 60 + _START_S,
            check=False,
        )
    text = log.read_text(errors="replace")
    runs = _RUNS.search(text) or (_LAST_RUN.findall(text) or ["0"])[-1]
    executions = int(runs if isinstance(runs, str) else runs[1])
    edges = max(map(int, _EDGES.findall(text)), default=0)
    fault = "" if done.returncode == 0 else str(folder)
    return Figures(name, minutes, executions, edges, fault)


def _fuzz_router(minutes: float, folder: Path) -> Figures:
    model = router_model(folder)
    found = asyncio.run(router.fuzz(minutes, model, folder))
    for fault in found.faults:
        print(f"router: {fault}", file=sys.stderr)
    held_ms = round(found.longest_s * 1e3)
    fault = f"{folder}: {'; '.join(found.faults)}" if found.faults else ""
    return Figures(ROUTER, minutes, found.inputs, held_ms, fault)


def _fuzz_answers(minutes: float, folder: Path, seed: int, kinds: Sequence[str]) -> Figures:
    found = answers.fuzz(minutes, seed, folder, kinds)
    log = folder / "faults.txt"
    log.write_text("\n\n".join(found.faults))
    for fault in found.faults[:_SHOWN]:
        print(f"answers: {fault}", file=sys.stderr)
    print(f"answers: {found}", file=sys.stderr)
    fault = f"{len(found.faults)} in {log}" if found.faults else ""
    return Figures(ANSWERS, minutes, found.compared + found.begun, found.strikes, fault)


def _replay(given: str, out: Path) -> int:
    kind, _, number = given.partition(":")
    if kind not in KINDS or not number.isdecimal():
        print(f"--input: KIND:NUMBER, of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    print(asyncio.run(router.replay(kind, int(number), router_model(out), out)))
    return 0


def main() -> int:
    """0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--minutes", type=float, default=5.0, help="For each target.")
    parser.add_argument("--out", type=Path, help="Where inputs and logs go.")
    parser.add_argument(
        "--input", default="", metavar="KIND:NUMBER", help="Send one input of router again."
    )
    parser.add_argument("--seed", type=int, default=0, help="Of the first round of answers.")
    parser.add_argument(
        "--only", action="append", choices=FAULTS, help="A kind of fault of answers; repeatable."
    )
    given = parser.parse_args()
    unknown = [name for name in given.targets if name not in NAMES]
    if unknown:
        parser.error(f"there is no target {unknown[0]!r}; there are {', '.join(NAMES)}")
    out = given.out or Path(tempfile.mkdtemp(prefix="baton-fuzz-"))
    if given.input:
        return _replay(given.input, out)
    print("| target | minutes | executions | edges | found |\n|---|---|---|---|---|", flush=True)
    found = False
    for name in given.targets or NAMES:
        if name == ANSWERS:
            kinds = given.only or tuple(FAULTS)
            figures = _fuzz_answers(given.minutes, out / name, given.seed, kinds)
        else:
            figures = fuzz(name, given.minutes, out)
        found |= bool(figures.fault)
        print(
            f"| {name} | {figures.minutes:g} | {figures.executions} | {figures.edges} |"
            f" {figures.fault or '-'} |",
            flush=True,
        )
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
