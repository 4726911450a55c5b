"""Puts an engine together: model, KV cache, block pool and scheduler."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from baton.errors import ConfigError
from baton.grammars.compiled_grammars import CompiledGrammars, grammars_of
from baton.host.cache import cache_dir
from baton.sampling_params import SamplingParams
from engine.checkpoint.fingerprint import Fingerprint
from engine.checkpoint.model_config import ModelConfig, load_model_config
from engine.checkpoint.rope_spec import LongRopeScaling
from engine.cpu.decoder import cpu_decoder
from engine.cpu.library import library_build
from engine.cpu.sampler import cpu_sampler
from engine.execution.runner import ModelRunner
from engine.kv.kv_cache import Allocate, KvCache, KvGroup, block_bytes
from engine.kv.kv_quantization import kv_dtype, kv_dtype_name
from engine.model.embedding import Embedder
from engine.model.model import DecoderModel
from engine.model.torch_step import TorchStepModel
from engine.model.weights import bytes_per_weight, fingerprint, load_weights
from engine.parallel.context_parallel import ContextExchange, ContextModel, ContextSteps
from engine.parallel.rank_group import RankGroup
from engine.parallel.rank_model import RankModel
from engine.parallel.ranks import FollowerModel, FormedGroup, Leader, LeaderModel, TorchFollower
from engine.parallel.shard import config_of, shard_of
from engine.parallel.weight_slices import WeightSlices
from engine.quantization.packed_cache import PackedCache
from engine.roofline import Storage
from engine.sampling.sampling import sample
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SCORED_TOKENS, SchedulerLimits
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from engine.scheduling.scheduler import Scheduler
from engine.speculation.heads.loading import (
    HEADS,
    EagleHead,
    MedusaHeads,
    load_heads,
)
from engine.speculation.length import MAX_IN_A_STEP
from engine.speculation.model.draft_model import DraftModel, check_vocabulary
from engine.speculation.model.speculation import ModelSpeculation
from engine.speculation.model_drafter import FilledSlots, ModelDrafter, Sampler
from engine.speculation.speculation import (
    DRAFTERS,
    MAX_DRAFT_TOKENS,
    TOKEN_DRAFTERS,
    StepSpeculation,
    make_speculation,
)
from engine.step.step import StepModel

if TYPE_CHECKING:
    from engine.gpu.fused_weights import GpuWeights

_CHUNK_KEYS = {"cpu": 1 << 19, "cuda": 0}
"""512 tokens up to a context of 1024, and fewer behind that, so that a step stays short."""
_CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is built from."""

    model_path: Path
    dtype: str = "bfloat16"
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``: a GPU where there is one."""
    threads: int = 0
    """Compute threads on the CPU; 0 leaves torch's own choice."""
    block_size: int = 16
    kv_pool_bytes: int = 1 << 30
    """Memory for blocks on the CPU."""
    gpu_memory_fraction: float = 0.9
    """Share of the GPU's memory for everything that this engine needs there."""
    chunk_tokens: int = 0
    """Most tokens of a step; 0 takes 512 on the CPU and 8192 on a GPU."""
    max_sequences: int = 64
    quantization: str = "auto"
    """As ``engine.model.weights.load_weights`` takes it."""
    hash_block_size: int = 0
    """Tokens of a hash block, of which ``block_size`` is a multiple; 0: as many."""
    kv_dtype: str = "auto"
    """The cache's: ``auto`` for ``dtype``, ``int8``, ``fp8``, or a plain type."""
    lossiest_kv_dtype: str = ""
    """The lossiest type of the caches that exchange KV, by name, for the fingerprint; empty: this
    one's."""
    deterministic: bool = False
    """Whether what cannot keep a row's bits the same in every batch is refused."""
    drafter: str = "none"
    """What guesses tokens: of ``engine.speculation.speculation.DRAFTERS``, or ``auto``: ``ngram``
    on a CPU, and ``none`` on a GPU."""
    divides_context: bool = False
    """Whether several ranks divide the tokens of prompts, and have all weights and KV each; else
    they divide the model."""
    draft_model: Path | None = None
    """The smaller model's folder, for the drafter ``draft``; its weights stay as the files hold
    them. Of ``eagle`` and ``medusa`` the heads' folder."""
    max_model_len: int = 0
    """Maximum tokens of a sequence, which the KV pool must have room for; 0 takes the model's own,
    or as many as there is room for."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of an engine. The engine core owns pool and scheduler, its thread the runner."""

    config: ModelConfig
    runner: ModelRunner
    pool: BlockPool
    scheduler: Scheduler
    fingerprint: str
    """Of what decides the KV: weights, their quantisation, the tokenizer, the lossiest KV type of
    those that share it, a drafter's weights if it has KV too, and, where a row's bits are promised,
    what computes them. Engines with another one share no KV."""
    grammars: CompiledGrammars
    """Those that sequences follow, in the tokens of the model's tokenizer.json."""
    storage: Storage | None = None
    """How its weights and their KV are held; None where there are no weights."""

    @property
    def cache(self) -> KvCache:
        return self.runner.cache

    @property
    def context_length(self) -> int:
        return self.scheduler.limits.context_length


def build_engine(
    settings: EngineSettings, allocate: Allocate | None = None, ranks: FormedGroup | None = None
) -> Engine:
    """Load the model and take the memory, that of the KV blocks by ``allocate``.

    Of several ``ranks`` this one leads: it loads its shard, and the others compute theirs.

    Raises ConfigError with what to change, and WorkerFailed where another rank is lost.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = device_of(settings)
    dtype = _dtype(settings.dtype)
    config = load_model_config(settings.model_path, settings.max_model_len)
    if ranks is not None:
        _check_ranks(settings)
    with fingerprint(settings.model_path, settings.dtype, settings.quantization) as hashed:
        return _build(settings, config, device, dtype, allocate, ranks, hashed)


def _build(
    settings: EngineSettings,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    allocate: Allocate | None,
    ranks: FormedGroup | None,
    hashed: Fingerprint,
) -> Engine:
    """See ``build_engine``; the files are hashed while they are loaded."""
    group = None if ranks is None else ranks.group
    model, per_weight = _load_model(settings, config, device, dtype, group)
    weights = _gpu_weights(model, settings, device)
    draft = _load_draft(settings, model, device, dtype)
    draft_config = None if draft is None else draft.config
    kv = kv_dtype(settings.kv_dtype, dtype)
    blocks = _blocks(settings, config, model, weights, dtype, draft_config, device)
    cache = KvCache(
        model.config,
        blocks,
        settings.block_size,
        kv,
        device,
        allocate,
        draft_config,
        whole=config,
        ranks=_model_ranks(model),
    )
    pool = BlockPool(blocks)
    limits = SchedulerLimits(
        block_size=settings.block_size,
        chunk_tokens=_chunk_tokens(settings, device, model),
        chunk_keys=_CHUNK_KEYS[device.type] * _context_ranks(model),
        max_sequences=settings.max_sequences,
        context_length=min(config.context_length, blocks * settings.block_size),
        hash_block_size=settings.hash_block_size,
        draft_tokens=MAX_DRAFT_TOKENS if drafter_of(settings, device) != "none" else 0,
    )
    name = hashed.result()
    grammars = grammars_of(
        (settings.model_path / "tokenizer.json").read_text, config.vocab_size, config.eos_ids
    )
    speculation = _speculation(settings, model, cache, draft)
    lead = None if ranks is None else ranks.lead
    runner = _runner(model, weights, cache, settings, name, config.vocab_size, speculation, lead)
    scheduler = Scheduler(pool, limits)
    arithmetic = _arithmetic(device) if settings.deterministic else ""
    lossiest = settings.lossiest_kv_dtype or kv_dtype_name(kv)
    drafter = "" if draft is None else draft.name
    own = _fingerprint(name, lossiest, arithmetic, drafter, _rotation(settings, config))
    whole = block_bytes(config, settings.block_size, kv, draft_config)
    storage = Storage(*per_weight, whole / cache.block_size)
    return Engine(config, runner, pool, scheduler, own, grammars, storage)


def build_following(
    settings: EngineSettings, group: RankGroup, allocate: Allocate | None = None
) -> tuple[FollowerModel, KvCache]:
    """What another rank than 0 has of an engine: its shard of the model, and of all KV blocks.

    Raises ConfigError and WorkerFailed, as ``build_engine`` does.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = device_of(settings)
    dtype = _dtype(settings.dtype)
    config = load_model_config(settings.model_path, settings.max_model_len)
    _check_ranks(settings)
    model, _ = _load_model(settings, config, device, dtype, group)
    weights = _gpu_weights(model, settings, device)
    kv = kv_dtype(settings.kv_dtype, dtype)
    blocks = _blocks(settings, config, model, weights, dtype, None, device)
    cache = KvCache(
        model.config,
        blocks,
        settings.block_size,
        kv,
        device,
        allocate,
        whole=config,
        ranks=_model_ranks(model),
    )
    if weights is None:
        return TorchFollower(_torch_model(model, cache)), cache
    from engine.gpu.decoder import gpu_decoder  # noqa: PLC0415

    return gpu_decoder(weights, cache, _max_rows(settings, device)), cache


def _check_ranks(settings: EngineSettings) -> None:
    """Raises ConfigError for what several ranks do not do."""
    degree = "cp" if settings.divides_context else "tp"
    if settings.deterministic:
        raise ConfigError(
            f"deterministic is not promised with {degree} above 1: sums have another order there;"
            f" take {degree} 1"
        )
    if settings.drafter in ("draft", *HEADS):
        raise ConfigError(
            f"drafter {settings.drafter} has KV or weights that are not divided among ranks: take"
            f" drafter ngram or none with {degree} above 1"
        )


def _context_ranks(model: DecoderModel) -> int:
    """How many ranks divide prompts."""
    return 1 if model.context is None else model.context.group.ranks


def _model_ranks(model: DecoderModel) -> int:
    """How many ranks divide the model, and with it each block of KV."""
    return 1 if model.rank is None else model.rank.shard.ranks


def _blocks(
    settings: EngineSettings,
    config: ModelConfig,
    model: DecoderModel,
    weights: GpuWeights | None,
    dtype: torch.dtype,
    draft: ModelConfig | None,
    device: torch.device,
) -> int:
    """How many KV blocks there is room for, on every rank. Raises ConfigError where that is none.

    ``config`` is the whole model's.
    """
    kv = kv_dtype(settings.kv_dtype, dtype)
    size = block_bytes(model.config, settings.block_size, kv, draft)
    pool = settings.kv_pool_bytes if weights is None else _gpu_pool_bytes(settings, weights, device)
    if model.rank is not None and device.type == "cpu":
        # The pool's memory is the worker's: all of its ranks share it.
        ranks = model.rank.shard.ranks
        own = (config_of(config, shard_of(config, rank, ranks)) for rank in range(ranks))
        size = sum(block_bytes(one, settings.block_size, kv) for one in own)
    if model.context is not None and device.type == "cpu":
        # The same, and each of them has all of a block.
        size *= model.context.group.ranks
    blocks = pool // size
    if model.context is not None and device.type != "cpu":
        blocks -= _gathered_blocks(settings, device, model)
    for divided in (model.rank, model.context):
        if divided is not None:
            blocks = divided.group.least(blocks)
    _check_room(settings, blocks, size, device)
    return blocks


def _check_room(settings: EngineSettings, blocks: int, size: int, device: torch.device) -> None:
    """Raises ConfigError where the pool is too small: ``size`` is what a block takes of it."""
    advice = (
        "raise kv_pool_mib"
        if device.type == "cpu"
        else "raise gpu_memory_fraction, lower chunk_tokens or max_sequences, or quantise the"
        " weights"
    )
    if blocks < 2:
        raise ConfigError(
            f"the KV pool holds {max(0, blocks)} blocks of {size} bytes, and needs 2; {advice}"
        )
    needed = -(-settings.max_model_len // settings.block_size)
    if blocks < needed:
        raise ConfigError(
            f"a sequence of max_model_len {settings.max_model_len} tokens needs"
            f" {_mib(needed * size)} of KV memory, and the pool has {_mib(blocks * size)}, enough"
            f" for {blocks * settings.block_size} tokens; {advice}, or lower max_model_len"
        )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _gathered_blocks(settings: EngineSettings, device: torch.device, model: DecoderModel) -> int:
    """How many blocks as much memory has as a layer's exchange among ranks takes, all copies

    of a step's KV counted.
    """
    tokens = _chunk_tokens(settings, device, model)
    return -(-3 * tokens // (settings.block_size * model.config.layers))


def _load_model(
    settings: EngineSettings,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    group: RankGroup | None = None,
) -> tuple[DecoderModel, tuple[float, float]]:
    """The model, or what a rank of a ``group`` has of it, and ``bytes_per_weight`` of that.

    Weights are held by the model alone: what is packed or fused in their place must not be kept
    twice.
    """
    path, quantization = settings.model_path, settings.quantization
    if group is None or settings.divides_context:
        weights = load_weights(path, device, dtype, quantization)
        per_weight = bytes_per_weight(weights.items())
        model = DecoderModel(config, weights, device)
        model.context = None if group is None else ContextExchange(group)
        return model, per_weight
    shard = shard_of(config, group.rank, group.ranks)
    slices = WeightSlices(config, shard)
    weights = load_weights(path, device, dtype, quantization, slices)
    per_weight = bytes_per_weight(weights.items())
    own = config_of(config, shard)
    return DecoderModel(own, weights, device, RankModel(shard, group)), per_weight


def _gpu_weights(
    model: DecoderModel, settings: EngineSettings, device: torch.device
) -> GpuWeights | None:
    """As the kernels of a GPU take them; None on a CPU. Takes the layers out of ``model``."""
    if device.type == "cpu":
        return None
    from engine.gpu.fused_weights import gpu_weights  # noqa: PLC0415

    return gpu_weights(model, deterministic=settings.deterministic)


def _fingerprint(weights: str, kv: str, arithmetic: str, drafter: str, rotation: str) -> str:
    """An engine's, of those of its weights and the drafter's and the KV type's name: 32 hex digits.

    ``drafter`` is empty where no drafter has KV, ``rotation`` where it is the model's own.
    """
    text = f"{weights}:{kv}:{arithmetic}" + (f":{drafter}" if drafter else "") + rotation
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _rotation(settings: EngineSettings, config: ModelConfig) -> str:
    """What names the rotary factors, where ``max_model_len`` may have chosen others."""
    scalings = (rope.scaling for rope in config.ropes)
    short = any(
        isinstance(one, LongRopeScaling) and config.context_length <= one.original_context
        for one in scalings
    )
    return ":short rope" if short and settings.max_model_len else ""


def _arithmetic(device: torch.device) -> str:
    """What decides the last bits: the GPU's model and torch, or the build of the CPU's decoder."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"cpu {library_build()}"


def _runner(
    model: DecoderModel,
    weights: GpuWeights | None,
    cache: KvCache,
    settings: EngineSettings,
    name: str,
    vocab_size: int,
    speculation: StepSpeculation | None,
    lead: Leader | None,
) -> ModelRunner:
    """With the fastest step model that there is for the device."""
    device = cache.data.device
    embedder = Embedder(model)
    copy = None if lead is None else lead.copier(cache.copy)
    if weights is not None:
        # Here, and below: what is for GPUs would take a worker on a CPU half a second to import.
        from engine.gpu.decoder import gpu_decoder  # noqa: PLC0415
        from engine.gpu.runner import GpuRunner  # noqa: PLC0415
        from engine.gpu.speculation import make_overlap_speculation  # noqa: PLC0415

        gpu_model = gpu_decoder(weights, cache, _max_rows(settings, device), lead)
        drafts = make_overlap_speculation(drafter_of(settings, device))
        return GpuRunner(gpu_model, cache, device, vocab_size, drafts, embedder, copy)
    step_model = _step_model(model, cache, name)
    if settings.deterministic:
        _check_deterministic(step_model, settings)
    if lead is not None:
        step_model = LeaderModel(step_model, lead)
    return ModelRunner(step_model, cache, device, vocab_size, speculation, embedder, copy)


def _step_model(model: DecoderModel, cache: KvGroup, name: str) -> StepModel:
    """The CPU's own decoder where it has what the model needs; ``name`` is the weights'."""
    if model.context is not None:
        # Between a layer's KV and its attention the C++ stops for nobody.
        return _torch_model(model, cache)
    found = cpu_decoder(model, cache, PackedCache(cache_dir()), name)
    return found or _torch_model(model, cache)


def _torch_model(model: DecoderModel, cache: KvGroup) -> StepModel:
    """Steps in plain torch, of all ranks where they divide prompts."""
    found = TorchStepModel(model, cache, cache.data.device)
    if model.context is None:
        return found
    return ContextModel(found, ContextSteps(cache, model.context))


@dataclass(frozen=True, slots=True)
class _Draft:
    """A smaller model that guesses."""

    config: ModelConfig
    model: DecoderModel
    name: str
    """Its weights' fingerprint."""

    def drafter(self, target: DecoderModel, cache: KvCache, sampler: Sampler) -> ModelDrafter:
        """Over the cache's group ``drafter``."""
        assert cache.drafter is not None, "a draft model has a group of the cache"
        step_model = _step_model(self.model, cache.drafter, self.name)
        filled = FilledSlots(cache.drafter)
        return DraftModel(step_model, filled, self.config.context_length, sampler)


def _load_draft(
    settings: EngineSettings, target: DecoderModel, device: torch.device, dtype: torch.dtype
) -> _Draft | EagleHead | MedusaHeads | None:
    """The drafter's model, where there is one. Raises ConfigError where it cannot be served."""
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
        return _Draft(found, model, hashed.result())


def _speculation(
    settings: EngineSettings,
    target: DecoderModel,
    cache: KvCache,
    draft: _Draft | EagleHead | MedusaHeads | None,
) -> StepSpeculation | None:
    if draft is None:
        return make_speculation(drafter_of(settings, cache.data.device))
    sampler = cpu_sampler()
    drafter = draft.drafter(target, cache, sample if sampler is None else sampler.sample)
    return ModelSpeculation(drafter)


def drafter_of(settings: EngineSettings, device: torch.device) -> str:
    """What guesses tokens: of ``DRAFTERS``. Raises ConfigError for one that there is not."""
    if settings.drafter == "auto":
        # On a GPU no drafter was measured yet.
        return "ngram" if device.type == "cpu" else "none"
    if settings.drafter not in DRAFTERS:
        known = ", ".join(("auto", *DRAFTERS))
        raise ConfigError(f"drafter {settings.drafter!r} is unknown; known: {known}")
    if device.type != "cpu" and settings.drafter not in TOKEN_DRAFTERS:
        raise ConfigError(
            f"drafter {settings.drafter} runs on CPUs alone; known on a GPU: auto,"
            f" {', '.join(TOKEN_DRAFTERS)}"
        )
    return settings.drafter


def _max_rows(settings: EngineSettings, device: torch.device) -> int:
    """Of a step of sequences that decode: a token of a draft is a row of its own."""
    drafted = MAX_IN_A_STEP if drafter_of(settings, device) != "none" else 0
    return settings.max_sequences + drafted


def _check_deterministic(step_model: StepModel, settings: EngineSettings) -> None:
    """Raises ConfigError where a row's bits depend on the batch that it is computed in.

    The CPU's own decoder adds the products of a row in an order that the row alone decides, always:
    there the promise costs nothing. The GPU's takes kernels of that kind when it is told. Torch's
    matrix products split their sums by the shape of the batch.
    """
    if not isinstance(step_model, TorchStepModel):
        return
    if settings.dtype != "bfloat16":
        raise ConfigError(
            f"deterministic is kept in bfloat16 on a CPU, and dtype is {settings.dtype}: take dtype"
            " bfloat16, or leave deterministic out"
        )
    raise ConfigError(
        "deterministic needs Baton's own kernels, and torch is to compute this model here: install"
        " a C++ compiler (g++), take a block_size that is a multiple of 16, or leave deterministic"
        " out; heads whose size is no multiple of 16 cannot be served so"
    )


def warm_up(engine: Engine) -> None:
    """Run a prefill and a decode step, so that the first request does not pay for first uses."""
    size = engine.cache.block_size
    count = min(engine.context_length - 1, engine.scheduler.limits.chunk_tokens, 64)
    table = tuple(range(-(-(count + 1) // size)))
    new = NewSequence(0, (0,) * count, count, SamplingParams(temperature=0.0), ())
    engine.runner.run(StepPlan(0, (new,), (), (PlanRow(0, 0, count, table, True),)))
    engine.runner.run(StepPlan(0, (), (), (PlanRow(0, count, 1, table, True),)))
    engine.runner.forget(0)
    if engine.cache.data.device.type == "cuda":
        from engine.gpu.runner import GpuRunner  # noqa: PLC0415

        assert isinstance(engine.runner, GpuRunner), "every GPU has one"
        engine.runner.capture()


def device_of(settings: EngineSettings) -> torch.device:
    """Where it is to compute. Raises ConfigError for what there is not."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in _CHUNK_TOKENS:
        raise ConfigError(f"device {name!r} is unknown; known: auto, cpu, cuda, cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} was asked for, but torch finds {torch.cuda.device_count()} GPUs"
        )
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name} is unknown; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _chunk_tokens(
    settings: EngineSettings, device: torch.device, model: DecoderModel | None = None
) -> int:
    """Of a step, whose prompts the ranks may divide; without ``model`` of one rank."""
    ranks = 1 if model is None else _context_ranks(model)
    return settings.chunk_tokens or _CHUNK_TOKENS[device.type] * ranks


def _gpu_pool_bytes(settings: EngineSettings, weights: GpuWeights, device: torch.device) -> int:
    """What is left for KV blocks when the weights lie on the GPU and a step has its room."""
    from engine.gpu.memory_plan import StepLimits, memory_plan  # noqa: PLC0415

    limits = StepLimits(
        chunk_tokens=_chunk_tokens(settings, device),
        decode_rows=_max_rows(settings, device),
        scored_tokens=SCORED_TOKENS,
        block_size=settings.block_size,
        context=weights.config.context_length,
        itemsize=weights.dtype.itemsize,
        quantized=weights.quantized,
        separate_experts=weights.waits,
        deterministic=settings.deterministic,
        ranks=1 if weights.rank is None else weights.rank.shard.ranks,
    )
    planned = memory_plan(weights.config, limits).total
    # What loading has left in torch's allocator, but for what lies between weights.
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    # Of the whole memory rather than of what is free: another worker of this GPU may not have
    # taken its share yet.
    free, total = torch.cuda.mem_get_info(device)
    return min(int(total * settings.gpu_memory_fraction) - held, int(free * 0.95)) - planned
