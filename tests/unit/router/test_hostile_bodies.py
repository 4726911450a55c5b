"""What one request may hold and take: each body of the benchmark's table gets its answer.

The strict bound on holds, 20 ms, is measured by ``python -m loadtest.router.hostile_bodies`` on a
quiet machine. Here it is ten times as much, and of CPU time, which other load does not lengthen.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache

import pytest
from starlette.types import ASGIApp

from baton.config.cluster import Config
from loadtest.router.hostile_bodies import BODIES, Body, held_by, make_app
from tests.support.router.front_fakes import tiny_tokenizer

HOLD_S = 0.2
MEMORY_BYTES = 128 << 20


@cache
def served() -> ASGIApp:
    return make_app(tiny_tokenizer(), Config())


@pytest.fixture
def no_collections() -> Iterator[None]:
    """A router excludes from collections what it has at its start: see ``router.main``."""
    gc.collect()
    # Nor does the next test look again at what all before it have left.
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name)
async def test_a_body_holds_the_loop_shortly(body: Body) -> None:
    held = await held_by(served(), body, Config().max_body_bytes)
    assert held.status == body.status
    assert held.hold_cpu_s < HOLD_S
    assert held.memory_bytes < MEMORY_BYTES
