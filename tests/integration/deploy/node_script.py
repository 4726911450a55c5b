"""Another Ray node on this machine, until it is ended: ``node_script.py GCS_ADDRESS RESOURCES``."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

from deploy.ray_internals import NodeProcesses


def main() -> None:
    with tempfile.TemporaryDirectory() as sockets:
        NodeProcesses(
            sys.argv[1],
            "127.0.0.1",
            json.loads(sys.argv[2]),
            Path(sockets),
            object_store_bytes=80 << 20,
        )
        (raylet,) = (one for one in psutil.Process().children() if one.name() == "raylet")
        sys.stdout.write(f"{raylet.pid}\n")
        sys.stdout.flush()
        while raylet.is_running() and raylet.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.1)


if __name__ == "__main__":
    main()
