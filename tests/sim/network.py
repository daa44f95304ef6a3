"""One stream between an aggregator and a model server.

Messages of each direction arrive in their order, late at times; a broken stream is noticed by each
end in its own time. It must not know what the messages say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from aggregator.core.effects import Dispatch
from aggregator.core.query import Query
from protos.embedding.v1 import embedding_service_pb2 as pb
from tests.sim.doses import Doses
from tests.sim.kernel import MS, Kernel, Owner


class Truth(Protocol):
    """Who remembers what was done to queries."""

    def hit(self, queries: Iterable[Query], what: str) -> None:
        """A claim with these came to nothing, or was answered with a lie or an odd status."""

    def alone_hit(self, query: Query) -> None:
        """A stream or an engine died with this query alone in an exclusive request."""

    def violated(self, guarantee: int, what: str) -> None: ...


class Client(Protocol):
    """The aggregator's end of a stream."""

    @property
    def owner(self) -> Owner: ...
    def received(self, connection: Connection, response: pb.EmbedStreamResponse) -> None: ...
    def ended(self, connection: Connection, message: str) -> None: ...


class Server(Protocol):
    """The server's end of a stream."""

    owner: Owner

    def arrived(self, connection: Connection, request: pb.EmbedStreamRequest) -> None: ...
    def note_unsent(self, dispatch: Dispatch) -> None: ...
    def noticed_closed(self, connection: Connection) -> None: ...


class Connection:
    """One stream between an aggregator and a server."""

    def __init__(self, kernel: Kernel, doses: Doses, client: Client, stream: int) -> None:
        self.kernel = kernel
        self.client = client
        self.stream = stream
        self.open = True
        self.stalled_until_ns = 0
        self.claims: dict[int, Dispatch] = {}
        """What its client has no last answer to, by request id: the world's own knowledge."""
        self.answered: set[int] = set()
        """Of these, what the server has sent the last answer to."""
        self.server: Server
        self._doses = doses
        self._up_ns = 0
        self._down_ns = 0

    def _way_ns(self, last_ns: int) -> int:
        kernel = self.kernel
        at_ns = kernel.now_ns + kernel.delay_ns(100_000, 900_000)
        if kernel.chance(self._doses.chance("message late")):
            kernel.fire("message late")
            at_ns += kernel.delay_ns(MS, 300 * MS)
        return max(at_ns, last_ns + 1, self.stalled_until_ns)

    def to_server(self, request: pb.EmbedStreamRequest, dispatch: Dispatch) -> None:
        self.claims[dispatch.claim_id] = dispatch
        self._up_ns = self._way_ns(self._up_ns)
        server = self.server
        owner = server.owner
        self.kernel.at(self._up_ns, owner, "request", lambda: server.arrived(self, request))

    def to_client(self, response: pb.EmbedStreamResponse) -> None:
        self._down_ns = self._way_ns(self._down_ns)
        owner = self.client.owner
        self.kernel.at(
            self._down_ns, owner, "response", lambda: self.client.received(self, response)
        )

    def end(self, message: str, *, by_server: bool) -> None:
        """Nothing more is sent; what is under way to the client still comes, if the server ends."""
        if not self.open:
            return
        self.open = False
        kernel = self.kernel
        self._down_ns = max(self._way_ns(self._down_ns) if by_server else kernel.now_ns, 0)
        owner = self.client.owner
        kernel.at(self._down_ns, owner, "stream ends", lambda: self.client.ended(self, message))

    def cut(self, message: str) -> None:
        """It breaks: what is under way to the client is lost, the server notices a little later."""
        if not self.open:
            return
        self.end(message, by_server=False)
        self.server.noticed_closed(self)
