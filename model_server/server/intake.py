"""The checks of a request as a whole, before it is tokenized."""

from __future__ import annotations

from model_server.core.failures import Failure, invalid, model_unknown
from model_server.core.limits import Limits
from model_server.engines.base import ModelInfo
from model_server.server.requests import Columns, Reader
from model_server.vectors import Encoding
from protos.embedding.v1 import embedding_service_pb2 as pb


class Intake:
    """Reads requests for one served model."""

    def __init__(self, model: str, info: ModelInfo) -> None:
        self._model = model
        self._reader = Reader(info)

    def read(
        self, request: pb.EmbedStreamRequest | pb.EmbedRequest, limits: Limits, arrived_ns: int
    ) -> Columns | Failure:
        """A request's inputs, or why all of it is refused."""
        if request.HasField("model") and request.model != self._model:
            return model_unknown(request.model, self._model)
        count = len(request.inputs)
        failure = limits.check_request(inputs=count, request_bytes=0)
        if failure is not None:
            return failure
        columns = self._reader.read(request.inputs, arrived_ns)
        failure = limits.check_request(inputs=count, request_bytes=sum(columns.text_bytes))
        if failure is not None:
            return failure
        if isinstance(request, pb.EmbedRequest) and request.float_values:
            return _check_float_values(columns) or columns
        return columns


def _check_float_values(columns: Columns) -> Failure | None:
    if all(encoding is Encoding.FLOAT32 for encoding in columns.encodings):
        return None
    return invalid("float_values", "float_values is for encoding float32 only.")
