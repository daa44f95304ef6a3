"""Topics: that they are as the guarantees need them, and making them so.

Owns what the three topics must be like: they exist and differ, results and dead letters are not
compacted, the clock of the queries is the brokers', dead letters hold a query and its error.
Invariant: a check creates nothing (a producer would create a misspelt topic). Must not know
settings.

All functions block; run them off the loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from aggregator.adapters.kafka_config import KafkaOptions, admin_config

TIMEOUT_S = 15.0
LETTER_EXTRA_BYTES = 64 * 1024
"""What a dead letter's own headers may add to the record it holds."""

_BROKER_DEFAULT = -1
_LOG_TIME = "LogAppendTime"
_RETRY_S = 0.05
_OF_TRANSACTIONS = ("__transaction_state", "__consumer_offsets")
"""Kafka's own topics that each transaction of ours writes to."""
_NOT_TOLD = frozenset(
    {
        KafkaError._UNSUPPORTED_FEATURE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)
_NO_ANSWER = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
    }
)

TopicConfig = dict[str, str]


class TopicsError(Exception):
    """A topic is missing or unfit, or the brokers can't be asked; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """What was found. `warnings` are for the log."""

    message_bytes: Mapping[str, int]
    """`max.message.bytes` of the topics written to, by name."""
    cluster_id: str | None = None
    """None: the brokers don't tell."""
    warnings: list[str] = field(default_factory=list)

    @property
    def message_bytes_min(self) -> int:
        """The smallest limit."""
        return min(self.message_bytes.values())

    @property
    def message_bytes_max(self) -> int:
        """The largest limit."""
        return max(self.message_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPlan:
    """What to create. -1: as the broker has it by default."""

    queries: str
    results: str
    dlq: str
    partitions: int = _BROKER_DEFAULT
    replication_factor: int = _BROKER_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOutcome:
    """What became of one topic. `notes`: how an existing one differs from what we would make."""

    name: str
    created: bool
    partitions: int
    notes: list[str] = field(default_factory=list)


def check_topics(
    options: KafkaOptions,
    *,
    queries: str,
    results: str,
    dlq: str,
    fallback_max_message_bytes: int,
    transactions: bool = False,
    logger: logging.Logger | None = None,
) -> Topics:
    """Check the three at start; `fallback_max_message_bytes` stands in for a limit not readable.

    `transactions`: results and dead letters are to be written in such.

    Raises:
        TopicsError: the brokers don't answer, a topic is missing or not ours to see, two are one,
            or results or dead letters are compacted.
    """
    _differ(queries, results, dlq)
    admin = _Admin(options, logger)
    known = admin.partitions()
    for name in (queries, results, dlq):
        if name not in known:
            raise TopicsError(
                f"topic {name!r} does not exist at {options.bootstrap_servers} "
                "(`aggregator topics create` makes it)"
            )
    configs = {name: admin.config(name) for name in (queries, results, dlq)}
    _refuse_compacted(configs, results=results, dlq=dlq)
    warnings = _notes_on_letters(dlq, configs[dlq], configs[queries])
    limits = {}
    for name in (results, dlq):
        limit = _message_bytes(configs[name])
        if limit is None:
            limit = fallback_max_message_bytes
            warnings.append(
                f"the configuration of topic {name!r} can't be read: the setting "
                f"max_message_bytes ({limit}) stands in for its max.message.bytes"
            )
        limits[name] = limit
    if transactions:
        warnings += _notes_on_replicas(admin.least_replicas, [results, dlq, *_OF_TRANSACTIONS])
    return Topics(message_bytes=limits, cluster_id=admin.cluster_id, warnings=warnings)


def create_topics(
    options: KafkaOptions, plan: TopicPlan, *, logger: logging.Logger | None = None
) -> list[TopicOutcome]:
    """Create those of the three that are missing; report on those that exist. Idempotent.

    Raises:
        TopicsError: the brokers don't answer or refuse, two topics are one, or results or dead
            letters exist and are compacted.
    """
    _differ(plan.queries, plan.results, plan.dlq)
    admin = _Admin(options, logger)
    # Creating says of brokers that are not there that it has waited for a controller.
    admin.partitions()
    keep = {"cleanup.policy": "delete"}
    # The queries first: the dead letters' limit follows from theirs.
    made = {plan.queries: admin.create(plan, plan.queries, {"message.timestamp.type": _LOG_TIME})}
    admin.wait_until_known([plan.queries])
    queries_config = admin.config(plan.queries)
    limit = _message_bytes(queries_config)
    letters = dict(keep)
    if limit is not None:
        letters["max.message.bytes"] = str(limit + LETTER_EXTRA_BYTES)
    made[plan.results] = admin.create(plan, plan.results, keep)
    made[plan.dlq] = admin.create(plan, plan.dlq, letters)
    partitions = admin.wait_until_known(list(made))
    configs = {name: admin.config(name) for name in (plan.results, plan.dlq)}
    _refuse_compacted(configs, results=plan.results, dlq=plan.dlq)
    notes = {
        plan.queries: _notes_on_queries(plan.queries, queries_config),
        plan.results: [],
        plan.dlq: _notes_on_letters(plan.dlq, configs[plan.dlq], queries_config),
    }
    return [
        TopicOutcome(
            name=name, created=created, partitions=partitions[name], notes=list(notes[name])
        )
        for name, created in made.items()
    ]


class _Admin:
    """An admin client; its failures are sentences."""

    def __init__(self, options: KafkaOptions, logger: logging.Logger | None) -> None:
        config: dict[str, Any] = admin_config(options)
        if logger is not None:
            config["logger"] = logger
        self._address = options.bootstrap_servers
        self.cluster_id: str | None = None
        """Known after the first look at the topics, as `least_replicas` is."""
        self.least_replicas: dict[str, int] = {}
        """How many the partition with the fewest has, by topic."""
        try:
            self._client = AdminClient(config)
        except (KafkaException, TypeError, ValueError) as error:
            raise TopicsError(f"the Kafka client's configuration: {error}") from error

    def partitions(self) -> dict[str, int]:
        """Return the number of partitions of every topic that we may see."""
        try:
            # Of all topics: asking for one by name may create it.
            found = self._client.list_topics(timeout=TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() in _NO_ANSWER:
                raise TopicsError(f"no Kafka broker answers at {self._address}") from error
            raise TopicsError(
                f"looking up the topics at {self._address} failed: {_why(error)}"
            ) from error
        self.cluster_id = found.cluster_id
        topics = {name: topic.partitions for name, topic in found.topics.items() if not topic.error}
        self.least_replicas = {
            name: min(len(partition.replicas) for partition in partitions.values())
            for name, partitions in topics.items()
            if partitions
        }
        return {name: len(partitions) for name, partitions in topics.items()}

    def wait_until_known(self, names: Sequence[str]) -> dict[str, int]:
        """Wait until the brokers know topics just created; return `partitions()` of then."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            known = self.partitions()
            missing = [name for name in names if not known.get(name)]
            if not missing:
                return known
            if time.monotonic() > deadline:
                raise TopicsError(f"topics {missing} were created but did not appear")
            time.sleep(_RETRY_S)

    def config(self, name: str) -> TopicConfig | None:
        """Return a topic's configuration; None: not ours to read, or the broker can't tell."""
        resource = ConfigResource(ResourceType.TOPIC, name)
        asked = self._client.describe_configs([resource], request_timeout=TIMEOUT_S)
        try:
            entries = _result(asked[resource])
        except KafkaException as error:
            if error.args[0].code() in _NOT_TOLD:
                return None
            if error.args[0].code() in _NO_ANSWER:
                raise TopicsError(f"no Kafka broker answers at {self._address}") from error
            raise TopicsError(
                f"the configuration of topic {name!r} was not told: {_why(error)}"
            ) from error
        return {key: entry.value for key, entry in entries.items()}

    def create(self, plan: TopicPlan, name: str, config: TopicConfig) -> bool:
        """Create a topic; returns whether it was missing."""
        topic = NewTopic(name, plan.partitions, plan.replication_factor, config=dict(config))
        try:
            _result(self._client.create_topics([topic], request_timeout=TIMEOUT_S)[name])
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                return False
            raise TopicsError(f"topic {name!r} was not created: {_why(error)}") from error
        return True


def _result(future: Future[Any]) -> Any:
    return future.result(TIMEOUT_S + 5)


def _why(error: KafkaException) -> str:
    return str(error.args[0].str())


def _differ(*names: str) -> None:
    if len(set(names)) != len(names):
        raise TopicsError(f"queries, results and dead letters need three topics, not {names}")


def _message_bytes(config: TopicConfig | None) -> int | None:
    return None if config is None else int(config["max.message.bytes"])


def _compacted(config: TopicConfig | None) -> bool:
    return config is not None and "compact" in config["cleanup.policy"]


def _refuse_compacted(configs: Mapping[str, TopicConfig | None], *, results: str, dlq: str) -> None:
    """A compacted topic keeps one record a key, none without a value, and takes none without a key.

    Of dead letters the bare ones and the marks of a replay have no value, and those of keyless
    queries no key.
    """
    for what, name in (("results", results), ("dead letter", dlq)):
        if _compacted(configs[name]):
            raise TopicsError(
                f"{what} topic {name!r} is compacted: records of one key would be lost "
                "(set its cleanup.policy to delete)"
            )


def _notes_on_queries(name: str, config: TopicConfig | None) -> list[str]:
    if config is None or config["message.timestamp.type"] == _LOG_TIME:
        return []
    note = (
        f"topic {name!r} keeps its writers' timestamps: deadlines depend on their clocks "
        f"(message.timestamp.type={_LOG_TIME} makes it the brokers')"
    )
    return [note]


def _notes_on_letters(
    name: str, config: TopicConfig | None, queries_config: TopicConfig | None
) -> list[str]:
    own, queries = _message_bytes(config), _message_bytes(queries_config)
    if own is None or queries is None or own >= queries + LETTER_EXTRA_BYTES:
        return []
    note = (
        f"dead letter topic {name!r} has max.message.bytes {own}: letters of the largest "
        f"queries will lack their value ({queries + LETTER_EXTRA_BYTES} would hold them)"
    )
    return [note]


def _notes_on_replicas(least_replicas: Mapping[str, int], names: Sequence[str]) -> list[str]:
    alone = [name for name in names if least_replicas.get(name) == 1]
    if not alone:
        return []
    note = (
        f"one replica in {', '.join(alone)}: Kafka does not end a transaction in a partition "
        "without a leader (4.4.0 takes it for deleted), so results committed while their broker is "
        "away may stay hidden or be lost to readers; exactly_once needs 3 replicas"
    )
    return [note]


def outcome_lines(outcomes: Sequence[TopicOutcome]) -> list[str]:
    """Return what was done, for people."""
    lines = []
    for outcome in outcomes:
        verb = "created" if outcome.created else "exists"
        lines.append(f"{outcome.name}: {verb}, {outcome.partitions} partitions")
        lines.extend(f"  {note}" for note in outcome.notes)
    return lines
