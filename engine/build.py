"""Builds an engine: model, KV cache, block pool, scheduler, drafter and runner."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from baton.errors import ConfigError
from baton.grammars.compiled_grammars import grammars_of
from baton.host.cache import cache_dir
from engine.checkpoint.model_config import ModelConfig, load_model_config
from engine.checkpoint.rope_spec import LongRopeScaling
from engine.cpu.decoder import cpu_decoder
from engine.cpu.library import library_build
from engine.cpu.sampler import cpu_sampler
from engine.engine import Engine, EngineSettings, chunk_tokens, drafter_of, max_rows
from engine.execution.runner import ModelRunner
from engine.kv.kv_cache import Allocate, KvCache, KvGroup, block_bytes
from engine.kv.kv_quantization import kv_dtype, kv_dtype_name
from engine.load import LoadedModel, load_model, model_source
from engine.model.embedding import Embedder
from engine.model.model import DecoderModel
from engine.model.torch_step import TorchStepModel
from engine.model.weights import fingerprint, load_weights
from engine.parallel.context_parallel import ContextModel, ContextSteps
from engine.parallel.rank_group import RankGroup
from engine.parallel.ranks import FollowerModel, FormedGroup, Leader, LeaderModel, TorchFollower
from engine.pool_size import pool_blocks
from engine.quantization.packed_cache import PackedCache
from engine.roofline import Storage
from engine.sampling.sampling import sample
from engine.sampling.step import StepModel
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits
from engine.speculation.heads.loading import HEADS, EagleHead, MedusaHeads, load_heads
from engine.speculation.model.draft_model import DraftModel, check_vocabulary
from engine.speculation.model.speculation import ModelSpeculation
from engine.speculation.model_drafter import FilledSlots, ModelDrafter, Sampler
from engine.speculation.speculation import MAX_DRAFT_TOKENS, StepSpeculation, make_speculation

_CHUNK_KEYS = {"cpu": 1 << 19, "cuda": 0}
"""Maximum product, for each type of device, of a chunk's number of tokens and the number of keys
that its last token attends to; 0 means no limit. On a CPU, a chunk may have 512 tokens up to a
context of 1024, and fewer in a longer context, so that a step stays short."""


def build_engine(
    settings: EngineSettings, allocate: Allocate | None = None, ranks: FormedGroup | None = None
) -> Engine:
    """Load the model, and build the engine. Memory for the KV blocks is allocated by ``allocate``.

    With several ``ranks``, this process is rank 0: it loads its shard, and sends each step to the
    other ranks.

    Raises ConfigError with the setting to change, and WorkerFailed if another rank is lost.
    """
    source = model_source(settings, ranked=ranks is not None)
    # The files are hashed while they are loaded.
    with fingerprint(settings.model_path, settings.dtype, settings.quantization) as hashed:
        loaded = load_model(source, None if ranks is None else ranks.group)
        draft = _load_draft(loaded)
        cache = _kv_cache(loaded, allocate, None if draft is None else draft.config)
        name = hashed.result()
        leader = None if ranks is None else ranks.leader
        runner = _runner(loaded, cache, name, _speculation(loaded, cache, draft), leader)
        return _assembled(loaded, draft, runner, name)


def build_follower(
    settings: EngineSettings, group: RankGroup, allocate: Allocate | None = None
) -> tuple[FollowerModel, KvCache]:
    """Build the engine parts of a rank other than 0: its shard of the model, and its KV blocks.

    Raises ConfigError and WorkerFailed, as ``build_engine`` does.
    """
    loaded = load_model(model_source(settings, ranked=True), group)
    cache = _kv_cache(loaded, allocate, None)
    if loaded.weights is None:
        return TorchFollower(_torch_model(loaded.model, cache)), cache
    from engine.gpu.decoder import gpu_decoder  # noqa: PLC0415

    return gpu_decoder(loaded.weights, cache, max_rows(settings, loaded.source.device)), cache


def _kv_cache(loaded: LoadedModel, allocate: Allocate | None, draft: ModelConfig | None) -> KvCache:
    source = loaded.source
    return KvCache(
        loaded.model.config,
        pool_blocks(loaded, draft),
        source.settings.block_size,
        kv_dtype(source.settings.kv_dtype, source.dtype),
        source.device,
        allocate,
        draft,
        whole=source.config,
        ranks=loaded.model_ranks,
    )


def _assembled(loaded: LoadedModel, draft: Draft | None, runner: ModelRunner, name: str) -> Engine:
    """Assemble the engine around its runner; ``name`` is the fingerprint of the weights."""
    source, cache = loaded.source, runner.cache
    settings, config, device = source.settings, source.config, source.device
    grammars = grammars_of(
        (settings.model_path / "tokenizer.json").read_text, config.vocab_size, config.eos_ids
    )
    pool = BlockPool(cache.blocks)
    limits = SchedulerLimits(
        block_size=settings.block_size,
        chunk_tokens=chunk_tokens(settings, device, loaded.context_ranks),
        chunk_keys=_CHUNK_KEYS[device.type] * loaded.context_ranks,
        max_sequences=settings.max_sequences,
        context_length=min(config.context_length, pool.total * settings.block_size),
        hash_block_size=settings.hash_block_size,
        draft_tokens=MAX_DRAFT_TOKENS if drafter_of(settings, device) != "none" else 0,
    )
    kv = kv_dtype(settings.kv_dtype, source.dtype)
    own = _fingerprint(
        name,
        settings.lossiest_kv_dtype or kv_dtype_name(kv),
        _arithmetic(device) if settings.deterministic else "",
        "" if draft is None else draft.name,
        _rotation(settings, config),
    )
    draft_config = None if draft is None else draft.config
    whole = block_bytes(config, settings.block_size, kv, draft_config)
    storage = Storage(*loaded.bytes_per_weight, whole / cache.block_size)
    kind = loaded.quantization or ""
    return Engine(config, runner, pool, Scheduler(pool, limits), own, grammars, storage, kind)


# The fingerprint


def _fingerprint(weights: str, kv: str, arithmetic: str, drafter: str, rotation: str) -> str:
    """Compute an engine's fingerprint: 32 hex digits.

    ``weights`` and ``drafter`` are fingerprints of weights; ``drafter`` is empty if no drafter has
    KV. ``kv`` is the name of the KV type. ``arithmetic`` names hardware and software, and is empty
    unless results must be deterministic. ``rotation`` is empty if the model's rotary factors are
    unchanged.
    """
    text = f"{weights}:{kv}:{arithmetic}" + (f":{drafter}" if drafter else "") + rotation
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _rotation(settings: EngineSettings, config: ModelConfig) -> str:
    """Return a name of the rotary factors for the fingerprint if ``max_model_len`` may have changed
    these factors; otherwise, an empty string."""
    scalings = (rope.scaling for rope in config.ropes)
    short = any(
        isinstance(one, LongRopeScaling) and config.context_length <= one.original_context
        for one in scalings
    )
    return ":short rope" if short and settings.max_model_len else ""


def _arithmetic(device: torch.device) -> str:
    """Return a name, for the fingerprint, of the hardware and software that determine the last bits
    of results: the GPU model and torch, or the build of the CPU's decoder."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"cpu {library_build()}"


# The runner


def _runner(
    loaded: LoadedModel,
    cache: KvCache,
    name: str,
    speculation: StepSpeculation | None,
    leader: Leader | None,
) -> ModelRunner:
    """Make the runner, with the fastest step model for the device."""
    source, model = loaded.source, loaded.model
    settings, vocab_size = source.settings, source.config.vocab_size
    device = cache.data.device
    embedder = Embedder(model)
    copy = None if leader is None else leader.copier(cache.copy)
    if loaded.weights is not None:
        # Imported here, and below: GPU modules would cost a worker on a CPU half a second.
        from engine.gpu.decoder import gpu_decoder  # noqa: PLC0415
        from engine.gpu.runner import GpuRunner  # noqa: PLC0415
        from engine.gpu.speculation import make_overlap_speculation  # noqa: PLC0415

        gpu_model = gpu_decoder(loaded.weights, cache, max_rows(settings, device), leader)
        drafts = make_overlap_speculation(drafter_of(settings, device))
        return GpuRunner(gpu_model, cache, device, vocab_size, drafts, embedder, copy)
    step_model = _step_model(model, cache, name)
    if settings.deterministic:
        _check_deterministic(step_model, settings)
    if leader is not None:
        step_model = LeaderModel(step_model, leader)
    return ModelRunner(step_model, cache, device, vocab_size, speculation, embedder, copy)


def _step_model(model: DecoderModel, cache: KvGroup, name: str) -> StepModel:
    """Make the C++ decoder if it supports the model, or else a step model in torch; ``name`` is the
    weights' fingerprint."""
    if model.context is not None:
        # Ranks exchange KV between a layer's KV and its attention, where the C++ decoder cannot
        # stop.
        return _torch_model(model, cache)
    found = cpu_decoder(model, cache, PackedCache(cache_dir()), name)
    return found or _torch_model(model, cache)


def _torch_model(model: DecoderModel, cache: KvGroup) -> StepModel:
    """Make a step model in plain torch. If ranks divide prompts, it runs each step on all ranks."""
    found = TorchStepModel(model, cache, cache.data.device)
    if model.context is None:
        return found
    return ContextModel(found, ContextSteps(cache, model.context))


def _check_deterministic(step_model: StepModel, settings: EngineSettings) -> None:
    """Raise ConfigError if a row's bits depend on the batch in which it is computed.

    The C++ decoder always adds the products of a row in an order that depends only on the row. So
    determinism costs nothing on the CPU. On a GPU, the decoder uses kernels with such an order if
    ``settings.deterministic`` is set. In torch, the order depends on the batch's shape.
    """
    if not isinstance(step_model, TorchStepModel):
        return
    if settings.dtype != "bfloat16":
        raise ConfigError(
            f"deterministic needs dtype bfloat16 on a CPU, and dtype is {settings.dtype}: set dtype"
            " bfloat16, or remove deterministic"
        )
    raise ConfigError(
        "deterministic needs Baton's own kernels, and torch computes this model here: install"
        " a C++ compiler (g++), set block_size to a multiple of 16, or remove deterministic."
        " Models with a head size that is no multiple of 16 cannot be deterministic"
    )


# The drafter


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A loaded draft model, and how it is made into a drafter."""

    config: ModelConfig
    model: DecoderModel
    name: str
    """Fingerprint of the draft model's weights."""

    def drafter(self, target: DecoderModel, cache: KvCache, sampler: Sampler) -> ModelDrafter:
        """Make the drafter from the draft model. Its KV is in the cache group ``drafter``."""
        assert cache.drafter is not None, "a draft model has a group of the cache"
        step_model = _step_model(self.model, cache.drafter, self.name)
        filled = FilledSlots(cache.drafter)
        return DraftModel(step_model, filled, self.config.context_length, sampler)


Draft = SmallModel | EagleHead | MedusaHeads


def _load_draft(loaded: LoadedModel) -> Draft | None:
    """Load the draft model or heads, if the drafter has any. Raises ConfigError if the model or
    heads are not supported."""
    source, target = loaded.source, loaded.model
    settings, device, dtype = source.settings, source.device, source.dtype
    if drafter_of(settings, device) not in ("draft", *HEADS):
        return None
    folder = settings.draft_model
    if folder is None:
        raise ConfigError(f"drafter {settings.drafter} needs a draft_model")
    if settings.drafter in HEADS:
        return load_heads(settings.drafter, folder, target, device, settings.dtype)
    found = load_model_config(folder)
    check_vocabulary(settings.model_path, target.config, folder, found)
    found = replace(found, context_length=min(found.context_length, target.config.context_length))
    with fingerprint(folder, settings.dtype) as hashed:
        model = DecoderModel(found, load_weights(folder, device, dtype), device)
        return SmallModel(found, model, hashed.result())


def _speculation(
    loaded: LoadedModel, cache: KvCache, draft: Draft | None
) -> StepSpeculation | None:
    if draft is None:
        return make_speculation(drafter_of(loaded.source.settings, cache.data.device))
    sampler = cpu_sampler()
    drafter = draft.drafter(loaded.model, cache, sample if sampler is None else sampler.sample)
    return ModelSpeculation(drafter)
