"""Checks and measures Baton on one GPU, in ten or thirty minutes:

    python -m loadtest.gpu.run --plan 10min --output gpu.jsonl

Each phase is a process with a time limit. Each result is written at once, as a line of JSON. A
second call with the same file resumes: it skips the completed items. An item that ends its process,
or takes too long, is recorded as broken, and the phase continues with the next one. ``--dry-run``
runs every phase on the CPU with interpreted kernels and small sizes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from baton.host.process_end import end_process, end_with_parent
from loadtest.gpu.common.place import Place, versions
from loadtest.gpu.phases import PHASES, PLANS, Phase, missing_packages, phase_of, table
from loadtest.gpu.report import Report, finished, wrong
from loadtest.gpu.report import table as report_table
from loadtest.gpu.triton_cache import StaleCache, code_hash, unpack

_ITEM_S = 120.0
"""Maximum time of an item, in seconds. On a GPU, the longest item should take half a minute."""
_DRY = 5.0
"""Factor by which time limits are longer in a dry run."""
_POLL_S = 0.1
_GONE_S = 30.0
"""Seconds that a killed process has to end. It may not end if the GPU runs a kernel that hangs."""
_BROKEN = 4
"""Exit code of a phase's process after it has recorded an item as broken."""
_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "loadtest.gpu.run")
_WHY_CHARACTERS = 500
_OWN = ("device", "torch", "triton", "code")
"""Properties in a report's first line that must be the same when a run resumes the report."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the phases. Return 0 if all items have run and passed, 1 if an item failed, 2 if the run
    is impossible, 3 if some items have not run."""
    options = _parser().parse_args(arguments)
    if options.list:
        sys.stdout.write(table() + "\n")
        return 0
    if options.child:
        _run_items(options)
        return 0
    if not options.dry_run and not torch.cuda.is_available():
        sys.stderr.write("torch finds no GPU here; --dry-run tries the run without one\n")
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="baton-gpu-") as scratch:
            return _run(options, Path(scratch))
    except StaleCache as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None, "it is above"
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gpu.run", description=__doc__.split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument("--plan", choices=PLANS, default="10min", help="default: 10min")
    parser.add_argument(
        "--output", type=Path, default=Path("gpu.jsonl"), help="the report; default: gpu.jsonl"
    )
    parser.add_argument("--list", action="store_true", help="list the phases and their limits")
    parser.add_argument("--dry-run", action="store_true", help="small sizes, on the CPU")
    parser.add_argument(
        "--only", choices=[phase.name for phase in PHASES], action="append", help="these phases"
    )
    parser.add_argument(
        "--triton-cache", type=Path, help="kernels compiled by loadtest.gpu.triton_cache"
    )
    parser.add_argument("--child", choices=[p.name for p in PHASES], help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser


def _place(options: argparse.Namespace) -> Place:
    if options.dry_run:
        return Place(torch.device("cpu"), torch.float32, small=True)
    return Place(torch.device("cuda", 0), torch.bfloat16, small=False)


def _run(options: argparse.Namespace, scratch: Path) -> int:
    report = Report(options.output)
    about = {**versions(_place(options)), "code": code_hash()}
    if not _begin(report, about, options):
        return 2
    environment = _environment(options, scratch)
    complete = True
    for phase in PHASES:
        limit_s = phase.limits_s.get(options.plan)
        if limit_s is None or (options.only and phase.name not in options.only):
            continue
        if absent := missing_packages(phase):
            why = f"these packages are missing: {' '.join(absent)}"
            report.append({"kind": "skipped", "phase": phase.name, "why": why})
            continue
        sys.stderr.write(f"{phase.name}: {phase.question}\n")
        limit_s *= _DRY if options.dry_run else 1.0
        complete &= _supervise(options, phase, limit_s, report, environment, scratch)
    records = report.records()
    sys.stdout.write(report_table(records))
    return 1 if wrong(records) else 0 if complete else 3


def _begin(report: Report, about: dict[str, str], options: argparse.Namespace) -> bool:
    """Write the report's first line, or check that an existing one matches. Return whether the run
    may go on.
    """
    report.mend()
    records = report.records()
    if not records:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report.append({"kind": "run", "plan": options.plan, "date": date, **about})
        return True
    first = records[0]
    differ = [name for name in _OWN if first.get(name) != about[name]]
    if differ:
        told = ", ".join(f"{name} {first.get(name)}, now {about[name]}" for name in differ)
        sys.stderr.write(
            f"{options.output} is the report of another run ({told}): name another file\n"
        )
    return not differ


def _environment(options: argparse.Namespace, scratch: Path) -> dict[str, str]:
    environment = dict(os.environ)
    if options.dry_run:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    elif options.triton_cache is not None:
        environment["TRITON_CACHE_DIR"] = str(unpack(options.triton_cache, scratch / "triton"))
    return environment


def _supervise(
    options: argparse.Namespace,
    phase: Phase,
    limit_s: float,
    report: Report,
    environment: dict[str, str],
    scratch: Path,
) -> bool:
    """Run a phase's items in a child process. If an item ends the child process, run the rest in a
    new one.

    Return whether all items are done.
    """
    ends_at = time.monotonic() + limit_s
    item_s = _ITEM_S * (_DRY if options.dry_run else 1.0)
    command = [*_COMMAND, "--child", phase.name]
    command += ["--parent", str(os.getpid())]
    command += ["--output", str(options.output), "--scratch", str(scratch)]
    command += ["--dry-run"] if options.dry_run else []
    while (left_s := ends_at - time.monotonic()) > 0:
        child = subprocess.Popen(command, env=environment)  # noqa: S603 - this very module
        try:
            ended = _wait(child, phase, report, left_s, item_s)
        finally:
            has_gone = _end(child)
        if ended is None:
            return True
        item = _under_way(report, phase)
        if not has_gone:
            ended = f"{ended or 'the phase is over'}; its process does not end"
        if ended == "":
            # The phase's time is over: the next call runs the item again.
            return False
        if child.returncode == _BROKEN:
            # The process has written the error to the report.
            continue
        report.append({"kind": "broken", "phase": phase.name, "item": item or "", "why": ended})
        if item is None or not has_gone:
            return True
    return False


def _end(child: subprocess.Popen[bytes]) -> bool:
    """Kill the child process if it still runs. Return whether the child process has ended, so that
    its GPU memory is free."""
    if child.poll() is None:
        child.kill()
    try:
        child.wait(timeout=_GONE_S)
    except subprocess.TimeoutExpired:
        # A driver may keep the process as long as a kernel hangs.
        return False
    return True


def _wait(
    child: subprocess.Popen[bytes], phase: Phase, report: Report, left_s: float, item_s: float
) -> str | None:
    """Wait for the child process that runs a phase's items.

    Return None if all items are done, and an empty text if the phase's time is over. Otherwise
    return the reason why the process must end.
    """
    ends_at = time.monotonic() + left_s
    item, begun_at = None, time.monotonic()
    while time.monotonic() < ends_at:
        try:
            code = child.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            now = _under_way(report, phase)
            if now != item:
                item, begun_at = now, time.monotonic()
            if item is not None and time.monotonic() - begun_at > item_s:
                return f"it did not end within {item_s:.0f} s"
            continue
        return None if code == 0 else f"its process ended with {code}"
    return ""


def _under_way(report: Report, phase: Phase) -> str | None:
    """Return the name of that item of the phase that was started and has not ended; None if there
    is none."""
    own = [record for record in report.records() if record.get("phase") == phase.name]
    ended = finished(own, phase.name)
    begun = [record["item"] for record in own if record["kind"] == "begun"]
    return begun[-1] if begun and begun[-1] not in ended else None


def _run_items(options: argparse.Namespace) -> None:
    """Run the items of a phase, in the phase's own process."""
    end_with_parent()
    if os.getppid() != options.parent:
        # The parent ended while this process started: another run may use the GPU by now.
        return
    # Imported objects are not examined by the garbage collector after each item.
    gc.freeze()
    phase, report = phase_of(options.child), Report(options.output)
    ended = finished(report.records(), phase.name)
    for item in phase.items(_place(options), options.scratch / phase.name):
        if item.name in ended:
            continue
        place = {"phase": phase.name, "item": item.name}
        report.append({"kind": "begun", **place})
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                for result in item.work():
                    report.append({**place, **result.record()})
        except Exception as error:  # the report has every error
            traceback.print_exc()
            why = " ".join(f"{type(error).__name__}: {error}".split())[:_WHY_CHARACTERS]
            report.append({"kind": "broken", **place, "why": why})
            # The next item runs in a new process: a CUDA error stays in this one.
            end_process(_BROKEN)
        seconds = round(time.perf_counter() - began, 3)
        report.append({"kind": "done", **place, "seconds": seconds})
        _give_back()


def _give_back() -> None:
    """Free the memory that an item has left on the GPU. Captured steps and their models form
    reference cycles.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
