from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InputType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INPUT_TYPE_UNSPECIFIED: _ClassVar[InputType]
    INPUT_TYPE_QUERY: _ClassVar[InputType]
    INPUT_TYPE_DOCUMENT: _ClassVar[InputType]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_FLOAT32: _ClassVar[Encoding]
    ENCODING_FLOAT16: _ClassVar[Encoding]
    ENCODING_INT8: _ClassVar[Encoding]
    ENCODING_UBINARY: _ClassVar[Encoding]
INPUT_TYPE_UNSPECIFIED: InputType
INPUT_TYPE_QUERY: InputType
INPUT_TYPE_DOCUMENT: InputType
ENCODING_UNSPECIFIED: Encoding
ENCODING_FLOAT32: Encoding
ENCODING_FLOAT16: Encoding
ENCODING_INT8: Encoding
ENCODING_UBINARY: Encoding

class Query(_message.Message):
    __slots__ = ("id", "model", "text", "input_type", "dimensions", "encoding", "truncate", "ttl_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INPUT_TYPE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    text: str
    input_type: InputType
    dimensions: int
    encoding: Encoding
    truncate: bool
    ttl_ms: int
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., input_type: _Optional[_Union[InputType, str]] = ..., dimensions: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., truncate: _Optional[bool] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class QueryError(_message.Message):
    __slots__ = ("code", "reason", "field", "message", "retryable", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    reason: str
    field: str
    message: str
    retryable: bool
    retry_after_ms: int
    def __init__(self, code: _Optional[str] = ..., reason: _Optional[str] = ..., field: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("topic", "partition", "offset")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("id", "model", "model_revision", "tokens", "embedding", "dimensions", "encoding", "scale", "error", "source", "queue_ms", "inference_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    model_revision: str
    tokens: int
    embedding: bytes
    dimensions: int
    encoding: Encoding
    scale: float
    error: QueryError
    source: Source
    queue_ms: float
    inference_ms: float
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., tokens: _Optional[int] = ..., embedding: _Optional[bytes] = ..., dimensions: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., scale: _Optional[float] = ..., error: _Optional[_Union[QueryError, _Mapping]] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., queue_ms: _Optional[float] = ..., inference_ms: _Optional[float] = ...) -> None: ...
