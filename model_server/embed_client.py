"""The client behind `model-server embed`: unary calls, results for people or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np
from google.rpc import code_pb2

from model_server.settings import MESSAGE_BYTES_MAX
from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1 import embedding_service_pb2_grpc as pb_grpc
from protos.embedding.v1 import query_pb2

TEXTS_A_CALL = 64
SHOWN_NUMBERS = 6
SHOWN_CHARACTERS = 40
_INPUT_TYPES = {
    None: query_pb2.INPUT_TYPE_UNSPECIFIED,
    "query": query_pb2.INPUT_TYPE_QUERY,
    "document": query_pb2.INPUT_TYPE_DOCUMENT,
}


class EmbedError(Exception):
    """The call failed; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """As on the command line."""

    model: str | None = None
    input_type: str | None = None
    dimensions: int | None = None
    truncate: bool = False
    as_json: bool = False
    timeout_s: float = 30.0


def embed_texts(
    server: str, texts: Sequence[str], options: EmbedOptions, echo: Callable[[str], None]
) -> int:
    """Embed texts in calls of some; prints a line each, in order. Returns how many were refused.

    Raises:
        EmbedError: a call failed.
    """
    refused = 0
    channel_options = (("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),)
    with grpc.insecure_channel(server, options=channel_options) as channel:
        stub = pb_grpc.EmbeddingServiceStub(channel)
        for start in range(0, len(texts), TEXTS_A_CALL):
            some = texts[start : start + TEXTS_A_CALL]
            try:
                response = stub.Embed(_request(some, options), timeout=options.timeout_s)
            except grpc.RpcError as error:
                raise EmbedError(f"{server}: {_reason(error)}") from error
            for text, output in zip(some, response.outputs, strict=True):
                refused += output.HasField("status")
                echo(_line(text, output, as_json=options.as_json))
    return refused


def _reason(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def _request(texts: Sequence[str], options: EmbedOptions) -> pb.EmbedRequest:
    request = pb.EmbedRequest()
    if options.model is not None:
        request.model = options.model
    for text in texts:
        one = request.inputs.add(text=text, truncate=options.truncate)
        if options.input_type is not None:
            one.input_type = _INPUT_TYPES[options.input_type]
        if options.dimensions is not None:
            one.dimensions = options.dimensions
    return request


def _line(text: str, output: pb.Output, *, as_json: bool) -> str:
    vector = np.frombuffer(output.embedding, dtype="<f4")
    if as_json:
        fields: dict[str, object] = {"text": text}
        if output.HasField("status"):
            code = code_pb2.Code.Name(output.status.code)
            fields["error"] = {"code": code, "message": output.status.message}
        else:
            fields |= {
                "tokens": output.tokens,
                "dimensions": output.dimensions,
                "embedding": [float(str(number)) for number in vector],
            }
        return json.dumps(fields, ensure_ascii=False)
    short = text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
    if output.HasField("status"):
        return f"{short}\n  {code_pb2.Code.Name(output.status.code)}: {output.status.message}"
    numbers = " ".join(f"{number:+.4f}" for number in vector[:SHOWN_NUMBERS])
    return f"{short}\n  {output.tokens} tokens, {output.dimensions} dimensions: {numbers} ..."
