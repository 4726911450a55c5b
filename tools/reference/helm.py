"""Makes docs/reference/helm-values.md from the chart's values.yaml, its comments and its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tools.reference.markdown import ROOT, anchor, cell, code, made_from, table, text

CHART = "deploy/helm/baton"
_HEAD = f"""# Helm values

The values of the chart `{CHART}`. [Kubernetes](../how-to/deploy/kubernetes.md) describes the three
modes and shows complete examples. `helm lint` and `helm install` check values against the chart's
schema, and refuse names that are not listed here.

{made_from(f"`{CHART}/values.yaml` and `values.schema.json`")}
"""
_WHOLE = ("config", "resources", "requests", "limits")
"""Names of tables in values.yaml that the page shows as one value each. Their entries are defined
by Kubernetes or by Baton's configuration."""
_KEY = re.compile(r"( *)(\w+):(.*)")
Path = tuple[str, ...]


def reference() -> str:
    """Return the Markdown text of the page on Helm values."""
    source = (ROOT / CHART / "values.yaml").read_text()
    schema = json.loads((ROOT / CHART / "values.schema.json").read_text())
    values, about = yaml.safe_load(source), comments(source)
    parts = [_HEAD]
    general: list[Path] = [
        (name,) for name, value in values.items() if not _is_table((name,), value)
    ]
    parts.append(f"\n## General\n\n{_table(general, values, schema, about)}\n")
    for name, value in values.items():
        if not _is_table((name,), value):
            continue
        described = about.get((name,), "")
        parts.append(f"\n## {name}\n" + (f"\n{text(described)}\n" if described else ""))
        paths = list(leaves((name,), value, source))
        parts.append(f"\n{_table(paths, values, schema, about)}\n")
    return "".join(parts)


def comments(source: str) -> dict[Path, str]:
    """Return the comment above each key of a YAML file, by the key's path."""
    found: dict[Path, str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in source.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip().removeprefix("#").removeprefix(" "))
            continue
        key = _KEY.fullmatch(line)
        if key is not None:
            path = [*path[: len(key[1]) // 2], key[2]]
            if comment:
                found[tuple(path)] = "\n".join(comment)
        comment = []
    return found


def leaves(path: Path, value: Any, source: str) -> Iterator[Path]:
    """Yield the paths of all values within ``value`` that a user can set."""
    if not _is_table(path, value):
        yield path
    elif re.search(rf"^ *{path[-1]}: \*\w+$", source, re.MULTILINE):
        # Another table has the same values.
        yield path
    else:
        for name, inner in value.items():
            yield from leaves((*path, name), inner, source)


def _is_table(path: Path, value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and path[-1] not in _WHOLE


def _table(
    paths: list[Path], values: Any, schema: Mapping[str, Any], about: Mapping[Path, str]
) -> str:
    left = dict(about)
    rows = (_row(path, values, schema, left) for path in paths)
    return table(("value", "type", "default", "meaning"), rows)


def _row(
    path: Path, values: Any, schema: Mapping[str, Any], left: dict[Path, str]
) -> tuple[str, ...]:
    """Return the table row of a Helm value. ``left`` has the comments that no row has shown yet. A
    table's comment appears in the row of the table's first value."""
    value = values
    for part in path:
        value = value[part]
    name = ".".join(path)
    first = 2 if len(path) > 1 else 1
    about = [left.pop(path[:depth], "") for depth in range(first, len(path) + 1)]
    return (
        f"{anchor(name)}{code(name)}",
        _type(_schema_of(path, schema)),
        "as above" if _is_table(path, value) else code(json.dumps(value)),
        cell(" ".join(about)),
    )


def _schema_of(path: Path, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    here: Mapping[str, Any] = schema
    for part in path:
        here = here.get("properties", {}).get(part, {})
        if "$ref" in here:
            here = schema["definitions"][str(here["$ref"]).rpartition("/")[2]]
    return here


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(map(code, schema["enum"]))
    kinds = schema.get("type", "any")
    kind = kinds if isinstance(kinds, str) else " or ".join(kinds)
    kind = {"array": "list", "object": "table"}.get(kind, kind)
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{kind}, {low} to {high}"
    return kind if low is None else f"{kind}, at least {low}"
