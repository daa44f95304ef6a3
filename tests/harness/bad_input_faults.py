"""Records that are sound and fail all the same: poison to an engine, servers that lie, deadlines.

Each lie has a model, and so a server and a breaker, of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.harness.bad_input import ABSENT, FAULTS, JSON, TTL_MS, Case, js, pb
from tests.harness.lying_server import (
    INFINITE_HALF,
    MARKER,
    NOT_A_NUMBER,
    Lie,
    LyingServer,
    answered_again,
    bytes_of,
    doubled,
    doubled_later,
    engine_dies,
    failed,
    refused,
    scales_of,
    silent,
    states_empty,
    status,
    stream_dies,
    times_absurd,
    with_column,
    with_field,
)

LARGE, LARGE_DIMENSIONS = "large", 1024
"""A model whose vectors are too large for the results topic as JSON arrays of float32."""
ONE_OF_TWO = "one-of-two"
"""A model with two servers; whichever is asked first lies."""

BAD_ANSWERS: dict[str, tuple[Lie, dict[str, Any]]] = {
    # What the server does, and what else the query asks for.
    "missing": (failed(None), {}),
    "doubled": (doubled, {}),
    "vector-and-error": (failed(status(13, "NOT_FINITE"), vector_too=True), {}),
    "index-of-another-claim": (with_column("indexes", [999]), {}),
    "no-indexes": (with_column("indexes", []), {}),
    "no-tokens": (with_column("tokens", []), {}),
    "short": (bytes_of(lambda data: data[:-1]), {}),
    "long": (bytes_of(lambda data: data + bytes(4)), {}),
    "empty": (bytes_of(lambda _: b""), {}),
    "other-dimensions": (with_field("dimensions", 4), {}),
    "other-encoding": (with_field("encoding", 3), {}),
    "unknown-encoding": (with_field("encoding", 99), {}),
    "not-finite": (bytes_of(lambda data: NOT_A_NUMBER + data[4:]), {}),
    "infinite-half": (bytes_of(lambda data: INFINITE_HALF + data[2:]), {"encoding": "float16"}),
    "scale-not-finite": (scales_of([float("nan")]), {"encoding": "int8"}),
    "scale-below-0": (scales_of([-1.0]), {"encoding": "int8"}),
    "scale-missing": (scales_of([]), {"encoding": "int8"}),
    "scale-too-many": (scales_of([1.0]), {}),
    "error-ok": (failed(status(0)), {}),
    "refused-ok": (refused(status(0)), {}),
    "refused-with-vectors": (refused(status(13), vectors_too=True), {}),
}
STATUSES: dict[str, Lie] = {
    "internal": failed(status(13)),
    "denied": failed(status(7, "SOMETHING")),
    "code-99": failed(status(99, "NOT_FINITE")),
    "reason-of-others": failed(status(13, "NOT_FINITE", domain="example.com")),
    "reason-with-another-code": failed(status(2, "ENGINE_FAILED_ALONE")),
    "not-its-model": failed(status(5, "MODEL_UNKNOWN")),
    "refused-internal": refused(status(13)),
    "refused-invalid": refused(status(3, "INVALID_FIELD")),
}
DEATHS: dict[str, Lie] = {"stream-dies": stream_dies, "engine-dies": engine_dies}
OVERDUE: dict[str, tuple[Lie, str]] = {
    "silent": (silent, "EXPIRED"),
    "expired-there": (failed(status(4, "EXPIRED")), "EXPIRED"),
    "holds-too-much": (refused(status(8, "TOO_MUCH_HELD")), "EXPIRED"),
    "refuses-all": (refused(status(14, "NOT_STARTED")), "NO_SERVER"),
}
HARMLESS: dict[str, Lie] = {
    # There is a right vector all the same.
    "doubled-later": doubled_later,
    "answered-again": answered_again,
    "states-empty": states_empty,
    "times-absurd": times_absurd,
    "tokens-0": with_column("tokens", [0]),
    "tokens-absurd": with_column("tokens", [2**32 - 1]),
}
LIES: dict[str, Lie] = {
    **{model: lie for model, (lie, _) in BAD_ANSWERS.items()},
    **STATUSES,
    **DEATHS,
    **{model: lie for model, (lie, _) in OVERDUE.items()},
    **HARMLESS,
}


def servers() -> list[LyingServer]:
    """All of them, to be run by `LyingServers`."""
    lied_about: set[str] = set()
    return [
        *[LyingServer(lie, model=model) for model, lie in LIES.items()],
        *[
            LyingServer(BAD_ANSWERS["short"][0], model=ONE_OF_TWO, lied_about=lied_about)
            for _ in range(2)
        ],
        LyingServer(None, model=LARGE, dimensions=LARGE_DIMENSIONS),
    ]


def lied(model: str, options: dict[str, Any] | None = None, **expected: Any) -> Case:
    """A query about which that model's server lies."""
    return js({"model": model, "id": model, **(options or {})}, text=MARKER, id=model, **expected)


def mate(model: str, number: int) -> Case:
    """A sound query of a model whose server lies about others."""
    return js({"model": model, "format": "base64"}, text=f"mate {number}")


ENGINE = {
    marker: js(text=f"a text, {marker}", reason=reason, key=b"k", headers=[("h", None)])
    for marker, reason in {
        "please raise": "ENGINE_FAILED_ALONE",
        "please cut short": "ENGINE_FAILED_ALONE",
        "please use up memory": "ENGINE_FAILED_ALONE",
        "please nan": "NOT_FINITE",
        "please die": "ENGINE_DIED_ALONE",
    }.items()
} | {
    "Protobuf, please raise": pb(text="please raise", reason="ENGINE_FAILED_ALONE"),
    "Protobuf, please nan": pb({"encoding": 3}, text="please nan", reason="NOT_FINITE"),
}
assert {name for name in ENGINE if name.startswith("please")} == set(FAULTS)

SERVERS = {
    **{
        model: lied(model, options, reason="BAD_ANSWER", attempts=3)
        for model, (_, options) in BAD_ANSWERS.items()
    },
    **{model: lied(model, reason="SERVER_ERROR", attempts=5) for model in STATUSES},
    **{model: lied(model, reason="ENGINE_DIED_ALONE") for model in DEATHS},
    **{model: lied(model) for model in HARMLESS},
    ONE_OF_TWO: lied(ONE_OF_TWO),
    LARGE: js({"model": LARGE}, reason="RESULT_TOO_LARGE", headers=[("h", b"1")]),
    "large as base64": js(
        {"model": LARGE, "format": "base64"},
        headers=[("content-type", JSON)],
        dimensions=LARGE_DIMENSIONS,
    ),
}

TIMES = {
    # To be sent when all servers are ready.
    "deadline past by the setting": js(age_ms=TTL_MS + 60_000, reason="EXPIRED", key=b"k"),
    "deadline past by the query": pb({"ttl_ms": 1_000}, age_ms=5_000, reason="EXPIRED"),
    "timestamp of 1970": js(age_ms=10**13, reason="EXPIRED"),
    "no server": js({"model": ABSENT, "ttl_ms": 300}, reason="NO_SERVER"),
    "no server, Protobuf": pb(
        {"model": ABSENT, "ttl_ms": 300, "id": "i"}, reason="NO_SERVER", id="i"
    ),
    "no server and past": js({"model": ABSENT}, age_ms=TTL_MS + 60_000, reason="NO_SERVER"),
    **{
        model: lied(model, {"ttl_ms": 1_500}, reason=reason)
        for model, (_, reason) in OVERDUE.items()
    },
}


def mates(models: Sequence[str]) -> dict[str, Case]:
    """Two for each of these."""
    return {
        f"mate {number} of {model}": mate(model, number) for model in models for number in (1, 2)
    }


MATES = mates([*BAD_ANSWERS, *STATUSES, *DEATHS, *HARMLESS, ONE_OF_TWO])
