"""The bugs that are planted by hand still fit the code: see docs/reliability.md."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("patch", sorted(HERE.glob("planted/*.patch")), ids=lambda path: path.stem)
def test_it_applies(patch: Path) -> None:
    if shutil.which("patch") is None:
        pytest.skip("there is no patch command")
    done = subprocess.run(
        ["patch", "--dry-run", "--force", "--strip=1", f"--input={patch}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
