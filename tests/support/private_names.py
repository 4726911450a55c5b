"""Names that Baton takes from inside other packages, looked up in what is installed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any


def find(name: str) -> Any:
    """What a dotted name stands for. Raises AttributeError with the part that is not there."""
    module, *rest = name.split(".")
    found: Any = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        if not hasattr(found, part) and inspect.ismodule(found):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                raise AttributeError(module) from None
        if not hasattr(found, part):
            raise AttributeError(module)
        found = getattr(found, part)
    return found


def missing(user: str, names: Iterable[str]) -> list[str]:
    """A sentence for each of ``names`` that the installed package lacks; ``user`` is our file.

    A name is dotted, and may end with parameters that it must take: ``ray.init(num_cpus)``.
    """
    return [fault for name in names for fault in _faults(user, name)]


def _faults(user: str, name: str) -> list[str]:
    dotted, _, parameters = name.rstrip(")").partition("(")
    package = dotted.partition(".")[0]
    try:
        found = find(dotted)
    except AttributeError as error:
        return [f"{package} {version(package)} has no {error}: see {user}"]
    wanted = [parameter for parameter in parameters.split(", ") if parameter]
    known = inspect.signature(found).parameters if wanted else ()
    return [
        f"{package} {version(package)} has no parameter {one} of {dotted}: see {user}"
        for one in wanted
        if one not in known
    ]
