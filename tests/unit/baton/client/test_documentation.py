"""The examples of docs/reference/python-client.md run, against a scripted cluster."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.support.baton.clients import fronts
from tests.support.router.front_fakes import MODEL, make_front

PAGE = Path(__file__).parents[4] / "docs/reference/python-client.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
DEADLINE_S = 60.0


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_an_example(number: int, tmp_path: Path) -> None:
    front = make_front(data_dir=str(tmp_path / "data"))
    async with fronts(front) as there:
        text = EXAMPLES[number].replace("http://127.0.0.1:8000", there.http)
        text = text.replace("127.0.0.1:8001", there.grpc)
        text = text.replace("smollm2-135m-instruct", MODEL.id)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", text),
            cwd=tmp_path,
            env={"PYTHONPATH": str(PAGE.parents[1])},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                out, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, errors.decode()
        assert out or (tmp_path / "out.jsonl").exists()
