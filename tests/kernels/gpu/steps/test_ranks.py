"""The GPU's steps on several ranks, which are threads here, against one rank in plain torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.errors import WorkerFailed
from engine.build import build_engine
from engine.checkpoint.model_config import load_model_config
from engine.engine import EngineSettings
from engine.gpu.decoder import GpuStepModel
from engine.gpu.draws import GREEDY
from engine.gpu.fused_weights import gpu_weights
from engine.gpu.kernels.launch import Launch
from engine.kv.kv_cache import KvCache
from engine.model.model import DecoderModel
from engine.model.weights import load_weights
from engine.parallel import context_split
from engine.parallel.context_parallel import ContextExchange
from engine.parallel.rank_group import RankGroup
from engine.parallel.rank_model import RankModel
from engine.parallel.ranks import Follower, Leader
from engine.parallel.shard import config_of, shard_of
from engine.parallel.weight_slices import WeightSlices
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow
from tests.kernels.gpu.device import DEVICE
from tests.support.models import make_tiny_model, make_tiny_moe

HOST = "127.0.0.1"
WAIT_S = 120.0
RANKS = 2
PROMPT = list(range(7, 32))
TABLE = (3, 5, 2)

MakeStepModel = Callable[[Path, RankGroup, Leader | None], GpuStepModel]


def model_shard(folder: Path, group: RankGroup, leader: Leader | None) -> GpuStepModel:
    """Of ranks that divide the model."""
    config = load_model_config(folder)
    shard = shard_of(config, group.rank, group.ranks)
    slices = WeightSlices(config, shard)
    weights = load_weights(folder, DEVICE, torch.float32, slices=slices)
    model = DecoderModel(config_of(config, shard), weights, DEVICE, RankModel(shard, group))
    cache = KvCache(model.config, 8, 16, torch.float32, DEVICE)
    return GpuStepModel(gpu_weights(model), cache, 8, leader=leader)


def context_shard(folder: Path, group: RankGroup, leader: Leader | None) -> GpuStepModel:
    """Of ranks that divide prompts."""
    config = load_model_config(folder)
    model = DecoderModel(config, load_weights(folder, DEVICE, torch.float32), DEVICE)
    model.context = ContextExchange(group)
    cache = KvCache(config, 8, 16, torch.float32, DEVICE)
    return GpuStepModel(gpu_weights(model), cache, 8, leader=leader)


@pytest.fixture(autouse=True)
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is one thread's."""
    lock, run = threading.Lock(), Launch.run

    def locked(launch: Launch) -> None:
        with lock:
            run(launch)

    monkeypatch.setattr(Launch, "run", locked)


# Rows that no expert of a rank has are never written, and computed for nothing: what lay in that
# memory may overflow. A GPU says nothing of it either; results are compared.
@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="NCCL takes one GPU for each rank")
@pytest.mark.parametrize(
    ("make", "shard"),
    [
        pytest.param(make_tiny_model, model_shard, marks=pytest.mark.long),
        (make_tiny_moe, model_shard),
        pytest.param(make_tiny_model, context_shard, marks=pytest.mark.long),
    ],
    ids=["model", "experts", "context"],
)
def test_ranks_compute_what_one_computes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    shard: MakeStepModel,
) -> None:
    # So that ranks divide a prompt as short as this one.
    monkeypatch.setattr(context_split, "MIN_TOKENS", 8)
    folder = make(tmp_path)
    leader = Leader(HOST, RANKS)
    ended: Future[None] = Future()

    def follow() -> None:
        try:
            with closing(Follower(leader.address, 1, RANKS, WAIT_S)) as follower:
                group = follower.form(DEVICE, lambda _: None)
                model = shard(folder, group, None)
                follower.ready("none")
                cache = KvCache(load_model_config(folder), 8, 16, torch.float32, DEVICE)
                follower.run(model, cache)
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        model = shard(folder, leader.form(DEVICE, WAIT_S).group, leader)
        rows = (PlanRow(0, 0, len(PROMPT), TABLE, True),)
        step = StepInput(rows, PROMPT, list(range(len(PROMPT))), False)
        found = model.run(step).logits
        # The next step's token is known to the ranks alone, by where it lies.
        last = replace(step, outputs=[len(PROMPT) - 1], greedy=True)
        drawn = model.start(last, [GREEDY])
        row = PlanRow(0, len(PROMPT), 1, TABLE, True)
        follower = model.start(StepInput((row,), [-1], [0], True), [GREEDY])
        tokens = drawn.token_ids() + follower.token_ids()
    except WorkerFailed as error:
        # Most likely since the other rank failed, which says more.
        raise ended.exception(WAIT_S) or error from error
    finally:
        leader.close()
        thread.join(WAIT_S)
    ended.result(0)
    reference = build_engine(EngineSettings(folder, "float32", "cpu", kv_pool_bytes=1 << 20))
    expected = reference.runner.model.run(step).logits
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert tokens[0] == int(expected[-1].argmax())
    after = StepInput((row,), tokens[:1], [0], True)
    assert tokens[1:] == reference.runner.model.run(after).best
