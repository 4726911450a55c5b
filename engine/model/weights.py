"""Loads weights from safetensors files. They are memory-mapped, so that workers of one host share
the page cache."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from baton.errors import ConfigError
from baton.host.cache import cache_dir
from engine.checkpoint.fingerprint import Fingerprint
from engine.checkpoint.weight_files import plain_names, weight_paths
from engine.model.named_tensors import TIED_HEAD
from engine.parallel.weight_slices import Cut, WeightSlices
from engine.quantization.checkpoint_format import UNUSED, CheckpointFormat, checkpoint_format
from engine.quantization.tensor_file import PADDING
from engine.quantization.weight import KINDS, QuantizedWeight, QuantKind, dequantize, quantize

log = logging.getLogger(__name__)

Weight = torch.Tensor | QuantizedWeight

_QUANTIZATIONS = ("auto", "none", *KINDS)
_EMBEDDINGS = ("embed_tokens",)
_HEAD = ".lm_head."
_ROUTERS = ("gate", "router")
"""Names of the modules that choose experts. They are never quantized: they are small, and a wrongly
chosen expert costs more than a rounding error."""
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PIECE_VALUES = 1 << 22
"""Maximum number of values that are dequantized at a time, which bounds the memory use."""


def load_weights(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str = "auto",
    slices: WeightSlices | None = None,
    *,
    heads: bool = False,
) -> dict[str, Weight]:
    """Load all weights of the model in ``folder``, by name; see ``iterate_weights``."""
    return dict(iterate_weights(folder, device, dtype, quantization, slices, heads=heads))


def iterate_weights(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str = "auto",
    slices: WeightSlices | None = None,
    *,
    heads: bool = False,
) -> Iterator[tuple[str, Weight]]:
    """Yield the name and weight of each tensor of the model in ``folder``, with Hugging Face's
    plain names (``engine.checkpoint.weight_files.plain_names``). With ``heads``, the folder has a
    drafter's heads, whose names stay as they are.

    With ``quantization`` ``auto``, weights stay as the files have them: a quantized matrix is a
    QuantizedWeight under ``<module>.weight``. With ``none``, it is a tensor of ``dtype``. With
    ``int8``, ``int4`` or ``fp8``, every matrix of a plain checkpoint is quantized, except
    embeddings and the routers of experts.

    If the embedding is also the head, there is a quantized copy of it, ``TIED_HEAD``. A step reads
    all of the head and only some rows of the embedding, so quantization makes the head faster and
    the embedding worse. The copy is always ``int8``. Measured on SmolLM2-135M, where the head is a
    fifth of the weights: in int8 it changes no choice, in fp8 it costs 0.6 % of perplexity, in int4
    5 %.

    On the CPU, tensors are views of the mapped file if the file's type is ``dtype`` or the weight
    is in Baton's own quantized form; otherwise they are copies. At most one weight is in fp32 at a
    time. Raises ConfigError if there is no file, a file cannot be read, or the quantization is not
    supported.

    With ``slices``, the result is one rank's part of each weight, as copies. No more of the files
    is read, and nothing stays mapped. A quantized matrix that is not in Baton's own form is read in
    full.
    """
    if quantization not in _QUANTIZATIONS:
        known = ", ".join(_QUANTIZATIONS)
        raise ConfigError(f"quantization {quantization!r} is unknown; known: {known}")
    layout = checkpoint_format(folder)
    if layout is not None and quantization in KINDS:
        raise ConfigError(
            f"{folder}: the weights are quantized already ({layout.method}); set quantization"
            f" to auto to use them directly, or to none, not to {quantization}"
        )
    with ExitStack() as stack:
        files = _TensorFiles(
            weight_paths(folder), stack, stay_open=slices is None, renames=not heads
        )
        # A model without its own head multiplies by the embedding.
        tied = quantization in KINDS and not any(_HEAD in f".{name}" for name in files)
        for name, weight in _stored(files, layout, slices):
            if isinstance(weight, QuantizedWeight):
                yield name, _of_type(weight.to(device), dtype, quantization)
            elif (kind := _kind_of(name, weight, quantization)) is not None:
                yield name, quantize(weight.to(device), kind)
            else:
                # A drafter's table of token ids keeps its integer type.
                plain = dtype if weight.is_floating_point() else weight.dtype
                yield name, weight.to(device=device, dtype=plain)
                if tied and _module(name) in _EMBEDDINGS:
                    yield TIED_HEAD, quantize(weight.to(device), "int8")


def bytes_per_weight(weights: Iterable[tuple[str, Weight]]) -> tuple[float, float]:
    """Mean number of bytes of a weight, including scales: (in the layers' matrices, in the head).

    If the model has no separate head, its embedding is the head. A number is 0 if there are no
    weights of that kind.
    """
    values, held = 0, 0
    embedding = head = 0.0
    for name, weight in weights:
        if len(weight.shape) != 2:
            continue
        count = weight.shape[0] * weight.shape[1]
        if ".layers." in name:
            values, held = values + count, held + weight.nbytes
        elif name.endswith("embed_tokens.weight"):
            embedding = weight.nbytes / count
        elif name.endswith("lm_head.weight"):
            head = weight.nbytes / count
    # The model itself reports missing weights.
    return held / values if values else 0.0, head or embedding


def kind_of_most(weights: Iterable[tuple[str, Weight]]) -> QuantKind | None:
    """The quantized type that most values of the layers' matrices have; None if most are not
    quantized."""
    values: Counter[QuantKind | None] = Counter()
    for name, weight in weights:
        if ".layers." in name and len(weight.shape) == 2:
            kind = weight.kind if isinstance(weight, QuantizedWeight) else None
            values[kind] += weight.shape[0] * weight.shape[1]
    return values.most_common(1)[0][0] if values else None


def _of_type(weight: QuantizedWeight, dtype: torch.dtype, quantization: str) -> Weight:
    """Return a quantized weight unchanged. With ``quantization`` ``none``, dequantize it to
    ``dtype``, some rows at a time."""
    if quantization != "none":
        return weight
    plain = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    step = max(1, _PIECE_VALUES // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        plain[rows] = dequantize(weight.rows(rows))
    return plain


def _module(name: str) -> str:
    """Last part of a module's dotted name, from the name of its weight."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _kind_of(name: str, weight: torch.Tensor, quantization: str) -> QuantKind | None:
    """Choose the type to which a plain weight is quantized; None if it stays plain."""
    wanted = next((kind for kind in KINDS if kind == quantization), None)
    if wanted is not None and weight.dim() == 3:
        log.warning("%s holds several experts in one tensor: it is not quantized", name)
    if weight.dim() != 2 or not name.endswith(".weight"):
        return None
    if _module(name) in (*_ROUTERS, *_EMBEDDINGS):
        return None
    # Two int4 codes share a byte.
    return "int8" if wanted == "int4" and weight.shape[1] % 2 else wanted


class _TensorFiles:
    """Reads tensors by name from several safetensors files. Its methods raise ConfigError."""

    def __init__(
        self, paths: list[Path], stack: ExitStack, *, stay_open: bool, renames: bool
    ) -> None:
        """``stack`` closes the files when it is closed. With ``renames``, tensors have their plain
        names.

        If ``stay_open`` is false, each tensor is mapped separately, so that bytes which were read
        no longer count as this process's memory.
        """
        found: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            with _read_errors(path):
                file = stack.enter_context(_open(path))
                names = [name for name in file.keys() if not name.startswith(PADDING)]  # noqa: SIM118
                found |= dict.fromkeys(names, (path, file if stay_open else None))
                if not stay_open:
                    stack.pop_all().close()
        plain = plain_names(found) if renames else {name: name for name in found}
        self._files = {plain[name]: (*found[name], name) for name in found if name in plain}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __getitem__(self, name: str) -> torch.Tensor:
        path, file, stored = self._files[name]
        with _read_errors(path), _open(path) if file is None else nullcontext(file) as opened:
            tensor: torch.Tensor = opened.get_tensor(stored)
        return tensor

    def cut(self, name: str, cut: Cut) -> torch.Tensor:
        """Read the part of a tensor that ``cut`` selects, into its own memory."""
        path, _, stored = self._files[name]
        with _read_errors(path), _open(path) as opened:
            if not cut.runs:
                return opened.get_tensor(stored).clone()  # type: ignore[no-any-return]
            found = opened.get_slice(stored)

            def read(dim: int, run: range) -> torch.Tensor:
                chosen = slice(run.start, run.stop)
                part: torch.Tensor = found[chosen] if dim == 0 else found[:, chosen]
                return part

            return cut.tensor(read)


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt", device="cpu")


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _stored(
    files: _TensorFiles, layout: CheckpointFormat | None, slices: WeightSlices | None
) -> Iterator[tuple[str, Weight]]:
    """Yield every weight as its file holds it, in the files' order. With ``slices``, yield only the
    part of each weight that they select."""
    owners = {} if layout is None else _owners(files, layout)
    done: set[str] = set()
    for name in files:
        module = owners.get(name)
        if layout is not None and module is not None:
            if module not in done:
                done.add(module)
                weight = _read_part(files, layout, module, slices)
                if weight is not None:
                    yield f"{module}.weight", weight
        elif layout is None or not name.endswith(UNUSED):
            cut = None if slices is None else slices.of(name)
            if slices is not None and cut is None:
                continue
            tensor = files[name] if cut is None else files.cut(name, cut)
            if tensor.dtype in _FLOAT8:
                raise ConfigError(f"tensor {name} is fp8, and the checkpoint has no scale for it")
            yield name, tensor


def _owners(files: _TensorFiles, layout: CheckpointFormat) -> dict[str, str]:
    """Map the names of the tensors that make up a quantized module to the module's name."""
    modules = {module for name in files if (module := layout.module(name)) is not None}
    return {name: module for module in modules for name in layout.names(module).values()}


def _read_part(
    files: _TensorFiles, layout: CheckpointFormat, module: str, slices: WeightSlices | None
) -> QuantizedWeight | None:
    """Read a quantized matrix, or only the part that ``slices`` select; None if that part is
    empty."""
    name = f"{module}.weight"
    if slices is None:
        return _read(files, layout, module)
    if slices.of(name) is None:
        return None
    return slices.quantized(name, _read(files, layout, module))


def _read(files: _TensorFiles, layout: CheckpointFormat, module: str) -> QuantizedWeight:
    names = layout.names(module)
    parts = {part: files[name] for part, name in names.items() if name in files}
    try:
        return layout.read(parts)
    except KeyError as error:
        raise ConfigError(f"{layout.method} weight {module} has no {error.args[0]}") from error
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{layout.method} weight {module} cannot be read: {error}") from error


def fingerprint(folder: Path, dtype: str, quantization: str = "auto") -> Fingerprint:
    """Make the fingerprint of a model folder: its weights, their type and quantization, and the
    tokenizer.

    Raises ConfigError if there are no weights.
    """
    return Fingerprint(weight_paths(folder), dtype, quantization, cache_dir())
