from protos.embedding.v1 import query_pb2 as _query_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_BULK: _ClassVar[Priority]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_BULK: Priority

class Input(_message.Message):
    __slots__ = ("text", "input_type", "dimensions", "encoding", "truncate", "timeout_ms")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INPUT_TYPE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    text: str
    input_type: _query_pb2.InputType
    dimensions: int
    encoding: _query_pb2.Encoding
    truncate: bool
    timeout_ms: int
    def __init__(self, text: _Optional[str] = ..., input_type: _Optional[_Union[_query_pb2.InputType, str]] = ..., dimensions: _Optional[int] = ..., encoding: _Optional[_Union[_query_pb2.Encoding, str]] = ..., truncate: _Optional[bool] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "inputs", "priority", "float_values")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FLOAT_VALUES_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    priority: Priority
    float_values: bool
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., priority: _Optional[_Union[Priority, str]] = ..., float_values: _Optional[bool] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("embedding", "float_values", "status", "tokens", "dimensions", "encoding", "scale")
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    FLOAT_VALUES_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    embedding: bytes
    float_values: _containers.RepeatedScalarFieldContainer[float]
    status: _status_pb2.Status
    tokens: int
    dimensions: int
    encoding: _query_pb2.Encoding
    scale: float
    def __init__(self, embedding: _Optional[bytes] = ..., float_values: _Optional[_Iterable[float]] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., tokens: _Optional[int] = ..., dimensions: _Optional[int] = ..., encoding: _Optional[_Union[_query_pb2.Encoding, str]] = ..., scale: _Optional[float] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("outputs", "model", "model_revision", "queue_us", "inference_us")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_US_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    model: str
    model_revision: str
    queue_us: int
    inference_us: int
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., queue_us: _Optional[int] = ..., inference_us: _Optional[int] = ...) -> None: ...

class EmbedStreamRequest(_message.Message):
    __slots__ = ("request_id", "model", "exclusive", "priority", "inputs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    model: str
    exclusive: bool
    priority: Priority
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    def __init__(self, request_id: _Optional[int] = ..., model: _Optional[str] = ..., exclusive: _Optional[bool] = ..., priority: _Optional[_Union[Priority, str]] = ..., inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ...) -> None: ...

class EmbeddingGroup(_message.Message):
    __slots__ = ("encoding", "dimensions", "indexes", "tokens", "embeddings", "scales")
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    encoding: _query_pb2.Encoding
    dimensions: int
    indexes: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    embeddings: bytes
    scales: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, encoding: _Optional[_Union[_query_pb2.Encoding, str]] = ..., dimensions: _Optional[int] = ..., indexes: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., embeddings: _Optional[bytes] = ..., scales: _Optional[_Iterable[float]] = ...) -> None: ...

class InputError(_message.Message):
    __slots__ = ("index", "status")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    index: int
    status: _status_pb2.Status
    def __init__(self, index: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class ServerState(_message.Message):
    __slots__ = ("batch_tokens_target", "batch_tokens_max", "window_tokens", "inputs_max", "request_bytes_max", "busy_ms", "queued_tokens", "draining", "running")
    BATCH_TOKENS_TARGET_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_MAX_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    BUSY_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    batch_tokens_target: int
    batch_tokens_max: int
    window_tokens: int
    inputs_max: int
    request_bytes_max: int
    busy_ms: float
    queued_tokens: int
    draining: bool
    running: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch_tokens_target: _Optional[int] = ..., batch_tokens_max: _Optional[int] = ..., window_tokens: _Optional[int] = ..., inputs_max: _Optional[int] = ..., request_bytes_max: _Optional[int] = ..., busy_ms: _Optional[float] = ..., queued_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., running: _Optional[_Iterable[int]] = ...) -> None: ...

class EmbedStreamResponse(_message.Message):
    __slots__ = ("request_id", "groups", "errors", "last", "queue_us", "inference_us", "state", "status")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_US_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    groups: _containers.RepeatedCompositeFieldContainer[EmbeddingGroup]
    errors: _containers.RepeatedCompositeFieldContainer[InputError]
    last: bool
    queue_us: int
    inference_us: int
    state: ServerState
    status: _status_pb2.Status
    def __init__(self, request_id: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[EmbeddingGroup, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[InputError, _Mapping]]] = ..., last: _Optional[bool] = ..., queue_us: _Optional[int] = ..., inference_us: _Optional[int] = ..., state: _Optional[_Union[ServerState, _Mapping]] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class CurvePoint(_message.Message):
    __slots__ = ("tokens", "pass_ms")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PASS_MS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    pass_ms: float
    def __init__(self, tokens: _Optional[int] = ..., pass_ms: _Optional[float] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "model_revision", "dimensions", "matryoshka_dimensions", "input_tokens_max", "prompts", "encodings", "batch_tokens_target", "batch_tokens_max", "batch_tokens_target_source", "curve", "engine", "versions", "device", "precision")
    class PromptsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    MATRYOSHKA_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_TARGET_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_TARGET_SOURCE_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_revision: str
    dimensions: int
    matryoshka_dimensions: _containers.RepeatedScalarFieldContainer[int]
    input_tokens_max: int
    prompts: _containers.ScalarMap[str, str]
    encodings: _containers.RepeatedScalarFieldContainer[_query_pb2.Encoding]
    batch_tokens_target: int
    batch_tokens_max: int
    batch_tokens_target_source: str
    curve: _containers.RepeatedCompositeFieldContainer[CurvePoint]
    engine: str
    versions: _containers.ScalarMap[str, str]
    device: str
    precision: str
    def __init__(self, model: _Optional[str] = ..., model_revision: _Optional[str] = ..., dimensions: _Optional[int] = ..., matryoshka_dimensions: _Optional[_Iterable[int]] = ..., input_tokens_max: _Optional[int] = ..., prompts: _Optional[_Mapping[str, str]] = ..., encodings: _Optional[_Iterable[_Union[_query_pb2.Encoding, str]]] = ..., batch_tokens_target: _Optional[int] = ..., batch_tokens_max: _Optional[int] = ..., batch_tokens_target_source: _Optional[str] = ..., curve: _Optional[_Iterable[_Union[CurvePoint, _Mapping]]] = ..., engine: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., device: _Optional[str] = ..., precision: _Optional[str] = ...) -> None: ...
