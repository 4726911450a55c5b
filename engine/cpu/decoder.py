"""Steps on the CPU: decoder.cpp over packed weights and a cache of bf16, int8 or fp8."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from engine.cpu import structs
from engine.cpu.library import CoreShare, cpu_library
from engine.cpu.structs import LAYOUT_VERSION, address, packed_parts
from engine.kv.kv_cache import KvGroup
from engine.model.layers import Experts, GatedMlp, Linear
from engine.model.model import DecoderModel
from engine.quantization.packed_cache import PackedCache
from engine.quantization.weight import QuantizedWeight, dequantize
from engine.sampling.step import StepInput, StepOutput

_QK_NORMS = {"none": 0, "head": 1, "full": 2}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_KINDS = {"int8": 1, "int4": 2, "fp8": 3}
_KV_KINDS = {torch.bfloat16: 0, torch.int8: _KINDS["int8"], torch.float8_e4m3fn: _KINDS["fp8"]}
_WIDEST_HEAD = 512
_LANES = 16


def cpu_decoder(
    model: DecoderModel, cache: KvGroup, packed: PackedCache | None = None, key: str = ""
) -> CpuDecoder | None:
    """Make the C++ decoder for a model and a cache; None if they are not supported, so that torch
    has to compute.

    The weights in the layout of the C++ code are stored in ``packed`` under ``key``, which
    identifies them. Without ``packed``, they are in this process's memory.
    """
    library = cpu_library() if _fits(model, cache) else None
    return None if library is None else CpuDecoder(library, model, cache, packed, key)


def _fits(model: DecoderModel, cache: KvGroup) -> bool:
    config, data = model.config, cache.data
    dim, size = config.head_dim, cache.block_size
    return (
        data.device.type == "cpu"
        and model.rank is None
        and data.dtype in _KV_KINDS
        and model.dtype == torch.bfloat16
        and dim % _LANES == 0
        and dim <= _WIDEST_HEAD
        and size % _LANES == 0
        and all(_multiplies(linear.weight) for _, linear in _linears(model))
    )


def _multiplies(weight: torch.Tensor | QuantizedWeight) -> bool:
    """Whether the C++ code can multiply with this weight. It reads inputs in pairs, and both inputs
    of a pair must be in the same group."""
    even = weight.shape[1] % 2 == 0
    if isinstance(weight, torch.Tensor):
        return even
    return even and weight.group % 2 == 0 and not (weight.kind == "fp8" and weight.mins is not None)


class CpuDecoder:
    """Computes steps on the CPU in C++. Implements ``engine.sampling.step.StepModel``. ``threads``
    may be changed between steps."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: DecoderModel,
        cache: KvGroup,
        packed: PackedCache | None,
        key: str,
    ) -> None:
        self.threads = torch.get_num_threads()
        self._layers_done = np.zeros(1, dtype=np.int64)
        self._vocab = model.embedding.shape[0]
        self._outputs = model.head.weight.shape[0]
        self._hidden = model.config.hidden_size
        self._block_size = cache.block_size
        embedding = model.embedding
        self._quantized_embedding = embedding if isinstance(embedding, QuantizedWeight) else None
        self._run = library.baton_decoder_run
        self._run.argtypes = [ctypes.c_void_p, ctypes.POINTER(structs.Step)]
        self._run.restype = None
        # Objects to which the structs point. The model is not one: its linear weights are packed,
        # and one copy of them is enough.
        self._kept: list[object] = [model.embedding, cache]
        self._parts = self._pack(model, packed, key)
        create, free = library.baton_decoder_new, library.baton_decoder_free
        create.argtypes = [ctypes.POINTER(structs.Model), ctypes.POINTER(structs.Cache)]
        create.restype = ctypes.c_void_p
        free.argtypes = [ctypes.c_void_p]
        free.restype = None
        self._share = library.baton_decoder_share
        self._share.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 4
        self._share.restype = None
        self._decoder: int = create(self._model(model), self._cache(cache))
        # Not freed at the process's end: the engine thread may still use it.
        weakref.finalize(self, free, self._decoder).atexit = False

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines from the next step on."""
        mine = (share.lines, share.count, share.mine, share.cores, share.yields)
        self._share(self._decoder, *mine)

    def use_threads(self, threads: int) -> None:
        """Set the number of CPU threads from the next step on."""
        self.threads = threads

    @property
    def layers_done(self) -> int:
        return int(self._layers_done[0])

    def clear_progress(self) -> None:
        self._layers_done[0] = 0

    def run(self, step: StepInput) -> StepOutput:
        """Compute a step's tokens, and store their KV in the cache. Releases the interpreter's
        lock."""
        tokens, outputs = len(step.token_ids), len(step.outputs)
        size = self._block_size
        rows = np.array([(row.start, row.count, len(row.block_table)) for row in step.rows])
        start, count, width = rows.astype(np.int32).T.copy()
        first, table = _before(count), _before(width)
        tables = np.fromiter(
            (block for row in step.rows for block in row.block_table), np.int32, int(width.sum())
        )
        positions = np.arange(tokens) + np.repeat(start - first, count)
        blocks = tables[np.repeat(table, count) + positions // size]
        slots = (positions % size).astype(np.int32)
        token_ids = np.array(step.token_ids, dtype=np.int64)
        output = np.array(step.outputs, dtype=np.int64)
        layers = np.array(step.hidden_layers, dtype=np.int64)
        hidden = torch.empty(tokens, len(layers), self._hidden) if len(layers) else None
        # The C++ code does not check its input; torch would raise for a missing row.
        if tokens != int(count.sum()) or not 0 <= token_ids.min() <= token_ids.max() < self._vocab:
            raise ValueError(
                f"{tokens} token ids for {int(count.sum())} positions, or an unknown id"
            )
        best = np.empty(outputs, dtype=np.int64) if step.greedy else None
        logits = None if step.greedy else torch.empty(outputs, self._outputs)
        embedded = None
        if self._quantized_embedding is not None:
            embedded = dequantize(self._quantized_embedding, torch.from_numpy(token_ids))
        arrays = (token_ids, positions, blocks, slots, first, count, start, table, tables, output)
        self._run(
            self._decoder,
            structs.Step(
                tokens,
                len(step.rows),
                outputs,
                self.threads,
                *(address(array) for array in arrays),
                address(embedded),
                address(logits),
                address(best),
                address(self._layers_done),
                address(step.features),
                address(step.states),
                address(hidden),
                address(layers),
                len(layers),
            ),
        )
        return StepOutput(None if best is None else best.tolist(), logits, hidden)

    @staticmethod
    def _pack(model: DecoderModel, packed: PackedCache | None, key: str) -> dict[str, torch.Tensor]:
        def build() -> Iterator[tuple[str, torch.Tensor]]:
            for name, linear in _linears(model):
                yield from packed_parts(name, linear.weight)

        if packed is None:
            return dict(build())
        return packed.get_or_build(f"{key}-cpu{LAYOUT_VERSION}", build)

    def _keep(self, tensor: torch.Tensor | None) -> int | None:
        """Convert a tensor to fp32, and keep the result alive. Returns the address of the result;
        None if ``tensor`` is None."""
        if tensor is None:
            return None
        tensor = tensor.float().contiguous()
        self._kept.append(tensor)
        return address(tensor)

    def _matrix(self, name: str, linear: Linear) -> structs.Matrix:
        outputs, inputs = linear.weight.shape
        parts = self._parts
        scales = parts.get(f"{name}.scales")
        quantized = linear.weight if isinstance(linear.weight, QuantizedWeight) else None
        return structs.Matrix(
            kind=_KINDS[quantized.kind] if quantized else 0,
            outputs=outputs,
            inputs=inputs,
            group=quantized.group if quantized else 0,
            half_scales=scales is not None and scales.dtype == torch.float16,
            data=address(parts[f"{name}.data"]),
            scales=address(scales),
            mins=address(parts.get(f"{name}.mins")),
            bias=self._keep(linear.bias),
            columns=address(parts.get(f"{name}.columns")),
        )

    def _matrices(self, named: Iterable[tuple[str, Linear]]) -> ctypes.Array[structs.Matrix]:
        found = [self._matrix(name, linear) for name, linear in named]
        array = (structs.Matrix * len(found))(*found)
        self._kept.append(array)
        return array

    def _model(self, model: DecoderModel) -> structs.Model:
        config = model.config
        layers = (structs.Layer * config.layers)(
            *(self._layer(model, number) for number in range(config.layers))
        )
        experts = config.experts
        return structs.Model(
            layers=config.layers,
            hidden=config.hidden_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            dim=config.head_dim,
            vocab=model.head.weight.shape[0],
            qk_norm=_QK_NORMS[config.qk_norm],
            activation=_ACTIVATIONS[config.activation],
            experts_per_token=experts.per_token if experts else 0,
            experts_normalized=bool(experts and experts.normalized),
            eps=config.rms_norm_eps,
            attention_scale=config.attention_scale,
            attention_softcap=config.attention_softcap,
            logits_softcap=config.logits_softcap,
            embedding_scale=model.embedding_scale,
            embedding=None
            if isinstance(model.embedding, QuantizedWeight)
            else address(model.embedding),
            norm=self._keep(model.norm),
            head=self._matrix("head", model.head),
            combine=structs.Matrix()
            if model.combine is None
            else self._matrix("combine", model.combine),
            layer=layers,
        )

    def _layer(self, model: DecoderModel, number: int) -> structs.Layer:
        layer, config = model.layers[number], model.config
        rope = config.layer_ropes[number]
        table = None if rope < 0 else model.ropes[rope]
        fields: dict[str, object] = {
            name: self._keep(getattr(layer, name))
            for name in (
                "attention_norm",
                "query_norm",
                "key_norm",
                "attention_post_norm",
                "mlp_norm",
                "mlp_post_norm",
                "feature_norm",
            )
        }
        fields |= {
            name: self._matrix(f"{number}.{name}", getattr(layer, name))
            for name in ("query", "key", "value", "output")
        }
        mlps: tuple[GatedMlp, ...]
        if isinstance(layer.mlp, Experts):
            mlps = layer.mlp.experts
            fields["router"] = self._matrix(f"{number}.router", layer.mlp.router)
            fields["experts"] = len(mlps)
        else:
            mlps = (layer.mlp,)
        for part in ("gate", "up", "down"):
            fields[part] = self._matrices(
                (f"{number}.{n}.{part}", getattr(mlp, part)) for n, mlp in enumerate(mlps)
            )
        return structs.Layer(
            residual_normed=layer.residual_normed,
            rope=self._keep(table),
            rotary=0 if table is None else 2 * table.shape[-1],
            window=config.windows[number],
            **fields,
        )

    @staticmethod
    def _cache(cache: KvGroup) -> structs.Cache:
        data, scales = cache.data, cache.scales
        return structs.Cache(
            kind=_KV_KINDS[data.dtype],
            data=data.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            block_stride=data.stride(0),
            layer_stride=data.stride(1),
            scale_block_stride=0 if scales is None else scales.stride(0),
            scale_layer_stride=0 if scales is None else scales.stride(1),
            block_size=cache.block_size,
        )


def _linears(model: DecoderModel) -> Iterator[tuple[str, Linear]]:
    """Yield all linear layers of a model, by the names under which ``CpuDecoder`` stores their
    packed weights."""
    for number, layer in enumerate(model.layers):
        for name in ("query", "key", "value", "output"):
            yield f"{number}.{name}", getattr(layer, name)
        mlps = (layer.mlp,) if isinstance(layer.mlp, GatedMlp) else layer.mlp.experts
        if isinstance(layer.mlp, Experts):
            yield f"{number}.router", layer.mlp.router
        for n, mlp in enumerate(mlps):
            for part in ("gate", "up", "down"):
                yield f"{number}.{n}.{part}", getattr(mlp, part)
    yield "head", model.head
    if model.combine is not None:
        yield "combine", model.combine


def _before(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """For each count, compute the sum of the counts before it."""
    return (np.cumsum(counts) - counts).astype(np.int32)
