"""`baton doctor`: checks what Baton can use on this machine, and lists what is missing.

``--nccl`` needs two GPUs of one host, and has not run on two yet.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from baton.errors import BatonError, ConfigError
from baton.extras import install_command

if TYPE_CHECKING:
    from deploy.doctor.pair_check import PairStep

_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of `baton doctor`."""

    what: str
    usable: bool
    detail: str
    """What the check found, or why the checked part cannot be used."""
    needed: bool = False
    """Whether Baton cannot run without the part that was checked."""

    @property
    def state(self) -> str:
        if self.usable:
            return "ok"
        return "missing" if self.needed else "no"


class Missing(Exception):
    """A check failed; the message says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of `baton doctor`: what it examines, and the function that does so."""

    what: str
    look: Callable[[], str]
    """Runs the check, and returns what it found. Raises Missing."""
    needed: bool = False


def examine(checks: Iterable[Check]) -> list[Finding]:
    """Run the checks. Return the result of each, in the same order."""
    return [_look(check) for check in checks]


def draw(findings: Iterable[Finding]) -> Table:
    """Return the results of the checks as a table, with one row for each."""
    table = Table("what", "state", "detail", box=None, pad_edge=False)
    table.columns[-1].overflow = "fold"
    for finding in findings:
        table.add_row(finding.what, finding.state, Text(finding.detail))
    return table


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as a JSON document; docs/reference/command-line.md lists the fields."""
    checks = [
        {
            "name": one.what,
            "state": one.state,
            "usable": one.usable,
            "needed": one.needed,
            "detail": one.detail,
        }
        for one in findings
    ]
    return {"fit": is_fit(findings), "checks": checks}


def is_fit(findings: Iterable[Finding]) -> bool:
    """Whether the checks have found everything that Baton needs."""
    return all(finding.usable or not finding.needed for finding in findings)


def draw_steps(steps: Iterable[PairStep]) -> Table:
    """Return a table with the exchanges of a self-test between two GPUs, and the rate of each."""
    table = Table("step", "MiB", "ms", "GB/s", box=None, pad_edge=False)
    for step in steps:
        size, rate = f"{step.bytes / (1 << 20):.0f}", f"{step.gb_per_s:.2f}"
        table.add_row(step.what, size, f"{step.seconds * 1e3:.1f}", rate)
    return table


def nccl_devices() -> tuple[str, str]:
    """Return the names of the two GPUs for the NCCL self-test. Raises ConfigError if there are
    fewer."""
    torch = import_module("torch")
    if not torch.distributed.is_nccl_available():
        raise ConfigError(
            "the NCCL self-test needs two GPUs and NCCL, and this torch is a build for CPUs"
        )
    count = torch.cuda.device_count()
    if count < 2:
        raise ConfigError(
            f"the NCCL self-test needs two GPUs, and torch finds {count}: NCCL refuses two "
            "processes on one"
        )
    return "cuda:0", "cuda:1"


def _look(check: Check) -> Finding:
    try:
        return Finding(check.what, True, check.look(), check.needed)
    except Missing as missing:
        return Finding(check.what, False, str(missing), check.needed)


def _python() -> str:
    if sys.version_info < _PYTHON:
        raise Missing(f"{platform.python_version()}: 3.11 or newer is needed")
    return platform.python_version()


def imported(name: str) -> Any:
    """Import a module that Baton needs. Raises Missing if that fails."""
    try:
        return import_module(name)
    except Exception as error:  # a broken installation may raise anything
        raise Missing(f"cannot be imported: {error}") from error


def _torch() -> str:
    torch = imported("torch")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{torch.__version__}; {', '.join(gpus) or 'no GPU: the CPU computes'}"


def _kernels() -> str:
    library = imported("engine.cpu.library").cpu_library()
    if library is None:
        raise Missing("not built, so steps run in torch, several times slower: install g++")
    return str(library._name)


def _sealing() -> str:
    if not hasattr(os, "memfd_create"):
        raise Missing("this system has no memfd_create: transport shm needs Linux")
    import fcntl  # noqa: PLC0415

    try:
        descriptor = os.memfd_create("baton-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Missing(f"the kernel refuses to seal a shared file: {error}") from error
    return "memfd, sealed"


def _store() -> str:
    module = imported("baton.valkey_binary")
    try:
        return str(module.valkey_binary())
    except BatonError as error:
        raise Missing(error.message) from error


def _ray() -> str:
    return str(imported("ray").__version__)


def _grpc() -> str:
    return f"grpcio {imported('grpc').__version__}"


def _gloo() -> str:
    if not imported("torch").distributed.is_gloo_available():
        raise Missing("this torch has no gloo")
    return "in torch"


def _nccl() -> str:
    torch = imported("torch")
    if not torch.distributed.is_nccl_available():
        raise Missing("this torch has no NCCL: it is a build for CPUs")
    if not torch.cuda.is_available():
        raise Missing("torch sees no GPU")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"NCCL {version}; `baton doctor --nccl` tries it on two GPUs"


def _cuda_ipc() -> str:
    cuda = imported("torch").cuda
    if not cuda.is_available():
        raise Missing("torch sees no GPU")
    if cuda.device_count() < 2:
        return "automatic between processes on one GPU"
    if not cuda.can_device_access_peer(0, 1):
        return "automatic between processes on one GPU; GPUs 0 and 1 cannot access each other"
    return "automatic between processes on one GPU; transport = cuda_ipc forces it between two"


def _nixl() -> str:
    if find_spec("nixl") is None:
        raise Missing(f"not installed: {install_command('nixl')}")
    return "installed"


CHECKS = (
    Check("Python", _python, needed=True),
    Check("torch", _torch, needed=True),
    Check("C++ kernels", _kernels),
    Check("embedded Valkey", _store),
    Check("Ray", _ray, needed=True),
    Check("transport shm", _sealing),
    Check("transport grpc", _grpc, needed=True),
    Check("transport gloo", _gloo),
    Check("transport nccl", _nccl),
    Check("transport cuda_ipc", _cuda_ipc),
    Check("transport nixl", _nixl),
)
