"""Streams to model servers: what the core is told, in which order, whatever the server does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from aggregator.adapters import model_servers
from aggregator.adapters.model_servers import ModelServers
from aggregator.adapters.server_stream import StreamOptions
from aggregator.core.effects import Cancel, Dispatch
from aggregator.core.events import (
    ClaimAnswered,
    ClaimLost,
    Event,
    Loss,
    ServerChanged,
    ServerPhase,
)
from aggregator.core.failures import Reason
from aggregator.core.query import Query
from protos.embedding.v1 import embedding_service_pb2 as pb
from tests.harness.fake_model_server import NOT_SERVING, SERVING, FakeModelServer, state
from tests.harness.processes import free_port, simulated_server

MODEL = "minilm"


class Client:
    """The adapter under test, every event that it emitted, and every line that it logged."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.events: list[Event] = []
        self.lines: list[str] = []
        self._changed = asyncio.Event()
        self.servers = ModelServers(
            addresses,
            options=StreamOptions(model=MODEL),
            emit=self.emit,
            clock_ns=time.monotonic_ns,
            log=cast("Any", self),
            resolve_interval_s=0.05,
        )

    def emit(self, events: list[Event]) -> None:
        self.events.extend(events)
        self._changed.set()

    def bind(self, **_: object) -> Client:
        return self

    def info(self, event: str, **values: object) -> None:
        self.lines.append(f"{event} {values}")
        self._changed.set()

    warning = error = info

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds, looking whenever an event or a line came."""
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def ready(self, count: int = 1) -> str:
        """Wait until so many servers are ready; return the address of the first."""
        await self.until(lambda: list(self.servers.phases().values()).count(READY) >= count)
        return next(a for a, phase in self.servers.phases().items() if phase is READY)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


READY = ServerPhase.READY


def query(text: str) -> Query:
    made = Query()
    made.text = text
    made.deadline_ns = 0
    made.encoding = 1
    made.dimensions = 0
    made.input_type = 0
    made.truncate = False
    return made


def claim(claim_id: int, server: str, *texts: str) -> Dispatch:
    return Dispatch(
        claim_id=claim_id,
        model=MODEL,
        server=server,
        queries=[query(text) for text in texts or ("hello",)],
        estimate=3.0,
    )


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    fake = FakeModelServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Client]]:
    """Makes clients, and checks at the end that closing them leaves no task behind."""
    before = asyncio.all_tasks()
    running: list[asyncio.Task[None]] = []

    def make(*addresses: str) -> Client:
        client = Client(addresses)
        running.append(asyncio.create_task(client.servers.run()))
        return client

    yield make
    for task in running:
        task.cancel()
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
    left = [
        task
        for task in asyncio.all_tasks() - before
        if "adapters" in str(task.get_coro()) and not task.done()
    ]
    assert left == []


Connect = Callable[..., Client]


async def with_a_claim_unanswered(server: FakeModelServer, connect: Connect) -> Client:
    """A client whose claim 1 is with the server, which does not answer."""
    server.answering = False
    client = connect(f"127.0.0.1:{server.port}")
    address = await client.ready()
    client.servers.send(claim(1, address))
    await server.requests.get()
    return client


# What both the fake and the real server do -------------------------------------------------------


@pytest.fixture(scope="module")
def real_port() -> Iterator[int]:
    port = free_port()
    with simulated_server(port):
        yield port


@pytest.fixture(params=["fake", "simulated"])
def port(request: pytest.FixtureRequest) -> int:
    if request.param == "fake":
        fake: FakeModelServer = request.getfixturevalue("server")
        return fake.port
    return int(request.getfixturevalue("real_port"))


async def test_a_claim_is_answered(port: int, connect: Connect) -> None:
    client = connect(f"127.0.0.1:{port}")
    address = await client.ready()
    opened = client.of(ServerChanged)[0]
    assert (opened.phase, opened.server) == (READY, address)
    assert opened.model_revision != ""
    assert opened.limits.window_tokens == 1200
    client.servers.send(claim(1, address, "a", "bcd"))
    await client.until(lambda: len(client.of(ClaimAnswered)) == 1)
    (answered,) = client.of(ClaimAnswered)
    (group,) = answered.answer.groups
    assert (answered.answer.claim_id, answered.answer.last) == (1, True)
    assert (list(group.indexes), list(group.tokens)) == ([0, 1], [3, 3])
    assert len(group.embeddings) == 2 * group.stride == 2 * 4 * opened.dimensions
    after = client.events[client.events.index(answered) + 1]
    assert isinstance(after, ServerChanged), "the answer comes before the state it brought"
    assert client.servers.missing() is None


async def test_many_claims_on_one_stream(port: int, connect: Connect) -> None:
    client = connect(f"127.0.0.1:{port}")
    address = await client.ready()
    for claim_id in range(1, 201):
        client.servers.send(claim(claim_id, address))
    await client.until(lambda: len(client.of(ClaimAnswered)) == 200)
    assert [event.answer.claim_id for event in client.of(ClaimAnswered)] == list(range(1, 201))
    assert client.servers.opened == 1


async def test_an_idle_server_says_so(port: int, connect: Connect) -> None:
    client = connect(f"127.0.0.1:{port}")
    address = await client.ready()
    client.servers.send(claim(1, address))
    await client.until(lambda: len(client.of(ClaimAnswered)) == 1)
    await client.until(lambda: client.of(ServerChanged)[-1].limits.busy_ms == 0)


async def test_a_text_that_is_refused_is_an_error_of_its_own(
    connect: Connect, real_port: int
) -> None:
    client = connect(f"127.0.0.1:{real_port}")
    address = await client.ready()
    client.servers.send(claim(1, address, "fine", "long " * 100_000))
    await client.until(lambda: any(e.answer.last for e in client.of(ClaimAnswered)))
    answers = [event.answer for event in client.of(ClaimAnswered)]
    assert [index for answer in answers for g in answer.groups for index in g.indexes] == [0]
    (failed,) = [failed for answer in answers for failed in answer.errors]
    assert (failed.index, failed.failure.reason) == (1, Reason.INVALID_FIELD)


def tarrying_ms(slow_ms: int) -> dict[str, str]:
    """Settings of a simulated engine whose pass takes long for a text with "tarry" in it."""
    return {
        "MODEL_SERVER_SIMULATED__FAULTS": '{"tarry": "slow"}',
        "MODEL_SERVER_SIMULATED__SLOW_MS": str(slow_ms),
    }


async def test_a_killed_server_loses_the_claims_of_its_pass(connect: Connect) -> None:
    port = free_port()
    with simulated_server(port, **tarrying_ms(60_000)) as process:
        client = connect(f"127.0.0.1:{port}")
        address = await client.ready()
        client.servers.send(claim(1, address, "tarry"))
        await client.until(lambda: any(1 in e.running for e in client.of(ServerChanged)))
        process.kill()
        await client.until(lambda: client.of(ServerChanged)[-1].phase is ServerPhase.DOWN)
        (lost,) = client.of(ClaimLost)
        assert (lost.claim_id, lost.loss) == (1, Loss.UNKNOWN)
    with simulated_server(port):
        address = await client.ready()
        client.servers.send(claim(2, address))
        await client.until(lambda: len(client.of(ClaimAnswered)) == 1)


async def test_a_terminated_server_drains(connect: Connect) -> None:
    port = free_port()
    with simulated_server(port, **tarrying_ms(300)) as process:
        client = connect(f"127.0.0.1:{port}")
        address = await client.ready()
        client.servers.send(claim(1, address, "tarry"))
        await client.until(lambda: any(1 in e.running for e in client.of(ServerChanged)))
        assert await asyncio.to_thread(process.terminate) == 0
        await client.until(lambda: client.of(ServerChanged)[-1].phase is ServerPhase.DOWN)
        phases = [event.phase for event in client.of(ServerChanged)]
        assert phases.index(ServerPhase.DRAINING) > phases.index(READY)
        assert client.of(ClaimLost) == []
        assert len(client.of(ClaimAnswered)) == 1


# What only the fake can be asked for -------------------------------------------------------------


async def test_a_dying_server_loses_its_claims_before_it_is_down(
    server: FakeModelServer, connect: Connect
) -> None:
    server.answering = False
    client = connect(f"127.0.0.1:{server.port}")
    address = await client.ready()
    client.servers.send(claim(1, address))
    client.servers.send(claim(2, address))
    await server.requests.get()
    await server.requests.get()
    await server.stop()
    await client.until(lambda: client.events[-1:] == client.of(ServerChanged)[-1:])
    await client.until(lambda: client.of(ServerChanged)[-1].phase is ServerPhase.DOWN)
    tail = client.events[-4:]
    assert isinstance(tail[0], ServerChanged)
    assert tail[0].phase is ServerPhase.DRAINING
    losses = client.of(ClaimLost)
    assert tail[1:3] == losses
    assert [(lost.claim_id, lost.loss) for lost in losses] == [
        (1, Loss.UNKNOWN),
        (2, Loss.UNKNOWN),
    ]
    assert "no server of minilm is ready" in str(client.servers.missing())


async def test_a_claim_for_a_dead_stream_was_not_started(
    server: FakeModelServer, connect: Connect
) -> None:
    client = connect(f"127.0.0.1:{server.port}")
    address = await client.ready()
    await server.stop()
    await client.until(lambda: client.of(ServerChanged)[-1].phase is ServerPhase.DOWN)
    client.servers.send(claim(1, address))
    client.servers.send(claim(2, "127.0.0.1:1"))
    assert client.of(ClaimLost) == [], "never from within send"
    await client.until(lambda: len(client.of(ClaimLost)) == 2)
    assert {lost.loss for lost in client.of(ClaimLost)} == {Loss.NOT_STARTED}


async def test_it_comes_back(server: FakeModelServer, connect: Connect) -> None:
    client = connect(f"127.0.0.1:{server.port}")
    await client.ready()
    await server.stop()
    await client.until(lambda: client.of(ServerChanged)[-1].phase is ServerPhase.DOWN)
    again = FakeModelServer(revision="r2")
    await again.start(server.port)
    address = await client.ready()
    assert client.of(ServerChanged)[-1].model_revision == "r2"
    client.servers.send(claim(7, address))
    await client.until(lambda: len(client.of(ClaimAnswered)) == 1)
    assert client.servers.opened == 2
    await again.stop()


async def test_a_cut_stream_loses_its_claims_and_is_opened_again(
    server: FakeModelServer, connect: Connect
) -> None:
    client = await with_a_claim_unanswered(server, connect)
    address = await client.ready()
    client.servers.cancel(Cancel(model=MODEL, server=address, message="silent for 15 s"))
    await client.until(lambda: len(client.of(ClaimLost)) == 1)
    (lost,) = client.of(ClaimLost)
    assert (lost.loss, lost.message) == (Loss.UNKNOWN, "silent for 15 s")
    assert client.servers.failed == 1
    await client.until(lambda: server.streams_opened == 2)
    await client.ready()
    assert server.streams_open == 1


@pytest.mark.parametrize(
    "response",
    [
        pb.EmbedStreamResponse(request_id=99, last=True),
        pb.EmbedStreamResponse(request_id=2, last=True),
    ],
)
async def test_an_answer_to_nothing_cuts_the_stream(
    server: FakeModelServer, connect: Connect, response: pb.EmbedStreamResponse
) -> None:
    client = await with_a_claim_unanswered(server, connect)
    server.send(response)
    await client.until(lambda: len(client.of(ClaimLost)) == 1)
    assert "which is not open" in client.of(ClaimLost)[0].message


async def test_the_first_message_must_be_a_state(connect: Connect) -> None:
    fake = FakeModelServer()
    fake.first_state = None
    await fake.start()
    client = connect(f"127.0.0.1:{fake.port}")
    await client.until(lambda: "not a ServerState" in str(client.servers.missing()))
    assert client.events == []
    await fake.stop()


async def test_another_models_server_is_not_used(connect: Connect) -> None:
    fake = FakeModelServer(model="other")
    await fake.start()
    client = connect(f"127.0.0.1:{fake.port}")
    await client.until(lambda: "NOT_FOUND: this server serves" in str(client.servers.missing()))
    assert client.events == []
    await fake.stop()


async def test_draining_servers_answer_what_they_hold_and_end(
    server: FakeModelServer, connect: Connect
) -> None:
    client = await with_a_claim_unanswered(server, connect)
    server.send(pb.EmbedStreamResponse(state=state(draining=True)))
    await client.until(lambda: client.of(ServerChanged)[-1].phase is ServerPhase.DRAINING)
    refused = pb.EmbedStreamResponse(request_id=1, last=True)
    refused.status.code = 14
    server.send(refused)
    server.send(None)
    await client.until(lambda: client.of(ServerChanged)[-1].phase is ServerPhase.DOWN)
    assert client.of(ClaimAnswered)[0].answer.refused is not None
    assert client.of(ClaimLost) == []
    assert client.servers.failed == 0


async def test_health_counts_while_the_stream_is_open(
    server: FakeModelServer, connect: Connect
) -> None:
    client = connect(f"127.0.0.1:{server.port}")
    await client.ready()
    await server.set_health(NOT_SERVING)
    await client.until(lambda: client.of(ServerChanged)[-1].phase is ServerPhase.DRAINING)
    server.send(pb.EmbedStreamResponse(state=state()))
    await client.until(lambda: len(client.of(ServerChanged)) == 3)
    assert client.of(ServerChanged)[-1].phase is ServerPhase.DRAINING
    await server.set_health(SERVING)
    await client.until(lambda: client.of(ServerChanged)[-1].phase is READY)
    assert client.servers.failed == 0


async def test_a_server_that_is_loading_is_waited_for(connect: Connect) -> None:
    fake = FakeModelServer()
    await fake.start()
    await fake.set_health(NOT_SERVING)
    client = connect(f"127.0.0.1:{fake.port}")
    await client.until(lambda: "not serving" in str(client.servers.missing()))
    assert client.events == []
    await fake.set_health(SERVING)
    await client.ready()
    assert client.servers.failed == 0
    await fake.stop()


async def test_running_claims_are_announced(server: FakeModelServer, connect: Connect) -> None:
    client = connect(f"127.0.0.1:{server.port}")
    await client.ready()
    server.send(pb.EmbedStreamResponse(state=state(busy_ms=15.5, running=(1, 2))))
    await client.until(lambda: len(client.of(ServerChanged)) == 2)
    changed = client.of(ServerChanged)[-1]
    assert (changed.limits.busy_ms, changed.running) == (15.5, (1, 2))


async def test_addresses_come_and_go(
    server: FakeModelServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = FakeModelServer()
    await second.start()
    first, other = f"127.0.0.1:{server.port}", f"127.0.0.1:{second.port}"
    found = [first]
    lookups = 0

    async def addresses(host: str, port: int) -> list[str]:
        nonlocal lookups
        lookups += 1
        client.emit([])
        if not found:
            raise OSError("no such name")
        return list(found)

    monkeypatch.setattr(model_servers, "_addresses", addresses)
    second.answering = False
    client = connect("servers:50051")
    await client.ready()
    found.append(other)
    await client.ready(2)
    client.servers.send(claim(1, other))
    request = await second.requests.get()

    found.remove(other)
    await client.until(lambda: client.servers.phases()[other] is ServerPhase.DRAINING)
    second.send(pb.EmbedStreamResponse(request_id=request.request_id, last=True))
    await client.until(lambda: other not in client.servers.phases())
    assert client.of(ClaimLost) == []
    await second.stream_closed.wait()
    assert second.streams_open == 0

    found.clear()  # a name server that fails takes nothing away
    lookups_done = lookups
    await client.until(lambda: lookups > lookups_done + 3)
    assert client.servers.phases() == {first: READY}
    await second.stop()


async def test_an_address_that_flaps_under_a_claim_is_closed_once(
    server: FakeModelServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{server.port}"
    found = [address]

    async def addresses(host: str, port: int) -> list[str]:
        return list(found)

    monkeypatch.setattr(model_servers, "_addresses", addresses)
    server.answering = False
    client = connect("servers:50051")
    await client.ready()
    client.servers.send(claim(1, address))
    request = await server.requests.get()
    for there in (False, True, False):
        found[:] = [address] if there else []
        phase = READY if there else ServerPhase.DRAINING
        await client.until(lambda: client.servers.phases()[address] is phase)  # noqa: B023
    server.send(pb.EmbedStreamResponse(request_id=request.request_id, last=True))
    await client.until(lambda: address not in client.servers.phases())
    found[:] = [address]
    await client.ready()
    assert client.of(ClaimLost) == []


async def test_localhost_is_one_server(server: FakeModelServer, connect: Connect) -> None:
    client = connect(f"localhost:{server.port}", f"127.0.0.1:{server.port}")
    await client.ready()
    assert list(client.servers.phases()) == [f"127.0.0.1:{server.port}"]
    assert server.streams_opened == 1
