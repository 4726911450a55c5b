"""Runs pip-audit on the installed packages, and fails if a package was not checked: ``make audit``.

    python -m tools.dependency_audit PIP_AUDIT SITE_PACKAGES

Exit code 0: all packages were checked, and none has a known vulnerability. 1: some have one. 2: not
all were checked, which pip-audit itself does not treat as a failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_DEADLINE_S = 600


def verdict(report: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the exit code for a JSON report of pip-audit, and the lines to print."""
    found: list[dict[str, Any]] = report.get("dependencies", [])
    skipped = [one["name"] for one in found if "skip_reason" in one]
    audited = len(found) - len(skipped)
    lines = [
        f"{one['name']} {one['version']}: {fault['id']}, fixed in"
        f" {', '.join(fault['fix_versions']) or 'no version'}"
        for one in found
        for fault in one.get("vulns", ())
    ]
    faulty = bool(lines)
    if not audited:
        return 2, ["NOTHING WAS AUDITED: the advisory service knows none of the packages"]
    lines.append(f"{audited} packages were checked")
    if skipped:
        lines.append(f"NOT AUDITED, since the service does not know them: {', '.join(skipped)}")
    return (1 if faulty else 2 if skipped else 0), lines


def main() -> int:
    """Run pip-audit and print the result. Returns the exit code."""
    program, folder = sys.argv[1:]
    command = [program, "--format", "json", "--progress-spinner", "off", "--skip-editable"]
    try:
        done = subprocess.run(  # noqa: S603 - what the Makefile names
            [*command, "--path", folder],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
        report = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"NOTHING WAS AUDITED: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it printed no reason"])[-1]
        print(f"NOTHING WAS AUDITED: pip-audit failed: {last}", file=sys.stderr)  # noqa: T201
        return 2
    code, lines = verdict(report)
    print("\n".join(lines))  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
