"""Checks one whole engine on a folder with random weights: it is built, warmed up, calibrated and
run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import torch

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.checkpoint.model_config import load_model_config
from engine.engine import Engine, EngineSettings, warm_up
from engine.kv.kv_cache import KvCache
from engine.model.model import DecoderModel
from engine.model.torch_step import TorchStepModel
from engine.model.weights import load_weights
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow
from engine.scheduling.sequence import Sequence
from loadtest.gpu.common.drafts import run_to_end
from loadtest.gpu.common.models import write_folder
from loadtest.gpu.common.place import Place
from loadtest.gpu.common.results import Check, Fact, Item, Result, Timing
from loadtest.gpu.common.shapes import SHAPES, llama_1b, miniature
from worker.costs.calibration import calibrate

_REGRET = 0.25
"""Maximum difference between the highest fp32 logit and that of a sampled token. Logits of random
weights have a standard deviation of about 1, and steps in bf16 have an error of some hundredths.
The logits of all but a few tokens lie far below the highest logit."""
_FRACTION = 0.5
"""Fraction of the GPU's memory that the engine may use."""
_BLOCK = 16


def engine_items(place: Place, folder: Path) -> Iterator[Item]:
    """Yield the checks of the engine. The model's files are written to ``folder``."""
    config = miniature(SHAPES["Llama 8B"]) if place.small else llama_1b(16384)

    @cache
    def engine() -> Engine:
        path = write_folder(config, folder / "model", place.device)
        if place.on_gpu:
            # The weights of the writer are not part of the engine's memory.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(place.device)
        return build_engine(_settings(place, path))

    yield Item("build", partial(_build, place, engine))
    yield Item("warm-up and calibration", partial(_warm_up, place, engine))
    yield Item("sequences", partial(_sequences, place, engine, folder / "model"))


def _settings(place: Place, path: Path) -> EngineSettings:
    return EngineSettings(
        path,
        dtype="float32" if place.dtype == torch.float32 else "bfloat16",
        device=place.device.type,
        gpu_memory_fraction=_FRACTION,
        kv_pool_bytes=1 << 22,
        chunk_tokens=64 if place.small else 0,
    )


def _build(place: Place, engine: Callable[[], Engine]) -> Iterator[Result]:
    began = time.perf_counter()
    built = engine()
    yield Timing("engine: files written, read and loaded", time.perf_counter() - began)
    yield Fact("engine", {"blocks": built.cache.blocks, "context": built.context_length})


def _warm_up(place: Place, engine: Callable[[], Engine]) -> Iterator[Result]:
    built = engine()
    began = time.perf_counter()
    warm_up(built)
    yield Timing("engine: warm-up", time.perf_counter() - began)
    costs = calibrate(built, built.runner.run)
    yield Fact("calibration", {"prefill": costs.prefill, "step": costs.step})


def _sequences(place: Place, engine: Callable[[], Engine], path: Path) -> Iterator[Result]:
    """Run prompts in chunks and overlapping decode steps, and compare each sampled token with
    fp32."""
    built = engine()
    prompts = (70, 33, 5) if place.small else (9000, 700, 300, 64, 17, 5)
    tokens = 8 if place.small else 64
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    sequences = []
    for number, count in enumerate(prompts):
        prompt = _prompt(number, count, built.config.vocab_size)
        spec = SequenceSpec(str(number), 0, "", prompt, count, greedy)
        sequences.append(Sequence(number, spec, stop_ids=(), hash_key=b"engine"))
        built.scheduler.add(sequences[-1])
    began = time.perf_counter()
    run_to_end(built.scheduler, built.runner)
    yield Timing("engine: all sequences", time.perf_counter() - began)
    short = sum(len(s.token_ids) != n + tokens for s, n in zip(sequences, prompts, strict=True))
    yield Check("sequences of another length", float(short), 0.0)
    # This precedes the reference, which takes memory too.
    yield from _memory(place, built)
    reference = DecoderModel(
        load_model_config(path), load_weights(path, place.device, torch.float32), place.device
    )
    for sequence, count in zip(sequences, prompts, strict=True):
        if count < 1000:
            regret = _regret(place, reference, sequence.token_ids, count)
            yield Check(f"largest regret, prompt of {count}", regret, _REGRET)


def _prompt(seed: int, count: int, vocab: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())


@torch.inference_mode()
def _regret(place: Place, model: DecoderModel, token_ids: list[int], prompt: int) -> float:
    """Return the largest gap between the highest fp32 logit and that of the sampled token, over all
    sampled tokens.
    """
    count = len(token_ids) - 1
    table = tuple(range(-(-count // _BLOCK)))
    cache = KvCache(model.config, len(table), _BLOCK, torch.float32, place.device)
    row = PlanRow(0, 0, count, table, True)
    outputs = list(range(prompt - 1, count))
    step = StepInput((row,), token_ids[:count], outputs, False)
    logits = TorchStepModel(model, cache, place.device).run(step).logits
    assert logits is not None, "the call requests them"
    drawn = torch.tensor(token_ids[prompt:], device=logits.device)
    return float((logits.amax(1) - logits.gather(1, drawn[:, None])[:, 0]).max())


def _memory(place: Place, built: Engine) -> Iterator[Result]:
    """Check that the engine holds at most the share of the GPU's memory that its settings allow."""
    if not place.on_gpu:
        yield Fact("memory", {"pool bytes": built.cache.bytes.nbytes})
        return
    _, total = torch.cuda.mem_get_info(place.device)
    reserved = torch.cuda.max_memory_reserved(place.device)
    allocated = torch.cuda.max_memory_allocated(place.device)
    yield Fact("memory", {"reserved": reserved, "allocated": allocated, "total": total})
    yield Check("reserved bytes over the share", reserved / (_FRACTION * total), 1.0)
