"""Programs that stand in for servers and for the client: one script under several names."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.common.peer_servers import Programs

_SCRIPT = """#!{python}
import http.server, json, os, subprocess, sys, time, urllib.request
from pathlib import Path

folder, name = Path({folder!r}), Path(sys.argv[0]).name


def option(flag):
    for number, given in enumerate(sys.argv):
        if given == flag:
            return sys.argv[number + 1]
        if given.startswith(flag + "="):
            return given.split("=", 1)[1]


def note(line):
    with (folder / "calls").open("a") as file:
        file.write(line + "\\n")


def mode(kind):
    file = folder / (kind + ".mode")
    return file.read_text() if file.exists() else ""


def serve(port):
    child = subprocess.Popen(["sleep", "600"])
    with (folder / "pids").open("a") as file:
        file.write(f"{{os.getpid()}} {{child.pid}} ")
    note("start " + name)
    if mode("server") == "dies":
        sys.exit("no weights for a fake")
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(503 if len(asked) == 1 else 200)
            self.end_headers()
            self.wfile.write(name.encode())

        def log_message(self, *args):
            pass

    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()


def drive():
    if mode("client") == "hangs":
        (folder / "hanging").touch()
        time.sleep(600)
    if mode("client") == "fails":
        print("first line\\n\\nconnection refused by a fake")
        sys.exit(3)
    with urllib.request.urlopen(option("--base-url") + "/name") as answer:
        server = answer.read().decode()
    note(" ".join(["drive", server, option("--seed"), option("--max-concurrency")]))
    speed = {speeds}[server]
    count = int(option("--num-prompts"))
    result = dict(
        num_prompts=count, completed=0 if mode("client") == "none" else count,
        total_input_tokens=1, total_output_tokens=1,
        output_throughput=speed, total_token_throughput=2 * speed,
        p50_ttft_ms=1e4 / speed, p99_ttft_ms=2e4 / speed,
        p50_tpot_ms=1e3 / speed, p99_tpot_ms=2e3 / speed, p50_itl_ms=1, p99_itl_ms=1,
        duration=1,
    )
    (Path(option("--result-dir")) / option("--result-filename")).write_text(json.dumps(result))


if "--version" in sys.argv:
    print("loading\\nversion: 1.2 of", name)
elif "bench" in sys.argv:
    drive()
elif option("--http"):
    serve(int(option("--http").split(":")[1]))
else:
    serve(int(option("--port")))
"""

SPEEDS = {"baton": 200.0, "vllm": 100.0, "llama-server": 160.0}
"""Output tokens/s that the client reports of each."""


@dataclass(frozen=True, slots=True)
class Fakes:
    """The programs and what they have done."""

    folder: Path
    programs: Programs

    def set_mode(self, kind: str, mode: str) -> None:
        """``server``: dies; ``client``: fails, hangs or (completes) none."""
        (self.folder / f"{kind}.mode").write_text(mode)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def left(self) -> list[int]:
        """Processes of servers, and their children, that still run."""
        path = self.folder / "pids"
        pids = [int(pid) for pid in path.read_text().split()] if path.exists() else []
        assert pids, "no server was started"
        return [pid for pid in pids if _runs(pid)]


def make_fakes(folder: Path) -> Fakes:
    """Install them in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _SCRIPT.format(python=sys.executable, folder=str(folder), speeds=json.dumps(SPEEDS))
    for name in SPEEDS:
        path = folder / name
        path.write_text(text)
        path.chmod(0o755)
    for name in ("bf16.gguf", "q8.gguf"):
        (folder / name).touch()
    programs = Programs(
        model=folder,
        vllm=folder / "vllm",
        llama_server=folder / "llama-server",
        gguf=folder / "bf16.gguf",
        gguf_q8=folder / "q8.gguf",
        baton=folder / "baton",
    )
    return Fakes(folder, programs)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
