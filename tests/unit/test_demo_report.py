"""The demo's arithmetic and its one screen, on figures made by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Message
from rich.console import Console

from aggregator.commands.demo_analysis import (
    Claim,
    Passes,
    as_claims,
    cosine,
    estimate_error,
    neighbourhoods,
    outcome,
    read_claims,
    read_passes,
)
from aggregator.commands.demo_load import Phase, Query
from aggregator.commands.demo_report import (
    Delivery,
    Engine,
    Figures,
    Latency,
    Neighbour,
    Neighbourhood,
    screen,
)
from protos.embedding.v1 import query_pb2

CLAIM = {"event": "claim", "outcome": "answered", "estimate": 90.0, "tokens": 100, "queries": 9}

FIGURES = Figures(
    engine=Engine(model="tiny", name="torch 2.9", device="cpu", precision="float32", dimensions=3),
    broker="embedded",
    start_seconds=9.5,
    delivery=Delivery(sent=7500, results_ok=7500, results_error=0, missing=0, duplicates=0),
    capacity_queries_per_second=600.0,
    paced_queries_per_second=300.0,
    paced_latency=Latency(p50_ms=31.25, p90_ms=55.5, p99_ms=91.0),
    flood_queries=4000,
    flood_queries_per_second=612.0,
    flood_tokens_per_second=6543.0,
    passes=181,
    pass_tokens_mean=243.2,
    pass_queries_mean=22.1,
    pass_fill_ratio=0.953,
    batch_tokens_target_min=256,
    batch_tokens_target_max=256,
    estimate_error_before_ratio=0.271,
    estimate_error_after_ratio=0.021,
    one_by_one_queries=300,
    one_by_one_queries_per_second=153.0,
    one_by_one_latency=Latency(p50_ms=6.5, p90_ms=8.0, p99_ms=10.0),
    cosine_min=0.9999994,
    neighbourhoods=[
        Neighbourhood(
            text="a [bold]dripping[/bold] tap",
            nearest=[Neighbour(text="word " * 40, cosine=0.814), Neighbour(text="[", cosine=0.7)],
        )
    ],
)


def drawn(figures: Figures, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(screen(figures))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_the_screen_has_every_figure_and_fits_a_terminal() -> None:
    text = drawn(FIGURES, 80)
    for part in (
        "tiny on torch 2.9, cpu, float32",
        "Batched       612 queries/s  flood of 4,000: 6,543 tokens/s",
        "One by one    153 queries/s  batched is 4.0 times as fast; p50 6.5 ms",
        "p50 31.2 ms  p90 55.5 ms, p99 91.0 ms, at 300 queries/s",
        "95% full  243 tokens, 22 queries; target 256",
        "off by 2.1%  per claim; 27.1% before calibration",
        "cosine 0.999999",
        "7,500  queries, each with exactly one result",
        "Nearest to a [bold]dripping[/bold] tap",
        "0.81  word word",
        "0.70  [",
    ):
        assert part in text, part
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) == 80
    assert max(map(len, drawn(FIGURES, 200).splitlines())) == 100


def test_a_long_text_is_cut_to_its_line_and_every_neighbour_is_shown() -> None:
    long = "a question that goes on and on for much longer than any terminal is wide " * 3
    near = [Neighbour(text=f"{n} {long}", cosine=n / 10) for n in range(3)]
    wide = Neighbour(text="月食黑洞" * 30, cosine=0.4)
    shown = replace(FIGURES, neighbourhoods=[Neighbourhood(text=long, nearest=[*near, wide])])
    for width in (80, 120):
        lines = [line.strip("│ ") for line in drawn(shown, width).splitlines()][-6:-1]
        assert [line[:13] for line in lines] == [
            "Nearest to a ",
            "0.00  0 a que",
            "0.10  1 a que",
            "0.20  2 a que",
            "0.40  月食黑洞月食黑",
        ]
        assert all(line.endswith("…") for line in lines)


def test_means_below_ten_have_a_decimal_and_a_target_that_moved_its_range() -> None:
    moved = replace(
        FIGURES,
        pass_queries_mean=8.34,
        batch_tokens_target_min=91,
        batch_tokens_target_max=164,
    )
    assert "243 tokens, 8.3 queries; target 91 to 164" in drawn(moved, 80)


def test_few_queries_are_not_compared() -> None:
    few = replace(FIGURES, flood_queries=49)
    assert "153 queries/s  fewer than 50 are not compared; p50 6.5 ms" in drawn(few, 80)
    assert "times as fast" not in drawn(few, 80)
    assert "times as fast" in drawn(replace(FIGURES, flood_queries=50), 80)


def test_one_query_is_one() -> None:
    delivery = Delivery(sent=1, results_ok=1, results_error=0, missing=0, duplicates=0)
    text = drawn(replace(FIGURES, delivery=delivery, pass_queries_mean=1.0), 80)
    assert "1  query, with exactly one result" in text
    assert "243 tokens, 1.0 query; target" in text


def test_where_there_is_nothing_near_the_screen_says_why() -> None:
    nothing = replace(FIGURES, neighbourhoods=[])
    assert "No nearest texts: there is only one text." in drawn(nothing, 80)
    engine = replace(FIGURES.engine, name="simulated 1.0")
    text = drawn(replace(FIGURES, engine=engine), 80)
    assert "the simulated engine's vectors have no meaning" in text
    assert "Nearest to" not in text


def test_the_screen_says_what_is_wrong_with_delivery() -> None:
    delivery = Delivery(sent=10, results_ok=7, results_error=1, missing=2, duplicates=1)
    text = drawn(replace(FIGURES, delivery=delivery), 100)
    assert "7 of 10  1 error, 2 without a result, 1 doubled" in text
    assert not delivery.exact
    doubled = Delivery(sent=10, results_ok=10, results_error=0, missing=0, duplicates=1)
    assert not doubled.exact
    assert FIGURES.delivery.exact


def test_the_json_has_all_figures_with_units_in_their_names() -> None:
    table = json.loads(FIGURES.as_json())
    assert table["flood_queries_per_second"] == 612.0
    assert table["paced_latency"] == {"p50_ms": 31.25, "p90_ms": 55.5, "p99_ms": 91.0}
    assert table["flood_to_one_by_one_ratio"] == pytest.approx(4.0)
    assert table["delivery"]["sent"] == 7500
    assert table["neighbourhoods"][0]["nearest"][1] == {"text": "[", "cosine": 0.7}


def line(**changes: Any) -> bytes:
    return json.dumps(CLAIM | changes).encode()


def test_claims_are_read_from_whole_lines_of_the_log() -> None:
    log = b"\n".join(
        [
            b'aim", "estimate": 1}',
            line(),
            line(outcome="lost", tokens=0),
            line(event="assigned"),
            b"not JSON",
            line(estimate=110.0),
            line()[:-5],
        ]
    )
    claims = read_claims(log)
    assert [claim.estimate for claim in claims] == [90.0, 110.0]
    assert estimate_error(claims) == pytest.approx(0.1)
    assert estimate_error([]) == 0.0


def pass_line(tokens: int, target: int, kind: str = "normal") -> bytes:
    entry = {"event": "pass", "kind": kind, "tokens": tokens, "inputs": tokens // 10}
    return json.dumps(entry | {"batch_tokens_target": target}).encode()


def test_passes_are_held_against_the_target_that_each_was_cut_for() -> None:
    log = b"\n".join(
        [
            pass_line(90, 100),
            pass_line(170, 200),
            json.dumps({"event": "target moved", "batch_tokens_target": 300}).encode(),
            pass_line(250, 200, "probe"),
            pass_line(10, 200, "isolation"),
            pass_line(200, 200)[:-5],
        ]
    )
    assert read_passes(log) == Passes(
        count=4, tokens=520, inputs=52, fill_ratio=260 / 300, target_min=100, target_max=200
    )
    assert read_passes(b"").fill_ratio == 0


def test_raw_counts_are_summed_over_claims_worth_of_queries() -> None:
    claims = as_claims([1, 2, 3, 4, 5], [2, 2, 6, 6, 9], 2)
    assert claims == [
        Claim(estimate=3, tokens=4, queries=2),
        Claim(estimate=7, tokens=12, queries=2),
    ]


def result(text_index: int, vector: list[float] | None, *, due_s: float = 0.0) -> Query:
    fields = query_pb2.Result(id="x", tokens=4)
    if vector is None:
        fields.error.code, fields.error.reason = "UNAVAILABLE", "NO_SERVER"
        fields.error.message = "none is ready"
    else:
        fields.embedding, fields.dimensions = np.array(vector, "<f4").tobytes(), len(vector)
        fields.encoding = query_pb2.ENCODING_FLOAT32
    headers: Any = [("content-type", b"application/protobuf")]
    record = Message(topic="results", value=fields.SerializeToString(), headers=headers)
    return Query(text_index, due_s, due_s + 1.0, record)


def test_the_ledger_counts_each_query_once() -> None:
    junk = Query(3, 0.0, 1.0, Message(topic="results", value=b"x", headers=[]))
    phases = [Phase([result(0, [1, 0]), result(1, None)]), Phase([Query(2, 0.0), junk])]
    found = outcome(phases, duplicates=2)
    assert found.delivery == Delivery(
        sent=4,
        results_ok=1,
        results_error=2,
        missing=1,
        duplicates=2,
        first_error="x  UNAVAILABLE  NO_SERVER: none is ready",
    )
    assert found.tokens == {0: 4}
    assert found.vectors[0].tolist() == [1.0, 0.0]


def test_nearest_neighbours_are_by_angle_and_never_the_text_itself() -> None:
    angles = {0: 0.0, 1: 0.1, 2: 0.3, 3: 1.5, 4: 3.0, 5: 0.0}
    vectors = {
        index: np.array([5 * np.cos(angle), 5 * np.sin(angle)], np.float32)
        for index, angle in angles.items()
    }
    # Only the first is of a few words; text 5 is the same as text 0 once more.
    texts = ["what do cats eat", "b", "c", "d", "e", "what do cats eat"]
    (found,) = neighbourhoods(texts, vectors, 1)
    assert found.text == "what do cats eat"
    assert [near.text for near in found.nearest] == ["b", "c", "d"]
    assert found.nearest[0].cosine == pytest.approx(np.cos(0.1), abs=1e-6)


def test_neighbours_of_few_or_odd_texts() -> None:
    vectors = {0: np.array([1, 0], np.float32), 1: np.array([0, 0], np.float32)}
    assert len(neighbourhoods(["二战", "x"], vectors, 3)) == 2
    assert neighbourhoods(["alone"], {0: vectors[0]}, 3) == []


def test_cosine() -> None:
    one = np.array([3, 0], np.float32)
    assert cosine(one, np.array([2, 2], np.float32)) == pytest.approx(np.sqrt(0.5))
    assert cosine(one, np.zeros(2, np.float32)) == 0.0
