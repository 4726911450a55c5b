"""`baton chat` in a terminal, with a real cluster."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.e2e.cluster import BATON, UpProcess
from tests.support.terminal import CTRL_C, CTRL_D, CTRL_J, ENTER, UP, Terminal

FIGURES = re.compile(
    r"^\d+ tokens · ([\d.]+ tokens/s · )?first token after [\d.]+ m?s · (prefill-0 → )?decode-0$",
    re.M,
)


def test_a_conversation_in_a_terminal(cluster: UpProcess, tmp_path: Path) -> None:
    command = [BATON, "chat", "--grpc", cluster.grpc, "--temperature", "0", "--max-tokens", "2000"]
    env = {"XDG_STATE_HOME": str(tmp_path)}
    with Terminal(command, env, columns=100) as terminal:
        terminal.wait_for(f"{cluster.model} at {cluster.grpc}, cluster {cluster.cluster_id}")
        terminal.wait_for("\n>")
        terminal.type(f"What is the capital{CTRL_J}of Japan?{ENTER}")
        terminal.wait_until(lambda text: FIGURES.search(text) is not None)
        assert "Tokyo" in terminal.text
        terminal.type(f"Write a long story about a dragon, with many chapters.{ENTER}")
        # Two lines of it are there, and it goes on.
        told = re.compile(r"many chapters\.\n(.+\n){2}")
        terminal.wait_until(lambda text: told.search(text) is not None)
        terminal.type(CTRL_C)
        terminal.wait_for("· interrupted")
        terminal.type(f"/new{ENTER}")
        terminal.wait_for("A new conversation.")
        terminal.type(f"What is half of 10?{ENTER}")
        terminal.wait_for("Half of 10 is 5.")
        terminal.wait_until(lambda text: len(FIGURES.findall(text)) == 2)
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0
    with Terminal(command, env, columns=100) as terminal:
        terminal.wait_for("\n>")
        terminal.type(UP)
        terminal.wait_for("> What is half of 10?")
        terminal.type(ENTER)
        terminal.wait_for("Half of 10 is 5.")
        terminal.type(f"/quit{ENTER}")
        assert terminal.wait_end() == 0
