"""Topics and a group of their own on a real broker, and aggregators that read them.

Made for one test: names are unique, so that tests share a broker without seeing each other.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType

from aggregator.adapters.kafka_config import KafkaOptions
from aggregator.adapters.kafka_topics import TopicPlan, create_topics
from tests.harness.ledger import Ledger, Names
from tests.harness.processes import CommandProcess


@dataclass
class Stack:
    """See the module."""

    bootstrap_servers: str
    server_port: int
    protocol: str = "consumer"
    partitions: int = 4
    suffix: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def __post_init__(self) -> None:
        """Make the topics as `aggregator topics create` does."""
        plan = TopicPlan(
            queries=self.names.queries,
            results=self.names.results,
            dlq=self.names.dlq,
            partitions=self.partitions,
            replication_factor=1,
        )
        create_topics(
            KafkaOptions(bootstrap_servers=self.bootstrap_servers, group_id=self.names.group), plan
        )

    @property
    def names(self) -> Names:
        """Of the topics and the group."""
        return Names(
            queries=f"queries-{self.suffix}",
            results=f"results-{self.suffix}",
            dlq=f"dlq-{self.suffix}",
            group=f"group-{self.suffix}",
        )

    def settings(self) -> dict[str, str]:
        """An aggregator's environment."""
        return {
            "AGGREGATOR_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "AGGREGATOR_MODELS": f"minilm=localhost:{self.server_port}",
            "AGGREGATOR_METRICS_LISTEN": "",
            "AGGREGATOR_GROUP_ID": self.names.group,
            "AGGREGATOR_GROUP_PROTOCOL": self.protocol,
            "AGGREGATOR_QUERIES_TOPIC": self.names.queries,
            "AGGREGATOR_RESULTS_TOPIC": self.names.results,
            "AGGREGATOR_DLQ_TOPIC": self.names.dlq,
        }

    def aggregator(self, **settings: str) -> CommandProcess:
        """Start one."""
        return CommandProcess("aggregator", "run", environment={**self.settings(), **settings})

    def ledger(self) -> Ledger:
        """Open the books."""
        return Ledger(self.bootstrap_servers, self.names)

    def configure(self, topic: str, key: str, value: str) -> None:
        """Change a topic's configuration."""
        entry = ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        admin.incremental_alter_configs([resource])[resource].result(30)
