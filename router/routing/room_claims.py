"""What decode workers say about room: where this router's requests wait, and for what.

    asked ─no room→ waiting at that worker ─its turn there→ granted ─a request of the router→ used
    waiting, granted ─placed elsewhere, ended→ given up: the worker gets an abort

A worker that has refused a request has no room for this router until it grants some. So routing
leaves the worker out, whatever its load snapshot says. Plain Python; owned by the router's event
loop."""

from __future__ import annotations

from collections.abc import Mapping

from baton.request import AttemptName
from router.routing.policy import ClassRoute, RouteSettings
from router.routing.room import ClassRoom, HeldRoom
from router.routing.worker_table import WorkerTable


class RoomClaims:
    """The attempts that full decode workers have refused, and for which they will grant room."""

    def __init__(self, settings: RouteSettings, table: WorkerTable) -> None:
        """``table`` gets the number of waiting attempts at each worker."""
        self._settings = settings
        self._table = table
        self._waiting: dict[str, dict[AttemptName, int]] = {}
        """Refused attempts by the incarnation of the worker, with the numbers of their first
        choices."""
        self._requests: dict[tuple[str, int], str] = {}
        """Context-length classes of the refused requests that no worker has accepted, by id and
        first choice."""

    def refused(
        self, worker: str, attempt: AttemptName, context_class: str, choice: int = 0
    ) -> None:
        """Record that a worker has no room for an attempt of a request of ``context_class``.
        ``choice``: number of the attempt's first choice."""
        self._requests[attempt[0], choice] = context_class
        self._waiting.setdefault(worker, {})[attempt] = choice
        self._show(worker)

    def granted(self, worker: str, attempt: AttemptName) -> None:
        """Record that a worker now holds room for an attempt that it has refused."""
        self._drop(worker, attempt)

    def leave(self, request_id: str, choice: int = 0) -> list[HeldRoom]:
        """Forget the attempts that begin with a choice of a request, because a worker has accepted
        it or it has ended. Return those that wait: their workers need an abort."""
        if self._requests.pop((request_id, choice), None) is None:
            return []
        left = [
            HeldRoom(worker, attempt)
            for worker, waiting in self._waiting.items()
            for attempt, first in waiting.items()
            if (attempt[0], first) == (request_id, choice)
        ]
        for worker, attempt in left:
            self._drop(worker, attempt)
        return left

    def forget(self, worker: str) -> None:
        """Forget all attempts at a worker that is gone, drains, or has lost its connection;
        idempotent."""
        self._waiting.pop(worker, None)
        self._show(worker)

    def _drop(self, worker: str, attempt: AttemptName) -> None:
        waiting = self._waiting.get(worker, {})
        waiting.pop(attempt, None)
        if not waiting:
            self._waiting.pop(worker, None)
        self._show(worker)

    def _show(self, worker: str) -> None:
        self._table.set_refusals(worker, len(self._waiting.get(worker, ())))

    def room(self) -> Mapping[str, ClassRoom]:
        """Return the room of each context-length class that has a refused request waiting."""
        waiting = set(self._requests.values())
        return {name: self._room_of(name) for name in waiting}

    def _room_of(self, context_class: str) -> ClassRoom:
        table, route = self._table, self._routes().get(context_class, self._settings.default)
        rows = table.group("decode", route.decode, None).rows
        refusals = table.refusals[rows]
        places = (table.max_sequences[rows] - table.sequences[rows]) * (refusals == 0)
        blocks = table.available_blocks[rows][places > 0]
        return ClassRoom(
            int(places[places > 0].sum()),
            float(blocks.max()) if len(blocks) else 0.0,
            is_claimed=bool((refusals > 0).any()),
        )

    def is_claimed(self, context_class: str) -> bool:
        """Return whether a decode worker that has refused a request of this router, and that serves
        the class, will grant room."""
        return bool(self._waiting) and self._room_of(context_class).is_claimed

    def is_full(self, context_class: str) -> bool:
        """Return whether the class has refused requests waiting, and no other worker with a
        place."""
        if not self._waiting:
            return False
        room = self._room_of(context_class)
        return room.is_claimed and not room.places

    def classes_at(self, worker: str) -> frozenset[str]:
        """Return the context-length classes that a decode worker serves."""
        row = self._table.row(worker)
        return frozenset(
            name
            for name, route in self._routes().items()
            if row in self._table.group("decode", route.decode, None).rows
        )

    def _routes(self) -> Mapping[str, ClassRoute]:
        return self._settings.classes or {"": self._settings.default}
