"""Frames between an engine's process and its parent: what goes in comes out, and nothing else."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.engines.base import EnginePass, Tokens
from model_server.engines.child import frames
from model_server.engines.child.frames import Failed, Fault, FrameError, Kind

INT32_MAX = 2**31 - 1


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, INT32_MAX), max_size=5), st.integers(0, 100)), max_size=5
    )
)
def test_inputs(given_inputs: list[tuple[list[int], int]]) -> None:
    inputs = [Tokens(ids=ids, prompt_tokens=prompt) for ids, prompt in given_inputs]
    assert frames.unpack_inputs(frames.pack_inputs(inputs)) == inputs


COUNTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)))


@given(st.integers(0, 4), st.integers(0, 5), COUNTS)
def test_vectors(rows: int, size: int, counts: list[tuple[int, int]]) -> None:
    vectors = np.random.default_rng(rows * 7 + size).normal(size=(rows, size)).astype(np.float32)
    passes = [EnginePass(sequences=sequences, tokens=tokens) for sequences, tokens in counts]
    unpacked, counted = frames.unpack_vectors(frames.pack_vectors(vectors, passes))
    assert np.array_equal(unpacked, vectors)
    assert unpacked.shape == vectors.shape
    assert counted == passes


@given(st.binary(max_size=60))
def test_nothing_else_is_taken_for_a_payload(payload: bytes) -> None:
    for unpack in (frames.unpack_inputs, frames.unpack_vectors, frames.unpack_failed):
        try:
            unpack(payload)
        except FrameError:
            continue


def test_failures() -> None:
    failed = Failed(fault=Fault.REFUSED, message="ünlike")
    assert frames.unpack_failed(frames.pack_failed(failed)) == failed


def test_frames_come_one_after_the_other(ends: tuple[socket.socket, socket.socket]) -> None:
    frames.send(ends[0], Kind.EMBED, b"one")
    frames.send(ends[0], Kind.VECTORS, b"")
    ends[0].close()
    assert frames.receive(ends[1]) == (Kind.EMBED, b"one")
    assert frames.receive(ends[1]) == (Kind.VECTORS, b"")
    assert frames.receive(ends[1]) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\1", "ended in a frame"),
        (struct.pack("<BI", Kind.START, 4) + b"abc", "ended in a frame"),
        (struct.pack("<BI", 99, 0), "unknown kind of frame: 99"),
        (struct.pack("<BI", Kind.START, frames.FRAME_BYTES_MAX + 1), "at most"),
    ],
)
def test_what_is_no_frame_is_refused(
    ends: tuple[socket.socket, socket.socket], data: bytes, message: str
) -> None:
    ends[0].sendall(data)
    ends[0].close()
    with pytest.raises(FrameError, match=message):
        frames.receive(ends[1])


def test_a_frame_that_is_too_long_is_not_sent(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 3)
    with pytest.raises(FrameError, match="at most 3"):
        frames.send(ends[0], Kind.EMBED, b"four")
