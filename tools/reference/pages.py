"""The reference pages that are made from the code, and what makes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tools.reference import cli, configuration, errors, grpc_api, helm, http, metrics
from tools.reference.markdown import FOLDER

PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        f"{FOLDER}/cli.md": cli.reference,
        f"{FOLDER}/configuration.md": configuration.reference,
        f"{FOLDER}/metrics.md": metrics.reference,
        f"{FOLDER}/http.md": http.reference,
        f"{FOLDER}/grpc.md": grpc_api.reference,
        f"{FOLDER}/errors.md": errors.reference,
        f"{FOLDER}/helm-values.md": helm.reference,
    }
)
"""For each reference page, the function that returns its text, by the path of the page."""
