"""`loadtest.cluster.policy_bench`, with a real Valkey."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.config.choices import PolicyName
from loadtest.cluster.policy_bench import LruCache, app

BLOCK = 512


def write_chats(path: Path, chats: int = 23, turns: int = 6) -> Path:
    """Chats with one first block, one after the other; each turn repeats the one before it."""
    dice, rows, fresh = random.Random(1), [], 1
    held: dict[int, list[int]] = {chat: [0] for chat in range(chats)}
    for turn in range(turns):
        for chat, blocks in held.items():
            more = dice.randint(1, 4)
            blocks.extend(range(fresh, fresh + more))
            fresh += more
            rows.append(
                {
                    "timestamp": 1000 * (turn * chats + chat),
                    "input_length": BLOCK * len(blocks),
                    "output_length": 1,
                    "hash_ids": list(blocks),
                    "session_id": f"chat {chat}",
                }
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bench(folder: Path, trace: Path, *flags: str) -> dict[str, Any]:
    output = folder / "found.json"
    arguments = ["--trace", str(trace), "--json", str(output), *flags]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.long
def test_prefixes_are_found_without_herding(tmp_path: Path) -> None:
    trace = write_chats(tmp_path / "chats.jsonl")
    found = {
        name: bench(tmp_path, trace, "--policy", name, "--scale-length", "32")
        for name in get_args(PolicyName)
    }
    for one in found.values():
        assert {"hit_ratio", "load_ratio", "decision_us_p50", "decision_us_p99"} <= one.keys()
        asked, uncached = one["blocks_asked"], one["uncached_blocks"]
        assert len(uncached) == 4
        assert one["blocks_found"] + sum(uncached) == asked
        assert one["hit_ratio"] == one["blocks_found"] / asked
        assert one["load_ratio"] == pytest.approx(4 * max(uncached) / sum(uncached))
    # One worker has every block after its first computing: no policy finds more.
    assert found["prefix"]["load_ratio"] == 4.0
    assert found["prefix"]["hit_ratio"] >= max(one["hit_ratio"] for one in found.values())
    best = found["predictive"]
    assert best["load_ratio"] < 1.2
    assert best["hit_ratio"] > 0.95 * found["prefix"]["hit_ratio"]
    for plain in ("round_robin", "least_loaded", "power_of_two"):
        assert found[plain]["hit_ratio"] < 0.9 * best["hit_ratio"]
    assert found["session"]["hit_ratio"] > 0.95 * found["prefix"]["hit_ratio"]


MOONCAKE = Path(__file__).resolve().parents[5] / "shared/traces/mooncake_conversation.jsonl.gz"


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the trace is not here")
@pytest.mark.long
@pytest.mark.parametrize("rows", [3000, None])
def test_three_routers_lose_less_than_a_hundredth_of_the_hits(
    tmp_path: Path, rows: int | None
) -> None:
    """Each with a policy and an account of its own: they share the index and the workers' loads."""
    trace = tmp_path / "trace.jsonl"
    with gzip.open(MOONCAKE, "rt") as whole:
        trace.write_text("".join(itertools.islice(whole, rows)))
    alone, together = (
        bench(tmp_path, trace, "--scale-length", "32", "--routers", routers)
        for routers in ("1", "3")
    )
    assert together["routers"] == 3
    assert together["blocks_found"] > 0.99 * alone["blocks_found"]
    assert together["load_ratio"] < 1.1


def test_small_caches_find_less(tmp_path: Path) -> None:
    trace = write_chats(tmp_path / "chats.jsonl")
    whole = bench(tmp_path, trace, "--workers", "2")
    small = bench(tmp_path, trace, "--workers", "2", "--cache-blocks", "20")
    assert small["workers"] == 2
    assert small["hit_ratio"] < 0.9 * whole["hit_ratio"]


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--policy", "best"), 2, "'best' is not one of 'predictive'"),
        (("--scale-length", "0"), 2, "must be above 0"),
        (("--json", "/nonexistent/found.json"), 1, "cannot be written"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, flags: tuple[str, ...], code: int, says: str
) -> None:
    trace = write_chats(tmp_path / "chats.jsonl", 1, 1)
    result = CliRunner().invoke(app, ["--trace", str(trace), *flags])
    assert result.exit_code == code
    assert says in result.output


def test_a_trace_without_blocks_or_not_there(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    row = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}
    empty.write_text(json.dumps(row))
    for trace, says in ((empty, "hash_ids"), (tmp_path / "none", "cannot read")):
        result = CliRunner().invoke(app, ["--trace", str(trace)])
        assert result.exit_code == 1
        assert says in result.output


def chain(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_the_least_used_go_first_from_their_ends() -> None:
    cache = LruCache(4)
    cache.use(chain("a", "b", "c"))
    cache.use(chain("a", "x", "y"))
    assert cache.leading(chain("a", "b", "c")) == 2
    assert cache.leading(chain("a", "x", "y")) == 3
    assert cache.drain_changes() == (chain("b", "a", "y", "x"), chain("c"))
    assert cache.drain_changes() == ([], [])


def test_a_prompt_that_does_not_fit_keeps_its_beginning() -> None:
    cache = LruCache(2)
    cache.use(chain("a", "b", "c"))
    assert cache.leading(chain("a", "b", "c")) == 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.one_of(st.none(), st.integers(1, 6)),
    st.lists(st.tuples(st.lists(st.sampled_from("abcdef"), unique=True), st.booleans())),
)
def test_changes_tell_what_is_held(most: int | None, uses: list[tuple[list[str], bool]]) -> None:
    cache, told = LruCache(most), set[bytes]()
    for names, drain in uses:
        cache.use(chain(*names))
        if drain:
            stored, removed = cache.drain_changes()
            assert not set(stored) & set(removed)
            told = (told | set(stored)) - set(removed)
            assert told == {n for n in chain(*"abcdef") if cache.leading([n])}
            assert most is None or len(told) <= most
