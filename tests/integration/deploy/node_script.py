"""Another Ray node on this machine, until it is ended: ``node_script.py GCS_ADDRESS RESOURCES``.

As `ray start --address` does it, which refuses to on a loopback address.
"""

from __future__ import annotations

import json
import sys
import time

import psutil
from ray._private.node import Node
from ray._private.parameter import RayParams


def main() -> None:
    parameters = RayParams(
        gcs_address=sys.argv[1],
        node_ip_address="127.0.0.1",
        num_cpus=0,
        resources=json.loads(sys.argv[2]),
        object_store_memory=80 << 20,
    )
    Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False)
    (raylet,) = (child for child in psutil.Process().children() if child.name() == "raylet")
    sys.stdout.write(f"{raylet.pid}\n")
    sys.stdout.flush()
    while raylet.is_running() and raylet.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
