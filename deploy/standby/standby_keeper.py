"""Sees to it that a process stands by on this worker's node (``deploy/standby/standby.py``).

One of the node's workers does so, whichever has the lock; the next one when that has died. So the
standby is there where workers are, and whoever has started these knows nothing of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from deploy.ray_internals import prestart_worker
from deploy.standby.standby import StandbyPlace
from deploy.standby.standby_watch import LOOK_S, StandbyWatch

PRELOAD_VARIABLE = "RAY_preload_python_modules"
PRELOAD_MODULE = "deploy.supervisor.ray_preload"
_ASK_S = 30.0
_KEEP_S = 24 * 3600
"""For so long Ray keeps the process, however many it has in stock; then another one is asked for.
"""

log = logging.getLogger(__name__)


def keep_standby() -> None:
    """Begin, on a thread of its own, which lasts as long as this process; once.

    Does nothing where Ray was started by others, and prepares no process.
    """
    if PRELOAD_MODULE in os.environ.get(PRELOAD_VARIABLE, "").split(","):
        threading.Thread(target=_keep, name="standby keeper", daemon=True).start()


def _keep() -> None:
    watch = StandbyWatch()
    try:
        place = StandbyPlace.own()
        duty, standby = place.duty, place.lock
        while not watch.gave_up:
            time.sleep(LOOK_S)
            if duty.take() and watch.look(time.monotonic(), stands_by=standby.is_held()):
                ask_for_standby(place)
        log.warning("no process stands by: a worker that dies here is back later")
    except Exception as error:
        # Nothing depends on it; and it goes by what Ray does not promise to keep.
        log.warning("no process can be had that stands by: %r", error)


def ask_for_standby(place: StandbyPlace) -> None:
    """Have this node's Ray take one more process into its stock, to stand by; does not wait for it.

    Raises OSError, and what Ray or gRPC raises.
    """
    place.ask()
    prestart_worker(_KEEP_S, _ASK_S)
