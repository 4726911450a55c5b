"""What an engine's settings decide: types, quantization, and the name that KV is shared under."""

from __future__ import annotations

import ctypes
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.checkpoint.model_config import load_model_config
from engine.engine import Engine, EngineSettings, warm_up
from engine.model.model import DecoderModel
from engine.model.weights import load_weights
from engine.offline import generate
from tests.support.models import make_tiny_model
from worker.cores.core_board import CoreBoard

ROW_BYTES = 2 * 2 * 2 * 16 * 16
"""Of a block of the tiny model: layers, K and V, heads, slots, values of a head."""
SCALES = 2 * 2 * 2 * 16 * 4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=16)
    return EngineSettings(folder, device="cpu", threads=1, kv_pool_bytes=1 << 20)


def answers(engine: Engine) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    prompts = [tuple(range(n, n + 30)) for n in range(4)]
    specs = [SequenceSpec(f"{n}", 0, "", p, len(p), sampling) for n, p in enumerate(prompts)]
    return [output.token_ids for output in generate(engine, specs)]


@pytest.mark.parametrize(
    ("kv_dtype", "block_bytes"),
    [("auto", 2 * ROW_BYTES), ("int8", ROW_BYTES + SCALES), ("fp8", ROW_BYTES + SCALES)],
)
def test_the_pool_is_counted_in_blocks_of_the_kv_type(
    base: EngineSettings, kv_dtype: str, block_bytes: int
) -> None:
    engine = build_engine(replace(base, kv_dtype=kv_dtype))
    assert engine.cache.block_bytes == block_bytes
    assert engine.pool.total == (1 << 20) // block_bytes
    expected = {"auto": "bfloat16"}.get(kv_dtype, kv_dtype)
    assert engine.cache.geometry.kv_dtype == expected
    warm_up(engine)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_every_combination_answers(
    base: EngineSettings, dtype: str, kv_dtype: str, quantization: str
) -> None:
    """By the CPU's own decoder, and by torch in fp32; the answers stay near the plain ones."""
    settings = replace(base, dtype=dtype, kv_dtype=kv_dtype, quantization=quantization)
    found = answers(build_engine(settings))
    plain = answers(build_engine(replace(base, dtype="float32")))
    same = sum(one[0] == other[0] for one, other in zip(found, plain, strict=True))
    assert same >= len(plain) - 1


def test_what_decides_kv_is_in_the_fingerprint(base: EngineSettings) -> None:
    changes: list[dict[str, object]] = [
        {},
        {"dtype": "float16"},
        {"quantization": "int8"},
        {"quantization": "none"},
        {"kv_dtype": "int8"},
        {"kv_dtype": "fp8"},
        {"deterministic": True},
        {"deterministic": True, "kv_dtype": "fp8"},
    ]
    names = [build_engine(replace(base, **change)).fingerprint for change in changes]  # type: ignore[arg-type]
    assert len(set(names)) == len(changes)
    assert build_engine(replace(base, max_sequences=3)).fingerprint == names[0]


def test_the_fingerprint_holds_the_lossiest_kv_type_of_those_that_share(
    base: EngineSettings,
) -> None:
    """Then a worker that is more precise shares its KV, and finds its blocks by the same hashes."""
    lossy = build_engine(replace(base, kv_dtype="int8"))
    precise = build_engine(replace(base, lossiest_kv_dtype="int8"))
    assert precise.cache.geometry.kv_dtype == "bfloat16"
    assert precise.fingerprint == lossy.fingerprint != build_engine(base).fingerprint


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_a_plain_cache_may_be_narrower_than_the_model(base: EngineSettings, kv_dtype: str) -> None:
    engine = build_engine(replace(base, dtype="float32", kv_dtype=kv_dtype))
    assert engine.cache.geometry.kv_dtype == kv_dtype
    plain = answers(build_engine(replace(base, dtype="float32")))
    same = sum(one[0] == other[0] for one, other in zip(answers(engine), plain, strict=True))
    assert same >= len(plain) - 1


def test_a_narrower_cache_is_read_rounded_from_the_first_chunk_on(base: EngineSettings) -> None:
    """Whether a prompt comes in one chunk or in two, its KV is the same, up to rare roundings."""
    settings = replace(base, dtype="float32", kv_dtype="bfloat16", max_sequences=8)
    prompt, sampling = tuple(range(30)), SamplingParams(temperature=0.0, max_tokens=1)
    codes = []
    for chunk in (32, 8):
        engine = build_engine(replace(settings, chunk_tokens=chunk))
        generate(engine, [SequenceSpec("r", 0, "", prompt, len(prompt), sampling)])
        codes.append(engine.cache.bytes[:2].view(torch.int16))
    assert codes[0].any()
    assert (codes[0] == codes[1]).float().mean() > 0.99


def test_unknown_types_are_named(base: EngineSettings) -> None:
    with pytest.raises(ConfigError, match="known: auto, int8, fp8, float32, bfloat16, float16"):
        build_engine(replace(base, kv_dtype="int4"))
    with pytest.raises(ConfigError, match="known: auto, none, int8, int4, fp8"):
        build_engine(replace(base, quantization="int3"))


def test_a_pool_beyond_the_machines_memory_is_refused(base: EngineSettings) -> None:
    """The kernel would grant it and kill a process when its pages are touched."""
    with pytest.raises(ConfigError, match="lower kv_pool_mib"):
        build_engine(replace(base, kv_pool_bytes=1 << 50))


def test_a_bounded_context_changes_no_token(base: EngineSettings) -> None:
    plain, bounded = build_engine(base), build_engine(replace(base, max_model_len=40))
    assert (plain.context_length, bounded.context_length) == (512, 40)
    assert answers(bounded) == answers(plain)
    assert bounded.fingerprint == plain.fingerprint
    warm_up(bounded)


def test_an_answer_ends_where_the_bounded_context_does(base: EngineSettings) -> None:
    engine = build_engine(replace(base, max_model_len=33))
    assert [len(found) for found in answers(engine)] == [3] * 4


def test_a_stop_token_before_min_tokens_ends_nothing(base: EngineSettings) -> None:
    """Where nothing but stop tokens may be drawn they are drawn, and the answer goes on."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=9, min_tokens=4, allowed_token_ids=(7,), stop_token_ids=(7,)
    )
    (output,) = generate(build_engine(base), [SequenceSpec("r", 0, "", (1, 2), 2, sampling)])
    assert output.token_ids == (7,) * 5
    assert output.finish_reason is FinishReason.STOP


def test_a_pool_must_hold_a_sequence_of_the_length_that_was_asked_for(
    base: EngineSettings,
) -> None:
    block = build_engine(base).cache.block_bytes
    small = replace(base, kv_pool_bytes=4 * block)
    assert build_engine(small).context_length == 64
    assert build_engine(replace(small, max_model_len=64)).context_length == 64
    mib = f"{5 * block / (1 << 20):.1f}", f"{4 * block / (1 << 20):.1f}"
    with pytest.raises(ConfigError) as caught:
        build_engine(replace(small, max_model_len=65))
    assert caught.value.message == (
        f"a sequence of max_model_len 65 tokens needs {mib[0]} MiB of KV memory, and the pool has"
        f" {mib[1]} MiB, enough for 64 tokens; raise kv_pool_mib, or lower max_model_len"
    )


def test_rotary_tables_end_with_the_bounded_context(base: EngineSettings) -> None:
    config = load_model_config(base.model_path, 40)
    weights = load_weights(base.model_path, torch.device("cpu"), torch.float32, "auto")
    whole = DecoderModel(load_model_config(base.model_path), weights, torch.device("cpu"))
    bounded = DecoderModel(config, weights, torch.device("cpu"))
    assert torch.equal(bounded.ropes[0], whole.ropes[0][:40])
    assert len(whole.ropes[0]) == 512


def test_a_bound_that_chooses_other_rotary_factors_is_in_the_fingerprint(tmp_path: Path) -> None:
    """Of longrope, as Phi-3 has it: the short factors hold within the original context."""
    folder = make_tiny_model(tmp_path, head_dim=16)
    config = json.loads((folder / "config.json").read_text())
    config["original_max_position_embeddings"] = 128
    config["rope_scaling"] = {
        "type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings = EngineSettings(folder, device="cpu", threads=1, kv_pool_bytes=1 << 20)
    names = [
        build_engine(replace(settings, max_model_len=bound)).fingerprint for bound in (0, 129, 128)
    ]
    assert names[0] == names[1] != names[2]


def test_a_long_step_says_that_it_goes_on(base: EngineSettings, tmp_path: Path) -> None:
    engine = build_engine(base)
    board = CoreBoard(tmp_path / "cores", 0, 1, 1, yields=True)
    engine.runner.share_cores(board.share)
    began = (ctypes.c_int64 * 1).from_address(board.share.lines)
    began[0] = 1
    warm_up(engine)
    assert time.monotonic_ns() - began[0] < 60 * 10**9
