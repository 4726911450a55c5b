"""Writes the report of a run, as JSON lines when results arrive, and makes a table of them.

`python -m loadtest.gpu.report FILE` prints the table of a report.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loadtest.gpu.common.predictions import Prediction, by_name, gpu_of, milliseconds
from loadtest.gpu.common.results import Record

_NO_PREDICTION = Prediction(0.0, 0.0)


class Report:
    """A report file to which several processes append, one JSON object per line.

    Lines have a ``kind``: ``run`` (the first line only), ``begun`` and ``done`` (of an item),
    ``check``, ``timing``, ``fact``, ``broken`` (an item that ended its process or took too long),
    ``skipped`` (a phase).
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, record: Record) -> None:
        """Append a record so that it survives a crash of the process or the machine."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)

    def records(self) -> list[Record]:
        """Return the records of all complete lines. An incomplete line that an interrupted run has
        left is skipped.
        """
        try:
            text = self._path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return []
        return list(_parsed(text.splitlines(keepends=True)))

    def mend(self) -> None:
        """End an incomplete line of the file, so that the next record is a separate line."""
        data = self._path.read_bytes() if self._path.exists() else b""
        if data and not data.endswith(b"\n"):
            with self._path.open("ab") as file:
                file.write(b"\n")


def _parsed(lines: Sequence[str]) -> Iterator[Record]:
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "kind" in found:
            yield found


def finished(records: Sequence[Record], phase: str) -> set[str]:
    """Return the names of those items of a phase that have ended, and need not run again."""
    return {
        record["item"]
        for record in records
        if record.get("phase") == phase and record["kind"] in ("done", "broken")
    }


def wrong(records: Sequence[Record]) -> list[Record]:
    """Return the records of failed checks, exceeded limits, and broken items."""
    return [
        record
        for record in records
        if record["kind"] == "broken"
        or record.get("holds") is False
        or record.get("seconds", 0.0) > record.get("limit_s", float("inf"))
    ]


def table(records: Sequence[Record]) -> str:
    """Return Markdown: the machine, the checks by phase, all failures, times and predictions."""
    parts = [_title(records), _checks(records)]
    if bad := wrong(records):
        parts.append(_wrong(bad))
    parts.append(_times(records))
    skipped = [record for record in records if record["kind"] == "skipped"]
    parts += [f"Not run: {record['phase']}: {record['why']}." for record in skipped]
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(records: Sequence[Record]) -> str:
    run = next((record for record in records if record["kind"] == "run"), {})
    told = [f"{name} {run[name]}" for name in ("device", "torch", "triton", "date") if name in run]
    for record in records:
        if record["kind"] == "fact" and record["name"] == "ceilings":
            values = record["values"]
            told.append(f"copy {values['bytes_per_s'] / 1e9:.0f} GB/s")
            told.append(f"products {values['operations_per_s'] / 1e12:.0f} TFLOP/s")
    return ", ".join(told)


def _checks(records: Sequence[Record]) -> str:
    phases = dict.fromkeys(record["phase"] for record in records if "phase" in record)
    lines = ["| phase | items | checks | wrong | broken |", "|---|---|---|---|---|"]
    for phase in phases:
        own = [record for record in records if record.get("phase") == phase]
        kinds = [record["kind"] for record in own]
        failed = sum(record.get("holds") is False for record in own)
        counts = (kinds.count("done"), kinds.count("check"), failed, kinds.count("broken"))
        lines.append(f"| {phase} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def _wrong(bad: Sequence[Record]) -> str:
    lines = ["| phase | item | what | found | bound |", "|---|---|---|---|---|"]
    for record in bad:
        place = f"{record.get('phase', '')} | {record.get('item', '')}"
        if record["kind"] == "broken":
            lines.append(f"| {place} | broken | {record['why']} | |")
        elif record["kind"] == "check":
            error = record["error"]
            told = "not a number" if error is None else f"{error:.3g}"
            found = f"{told} | {record['limit']:.3g}"
            lines.append(f"| {place} | {record['name']} | {found} |")
        else:
            found = f"{record['seconds']:.2f} s | {record['limit_s']:.2f} s"
            lines.append(f"| {place} | {record['name']} | {found} |")
    return "\n".join(lines)


def _times(records: Sequence[Record]) -> str:
    run = next((record for record in records if record["kind"] == "run"), {})
    gpu = gpu_of(run.get("device", ""))
    expected = {} if gpu is None else by_name(gpu)
    lines = [
        "| what | floor ms | expected ms | measured ms | measured / expected | peer | peer ms |"
        " measured / peer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    timings = [record for record in records if record["kind"] == "timing"]
    for record in timings:
        prediction = expected.get(record["name"], _NO_PREDICTION)
        cells = [
            record["name"],
            _ms(prediction.floor_s),
            _ms(prediction.expected_s),
            milliseconds(record["seconds"]),
            _ratio(record["seconds"], prediction.expected_s),
            record.get("peer", ""),
            _ms(record.get("peer_s", 0.0)),
            _ratio(record["seconds"], record.get("peer_s", 0.0)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if timings else ""


def _ms(seconds: float) -> str:
    return milliseconds(seconds) if seconds else ""


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a report."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.report", description=__doc__)
    parser.add_argument("file", type=Path)
    options: Any = parser.parse_args(arguments)
    records = Report(options.file).records()
    if not records:
        sys.stderr.write(f"{options.file} is not a report of a run\n")
        return 2
    sys.stdout.write(table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
