"""Workers by name, and from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.errors import ConfigError
from planning.simulator.costs.model_shape import MODELS
from planning.simulator.costs.sharing import ALONE
from planning.simulator.costs.worker_profile import gpu_profile, profile_fields, read_profile
from tests.support.loadtest.clusters import profile


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(profile_fields(profile(is_cpu=True))))
    assert read_profile(str(path)) == profile(is_cpu=True)


def test_a_profile_from_before_sharing_was_timed_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    fields = profile_fields(profile())
    del fields["sharing"]
    path.write_text(json.dumps(fields))
    assert read_profile(str(path)).sharing == ALONE


def test_an_h100_holds_what_its_memory_leaves() -> None:
    worker = read_profile("h100")
    # 72 GB less 16 GB of weights and 2 GB of the rest, at 128 KiB a token.
    assert worker.kv_tokens == pytest.approx(53.9e9 / 131072, rel=0.02)
    assert worker.context_length == 131072
    assert worker.wire_bytes_per_s == pytest.approx(40e9)
    assert read_profile("h100", tensor_parallel=2).kv_tokens > 2 * worker.kv_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "not a profile of version"),
        ({"step": [1.0, 2.0]}, "lacks a field"),
        ({"step": [0.0, 0.0, 0.0]}, "lacks a field"),
        ({"layers": "many"}, "lacks a field"),
        ({"sharing": {"decode_beside_prefill": 0.5}}, "lacks a field"),
        ({"sharing": {"decode_beside_lunch": 2.0}}, "lacks a field"),
    ],
)
def test_a_damaged_profile_is_reported(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile_fields(profile()) | change))
    with pytest.raises(ConfigError, match=message):
        read_profile(str(path))


def test_unknown_names_are_reported() -> None:
    with pytest.raises(ConfigError, match="nor one of a100"):
        read_profile("h1000")
    with pytest.raises(ConfigError, match="neither a config"):
        read_profile("h100", "no-such-model")
    with pytest.raises(ConfigError, match="no accelerator"):
        gpu_profile("tpu", MODELS["opt-13b"])


def test_a_model_that_does_not_fit_is_reported() -> None:
    with pytest.raises(ConfigError, match="no room for KV"):
        gpu_profile("l40s", MODELS["llama-3.1-70b"])


def test_a_profile_has_its_own_model(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile_fields(profile())))
    with pytest.raises(ConfigError, match="was measured with its own model"):
        read_profile(str(path), "opt-13b")
