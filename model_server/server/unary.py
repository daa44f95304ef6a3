"""One `Embed` call: gathers the outputs of its inputs, however many passes they come from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from model_server.core.failures import Failure
from model_server.server.answers import Group
from model_server.server.calls import Held, Timing
from model_server.server.statuses import status_of
from protos.embedding.v1 import embedding_service_pb2 as pb


class UnaryCall:
    """Becomes a response, or the failure of the whole request."""

    def __init__(self, inputs: int, *, float_values: bool) -> None:
        self._float_values = float_values
        self._outputs: list[pb.Output | None] = [None] * inputs
        self._timing = Timing(queue_us=0, inference_us=0)
        self.done: asyncio.Future[pb.EmbedResponse | Failure] = (
            asyncio.get_running_loop().create_future()
        )

    def answer(
        self,
        held: Held,
        groups: Sequence[Group],
        failures: Sequence[tuple[int, Failure]],
        *,
        last: bool,
        timing: Timing | None,
    ) -> None:
        """Keep the outputs; the last ones complete the response. Times are of the last pass."""
        for group in groups:
            for row, index in enumerate(group.indexes):
                self._outputs[index] = self._output(group, row, held.columns.counts[index])
        for index, failure in failures:
            self._outputs[index] = pb.Output(status=status_of(failure))
        if timing is not None:
            self._timing = timing
        if last and not self.done.done():
            self.done.set_result(
                pb.EmbedResponse(
                    outputs=[output for output in self._outputs if output is not None],
                    queue_us=self._timing.queue_us,
                    inference_us=self._timing.inference_us,
                )
            )

    def _output(self, group: Group, row: int, tokens: int) -> pb.Output:
        output = pb.Output(tokens=tokens, dimensions=group.dimensions)
        output.encoding = int(group.encoding)  # type: ignore[assignment]
        data = group.encoded.rows[row].tobytes()
        if self._float_values:
            output.float_values.extend(np.frombuffer(data, dtype="<f4").tolist())
        else:
            output.embedding = data
        if group.encoded.scales is not None:
            output.scale = float(group.encoded.scales[row])
        return output

    def refuse(self, held: Held, failure: Failure) -> None:
        """The call ends with this failure."""
        del held
        if not self.done.done():
            self.done.set_result(failure)
