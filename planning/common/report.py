"""Output of commands: tables that can be pasted, files, and the machine of a measurement."""

from __future__ import annotations

import datetime
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from baton.errors import ConfigError
from baton.version import VERSION

_WIDEST = 1000
_GIT_S = 10.0


def whole_table(*columns: str, title: str) -> Table:
    """Return a table drawn as Markdown.

    The first column is left-aligned, figures are right-aligned.
    """
    table = Table(*columns, title=title, title_justify="left", box=box.MARKDOWN)
    for number, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if number else "left"
    return table


def print_whole(console: Console, table: Table) -> None:
    """Print a table at its full width, even if the terminal is narrower."""
    unbounded = console.options.update(max_width=_WIDEST)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)


def write_json(path: Path, text: str) -> None:
    """Write ``text``, which is JSON, to a file. Raises ConfigError if that fails."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, the commit and the date of a measurement."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    kernel: str
    commit: str
    """Baton's commit, with ``+`` if files differ from it. Without a repository: Baton's version."""
    date: str
    """Date in ISO 8601, UTC."""

    def line(self) -> str:
        """Describe the machine in one line."""
        memory = f"{self.memory_bytes / (1 << 30):.0f} GiB"
        return (
            f"{self.cpu}, {self.cores} cores, {memory}, {self.kernel};"
            f" Baton {self.commit}; {self.date}"
        )


def this_machine() -> Machine:
    """Return the machine of this process, and the date."""
    return Machine(
        cpu=_cpu(Path("/proc/cpuinfo")),
        cores=len(psutil.Process().cpu_affinity() or ()),
        memory_bytes=int(psutil.virtual_memory().total),
        kernel=f"{platform.system()} {platform.release()}",
        commit=_commit(Path(__file__).parent),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _cpu(path: Path) -> str:
    """Return the CPU's model name, with its family and model number. The numbers help if a
    hypervisor hides the name.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return platform.machine()
    fields = dict(reversed([line.split(":", 1) for line in lines if ":" in line]))
    known = {name.strip(): value.strip() for name, value in fields.items()}
    name = known.get("model name", platform.machine())
    if "cpu family" not in known:
        return name
    return f"{name} (family {known['cpu family']}, model {known.get('model', '?')})"


def _commit(folder: Path) -> str:
    commit = _git(folder, "rev-parse", "--short=10", "HEAD")
    if not commit:
        return VERSION
    return f"{commit}+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "-C", str(folder), *arguments],  # noqa: S607 - the one on the path
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
