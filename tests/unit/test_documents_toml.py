"""Every TOML block of the documents is a configuration that Baton accepts, or a part of one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from baton.config.cluster import Config, load_config
from baton.config.sources import PREFIX
from baton.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"^ *```toml\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE)
HASH = "0" * 64
"""Stands for a hash that a page leaves out."""


def _pool(name: str, role: str) -> str:
    return f'\n[[pools]]\nname = "{name}"\nrole = "{role}"\n'


_POOLS = _pool("another-prefill", "prefill") + _pool("another-decode", "decode")
PARTS = {
    "at least one decode pool is needed": _POOLS,
    "owns 'prefill-long', which is no pool": _POOLS + _pool("prefill-long", "prefill"),
    "tokens have no price": "\n[prices]\ninput = 1\noutput = 2\n",
}
"""What a block lacks that is a part of a configuration, by the error that says it."""


def blocks() -> dict[str, str]:
    """The text of each block, by its page and line."""
    return {
        f"{page.relative_to(ROOT)}:{text[: found.start()].count(chr(10)) + 1}": found["text"]
        for page in PAGES
        for text in [page.read_text()]
        for found in _BLOCK.finditer(text)
    }


BLOCKS = blocks()


def loaded(text: str, folder: Path) -> Config:
    """The configuration of a file with this text, completed with at most one of ``PARTS``."""
    text = text.replace('sha256 = "…"', f'sha256 = "{HASH}"')
    file = folder / "baton.toml"
    file.write_text(text)
    try:
        return load_config(file)
    except ConfigError as error:
        missing = [part for fault, part in PARTS.items() if fault in error.message]
        if not missing:
            raise
        file.write_text(text + missing[0])
    return load_config(file)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def test_there_are_blocks() -> None:
    pages = {name.split(":")[0] for name in BLOCKS}
    assert {"docs/how-to/deploy/one-host.md", "docs/reference/configuration.md"} <= pages


@pytest.mark.parametrize("name", BLOCKS)
def test_a_toml_block_of_a_page_is_accepted(name: str, tmp_path: Path) -> None:
    loaded(BLOCKS[name], tmp_path)


def test_a_block_with_a_fault_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        loaded("nonsense = 1\n", tmp_path)
