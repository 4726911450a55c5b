"""Two bugs that are planted in a copy of the code: a chaos run must find them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
RUN_S = 900.0


@dataclass(frozen=True)
class Planted:
    """A bug, the faults under which it shows, and what a run says of it."""

    name: str
    file: str
    where: str
    """The text before which ``bug`` is put; it occurs once."""
    bug: str
    seed: int
    kinds: tuple[str, ...]
    is_found: Callable[[dict[str, Any]], bool]

    def plant(self, root: Path) -> str:
        """What the file below ``root`` is with the bug."""
        sound = (root / self.file).read_text()
        assert sound.count(self.where) == 1, f"{self.file} has changed"
        return sound.replace(self.where, self.bug + self.where)


PLANTED = (
    # A block stays used: the worker's own check meets that within a heartbeat, and ends it.
    Planted(
        "a leaked block on abort",
        "decode_worker/requests.py",
        """\
            self.context.core.remove(sequence)
        self.context.core.schedule_steps()

    def abort_handoff(""",
        "            self.context.engine.pool.pin(sequence.block_table[:1])\n",
        7,
        ("decode killed", "slow clients"),
        lambda told: any("decode-" in line for one in told["rounds"] for line in one["leaks"]),
    ),
    # The last token is drawn again at the next worker, and the client has it already.
    Planted(
        "a duplicated token on a move",
        "router/dispatch/running_request.py",
        """\
        request, sampling = self.request, self.request.sampling
        return SequenceSpec(
""",
        "        del self.choices[choices[0]].token_ids[-1:]\n",
        8,
        ("decode killed", "decode stopped"),
        lambda told: told["wrong_tokens"] > 0,
    ),
)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.name)
def test_it_can_be_planted(planted: Planted) -> None:
    compile(planted.plant(ROOT), planted.file, "exec")


@pytest.mark.long
@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.name)
def test_a_run_finds_it(planted: Planted, tmp_path: Path) -> None:
    root, found = tmp_path / "copy", tmp_path / "found.json"
    shutil.copytree(ROOT, root, ignore=NOT_COPIED)
    (root / planted.file).write_text(planted.plant(root))
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "1", "--json", str(found)]
    command += ["--seed", str(planted.seed)]
    for kind in planted.kinds:
        command += ["--only", kind]
    done = subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert found.exists(), done.stderr
    told = json.loads(found.read_text())
    assert done.returncode == 1, told
    assert planted.is_found(told), told
