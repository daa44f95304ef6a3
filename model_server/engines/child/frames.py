"""What an engine's process and its parent say to each other, over a stream socket.

A frame is a kind, the length of its payload, and the payload. The parent sends START once and then
one EMBED at a time; the child answers each with READY, VECTORS or FAILED. Invariant: a frame that
is longer than it may be, of unknown kind, or whose parts do not add up is refused before anything
is made of it.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Final

import numpy as np

from model_server.engines.base import EnginePass, Tokens, Vectors

FRAME_BYTES_MAX: Final = 512 * 1024 * 1024
_HEADER: Final = struct.Struct("<BI")
_INPUTS: Final = struct.Struct("<I")
_MATRIX: Final = struct.Struct("<III")
_WORD: Final = 4


class FrameError(Exception):
    """The other end does not speak this protocol."""


class Kind(IntEnum):
    """What a frame is."""

    START = 1
    """JSON: what to run."""
    READY = 2
    """JSON: what runs."""
    EMBED = 3
    VECTORS = 4
    FAILED = 5
    """JSON: `Failed`."""


class Fault(StrEnum):
    """What a FAILED means for the parent."""

    REFUSED = "refused"
    """The model can't be served."""
    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"
    """A pass failed; the next one may not."""
    DIED = "died"
    """The process is about to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Why there is no answer, in one line."""

    fault: Fault
    message: str


def send(connection: socket.socket, kind: Kind, payload: bytes) -> None:
    """Write one frame.

    Raises:
        FrameError: it is too long.
        OSError: the other end is gone.
    """
    if len(payload) > FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {len(payload)} bytes; at most {FRAME_BYTES_MAX}")
    connection.sendall(_HEADER.pack(kind, len(payload)))
    connection.sendall(payload)


def receive(connection: socket.socket) -> tuple[Kind, bytes] | None:
    """Read one frame; None: the other end closed.

    Raises:
        FrameError: what comes is no frame, or ends in the middle of one.
        OSError: the connection broke.
    """
    header = _read(connection, _HEADER.size)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise FrameError("the connection ended in a frame")
    number, length = _HEADER.unpack(header)
    if length > FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {length} bytes; at most {FRAME_BYTES_MAX}")
    try:
        kind = Kind(number)
    except ValueError:
        raise FrameError(f"unknown kind of frame: {number}") from None
    payload = _read(connection, length)
    if len(payload) < length:
        raise FrameError("the connection ended in a frame")
    return kind, payload


def _read(connection: socket.socket, length: int) -> bytes:
    """So many bytes, or fewer at the end of the stream."""
    data = bytearray(length)
    view = memoryview(data)
    filled = 0
    while filled < length:
        count = connection.recv_into(view[filled:])
        if count == 0:
            break
        filled += count
    return bytes(view[:filled])


def pack_object(value: Mapping[str, Any]) -> bytes:
    """A JSON object as a payload."""
    return json.dumps(value).encode()


def unpack_object(payload: bytes) -> dict[str, Any]:
    """The JSON object of a payload.

    Raises:
        FrameError: it is none.
    """
    try:
        value = json.loads(payload)
    except ValueError as error:
        raise FrameError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FrameError("not a JSON object")
    return value


def pack_failed(failed: Failed) -> bytes:
    """A failure as a payload."""
    return pack_object({"fault": failed.fault, "message": failed.message})


def unpack_failed(payload: bytes) -> Failed:
    """The failure of a payload.

    Raises:
        FrameError: it is none.
    """
    value = unpack_object(payload)
    try:
        return Failed(fault=Fault(value["fault"]), message=str(value["message"]))
    except (KeyError, ValueError) as error:
        raise FrameError(f"not a failure: {value}") from error


def pack_inputs(inputs: Sequence[Tokens]) -> bytes:
    """Token ids of a pass: count, lengths, prompt tokens, then all ids as int32."""
    lengths = np.array([len(one.ids) for one in inputs], dtype="<u4")
    prompts = np.array([one.prompt_tokens for one in inputs], dtype="<u4")
    ids = [np.asarray(one.ids, dtype="<i4").tobytes() for one in inputs]
    return b"".join([_INPUTS.pack(len(inputs)), lengths.tobytes(), prompts.tobytes(), *ids])


def unpack_inputs(payload: bytes) -> list[Tokens]:
    """The inputs of a pass; ids are lists of int.

    Raises:
        FrameError: the counts do not add up.
    """
    if len(payload) < _INPUTS.size:
        raise FrameError("inputs without a count")
    (count,) = _INPUTS.unpack_from(payload)
    columns = _INPUTS.size + 2 * _WORD * count
    if len(payload) < columns:
        raise FrameError(f"{count} inputs in {len(payload)} bytes")
    lengths = np.frombuffer(payload, "<u4", count, _INPUTS.size).tolist()
    prompts = np.frombuffer(payload, "<u4", count, _INPUTS.size + _WORD * count).tolist()
    if len(payload) != columns + _WORD * sum(lengths):
        raise FrameError(f"{sum(lengths)} tokens in {len(payload) - columns} bytes")
    ids = np.frombuffer(payload, "<i4", offset=columns).tolist()
    inputs, start = [], 0
    for length, prompt_tokens in zip(lengths, prompts, strict=True):
        inputs.append(Tokens(ids=ids[start : start + length], prompt_tokens=prompt_tokens))
        start += length
    return inputs


def pack_vectors(vectors: Vectors, passes: Sequence[EnginePass]) -> bytes:
    """Rows, size, number of passes; each pass's sequences and tokens; then the matrix."""
    rows, size = vectors.shape
    counts = np.array([(one.sequences, one.tokens) for one in passes], dtype="<u4")
    matrix = np.ascontiguousarray(vectors, dtype="<f4")
    return b"".join([_MATRIX.pack(rows, size, len(passes)), counts.tobytes(), matrix.tobytes()])


def unpack_vectors(payload: bytes) -> tuple[Vectors, list[EnginePass]]:
    """Vectors float32 [rows, size] of their own memory, and the passes they took.

    Raises:
        FrameError: the counts do not add up.
    """
    if len(payload) < _MATRIX.size:
        raise FrameError("a matrix without its sizes")
    rows, size, count = _MATRIX.unpack_from(payload)
    start = _MATRIX.size + 2 * _WORD * count
    if len(payload) != start + _WORD * rows * size:
        raise FrameError(f"{rows} x {size} vectors of {count} passes in {len(payload)} bytes")
    counts = np.frombuffer(payload, "<u4", 2 * count, _MATRIX.size).reshape(count, 2).tolist()
    matrix = np.frombuffer(payload, "<f4", offset=start).reshape(rows, size)
    passes = [EnginePass(sequences=sequences, tokens=tokens) for sequences, tokens in counts]
    return matrix.astype(np.float32), passes
