"""The phases of a model server and which may follow which.

Invariant: only a SERVING server takes requests and is reported healthy. It knows nothing of what
the phases' work is.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Where a server stands between start and exit."""

    LOADING = "loading"
    """Fetching, loading, checking golden vectors, warming up."""
    SERVING = "serving"
    RESTARTING = "restarting"
    """The engine died or broke; another is being loaded."""
    DRAINING = "draining"
    STOPPED = "stopped"


_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.LOADING: frozenset({Phase.SERVING, Phase.STOPPED}),
    Phase.SERVING: frozenset({Phase.RESTARTING, Phase.DRAINING, Phase.STOPPED}),
    Phase.RESTARTING: frozenset({Phase.SERVING, Phase.STOPPED}),
    Phase.DRAINING: frozenset({Phase.STOPPED}),
    Phase.STOPPED: frozenset(),
}


class Lifecycle:
    """The current phase.

    Raises:
        ValueError: on a step that the table does not have.
    """

    def __init__(self) -> None:
        self._phase = Phase.LOADING

    @property
    def phase(self) -> Phase:
        """Where the server stands."""
        return self._phase

    @property
    def serving(self) -> bool:
        """Whether requests are taken and health says so."""
        return self._phase is Phase.SERVING

    @property
    def running(self) -> bool:
        """Whether passes may start: while serving, and for what is held while draining."""
        return self._phase in (Phase.SERVING, Phase.DRAINING)

    def to(self, phase: Phase) -> None:
        """Take a step."""
        if phase not in _NEXT[self._phase]:
            raise ValueError(f"a {self._phase} server can't become {phase}")
        self._phase = phase
