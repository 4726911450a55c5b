"""A folder whose modules have the names of Baton's own is a folder like any other."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.support.e2e.cluster import PATIENT, UpProcess

HOSTILE = """
from pathlib import Path

Path({mark!r}).touch()
raise SystemExit("a module of the current folder was imported")
"""


def test_a_cluster_starts_in_a_folder_with_modules_of_the_same_names(tmp_path: Path) -> None:
    folder, mark = tmp_path / "project", tmp_path / "imported"
    text = HOSTILE.format(mark=str(mark))
    for package in ("worker", "deploy", "engine", "baton"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(text)
    for module in ("router", "planning", "kvtransfer", "prefill_worker", "decode_worker"):
        (folder / f"{module}.py").write_text(text)
    with UpProcess(env=PATIENT, folder=folder) as up:
        up.wait_ready()
        body = {
            "model": up.model,
            "temperature": 0,
            "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
        }
        url = f"{up.http}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=60.0, trust_env=False).raise_for_status()
        assert "Tokyo" in answer.json()["choices"][0]["message"]["content"]
        up.terminate()
        assert up.wait() == 0, up.text
    assert not mark.exists()
