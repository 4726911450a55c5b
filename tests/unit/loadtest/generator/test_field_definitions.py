"""Our figures are those of `vllm bench serve` and of aiperf, from the same recorded timestamps.

What theirs make of them is kept as data; where they are installed, their own code is run again.
"""

from __future__ import annotations

import json
import os
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest

from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.results.summary import Distribution, Window, summarize
from planning.common.slo import Slo
from tests.clients.environments import read_table

FOLDER = Path(__file__).parent / "field"
RECORDED = json.loads((FOLDER / "recorded.json").read_text())
VARIABLES = {"vllm": "BATON_VLLM_PYTHON", "aiperf": "BATON_AIPERF_PYTHON"}
"""A Python that has the client, where it is not in the environment of `make test-clients`."""
CLIENTS = {"vllm": "vllm-bench", "aiperf": "aiperf"}


def records() -> list[RequestRecord]:
    return [
        RequestRecord(
            number=number,
            # Theirs knows but the send itself.
            due_s=one["sent_s"],
            sent_s=one["sent_s"],
            ended_s=one["sent_s"],
            outcome=one["outcome"],
            input_tokens=one["input_tokens"],
            output_tokens=one["output_tokens"],
            token_times_s=array("d", one["token_times_s"]),
        )
        for number, one in enumerate(RECORDED["requests"])
    ]


def compare_with_vllm(theirs: dict[str, Any]) -> None:
    slo = Slo(**{f"{name}_s": bound for name, bound in RECORDED["slo"].items()})
    found = summarize(records(), Window(0.0, RECORDED["seconds"]), slo)
    ours: dict[str, Any] = {
        "completed": found.all.ok,
        "failed": found.all.requests - found.all.ok,
        "input_tokens": found.all.input_tokens,
        "output_tokens": found.all.output_tokens,
        "completed_per_s": found.completed_per_s,
        "goodput_per_s": found.goodput_per_s,
        "output_tokens_per_s": found.output_tokens_per_s,
    }
    assert ours == pytest.approx({name: theirs[name] for name in ours})
    for name in ("ttft", "tpot", "itl", "e2el"):
        distribution: Distribution = getattr(found.all, name)
        for figure, value in theirs[name].items():
            assert getattr(distribution, figure) == pytest.approx(value), (name, figure)


def compare_with_aiperf(theirs: dict[str, Any]) -> None:
    well = [record for record in records() if record.outcome == "ok"]
    assert len(well) == len(theirs["requests"])
    for record, row in zip(well, theirs["requests"], strict=True):
        assert record.ttft_s * 1e9 == pytest.approx(row["ttft_ns"])
        assert record.e2el_s * 1e9 == pytest.approx(row["e2el_ns"])
        assert record.tpot_s * 1e9 == pytest.approx(row["tpot_ns"] or 0, abs=1)
        assert [1e9 * gap for gap in record.itl_s] == pytest.approx(row["itl_ns"] or [], abs=1)


COMPARISONS = {"vllm": compare_with_vllm, "aiperf": compare_with_aiperf}


@pytest.mark.parametrize("client", COMPARISONS)
def test_same_timestamps_same_figures(client: str) -> None:
    COMPARISONS[client](json.loads((FOLDER / f"{client}.json").read_text()))


def test_the_recording_has_the_cases_that_matter() -> None:
    rows = RECORDED["requests"]
    assert {row["outcome"] for row in rows} == {"ok", "error", "shed", "aborted"}
    well = [row for row in rows if row["outcome"] == "ok"]
    assert any(row["output_tokens"] == 1 for row in well)
    assert any(len(row["token_times_s"]) < row["output_tokens"] for row in well)
    theirs = json.loads((FOLDER / "vllm.json").read_text())
    assert 0 < theirs["goodput_per_s"] < theirs["completed_per_s"]


@pytest.mark.long
@pytest.mark.parametrize("client", COMPARISONS)
def test_their_own_code_reports_it(client: str) -> None:
    python = _python(client)
    if python is None:
        pytest.skip(f"{client} is not installed; {VARIABLES[client]} may name a Python that has it")
    done = subprocess.run(
        [str(python), str(FOLDER / f"{client}_arithmetic.py")],
        input=json.dumps(RECORDED),
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    COMPARISONS[client](json.loads(done.stdout))


def _python(client: str) -> Path | None:
    named = os.environ.get(VARIABLES[client])
    if named:
        return Path(named)
    (program,) = (one for one in read_table() if one.name == CLIENTS[client])
    return program.home / "bin" / "python" if program.installed else None
