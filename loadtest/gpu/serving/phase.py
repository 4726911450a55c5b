"""Holds the clusters of the serving phase, their model and their event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from engine.checkpoint.model_config import ModelConfig
from loadtest.common.byte_tokenizer import write_tokenizer
from loadtest.gpu.common.models import write_folder
from loadtest.gpu.common.results import Result
from loadtest.gpu.common.shapes import llama_1b
from loadtest.gpu.serving.checks import (
    LARGE,
    SMALL,
    Sizes,
    check_answers,
    check_killed_writer,
    check_load,
    check_poisoned_context,
)
from loadtest.gpu.serving.cluster import ClusterSettings, ServingCluster, serving_cluster

TINY = replace(
    llama_1b(4096),
    hidden_size=64,
    intermediate_size=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=320,
    windows=(0,) * 2,
    layer_ropes=(0,) * 2,
    ropes=(replace(llama_1b().ropes[0], rotary_dim=16),),
    attention_scale=16**-0.5,
)
BILLION = replace(llama_1b(8192), vocab_size=32768)
"""Shape of the served model: Llama 3.2 1B with a smaller vocabulary."""


def write_model(folder: Path, config: ModelConfig, device: str) -> None:
    """Write config, tokenizer and random bf16 weights, which are generated on ``device``."""
    write_folder(config, folder, torch.device(device))
    write_tokenizer(folder, config.vocab_size)


Find = Callable[[ServingCluster, Sizes], Awaitable[list[Result]]]


class ServingPhase:
    """Runs the work of the serving phase's items. Each method starts the cluster that it needs. The
    object is a context manager, which stops the clusters.
    """

    def __init__(self, device: str, *, small: bool, folder: Path) -> None:
        """Take the same arguments as ``serving.serving_items``."""
        self._device = device
        self._small = small
        self._folder = folder
        self._runner = asyncio.Runner()
        self._ends = AsyncExitStack()
        self._exact: ServingCluster | None = None

    def __enter__(self) -> ServingPhase:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._runner:
            self._runner.run(self._ends.aclose())

    def answers(self) -> list[Result]:
        """Run ``check_answers``."""
        return self._run(self._exactly(check_answers))

    def load(self) -> list[Result]:
        """Run ``check_load``. On a GPU, use a cluster with the usual kernels instead of the
        deterministic ones.
        """
        # On a CPU deterministic kernels cost nothing.
        return self._run(self._exactly(check_load) if self._device == "cpu" else self._load())

    def writer_killed(self) -> list[Result]:
        """Run ``check_killed_writer``."""
        return self._run(self._exactly(check_killed_writer))

    def poisoned_context(self) -> list[Result]:
        """Run ``check_poisoned_context``."""
        return self._run(self._exactly(check_poisoned_context))

    def _run(self, work: Coroutine[None, None, list[Result]]) -> list[Result]:
        try:
            return self._runner.run(work)
        finally:
            # A closed runner does not accept the coroutine.
            work.close()

    async def _exactly(self, find: Find) -> list[Result]:
        """Run the check ``find`` on the deterministic cluster. That cluster keeps running for
        further checks."""
        if self._exact is None:
            self._exact = await self._ends.enter_async_context(self._cluster(deterministic=True))
        await self._exact.ensure()
        return await find(self._exact, self._sizes)

    async def _load(self) -> list[Result]:
        async with self._cluster(deterministic=False) as cluster:
            await cluster.ensure()
            return await check_load(cluster, self._sizes)

    @property
    def _sizes(self) -> Sizes:
        return SMALL if self._small else LARGE

    def _cluster(self, *, deterministic: bool) -> AbstractAsyncContextManager[ServingCluster]:
        """Make a cluster without workers. The first call also writes the model."""
        model = self._folder / "model"
        if not (model / "config.json").exists():
            write_model(model, TINY if self._small else BILLION, self._device)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # The workers need the memory that torch caches here.
            gc.collect()
            torch.cuda.empty_cache()
        settings = ClusterSettings(
            device="cuda" if self._device == "cuda" else "cpu",
            deterministic=deterministic,
            chunk_tokens=64 if self._small else 0,
            kv_pool_mib=16 if self._small else 4096,
        )
        name = "deterministic" if deterministic else "usual"
        logs = self._folder / name
        logs.mkdir(exist_ok=True)
        return serving_cluster(settings, model, logs)
