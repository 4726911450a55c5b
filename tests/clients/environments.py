"""Environments for the clients of others: one each, kept in the cache folder, pinned."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.host.cache import cache_dir

FOLDER = Path(__file__).parent
TABLE = FOLDER / "clients.toml"
INSTALL_S = 1800.0
_DONE = ".installed"


@dataclass(frozen=True, slots=True)
class ClientProgram:
    """A row of the table."""

    name: str
    script: str
    """In this folder."""
    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    heavy: bool = False
    """It takes minutes and gigabytes to install."""

    @property
    def home(self) -> Path:
        """Where it is installed; other pins, another folder."""
        pins = "\n".join((*self.pip, *self.npm, sys.version.split()[0]))
        digest = hashlib.sha256(pins.encode()).hexdigest()[:12]
        return cache_dir() / "clients" / f"{self.name}-{digest}"

    @property
    def installed(self) -> bool:
        return (self.home / _DONE).exists()

    def command(self) -> list[str]:
        """What runs its checks, once it is installed."""
        if self.npm:
            # Node looks for packages next to the script.
            return ["node", str(self.home / self.script)]
        return [str(self.home / "bin" / "python"), str(FOLDER / self.script)]


def read_table(path: Path = TABLE) -> list[ClientProgram]:
    """All clients. Raises ConfigError."""
    rows = tomllib.loads(path.read_text()).get("clients", [])
    try:
        return [_program(row) for row in rows]
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from None


def _program(row: dict[str, Any]) -> ClientProgram:
    lists: dict[str, Any] = {name: tuple(row.pop(name, ())) for name in ("pip", "npm")}
    return ClientProgram(**lists, **row)


def install(program: ClientProgram) -> None:
    """Install a client unless it is there. Raises ConfigError with the end of what was printed."""
    home = program.home
    if program.installed:
        if program.npm:
            shutil.copy(FOLDER / program.script, home)
        return
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    if program.npm:
        if shutil.which("npm") is None:
            raise ConfigError("npm is not installed")
        _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), *program.npm])
        shutil.copy(FOLDER / program.script, home)
    else:
        _run([sys.executable, "-m", "venv", str(home)])
        # Most of what they bring is never imported: to compile all of it takes half of the time.
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
        _run([*pip, *program.pip])
    (home / _DONE).touch()


def _run(arguments: list[str]) -> None:
    try:
        subprocess.run(
            arguments,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_S,
        )
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{arguments[0]}: {error.stdout[-500:]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{arguments[0]}: {error}") from None
