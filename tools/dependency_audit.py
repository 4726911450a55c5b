"""Runs pip-audit on the installed packages, and fails if a package was not checked: ``make audit``.

    python -m tools.dependency_audit PIP_AUDIT SITE_PACKAGES

It asks the next source of advisories if one has checked no package. Exit code 0: all packages were
checked, and none has a known vulnerability. 1: some have one. 2: not all were checked, which
pip-audit itself does not treat as a failure, or no source answered.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SOURCES = ("pypi", "osv")
"""Sources of advisories by pip-audit's names: the package index itself, and OSV."""
_DEADLINE_S = 300


def audited(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the packages of a JSON report of pip-audit that were checked."""
    return [one for one in report.get("dependencies", ()) if "skip_reason" not in one]


def verdict(report: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the exit code for a JSON report of pip-audit, and the lines to print."""
    checked = audited(report)
    skipped = [one["name"] for one in report["dependencies"] if one not in checked]
    lines = [
        f"{one['name']} {one['version']}: {fault['id']}, fixed in"
        f" {', '.join(fault['fix_versions']) or 'no version'}"
        for one in checked
        for fault in one["vulns"]
    ]
    faulty = bool(lines)
    lines.append(f"{len(checked)} packages were checked")
    if skipped:
        lines.append(f"NOT AUDITED, since the source does not know them: {', '.join(skipped)}")
    return (1 if faulty else 2 if skipped else 0), lines


def ask(program: str, source: str, folder: str) -> tuple[dict[str, Any], str]:
    """Return pip-audit's report on the packages in ``folder``, and why it checked none of them;
    the report is empty if there is none."""
    command = [program, "--vulnerability-service", source, "--format", "json"]
    command += ["--progress-spinner", "off", "--skip-editable", "--path", folder]
    try:
        done = subprocess.run(  # noqa: S603 - what the Makefile names
            command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, str(error)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it printed no reason"])[-1]
        return {}, f"pip-audit failed: {last}"
    reasons = [one["skip_reason"] for one in report["dependencies"] if "skip_reason" in one]
    if not reasons:
        return report, f"there are no packages in {folder}"
    return report, f"it knows none of {len(reasons)} packages. {reasons[0]}"


def main() -> int:
    """Run pip-audit and print the result. Returns the exit code."""
    program, folder = sys.argv[1:]
    silent = []
    for source in SOURCES:
        report, why = ask(program, source, folder)
        if audited(report):
            code, lines = verdict(report)
            print("\n".join([f"source of advisories: {source}", *lines]))  # noqa: T201
            return code
        silent.append(f"  {source}: {why}")
    message = "NOTHING WAS AUDITED: no source of advisories has answered for any package"
    print("\n".join([message, *silent]), file=sys.stderr)  # noqa: T201
    return 2


if __name__ == "__main__":
    sys.exit(main())
