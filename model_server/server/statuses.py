"""Failures as google.rpc.Status, with the details that clients read.

Every Status carries `ErrorInfo{reason, domain}`; UNAVAILABLE and RESOURCE_EXHAUSTED carry
`RetryInfo`, invalid fields `BadRequest`. Aborted and unary calls carry the Status in the trailing
metadata `grpc-status-details-bin` (https://github.com/grpc/proposal/blob/master/A66).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from model_server.core.failures import Failure

DOMAIN = "embedding.v1"
DETAILS_KEY = "grpc-status-details-bin"
_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


@lru_cache(maxsize=512)
def status_of(failure: Failure) -> status_pb2.Status:
    """The Status of a failure; shared between callers, so it must not be changed."""
    status = status_pb2.Status(code=int(failure.code), message=failure.message)
    info = error_details_pb2.ErrorInfo(reason=str(failure.reason), domain=DOMAIN)
    status.details.append(_packed(info))
    if failure.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=failure.field, description=failure.message
        )
        bad = error_details_pb2.BadRequest(field_violations=[violation])
        status.details.append(_packed(bad))
    if failure.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(failure.retry_after_ms)
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


async def abort(context: grpc.aio.ServicerContext[Any, Any], failure: Failure) -> NoReturn:
    """End a call with a failure; raises, as `context.abort` does."""
    details = status_of(failure).SerializeToString()
    await context.abort(
        _GRPC_CODES[int(failure.code)],
        failure.message,
        trailing_metadata=((DETAILS_KEY, details),),
    )
    raise RuntimeError("context.abort returned")
