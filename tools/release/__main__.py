"""Builds a release into dist/ and tries it: ``make release``.

    python -m tools.release [--python PYTHON ...]

There are an sdist and a wheel of the client and of the application, the images' build context, and
the Helm chart. The client's wheel is installed in an empty environment of each PYTHON, the
application's next to the packages of this one. A package index must be in reach.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tools.release.build import build_chart, build_distributions, build_image_context
from tools.release.trees import ROOT, client_files, distributed_files, tracked_files
from tools.release.trial import try_application, try_client, try_image_context


def main() -> None:
    """Build the release, and try all parts of it. Raises SystemExit at the first fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        *("--python", "-p"), action="append", help="an interpreter for the client (default: this)"
    )
    pythons: list[str] = parser.parse_args().python or [sys.executable]
    helm = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
    if helm is None:
        raise SystemExit("helm is not on the path: make install-dev, or install it")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    with tempfile.TemporaryDirectory(prefix="baton-release-") as name:
        folder = Path(name)
        client, application = build_distributions(dist, folder)
        context = build_image_context(dist, folder)
        build_chart(dist, helm)
        files = tracked_files()
        whole = distributed_files(files) | client_files(files)
        try_image_context(context, whole, folder / "image", sys.executable)
        installed = [
            try_client(python, client, folder / f"client-{number}")
            for number, python in enumerate(pythons)
        ]
        try_application((client, application), installed[0], folder / "application", sys.executable)
    print("\n".join(f"dist/{file.name}" for file in sorted(dist.iterdir())))  # noqa: T201


if __name__ == "__main__":
    main()
