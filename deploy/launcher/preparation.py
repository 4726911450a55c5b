"""Prepares the model and the compiled kernels, before a cluster's workers start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.config.cluster import Config
from baton.errors import ConfigError
from deploy.launcher.kernels import compile_kernels, kernels_of, missing_kernels
from deploy.models import model_store
from deploy.models.hub_download import DownloadWatch
from deploy.models.model_store import ResolvedModel, resolve_drafter
from deploy.processes.daemon_thread import DaemonThread
from deploy.processes.progress import Progress
from engine.checkpoint.model_config import load_model_config


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The model on this machine, and the configuration with which other nodes get the same
    model."""

    model: ResolvedModel
    """The model, with the name that clients use."""
    draft_path: str
    """The folder of the draft model; empty without one."""
    config: Config
    """The configuration, in which the commit of each model replaces its branch or tag."""


async def prepare_model(config: Config, progress: Progress) -> PreparedModel:
    """Download and convert the model and its draft model. Raises BatonError.

    All nodes, and the workers of a later start, get the same commit of a branch.
    """
    step = f"getting the model {config.model}"
    watch = DownloadWatch(progress.detail_every_s)
    with progress.step(step):
        show, thread = _shown(progress, step), DaemonThread("model")
        draft_path, pinned = "", {}
        try:
            model = await thread.call(
                lambda: model_store.resolve(
                    config.model, show, config.quantization, config.revision, watch
                )
            )
            # A model that cannot be served fails before Ray and the workers start.
            load_model_config(model.path, config.max_model_len)
            pinned["revision"] = model.commit
            if config.draft_model:
                draft = await thread.call(
                    lambda: resolve_drafter(
                        config.drafter, config.draft_model, show, config.draft_revision, watch
                    )
                )
                draft_path = str(draft.path)
                pinned["draft_revision"] = draft.commit
        except asyncio.CancelledError:
            watch.cancelled.set()
            raise
    served = config.served_model_name or model.name
    named = replace(model, name=served)
    return PreparedModel(named, draft_path, config.model_copy(update=pinned))


async def prepare_kernels(
    config: Config, progress: Progress, report: Callable[[str], None]
) -> None:
    """Compile the C++ libraries that this machine's workers need, so that no worker waits for the
    compiler.

    A failure is reported; the workers then compute their steps in torch.
    """
    thread, step = DaemonThread("kernels"), "compiling kernels for this CPU (first start only)"
    try:
        missing = await thread.call(lambda: missing_kernels(kernels_of(config)))
        if missing:
            with progress.step(step):
                show = _shown(progress, step)
                await thread.call(lambda: compile_kernels(missing, show))
    except ConfigError as error:
        report(f"{error.message}\nWithout it steps run in torch, several times slower.")


def _shown(progress: Progress, step: str) -> Callable[[str], None]:
    """Return a function that shows a text as the progress of ``step``. It may be called from any
    thread."""
    loop = asyncio.get_running_loop()

    def show(text: str) -> None:
        # the loop is closed, so that nothing is shown any more
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(progress.detail, step, text)

    return show
