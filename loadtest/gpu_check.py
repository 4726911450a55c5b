"""Everything that is to be known of a GPU machine, in one run of less than ten minutes:

    python -m loadtest.gpu_check --output gpu.json

First correctness: every kernel and whole steps against fp32 references. Then the device's ceilings
(copy bandwidth, products). Then kernels, and steps of an 8B Llama with random weights, against
them, and what drafts do to tokens a second. Each phase is a process with a time limit of its own;
what it had found by then is kept. ``--self-test`` runs small sizes with interpreted kernels on the
CPU: it tries this script.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from engine.ceilings import measure_ceilings
from engine.roofline import Ceilings
from loadtest.gpu_correctness import Place, check_kernels, check_steps
from loadtest.gpu_speculation import check_drafts, measure_speculation
from loadtest.gpu_speed import FULL, SMALL, Figure, measure_kernels, measure_steps

_LIMITS_S = {
    "correctness": 170.0,
    "ceilings": 30.0,
    "kernels": 110.0,
    "steps": 165.0,
    "speculation": 100.0,
}
"""Of each phase, in their order; 575 s together."""
_INTERPRETER = 5.0
"""How much longer a self-test may take."""
_SELF_TEST_CEILINGS = Ceilings(1e10, 1e11)

Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every check holds and every phase came to its end; whether targets are met is told."""
    options = _parser().parse_args(arguments)
    if options.phase:
        for record in _phase(options):
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
        return 0
    if not options.self_test and not torch.cuda.is_available():
        sys.stderr.write("torch finds no GPU here; --self-test tries the script without one\n")
        return 2
    records = list(_all_phases(options))
    machine = _machine(options.self_test)
    if options.output:
        report = {"machine": machine, "records": records}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(_table(machine, records))
    wrong = [record for record in records if record.get("holds") is False or "broken" in record]
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gpu_check", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--output", type=Path, help="a file for the report, JSON")
    parser.add_argument("--self-test", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--only", choices=_LIMITS_S, action="append", help="these phases alone")
    parser.add_argument("--phase", choices=_LIMITS_S, help=argparse.SUPPRESS)
    parser.add_argument("--bytes-per-s", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--operations-per-s", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser


def _all_phases(options: argparse.Namespace) -> Iterator[Record]:
    """What all phases find. Speeds are of no use without ceilings."""
    ceilings = _SELF_TEST_CEILINGS if options.self_test else None
    wanted = options.only or list(_LIMITS_S)
    for phase, seconds in _LIMITS_S.items():
        limit_s = seconds * (_INTERPRETER if options.self_test else 1.0)
        needed = phase == "ceilings" and {"kernels", "steps"} & set(wanted)
        if phase not in wanted and not needed:
            continue
        if phase in ("kernels", "steps") and ceilings is None:
            yield {"phase": phase, "broken": "there are no ceilings to measure against"}
            continue
        for record in _run(phase, limit_s, options.self_test, ceilings):
            if "bytes_per_s" in record and ceilings is None:
                ceilings = Ceilings(record["bytes_per_s"], record["operations_per_s"])
            yield record


def _run(
    phase: str, limit_s: float, self_test: bool, ceilings: Ceilings | None
) -> Iterator[Record]:
    """A phase in a process of its own: a kernel that hangs ends with it."""
    command = [sys.executable, "-m", "loadtest.gpu_check", "--phase", phase]
    environment = dict(os.environ)
    if self_test:
        command.append("--self-test")
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if ceilings is not None:
        command += ["--bytes-per-s", str(ceilings.bytes_per_s)]
        command += ["--operations-per-s", str(ceilings.operations_per_s)]
    broken = ""
    with tempfile.TemporaryFile("w+") as found:
        try:
            done = subprocess.run(  # noqa: S603 - this very module
                command, stdout=found, env=environment, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            broken = f"did not end within {limit_s:.0f} s"
        else:
            if done.returncode:
                broken = f"ended with {done.returncode}; see above"
        found.seek(0)
        lines = found.read().splitlines()
    yield from ({"phase": phase} | json.loads(line) for line in lines if line.endswith("}"))
    if broken:
        yield {"phase": phase, "broken": broken}


def _phase(options: argparse.Namespace) -> Iterator[Record]:
    """What one phase finds, as it finds it."""
    device = torch.device("cpu" if options.self_test else "cuda")
    dtype = torch.float32 if options.self_test else torch.bfloat16
    sizes = SMALL if options.self_test else FULL
    ceilings = Ceilings(options.bytes_per_s, options.operations_per_s)
    if options.phase == "correctness":
        yield from _checks(Place(device, dtype))
    elif options.phase == "ceilings":
        found = _SELF_TEST_CEILINGS if options.self_test else measure_ceilings(device, dtype)
        yield {"name": "ceilings", **asdict(found)}
    elif options.phase == "kernels":
        for figure in measure_kernels(device, dtype, sizes, ceilings):
            yield _figure(figure)
    elif options.phase == "speculation":
        for figure in measure_speculation(device, dtype, sizes):
            yield _figure(figure)
    else:
        for figure in measure_steps(device, dtype, sizes, ceilings):
            yield _figure(figure)


def _checks(place: Place) -> Iterator[Record]:
    for checks in (check_kernels(place), check_steps(place), check_drafts(place)):
        for check in checks:
            yield {**asdict(check), "holds": check.holds}


def _figure(figure: Figure) -> Record:
    return {**asdict(figure), "met": figure.met}


def _machine(self_test: bool) -> Record:
    device = "CPU, interpreted" if self_test else torch.cuda.get_device_name()
    return {
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _table(machine: Record, records: Sequence[Record]) -> str:
    """Markdown: a row for each record."""
    title = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [
        f"\n{title}\n",
        "| phase | what | found | limit or target | |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {record['phase']} | {' | '.join(_cells(record))} |" for record in records]
    return "\n".join(lines) + "\n"


def _cells(record: Record) -> tuple[str, str, str, str]:
    if "broken" in record:
        return "—", record["broken"], "", "FAILED"
    if "holds" in record:
        verdict = "ok" if record["holds"] else "WRONG"
        return record["name"], f"{record['error']:.2g}", f"≤ {record['limit']:.2g}", verdict
    if "bytes_per_s" in record:
        memory, products = record["bytes_per_s"] / 1e9, record["operations_per_s"] / 1e12
        return record["name"], f"{memory:.0f} GB/s, {products:.0f} TFLOP/s", "", ""
    found = f"{record['seconds'] * 1e3:.3f} ms, {record['share']:.1%} of {record['of']}"
    if record["target"] is None:
        return record["name"], found, "", ""
    sign = "≤" if record["at_most"] else "≥"
    return (
        record["name"],
        found,
        f"{sign} {record['target']:.0%}",
        "met" if record["met"] else "missed",
    )


if __name__ == "__main__":
    sys.exit(main())
