"""Runs the client that sends the requests to every server: `vllm bench serve`."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import Unavailable
from loadtest.common.child_processes import last_lines, process_group
from loadtest.common.peer_servers import SERVED_NAME, Server
from loadtest.common.workload import Workload

_RUN_S = 1800.0
_GRACE_S = 5.0
_RESULT = "result.json"


class ClientResult(BaseModel):
    """Results that the client reports for one run. Times are in milliseconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_prompts: int
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    output_throughput: float
    """Output tokens per second of the whole run, summed over all requests."""
    total_token_throughput: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    p50_tpot_ms: float
    p99_tpot_ms: float
    p50_itl_ms: float
    p99_itl_ms: float


@dataclass(frozen=True, slots=True)
class BenchClient:
    """Runs workloads against servers with `vllm bench serve`: with greedy sampling, and with
    end-of-sequence tokens ignored.
    """

    vllm: Path
    tokenizer: Path
    """Folder of a model in Hugging Face format. The client counts prompt tokens with the model's
    tokenizer."""
    warmups: int = 2

    def run(
        self, server: Server, workload: Workload, seed: int, *, deadline_s: float = _RUN_S
    ) -> ClientResult:
        """Run a workload against a server. If the client fails or exceeds ``deadline_s``, raises
        Unavailable with the last lines of the client's log.
        """
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
            folder = Path(name)
            log = folder / "client.log"
            command = self._command(server, workload, seed, folder)
            try:
                with process_group(command, _environment(), log, grace_s=_GRACE_S) as process:
                    code = process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                reason = f"did not finish within {deadline_s:.0f} s"
                raise Unavailable(_failure(server, workload, reason, log)) from None
            return self._result(server, workload, folder, log, code)

    def _command(self, server: Server, workload: Workload, seed: int, folder: Path) -> list[str]:
        return [
            *(str(self.vllm), "bench", "serve", "--backend=openai"),
            *(f"--base-url={server.base_url}", "--endpoint=/v1/completions"),
            *(f"--model={SERVED_NAME}", f"--tokenizer={self.tokenizer}"),
            *(f"--num-prompts={workload.requests}", f"--max-concurrency={workload.concurrency}"),
            *("--request-rate=inf", "--ignore-eos", "--temperature=0", f"--seed={seed}"),
            *(f"--num-warmups={self.warmups}", "--percentile-metrics=ttft,tpot,itl,e2el"),
            *("--metric-percentiles=50,99", "--disable-tqdm", "--save-result"),
            *(f"--result-dir={folder}", f"--result-filename={_RESULT}"),
            *workload.client_options(seed, folder),
        ]

    def _result(
        self, server: Server, workload: Workload, folder: Path, log: Path, code: int
    ) -> ClientResult:
        if code:
            raise Unavailable(_failure(server, workload, f"ended with exit code {code}", log))
        try:
            result = ClientResult.model_validate_json((folder / _RESULT).read_text())
        except (OSError, ValidationError) as error:
            reason = f"left no readable result ({type(error).__name__})"
            raise Unavailable(_failure(server, workload, reason, log)) from error
        if not result.completed:
            raise Unavailable(_failure(server, workload, "completed no request", log))
        return result


def _failure(server: Server, workload: Workload, reason: str, log: Path) -> str:
    what = f"the client of {server.title}, workload {workload.name}, {reason}"
    return f"{what}. Its last lines:\n{last_lines(log)}"


def _environment() -> dict[str, str]:
    """Return environment variables that limit the client to one thread, since the server runs on
    the same machine.
    """
    ones = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "OMP_NUM_THREADS")
    return dict(os.environ) | dict.fromkeys(ones, "1") | {"NO_PROXY": "*", "no_proxy": "*"}
