"""The size of the next pass, and of windows, when the target follows the machine.

Owns the probes: under backlog one pass in `PROBE_EVERY` runs at `PROBE_RATIO` targets, since
otherwise nothing would show that larger passes pay. From the start of the pass before it until it
is cut, windows are reckoned with `PROBE_WINDOW_TARGETS`, or there would be nothing to fill it with.
Without a profile to follow it says what is always so: passes of one target, windows of two.
"""

from __future__ import annotations

from model_server.core.effects import PassKind
from model_server.core.following import FollowOptions, TargetFollower
from model_server.core.limits import Limits
from model_server.core.passes import Chosen
from model_server.core.windows import SHARED_TARGETS

PROBE_EVERY = 64
PROBE_RATIO = 1.5
PROBE_WINDOW_TARGETS = 3
_FULL_RATIO = 0.75
"""A pass as full as claims by estimates make it: more would have come, had there been room."""
_MEASURED = frozenset({PassKind.NORMAL, PassKind.PROBE, PassKind.EXCLUSIVE})


class Steering:
    """See the module; `follow` begins anew with each engine."""

    def __init__(self) -> None:
        self._follower: TargetFollower | None = None
        self._full_passes = 0
        """Since the last probe."""
        self._probe_next = False
        self._after_probe = False
        """The last pass was one: it took what the next would have been full of."""

    def follow(self, options: FollowOptions | None) -> None:
        """An engine with this profile starts; None: the target stays as it is."""
        self._follower = TargetFollower(options) if options is not None else None
        self._full_passes = 0
        self._probe_next = self._after_probe = False

    @property
    def implied_tokens(self) -> int | None:
        """The target that the last passes imply; None: nothing is followed."""
        return self._follower.implied_tokens if self._follower is not None else None

    @property
    def window_targets(self) -> int:
        """Targets that all windows together hold."""
        return PROBE_WINDOW_TARGETS if self._probe_next else SHARED_TARGETS

    def pass_tokens(self, limits: Limits, waiting_tokens: int) -> int:
        """What the next merged pass may hold."""
        target = limits.batch_tokens_target
        if self._probe_next and waiting_tokens > target:
            return max(target, min(int(target * PROBE_RATIO), limits.batch_tokens_max))
        return target

    def is_probe(self, chosen: Chosen, limits: Limits) -> bool:
        """Whether this is a merged pass above the target; one long input alone is not."""
        if chosen.kind is not PassKind.NORMAL or chosen.tokens <= limits.batch_tokens_target:
            return False
        return sum(len(part.indexes) for part in chosen.parts) > 1

    def started(self, kind: PassKind, tokens: int, limits: Limits) -> bool:
        """A pass was cut; True: windows are to be reckoned anew."""
        if self._follower is None or kind not in (PassKind.NORMAL, PassKind.PROBE):
            return False
        before, target = self.window_targets, limits.batch_tokens_target
        if kind is PassKind.PROBE:
            self._full_passes = 0
        elif (tokens >= _FULL_RATIO * target or self._after_probe) and not self._probe_next:
            self._full_passes += 1
        self._after_probe = kind is PassKind.PROBE
        # A probe that found too little waiting is called off; the next full pass asks for it again.
        due = self._full_passes >= PROBE_EVERY - 1 and limits.batch_tokens_max > target
        self._probe_next = due and not self._probe_next
        self._full_passes = min(self._full_passes, PROBE_EVERY - 2)
        return self.window_targets != before

    def ended(self, kind: PassKind, tokens: int, duration_ns: int, limits: Limits) -> int | None:
        """A pass has run; returns the new target if it moves."""
        if self._follower is None or kind not in _MEASURED:
            return None
        return self._follower.observe(
            tokens,
            duration_ns,
            target=limits.batch_tokens_target,
            tokens_max=limits.batch_tokens_max,
        )
