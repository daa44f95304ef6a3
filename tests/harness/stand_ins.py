"""`kcat` and `grpcurl` for machines without them, as far as the README's commands need them.

Each takes the flags that the README uses and refuses all others, so that a changed example shows. A
real program on the PATH goes first; these keep the examples tested everywhere.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import grpc
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


def install(folder: Path) -> None:
    """Put a script for each program that this machine lacks into `folder`."""
    for name in ("kcat", "grpcurl"):
        if shutil.which(name) is None:
            script = folder / name
            module = f'-m tests.harness.stand_ins {name} "$@"'
            root = Path(__file__).parents[2]
            script.write_text(f'#!/bin/sh\nPYTHONPATH="{root}" exec "{sys.executable}" {module}\n')
            script.chmod(0o755)


def kcat(arguments: list[str]) -> None:
    """Produce lines of standard input, or print a topic from its beginning to its end."""
    parser = argparse.ArgumentParser("kcat")
    parser.add_argument("-P", dest="produce", action="store_true")
    parser.add_argument("-C", dest="consume", action="store_true")
    parser.add_argument("-b", dest="broker", required=True)
    parser.add_argument("-t", dest="topic", required=True)
    parser.add_argument("-o", dest="offset", choices=["beginning"])
    parser.add_argument("-e", dest="to_end", action="store_true")
    parser.add_argument("-q", dest="quiet", action="store_true")
    parser.add_argument("-f", dest="template", default="%s\\n")
    parsed = parser.parse_args(arguments)
    if parsed.produce:
        producer = Producer({"bootstrap.servers": parsed.broker})
        for line in sys.stdin:
            producer.produce(parsed.topic, line.rstrip("\n").encode())
        if producer.flush(10):
            raise SystemExit("not delivered")
    elif parsed.consume and parsed.to_end and parsed.offset:
        _print_topic(parsed.broker, parsed.topic, parsed.template)
    else:
        parser.error("not an example of the README")


def _print_topic(broker: str, topic: str, template: str) -> None:
    consumer = Consumer(
        {"bootstrap.servers": broker, "group.id": "kcat", "enable.partition.eof": True}
    )
    partitions = list(consumer.list_topics(topic, timeout=10).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    ends = 0
    while ends < len(partitions):
        message = consumer.poll(10)
        if message is None:
            raise SystemExit("the topic's end did not come")
        error = message.error()
        if error is not None:
            if error.code() != KafkaError._PARTITION_EOF:
                raise SystemExit(error.str())
            ends += 1
            continue
        pairs = message.headers() or []
        assert isinstance(pairs, list)
        headers = ",".join(
            f"{name}={value.decode()}" for name, value in pairs if isinstance(value, bytes)
        )
        value = message.value() or b""
        assert isinstance(value, bytes)
        line = template.replace("\\n", "\n").replace("%h", headers)
        sys.stdout.write(line.replace("%s", value.decode(errors="replace")))
    consumer.close()


def grpcurl(arguments: list[str]) -> None:
    """Call a unary method with a JSON request, knowing it by reflection only."""
    parser = argparse.ArgumentParser("grpcurl")
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", dest="request", default="{}")
    parser.add_argument("address")
    parser.add_argument("method")
    parsed = parser.parse_args(arguments)
    service_name, _, method_name = parsed.method.rpartition("/")
    with grpc.insecure_channel(parsed.address) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(service_name).FindMethodByName(method_name)
        request_class = message_factory.GetMessageClass(method.input_type)
        reply_class = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_unary(
            f"/{parsed.method}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=reply_class.FromString,
        )
        reply = call(json_format.ParseDict(json.loads(parsed.request), request_class()), timeout=30)
    sys.stdout.write(json_format.MessageToJson(reply, preserving_proto_field_name=True) + "\n")


if __name__ == "__main__":
    {"kcat": kcat, "grpcurl": grpcurl}[sys.argv[1]](sys.argv[2:])
