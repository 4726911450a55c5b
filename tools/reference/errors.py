"""Makes docs/reference/errors.md from the classes of baton/errors.py."""

from __future__ import annotations

import inspect

from baton.errors import BatonError, classes_by_code
from tools.reference.markdown import anchor, cell, code, made_from, table

_HEAD = f"""# Error codes

An error has a code, which is the same in HTTP and gRPC. Messages may change; programs compare
codes.

- **HTTP**: the body is `{{"error": {{"message", "type", "param", "code"}}}}`, and `param` names
  the field at fault. Paths below `/v1/messages` answer as Anthropic's API does: `{{"type":
  "error", "error": {{"type", "message"}}}}`. A stream that has begun ends with an event of the
  same form.
- **gRPC**: the status has the message, and the trailer `baton-code` has the code.
- **When to retry**: the HTTP header `Retry-After` (seconds) and, where the time is known,
  `retry-after-ms`; in gRPC the trailer `baton-retry-after-ms`. All statuses 429 and 503 have
  `Retry-After`.

A path that does not exist gets 404 with `unknown_url`, and a wrong method 405 with
`method_not_allowed`. The [failure model](../explanation/failure-model.md) describes what Baton
retries itself. Metrics count requests by code:
[`baton_requests_total`](metrics.md#baton_requests_total).

{made_from("`baton/errors.py`")}
"""


def reference() -> str:
    """Return the Markdown text of the page on errors."""
    kinds = [kind for name, kind in classes_by_code().items() if name]
    rows = (_row(kind) for kind in sorted(kinds, key=lambda kind: (kind.http_status, kind.code)))
    head = ("code", "HTTP, gRPC, type", "meaning", "retry", "what to do")
    return f"{_HEAD}\n{table(head, rows)}\n"


def advice(kind: type[BatonError]) -> tuple[str, str]:
    """Return the meaning of an error, and what to do about it: the paragraphs of the class's
    docstring."""
    meaning, _, what_to_do = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    return meaning, what_to_do


def _row(kind: type[BatonError]) -> tuple[str, ...]:
    meaning, what_to_do = advice(kind)
    return (
        f"{anchor(str(kind.code))}{code(kind.code)}",
        f"{kind.http_status}<br>{code(kind.grpc_status)}<br>{code(kind.error_type)}",
        cell(meaning),
        "yes" if what_to_do.startswith("Retry") else "no",
        cell(what_to_do),
    )
