"""Messages stay readable for clients of the last release."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.deploy.chart import program

ROOT = Path(__file__).parents[4]
_DEADLINE_S = 60


def broken(folder: Path) -> str:
    """What the messages of ``folder`` break of the last release's, as buf shows it."""
    against = ROOT / "proto" / "released.binpb"
    done = subprocess.run(
        [program("buf", "buf-bin"), "breaking", "--against", str(against)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert (done.returncode == 0) is (done.stdout == ""), done.stderr
    return done.stdout


def test_the_messages_break_nothing_of_the_last_release() -> None:
    assert broken(ROOT) == ""


def test_a_field_with_another_number_breaks_the_last_release(tmp_path: Path) -> None:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "proto" / "baton", tmp_path / "proto" / "baton")
    file = tmp_path / "proto" / "baton" / "v1" / "inference.proto"
    text = file.read_text()
    assert "string model = 1;" in text
    file.write_text(text.replace("string model = 1;", "string model = 99;", 1))
    assert "inference.proto" in broken(tmp_path)
