"""What a liar makes of an answer or of a state: each way in which a message can be wrong.

Vectors that are wrong in a form that looks right are not among them: nobody could tell.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from google.rpc import code_pb2, status_pb2

from protos.embedding.v1 import embedding_service_pb2 as pb
from tests.sim.doses import Doses
from tests.sim.kernel import Kernel

Response = pb.EmbedStreamResponse


@dataclass(slots=True)
class Told:
    """What is sent in place of an answer, and the lie's name."""

    responses: list[Response] = field(default_factory=list)
    what: str | None = None


def _twice(response: Response, told: Told) -> None:
    copy = Response()
    copy.CopyFrom(response)
    told.responses.append(copy)


def _never(response: Response, told: Told) -> None:
    told.responses.clear()


def _short(response: Response, told: Told) -> None:
    """One input has no answer."""
    if response.groups:
        group = response.groups[0]
        stride = len(group.embeddings) // max(len(group.indexes), 1)
        del group.indexes[-1:]
        del group.tokens[-1:]
        group.embeddings = group.embeddings[: len(group.embeddings) - stride]
        if not group.indexes:
            del response.groups[0]
    elif response.errors:
        del response.errors[-1]


def _wrong_length(response: Response, told: Told) -> None:
    for group in response.groups:
        group.embeddings = group.embeddings[:-3]


def _not_finite(response: Response, told: Told) -> None:
    for group in response.groups:
        group.embeddings = struct.pack("<f", math.nan) + group.embeddings[4:]


def _other_dimensions(response: Response, told: Told) -> None:
    for group in response.groups:
        group.dimensions //= 2
        group.embeddings = group.embeddings[: len(group.embeddings) // 2]


def _other_encoding(response: Response, told: Told) -> None:
    for group in response.groups:
        group.encoding = 2  # type: ignore[assignment]
        group.embeddings = group.embeddings[: len(group.embeddings) // 2]


def _out_of_range(response: Response, told: Told) -> None:
    for group in response.groups:
        group.indexes[-1] = 1_000_000


def _index_twice(response: Response, told: Told) -> None:
    for group in response.groups:
        group.indexes[-1] = group.indexes[0]
    if response.errors:
        response.errors.add().CopyFrom(response.errors[0])


def _no_counts(response: Response, told: Told) -> None:
    for group in response.groups:
        del group.tokens[:]


def _other_request(response: Response, told: Told) -> None:
    response.request_id += 1_000_000


def _odd() -> status_pb2.Status:
    return status_pb2.Status(code=code_pb2.INTERNAL, message="something odd")


def _odd_status(response: Response, told: Told) -> None:
    """Vectors are replaced by statuses that no table has."""
    for group in response.groups:
        for index in group.indexes:
            response.errors.add(index=index, status=_odd())
    del response.groups[:]


def _refusal_and_not(response: Response, told: Told) -> None:
    response.status.CopyFrom(_odd())


def _refused_oddly(response: Response, told: Told) -> None:
    del response.groups[:]
    del response.errors[:]
    response.last = True
    response.status.CopyFrom(_odd())


LIES: dict[str, Callable[[Response, Told], None]] = {
    "answer twice": _twice,
    "answer never": _never,
    "answer short": _short,
    "answer of wrong length": _wrong_length,
    "answer not finite": _not_finite,
    "answer of other dimensions": _other_dimensions,
    "answer of other encoding": _other_encoding,
    "answer with an index out of range": _out_of_range,
    "answer with an index twice": _index_twice,
    "answer without counts": _no_counts,
    "answer to another request": _other_request,
    "answer with an odd status": _odd_status,
    "answer that is a refusal and not": _refusal_and_not,
    "claim refused with an odd status": _refused_oddly,
}
_ANY = frozenset({"answer twice", "answer never", "answer to another request"})
"""Lies that any message can be; the others are made of vectors."""


def about_answer(
    kernel: Kernel, doses: Doses, response: Response, *, stride: int, inputs: int
) -> Told:
    """What is sent in place of this response: mostly itself."""
    del stride, inputs
    told = Told([response])
    for name, lie in LIES.items():
        chance = doses.chances.get(name, 0.0)
        if chance and kernel.rng.random() < chance and (response.groups or name in _ANY):
            kernel.fire(name)
            told.what = name
            lie(response, told)
            break
    return told


def about_state(rng: random.Random, state: pb.ServerState) -> None:
    """Make one field absurd; the heaviest of lies is an empty one."""
    kind = rng.choice([0, 1, 2, 2, 2, 3, 4, 5])
    if kind == 0:
        state.Clear()
    elif kind == 1:
        state.window_tokens = rng.choice([0, 1, 2**32 - 1])
    elif kind == 2:
        state.busy_ms = rng.choice([math.nan, math.inf, -5.0, 1e300, 0.0])
    elif kind == 3:
        state.batch_tokens_target = rng.choice([0, 1, 2**31])
    elif kind == 4:
        state.queued_tokens = rng.choice([0, 2**32 - 1])
    else:
        state.running.extend([rng.randrange(1, 200), 2**40])
