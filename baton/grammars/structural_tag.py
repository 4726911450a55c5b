"""The grammar of a structural tag, in llguidance's dialect of Lark. Plain Python.

A structural tag, as JSON, has ``structures`` (``begin``, ``schema`` and ``end`` each) and
``triggers``. Each structure begins with a trigger; the router has checked that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from baton.grammars.finite_text import ENDLESS, schema_ends
from baton.grammars.json_schema import LIBRARY_OPTIONS, closed_schema


def structural_lark(text: str) -> str:
    """Return a grammar of free text in which each trigger starts one of the structures.

    Raises ValueError for text that is not JSON or has no structures.
    """
    try:
        given = json.loads(text)
        tags = _tags(given["structures"], given["triggers"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a structural tag ({type(error).__name__})") from None
    if not tags:
        raise ValueError("no structure begins with a trigger")
    markers = [re.escape(trigger).replace("/", r"\/") for trigger in tags]
    blocks = " | ".join(f"block_{place}" for place in range(len(tags)))
    rules = [
        f"start: ({blocks})* TEXT?",
        f"TEXT: /(?s:.+)/ & ~/(?s:.*)({'|'.join(markers)})(?s:.*)/",
    ]
    for place, (marker, bodies) in enumerate(zip(markers, tags.values(), strict=True)):
        names = [f"tag_{place}_{number}" for number in range(len(bodies))]
        rules.append(f"block_{place}: head_{place} ({' | '.join(names)})")
        # A lazy text ends where the first marker does.
        rules.append(f"head_{place}[lazy]: /(?s:.*){marker}/")
        rules += [f"{name}: {body}" for name, body in zip(names, bodies, strict=True)]
    return "\n".join(rules) + "\n"


def trigger_of(begin: str, triggers: Sequence[str]) -> str | None:
    """Return the trigger that ``begin`` starts with; None if there is none.

    If one trigger starts with another, a text always contains the shorter one first.
    """
    return min((one for one in triggers if begin.startswith(one)), key=len, default=None)


def _tags(structures: Sequence[Mapping[str, Any]], triggers: Sequence[str]) -> dict[str, list[str]]:
    """Return, by trigger, what may follow it: the rest of a beginning, JSON, and an end."""
    tags: dict[str, list[str]] = {}
    for one in structures:
        begin, end = one["begin"], one.get("end", "")
        trigger = trigger_of(begin, triggers)
        if trigger is None:
            continue
        closed = closed_schema(one.get("schema", {}))
        if not schema_ends(closed):
            raise ValueError(ENDLESS)
        schema = {"x-guidance": LIBRARY_OPTIONS, **closed}
        value = f"%json {json.dumps(schema)}"
        parts = (_quoted(begin[len(trigger) :]), value, _quoted(end))
        tags.setdefault(trigger, []).append(" ".join(part for part in parts if part))
    return tags


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
