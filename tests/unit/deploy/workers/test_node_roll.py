"""The numbers of a node's workers, each another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deploy.workers.node_roll import NodeRoll

SIGN = """
import sys
from pathlib import Path
from deploy.workers.node_roll import NodeRoll
print(NodeRoll(Path(sys.argv[1])).sign(sys.argv[2], 5.0, "ab", "h:1"), flush=True)
sys.stdin.read()
"""


class Signer:
    """A process that has signed, until it is ended."""

    def __init__(self, folder: Path, slot: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SIGN, str(folder), slot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.number = int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_number_is_free_again_when_its_process_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    roll = NodeRoll(folder)
    assert roll.living() == []
    signers = [Signer(folder, f"decode-{n}") for n in range(3)]
    try:
        assert [one.number for one in signers] == [0, 1, 2]
        found = {worker.slot: worker for worker in roll.living()}
        assert {slot: one.process.pid for slot, one in found.items()} == {
            f"decode-{n}": one.process.pid for n, one in enumerate(signers)
        }
        assert (found["decode-1"].drain_s, found["decode-1"].node) == (5.0, "ab")
        signers[1].end()
        assert {worker.slot for worker in roll.living()} == {"decode-0", "decode-2"}
        signers.append(Signer(folder, "decode-3"))
        assert signers[-1].number == 1
    finally:
        for one in signers:
            one.end()


def test_a_file_that_says_nothing_is_nobody(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("")
    assert NodeRoll(tmp_path).living() == []
