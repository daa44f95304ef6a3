"""What is believed of each model server: busy until when, how much room, and whether to trust it.

Owns one `Server` per address and its breaker. Invariants: `unanswered_tokens` is the sum over its
open claims of what has not been answered; a server is believed idle only when it said so and
nothing of ours can still be on its way to it.

It must not know of the backlog: how much goes where is `aggregator.core.dispatch`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aggregator.core.backlog import NEVER_NS
from aggregator.core.events import ServerLimits, ServerPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aggregator.core.claims import Claim

_MS: Final = 1_000_000
_NEARLY_FULL: Final = 1 / 16
"""A pass with less room than this part of the target is not worth a claim."""


_PRESUME_IDLE_NS: Final = 1_000 * _MS


class Breaker:
    """Stops sending to a server that fails time after time, and probes it with one claim.

    Closed until `FAILURES_MAX` failures in a row, then open for a time that doubles from
    `OPEN_NS_MIN` to `OPEN_NS_MAX` at each failed probe (no jitter: servers have one each, and the
    core has no randomness). One success closes it.
    """

    __slots__ = ("_failures", "_open_ns", "_open_until_ns", "opened", "probing")

    FAILURES_MAX: Final = 3
    OPEN_NS_MIN: Final = 200 * _MS
    OPEN_NS_MAX: Final = 10_000 * _MS

    def __init__(self) -> None:
        """Start closed."""
        self._failures = 0
        self._open_ns = self.OPEN_NS_MIN
        self._open_until_ns = 0
        self.probing = False
        self.opened = 0
        """Times it has opened, for metrics."""

    @property
    def closed(self) -> bool:
        """Whether the server has not failed often enough in a row to be doubted."""
        return self._failures < self.FAILURES_MAX

    def allows(self, now_ns: int) -> bool:
        """Whether a claim may go there now: closed, or the time of one probe has come."""
        return self.closed or (now_ns >= self._open_until_ns and not self.probing)

    @property
    def wake_at_ns(self) -> int:
        """When a probe may go out; `NEVER_NS` if that is no matter of time."""
        return NEVER_NS if self.closed or self.probing else self._open_until_ns

    def failed(self, now_ns: int) -> None:
        """Count one failure of the server, not of an input."""
        if not self.closed and not self.probing:
            return  # what was sent before it opened tells nothing new
        self._failures += 1
        if self._failures >= self.FAILURES_MAX:
            self._open_until_ns = now_ns + self._open_ns
            self._open_ns = min(2 * self._open_ns, self.OPEN_NS_MAX)
            self.probing = False
            self.opened += 1

    def succeeded(self) -> None:
        """A vector came: close."""
        self._failures = 0
        self._open_ns = self.OPEN_NS_MIN
        self.probing = False


class Server:
    """One stream to one model server, as far as it is known from here."""

    __slots__ = (
        "_cancelled_ns",
        "_cut",
        "_failed_birth",
        "_idle_said",
        "_probe",
        "address",
        "births",
        "boundary_claims",
        "boundary_ns",
        "breaker",
        "claims",
        "engine_down",
        "heard_ns",
        "held_until_ns",
        "idle",
        "idle_since_ns",
        "limits",
        "model_revision",
        "others_tokens",
        "pass_ns",
        "pending_tokens",
        "phase",
        "reach_ns",
        "revision_ok",
        "suspect_claim",
        "unanswered_tokens",
    )

    def __init__(self, address: str) -> None:
        """Known by name only; it is down until its stream opens."""
        self.address = address
        self.phase = ServerPhase.DOWN
        self.limits: ServerLimits | None = None
        self.model_revision = ""
        self.revision_ok = False
        self.breaker = Breaker()
        self.claims: dict[int, Claim] = {}
        """Open claims by id, in the order in which they were sent."""
        self.unanswered_tokens = 0.0
        self.pending_tokens = 0.0
        """Of ours, sent for the pass to come: no start announced, and none assumed."""
        self.idle = False
        self.idle_since_ns = 0
        self.boundary_ns = NEVER_NS
        """When the running pass ends; `NEVER_NS`: not known until it says more."""
        self.boundary_claims = 0
        """Of ours that left for the coming pass."""
        self.reach_ns = 0
        """The way there and back: what a claim takes besides its queue and pass. 0: not known."""
        self.pass_ns = 0
        """How long a pass takes, from what it said; 0: not known."""
        self.others_tokens = 0.0
        """Of other callers, waiting there when it last spoke."""
        self.heard_ns = 0
        self.held_until_ns = 0
        """It holds too much of ours: nothing before this."""
        self.births = 0
        """Times its engine is known to have come up."""
        self.engine_down = False
        """Its engine died and it has not been seen to work since."""
        self.suspect_claim = 0
        """The one suspect request that is open here; 0: none."""
        self._failed_birth = -1
        self._cancelled_ns = 0
        self._cut = False
        self._idle_said = False
        self._probe = 0

    # What may be sent ----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Serving, with the right revision, and not broken."""
        return self.phase is ServerPhase.READY and self.revision_ok and self.breaker.closed

    def usable(self, now_ns: int) -> bool:
        """Whether a claim may be sent there now, its room apart."""
        return (
            self.phase is ServerPhase.READY
            and self.revision_ok
            and now_ns >= self.held_until_ns
            and self.breaker.allows(now_ns)
        )

    def room_tokens(self) -> float:
        """What is left of its window for this stream."""
        return self.limits.window_tokens - self.unanswered_tokens if self.limits else 0.0

    def too_small_for(self, claim: Claim) -> bool:
        """Whether a lone text is larger than any request that it takes, by its own word."""
        limits, queries = self.limits, claim.queries
        return (
            limits is not None
            and len(queries) == 1
            and queries[0].text_bytes > limits.request_bytes_max
        )

    # What it said --------------------------------------------------------------------------------

    def opened(self, revision: str, revision_ok: bool, now_ns: int) -> None:
        """Its stream opened: SERVING, and nothing on it yet."""
        self.phase = ServerPhase.READY
        self.model_revision = revision
        self.revision_ok = revision_ok
        self.births += 1
        self.engine_down = False
        self.boundary_ns = NEVER_NS
        self.pending_tokens = 0.0
        self.pass_ns = 0
        self.held_until_ns = 0
        self._cut = False
        self._cancelled_ns = 0
        self.heard_ns = now_ns

    def resumed(self) -> None:
        """It said that it drains no longer, unless its stream is being cut."""
        if not self._cut:
            self.phase = ServerPhase.READY
            self.births += 1

    def told(self, limits: ServerLimits, running: Sequence[int], now_ns: int) -> None:
        """Take in a ServerState."""
        self.limits = limits
        self.heard_ns = now_ns
        if running:
            self._pass_started(running)
        self._note_missed(limits, now_ns)
        if limits.busy_ms <= 0.0:
            # What it has not heard of yet is on its way: it will be busy, for how long it will say.
            if not self.idle:
                self.idle_since_ns = now_ns
            self.idle = not self.claims
            self.boundary_ns = NEVER_NS
        else:
            self.idle = False
            self._told_busy(limits, now_ns)
        self.pending_tokens = sum(
            [claim.tokens_left for claim in self.claims.values() if not claim.running]
        )
        arrived_ns = now_ns - self.reach_ns
        ours = [
            claim.tokens_left
            for claim in self.claims.values()
            if not claim.running and claim.sent_ns <= arrived_ns
        ]
        self.others_tokens = max(0.0, limits.queued_tokens - sum(ours))

    def _pass_started(self, running: Sequence[int]) -> None:
        """A pass with inputs of these claims starts, so the one before, if any, has ended.

        That was answered, or it raised: then what was in it is in this one or waits again.
        """
        for claim in self.claims.values():
            claim.running = claim.claim_id in running
            if claim.running:
                claim.missed_ns = NEVER_NS
        self.seen_working()
        self.boundary_claims = 0

    def _note_missed(self, limits: ServerLimits, now_ns: int) -> None:
        """A server that has nothing to do has nothing of ours but what is still on its way."""
        self._idle_said = limits.busy_ms <= 0.0 and limits.queued_tokens == 0
        if self._idle_said:
            for claim in self.claims.values():
                claim.missed_ns = min(claim.missed_ns, now_ns)

    def timed(self, claim: Claim, elsewhere_ns: int, now_ns: int) -> None:
        """An answer came that spent `elsewhere_ns` in the server's queue and pass."""
        reach_ns = max(now_ns - claim.sent_ns - elsewhere_ns, 1)
        self.reach_ns += (reach_ns - self.reach_ns) // 8 if self.reach_ns else reach_ns

    def _told_busy(self, limits: ServerLimits, now_ns: int) -> None:
        """Find the end of the running pass in `busy_ms`, which counts what is queued too."""
        busy_ns = int(limits.busy_ms * _MS)
        passes_queued = -(-limits.queued_tokens // max(limits.batch_tokens_target, 1))
        if passes_queued == 0:
            # Most messages come when a pass starts; the others see less of it.
            gain = 1.0 if busy_ns > self.pass_ns else 0.1
            self.pass_ns += int(gain * (busy_ns - self.pass_ns))
            rest_ns = busy_ns
        elif self.pass_ns == 0:
            self.pass_ns = rest_ns = busy_ns // (1 + passes_queued)
        else:
            rest_ns = max(busy_ns - passes_queued * self.pass_ns, 0)
        if now_ns + rest_ns > self.boundary_ns or self.boundary_ns >= NEVER_NS:
            self.boundary_claims = 0  # another pass than the one that was known to run
        self.boundary_ns = now_ns + rest_ns

    def _passes_ahead(self) -> int:
        """Passes that what waits there fills, as good as full."""
        target = self.limits.batch_tokens_target if self.limits else 1
        return int((self.others_tokens + self.pending_tokens) / target + _NEARLY_FULL)

    def next_start_ns(self) -> int:
        """When the first pass with room left starts; `NEVER_NS`: not known until it says more."""
        if self.boundary_ns >= NEVER_NS:
            return NEVER_NS
        return self.boundary_ns + self._passes_ahead() * self.pass_ns

    def pass_room(self) -> float:
        """What is left of that pass, tokens."""
        target = self.limits.batch_tokens_target if self.limits else 1
        ahead = self.others_tokens + self.pending_tokens
        return (self._passes_ahead() + 1) * target - ahead

    def running_tokens(self) -> float:
        """Of ours, in the pass that runs."""
        return sum([claim.tokens_left for claim in self.claims.values() if claim.running])

    def seen_working(self) -> None:
        """A pass started or a vector came: its engine is up."""
        if self.engine_down:
            self.engine_down = False
            self.births += 1

    def closed(self, phase: ServerPhase) -> None:
        """It drains, or its stream ended."""
        self.phase = phase
        self.idle = False
        self.boundary_ns = NEVER_NS

    # What became of claims -----------------------------------------------------------------------

    def sent(self, claim: Claim, now_ns: int) -> None:
        """A claim goes out."""
        self.claims[claim.claim_id] = claim
        claim.sent_ns = now_ns
        self.unanswered_tokens += claim.tokens_left
        self.pending_tokens += claim.tokens_left
        self.boundary_claims += 1
        if self.idle:
            self.idle = False
            self.boundary_ns = NEVER_NS
        if not self.breaker.closed:
            self.breaker.probing = True
            self._probe = claim.claim_id
        if len(self.claims) == 1:
            self.heard_ns = now_ns
        if claim.exclusive:
            self.suspect_claim = claim.claim_id

    def answered(self, claim: Claim, tokens: float) -> None:
        """Part of a claim, as estimated, is answered."""
        self.unanswered_tokens -= tokens
        claim.missed_ns = NEVER_NS
        if not claim.running:
            self.pending_tokens = max(0.0, self.pending_tokens - tokens)

    def ended(self, claim: Claim) -> None:
        """A claim gets no further answer."""
        if self.claims.pop(claim.claim_id, None) is None:
            return
        self.answered(claim, claim.tokens_left)
        claim.tokens_left = 0.0
        if not self.claims:
            self.unanswered_tokens = 0.0  # rounding does not add up
            self.pending_tokens = 0.0
        if self.suspect_claim == claim.claim_id:
            self.suspect_claim = 0
        if self._probe == claim.claim_id:
            # Neither success nor failure, if it is still open: the next claim is the probe.
            self._probe = 0
            self.breaker.probing = False

    def boundary_passed(self, now_ns: int) -> None:
        """Until it says otherwise, what was sent is assumed to have started."""
        if self.boundary_ns <= now_ns:
            self.boundary_ns = NEVER_NS
            self.boundary_claims = 0
            self.pending_tokens = 0.0
            self.others_tokens = 0.0

    def engine_died(self, now_ns: int) -> None:
        """Its engine died in a pass."""
        self.idle = False
        self.boundary_ns = NEVER_NS
        if not self.engine_down:
            self.engine_down = True
            self.failed(now_ns)

    def failed(self, now_ns: int) -> None:
        """It failed at something that was no fault of an input's; draining is no failure."""
        if self.phase is ServerPhase.READY:
            self.breaker.failed(now_ns)

    def stream_failed(self, now_ns: int) -> None:
        """Its stream died: one failure, however many claims were on it."""
        if self._failed_birth != self.births:
            self._failed_birth = self.births
            self.breaker.failed(now_ns)

    def presumed_idle_at_ns(self) -> int:
        """When it has said nothing for so long, with nothing of ours there, that it is tried."""
        if self.idle or self.claims or self.limits is None:
            return NEVER_NS
        return self.heard_ns + int(self.limits.busy_ms * _MS) + _PRESUME_IDLE_NS

    def presume_idle(self, now_ns: int) -> None:
        """Try it: its word must have been lost, and nobody may wait for ever."""
        self.idle = True
        self.idle_since_ns = now_ns

    def hold(self, until_ns: int) -> None:
        """It holds too much of ours."""
        self.held_until_ns = max(self.held_until_ns, until_ns)

    # Silence -------------------------------------------------------------------------------------

    def silent_at_ns(self, silence_ns_max: int) -> int:
        """When it will have been silent for too long with claims unanswered."""
        if not self.claims or self.phase is ServerPhase.DOWN:
            return NEVER_NS
        return max(self.heard_ns, self._cancelled_ns) + silence_ns_max

    def forgotten_at_ns(self, silence_ns_max: int) -> int:
        """When a claim will have been unanswered for too long by a server with nothing to do.

        It speaks of other claims, so it is not silent; only its word that it is idle, with nothing
        queued, tells that it does not know this one.
        """
        if not self._idle_said or not self.claims or self.phase is ServerPhase.DOWN:
            return NEVER_NS
        since_ns = min(claim.missed_ns for claim in self.claims.values())
        return min(max(since_ns, self._cancelled_ns) + silence_ns_max, NEVER_NS)

    def forgot(self) -> None:
        """No pass runs there, by its own word: none dies with its stream."""
        for claim in self.claims.values():
            claim.running = False

    def cancelled(self, now_ns: int) -> None:
        """Its stream is being cut; it is not used again before it opens anew."""
        self._cut = True
        self._cancelled_ns = now_ns
        self.closed(ServerPhase.DRAINING)
