"""The demo's one screen, and its figures as JSON.

Pure: figures in, text out. Units are in the names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aggregator.commands.wording import counted

WIDTH_MAX = 100
SIMULATED = "simulated"
"""The engine whose vectors are made from hashes of the texts."""
COMPARED_QUERIES_MIN = 50
"""Fewer are over before the claims and passes of a flood have begun to fill."""
FRACTION_BELOW = 10
"""Means from here on are shown as whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Percentiles of one phase."""

    p50_ms: float
    p90_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A text near another, and how near (cosine)."""

    text: str
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """A query and what is nearest to it, nearest first."""

    text: str
    nearest: Sequence[Neighbour]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What the server says about itself."""

    model: str
    name: str
    device: str
    precision: str
    dimensions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One result for each query: the ledger of all phases."""

    sent: int
    results_ok: int
    results_error: int
    missing: int
    duplicates: int
    first_error: str = ""
    """What the first result without a vector says; empty: there is none."""

    @property
    def exact(self) -> bool:
        """Every query has exactly one result, and it holds a vector."""
        return self.sent == self.results_ok and not self.duplicates


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All that a run has measured."""

    engine: Engine
    broker: str
    start_seconds: float
    """From the command to the first query."""
    delivery: Delivery
    capacity_queries_per_second: float
    """Of the short flood that the pace is set by."""
    paced_queries_per_second: float
    paced_latency: Latency
    flood_queries: int
    flood_queries_per_second: float
    flood_tokens_per_second: float
    passes: int
    """In the flood."""
    pass_tokens_mean: float
    pass_queries_mean: float
    pass_fill_ratio: float
    """Tokens over the target that each pass was cut for."""
    batch_tokens_target_min: int
    batch_tokens_target_max: int
    """Of these passes: a target follows the machine."""
    estimate_error_before_ratio: float
    """Mean of |raw count - tokens| / tokens over claims' worth of queries."""
    estimate_error_after_ratio: float
    """Mean of |estimate - tokens| / tokens over the claims of the flood."""
    one_by_one_queries: int
    one_by_one_queries_per_second: float
    one_by_one_latency: Latency
    cosine_min: float
    """The least cosine between a query's vector through Kafka and its vector alone."""
    neighbourhoods: Sequence[Neighbourhood]

    @property
    def gain(self) -> float:
        """Flood over one by one, both in queries a second."""
        return self.flood_queries_per_second / max(self.one_by_one_queries_per_second, 1e-9)

    def as_json(self) -> str:
        """One object, indented."""
        table = asdict(self) | {"flood_to_one_by_one_ratio": self.gain}
        return json.dumps(table, indent=2, ensure_ascii=False)


def screen(figures: Figures) -> RenderableType:
    """The figures for people: about 25 lines of 80 columns."""
    engine = figures.engine
    title = f"{engine.model} on {engine.name}, {engine.device}, {engine.precision}"
    body = Group(_numbers(figures), Text(), *_neighbours(figures))
    return Panel(body, title=title, title_align="left", padding=(0, 1), width=WIDTH_MAX)


def _numbers(figures: Figures) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="cyan")
    table.add_column()
    row = table.add_row
    paced, alone = figures.paced_latency, figures.one_by_one_latency
    row(
        "Batched",
        f"{figures.flood_queries_per_second:,.0f} queries/s",
        f"flood of {figures.flood_queries:,}: {figures.flood_tokens_per_second:,.0f} tokens/s",
    )
    row(
        "One by one",
        f"{figures.one_by_one_queries_per_second:,.0f} queries/s",
        f"{_comparison(figures)}; p50 {alone.p50_ms:,.1f} ms",
    )
    row(
        "Latency",
        f"p50 {paced.p50_ms:,.1f} ms",
        f"p90 {paced.p90_ms:,.1f} ms, p99 {paced.p99_ms:,.1f} ms, "
        f"at {figures.paced_queries_per_second:,.0f} queries/s",
    )
    row("Passes", f"{figures.pass_fill_ratio:.0%} full", _passes(figures))
    row(
        "Estimates",
        f"off by {figures.estimate_error_after_ratio:.1%}",
        f"per claim; {figures.estimate_error_before_ratio:.1%} before calibration",
    )
    row("Vectors", f"cosine {figures.cosine_min:.6f}", "the least between batched and alone")
    row("Records", *_records(figures.delivery))
    return table


def _comparison(figures: Figures) -> str:
    if figures.flood_queries < COMPARED_QUERIES_MIN:
        return f"fewer than {COMPARED_QUERIES_MIN} are not compared"
    return f"[bold green]batched is {figures.gain:.1f} times as fast[/bold green]"


def _passes(figures: Figures) -> str:
    """Means, and what the passes were to hold."""
    least, most = figures.batch_tokens_target_min, figures.batch_tokens_target_max
    target = f"{least}" if least == most else f"{least} to {most}"
    queries = figures.pass_queries_mean
    mean = f"{queries:.1f}" if queries < FRACTION_BELOW else f"{queries:,.0f}"
    noun = "query" if queries == 1 else "queries"
    return f"{figures.pass_tokens_mean:,.0f} tokens, {mean} {noun}; target {target}"


def _records(delivery: Delivery) -> tuple[str, str]:
    if delivery.exact:
        noun = "query, with" if delivery.sent == 1 else "queries, each with"
        return f"{delivery.sent:,}", f"{noun} exactly one result"
    faults = (
        f"{counted(delivery.results_error, 'error')}, {delivery.missing:,} without a result, "
        f"{delivery.duplicates:,} doubled"
    )
    return f"[red]{delivery.results_ok:,} of {delivery.sent:,}[/red]", f"[red]{faults}[/red]"


def _neighbours(figures: Figures) -> list[RenderableType]:
    if figures.engine.name.partition(" ")[0] == SIMULATED:
        return [Text("No nearest texts: the simulated engine's vectors have no meaning.")]
    if not figures.neighbourhoods:
        return [Text("No nearest texts: there is only one text.")]
    lines: list[RenderableType] = []
    for neighbourhood in figures.neighbourhoods:
        lines.append(_line(("Nearest to ", "bold"), neighbourhood.text))
        lines += [
            _line((f"  {near.cosine:.2f}  ", "cyan"), near.text) for near in neighbourhood.nearest
        ]
    return lines


def _line(label: tuple[str, str], text: str) -> Text:
    """On one line whatever the width: what is too long ends in an ellipsis."""
    return Text.assemble(label, text, no_wrap=True, overflow="ellipsis")
