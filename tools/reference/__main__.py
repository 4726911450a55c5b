"""`python -m tools.reference` writes the pages of docs/reference that are made from the code."""

from __future__ import annotations

import argparse
import sys

from tools.reference.markdown import ROOT
from tools.reference.pages import PAGES


def main() -> int:
    """Write the reference pages that differ from the code. With ``--check``, only list these pages,
    and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="Write nothing; list the pages that differ."
    )
    check = parser.parse_args().check
    differ = []
    for path, page in PAGES.items():
        file, made = ROOT / path, page()
        if file.exists() and file.read_text() == made:
            continue
        differ.append(path)
        if not check:
            file.write_text(made)
    for path in differ:
        sys.stdout.write(f"{path}: {'differs; run make reference' if check else 'written'}\n")
    return int(check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
