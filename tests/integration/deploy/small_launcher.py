"""A launcher in small: a guardian and a stubborn tree. ``small_launcher.py ID RUN_DIRECTORY``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from deploy.launcher.guardian import Guardian
from deploy.processes.child import Child
from deploy.processes.run_directory import ClusterMark, RunDirectory

TREE = Path(__file__).with_name("stubborn_tree.py")


async def main() -> None:
    run = RunDirectory(Path(sys.argv[2]))
    mark = ClusterMark(sys.argv[1], run.path)
    await Guardian(mark, run).start()
    await Child.spawn("tree", [sys.executable, str(TREE), "2"], mark, run.log("tree"))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
