"""schemathesis against a whole cluster: what /openapi.json describes, asked in every way.

A tiny model, one key with all scopes. Not asked: what ends or moves the very workers that are to
answer, and whether everything that fits a schema is accepted (an empty prompt fits, too).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.config.choices import Scope
from tests.support.e2e.cluster import UpProcess
from tests.support.models import make_tiny_model
from tests.support.router.front_fakes import TEMPLATE

PROGRAM = Path(sys.executable).with_name("schemathesis")
ROOT = Path(__file__).parents[2]
_KEY = "sk-fuzz"
SCOPES: tuple[Scope, ...] = ("admin", "inference", "metrics")
_REQUEST_S = 60
"""Of a request of the cluster."""
_ANSWER_S = _REQUEST_S + 30
"""An answer that takes longer is a fault."""
ANSWERS = "answers.json"
_UNSERVED = "/v1/batches/{batch_id}/cancel"
"""May be refused each time: a batch of few lines ends before."""
_CONFIG = """
# A cluster may be busy, and may have lost a worker: it says so.
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503, 504]
# A body may be too large before it is wrong.
[checks.negative_data_rejection]
expected-statuses = ["4xx", "5xx"]
"""
_END_S = 300
"""For ending, and for what had begun when the time was up."""
_CASES = re.compile(r"^\s+(\d+) generated", re.MULTILINE)
_OPERATIONS = re.compile(r"^\s+Tested: (\d+)", re.MULTILINE)


def router_model(folder: Path) -> Path:
    """A tiny model below ``folder``, with a chat template."""
    model = make_tiny_model(folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@contextmanager
def fuzzed_cluster(folder: Path) -> Iterator[UpProcess]:
    """A cluster that writes below ``folder`` alone."""
    model = router_model(folder)
    hashed = hashlib.sha256(_KEY.encode()).hexdigest()
    keys = folder / "keys.json"
    key = {"name": "fuzz", "tenant": "default", "sha256": hashed, "scopes": SCOPES}
    keys.write_text(json.dumps({"keys": [key]}))
    keys.chmod(0o600)
    env = {"BATON_DATA_DIR": str(folder / "data"), "BATON_REQUEST_DEADLINE_S": str(_REQUEST_S)}
    with UpProcess("--model", str(model), "--keys-file", str(keys), env=env) as up:
        yield up.wait_ready()
        assert up.process.poll() is None, up.text


def fuzz_openapi(minutes: float, folder: Path) -> tuple[int, int, bool]:
    """Cases, operations, and whether there was a fault; logs are left in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with fuzzed_cluster(folder) as up:
        text, code = ask_schema(up.http, up.model, minutes, folder)
        up.wait_healthy()
        # Each unexpected error is logged with its origin.
        broken = [log.name for log in up.logs.glob("*.log") if "Traceback" in log.read_text()]
        for log in up.logs.glob("*.log"):
            (folder / log.name).write_bytes(log.read_bytes())
    cases, operations = _CASES.search(text), _OPERATIONS.search(text)
    assert cases, f"it did not get so far: {folder}/schemathesis.log"
    assert operations, text[-2000:]
    refused = never_served(json.loads((folder / ANSWERS).read_text()))
    for one in refused:
        print(f"openapi: {one} was never answered with success", file=sys.stderr)
    return int(cases[1]), int(operations[1]), bool(code or broken or refused)


def never_served(answers: dict[str, dict[str, int]]) -> list[str]:
    """Operations whose requests were all refused: they were hardly fuzzed."""
    return [
        operation
        for operation, statuses in answers.items()
        if not any(status.startswith("2") for status in statuses)
        and not operation.endswith(_UNSERVED)
    ]


def ask_schema(url: str, model: str, minutes: float, folder: Path) -> tuple[str, int]:
    """Run schemathesis against a server of a model; what it prints, and its exit code.

    ``folder`` gets its log, and ``ANSWERS``: how often each operation had which status.
    """
    log = folder / "schemathesis.log"
    config = folder / "schemathesis.toml"
    config.write_text(_CONFIG)
    command = [
        *(str(PROGRAM), f"--config-file={config}", "--no-color", "run", f"{url}/openapi.json"),
        *("-H", f"Authorization: Bearer {_KEY}", "--phases=coverage,fuzzing,stateful"),
        *("--checks=all", "--exclude-checks=positive_data_acceptance", "--continue-on-failure"),
        *("--exclude-path-regex=^/v1/(workers|pools)/", f"--max-time={int(minutes * 60)}"),
        *(f"--request-timeout={_ANSWER_S}", f"--max-response-time={_ANSWER_S}"),
        *("--suppress-health-check=all", "--generation-database=none"),
    ]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SCHEMATHESIS_HOOKS": "tests.fuzz.schema_hooks",
        "BATON_FUZZ_MODEL": model,
        "BATON_FUZZ_ANSWERS": str(folder / ANSWERS),
        "BATON_FUZZ_URL": url,
        "BATON_FUZZ_KEY": _KEY,
    }
    with log.open("wb") as file:
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=minutes * 60 + _END_S,
            check=False,
        )
    return log.read_text(errors="replace"), done.returncode
