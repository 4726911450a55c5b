"""A pretended GPU: tensors without contents on ``cuda``, and launches that are noted, not run.

Every operation of torch passes ``FakeGpu``: it counts the memory that the operation's results take,
and within a capture it reports what no CUDA graph can hold. Works with torch for CPUs alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine
from engine.gpu.kernels.launch import Launch
from tests.kernels.gpu.fake.indexing import get_item, set_item
from tests.kernels.gpu.fake.ledger import Ledger

CUDA = torch.device("cuda", 0)
_ENGINE = Path(engine.__file__ or "").parent
CAPABILITY = (9, 0)

_FORBIDDEN_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_FORBIDDEN_OPS = {"aten::bincount", "aten::equal", "aten::is_nonzero", "aten::repeat_interleave"}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Tagged for the shapes that masks make; with numbers as indices nothing waits."""
_SCALARS = {"aten::_local_scalar_dense", "aten::item"}
_PINNING = {"aten::pin_memory", "aten::_pin_memory"}


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that a CUDA graph cannot hold."""

    op: str
    reason: str
    where: str
    """The innermost line of the engine: ``engine/gpu/forward.py:57 mix_separate``."""

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}, at {self.where}"


@dataclass(frozen=True, slots=True)
class Noted:
    """An operation or a launch within a capture."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Of the results; of a launch its grid."""


class FakeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Use ``fake_gpu``. What is in ``violations`` and ``noted`` was found within captures."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.violations: list[Violation] = []
        self.noted: list[Noted] = []
        self.captures = 0
        self.capture_peak = 0
        """Bytes that a capture had at most beyond those that were there before."""
        self.answers: Iterator[int] | None = None
        """What a host reads of the GPU's tensors, in their order; None: zeros."""
        self._capturing = False

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """An ``engine.gpu.graphs.Capture``: runs the work once, under watch."""
        with self.capturing():
            work()
        return lambda: None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.captures += 1
        before, self._capturing = self._capturing, True
        try:
            with self.ledger.section() as section:
                yield
        finally:
            self._capturing = before
        self.capture_peak = max(self.capture_peak, section.peak)

    def forbid(self, op: str, reason: str) -> None:
        """Report, within a capture alone."""
        if self._capturing:
            self.violations.append(Violation(op, reason, _line_of_the_engine()))

    def launched(self, launch: Launch) -> None:
        """In place of ``Launch.run``."""
        name = launch.kernel.__name__
        for key, value in launch.arguments.items():
            if isinstance(value, torch.Tensor) and value.device.type != "cuda":
                self.forbid(name, f"its argument {key} is on {value.device}")
        if self._capturing:
            self.noted.append(Noted(name, (launch.grid,)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _PINNING:
            self.forbid(name, "allocates pinned memory")
            return torch.empty_like(args[0])
        if name in _SCALARS and _on_gpu(args):
            self.forbid("aten::_local_scalar_dense", "the host waits for a number of the GPU's")
            return self._answer(args[0])
        if func not in (torch.ops.aten.lift_fresh.default, torch.ops.prim.device.default):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        self._check(func, name, args, kwargs)
        found = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        for result in results:
            if result.device.type == "cuda":
                self.ledger.add(result.untyped_storage())
        self.ledger.spike(name, args)
        if self._capturing:
            self.noted.append(Noted(name, tuple(tuple(result.shape) for result in results)))
        return found

    def _answer(self, tensor: torch.Tensor) -> int | float | bool:
        value = 0 if self.answers is None else next(self.answers)
        if tensor.dtype == torch.bool:
            return bool(value)
        return float(value) if tensor.is_floating_point() else value

    def _check(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        if not self._capturing:
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        made = kwargs.get("device")
        if made is not None and tensors:
            devices.add(torch.device(made).type)
        if name in _INDEXED:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                self.forbid(name, "a mask as an index waits to know how many it chooses")
        elif name in _FORBIDDEN_OPS or any(tag in func.tags for tag in _FORBIDDEN_TAGS):
            self.forbid(name, "its result's size or value is known to the GPU alone")
        if len(devices) > 1:
            self.forbid(name, "data of the host meets the GPU's")
        if kwargs.get("pin_memory"):
            self.forbid(name, "allocates pinned memory")


def _on_gpu(args: Sequence[Any]) -> bool:
    return isinstance(args[0], torch.Tensor) and args[0].device.type == "cuda"


def _line_of_the_engine() -> str:
    """Of the innermost frame that is not the harness's own."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(_ENGINE):
            return f"{path.relative_to(_ENGINE.parent)}:{frame.lineno} {frame.name}"
    frame = next(f for f in reversed(traceback.extract_stack()) if f.filename != __file__)
    return f"{frame.filename}:{frame.lineno} {frame.name}"


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


class _Unguarded(TorchFunctionMode):
    """Methods of tensors that set the device first, which torch for CPUs cannot do for GPUs."""

    _doubles: ClassVar[dict[Any, Callable[..., Any]]] = {
        torch.Tensor.__getitem__: get_item,
        torch.Tensor.__setitem__: set_item,
        torch.Tensor.contiguous: _contiguous,
        torch.Tensor.copy_: torch.ops.aten.copy_.default,
        torch.Tensor.nonzero: torch.ops.aten.nonzero.default,
        torch.Tensor.__invert__: torch.ops.aten.bitwise_not.default,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._doubles.get(func, func)(*args, **(kwargs or {}))


class _Stream:
    """In place of ``torch.cuda.Stream`` and ``Event``: all that was asked for has happened."""

    gpu: FakeGpu

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    def wait_stream(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        self.gpu.forbid("cuda::query", "a query of an event is not captured")
        return True

    def synchronize(self) -> None:
        self.gpu.forbid("cuda::synchronize", "the host waits for the GPU")


class _Device:
    """In place of ``torch.cuda.device``."""

    def __init__(self, _: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Torch and the engine's launches on a GPU that is not there, until the end of the block.

    The host's side of a step is not filled in: fake tensors have no contents.
    """
    gpu = FakeGpu()
    stream = type("Stream", (_Stream,), {"gpu": gpu})
    doubles = {
        "torch.cuda.get_device_capability": lambda _=None: CAPABILITY,
        "torch.cuda.current_stream": stream,
        "torch.cuda.Stream": stream,
        "torch.cuda.Event": stream,
        "torch.cuda.synchronize": lambda _=None: stream().synchronize(),
        "torch.cuda.device": _Device,
        "engine.gpu.decoder.fill_step": lambda *_: None,
    }

    def run(launch: Launch) -> None:
        gpu.launched(launch)

    with ExitStack() as stack:
        for name, double in doubles.items():
            stack.enter_context(mock.patch(name, double))
        stack.enter_context(mock.patch.object(Launch, "run", run))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu)
        stack.enter_context(_Unguarded())
        yield gpu
