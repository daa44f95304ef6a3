"""A record as librdkafka itself takes it: header names of any bytes.

confluent-kafka turns names into text; other clients do not ask what the bytes are. Calls the
library that is inside confluent-kafka's own module.
"""

from __future__ import annotations

import ctypes

from confluent_kafka import cimpl

_PRODUCER = 0
_TOPIC, _VALUE, _KEY, _MSGFLAGS, _TIMESTAMP, _HEADERS, _END = 1, 4, 5, 7, 8, 10, 0
"""RD_KAFKA_VTYPE_* of rdkafka.h."""
_COPY = 2
FLUSH_MS = 30_000


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(cimpl.__file__)
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
        getattr(library, name).restype = ctypes.c_void_p
    return library


def produce_with_raw_header(
    bootstrap_servers: str,
    topic: str,
    *,
    key: bytes | None,
    value: bytes | None,
    name: bytes,
    timestamp_ms: int,
) -> None:
    """Produce one record with one header of that name, and wait until it is on the topic."""
    library = _library()
    error = ctypes.create_string_buffer(512)
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    servers = bootstrap_servers.encode()
    assert library.rd_kafka_conf_set(conf, b"bootstrap.servers", servers, error, 512) == 0
    producer = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, conf, error, 512))
    assert producer.value, error.value
    headers = ctypes.c_void_p(library.rd_kafka_headers_new(1))
    size = ctypes.c_ssize_t
    assert library.rd_kafka_header_add(headers, name, size(len(name)), b"v", size(1)) == 0
    sizes = [ctypes.c_size_t(len(part or b"")) for part in (key, value)]
    arguments = (
        *(_TOPIC, topic.encode()),
        *(_KEY, key, sizes[0]),
        *(_VALUE, value, sizes[1]),
        *(_MSGFLAGS, _COPY),
        *(_TIMESTAMP, ctypes.c_int64(timestamp_ms)),
        *(_HEADERS, headers),
    )
    assert library.rd_kafka_producev(producer, *arguments, _END) == 0
    assert library.rd_kafka_flush(producer, FLUSH_MS) == 0
    assert library.rd_kafka_outq_len(producer) == 0
    library.rd_kafka_destroy(producer)
