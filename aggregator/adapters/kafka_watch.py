"""Clients that have lost their brokers for good, though these answer others.

Owns: when a client is called cut off. A broker that has just been restarted may answer a question
for metadata with topics and no brokers; librdkafka then forgets all of its own, the addresses that
it was started with too, and connects to nothing any more (its issue 5301, reported of 2.13, seen
with 2.16). Nothing that is called on such a client helps, so the process has to end and be started
again. Must not know whose client it watches, nor what its end means.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from aggregator.adapters.kafka_config import Config, KafkaOptions, admin_config

LOOK_EVERY_S = 5.0
"""How often a client tells the states of its connections."""
PATIENCE_S = 10.0
"""For so long a client may go without a connection after its brokers have answered another, if
they still do then. It tries again every two seconds at the latest."""
_ANSWER_TIMEOUT_S = 5.0
_LOG_CRITICAL = 2
_OWN = frozenset({"logical", "internal"})
"""Sources of what the client calls a broker and is none: the coordinator is one of the others."""


class ConnectionWatch:
    """Looks at one client's connections; when these are lost for good, says so once."""

    def __init__(
        self,
        client: str,
        options: KafkaOptions,
        on_cut_off: Callable[[str], None],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`client`: what to call it; `on_cut_off` is called where it calls back, inside poll."""
        self._client = client
        self._options = options
        self._on_cut_off = on_cut_off
        self._clock_s = clock_s
        self._lost_at_s: float | None = None
        """When the client was first seen without a connection."""
        self._answered_at_s: float | None = None
        """When the brokers answered another client after that."""
        self._confirmed = False
        """They did so again when the patience was over."""
        self._received: dict[str, int] = {}
        """Responses, by broker: a short connection may have come and gone between two looks."""
        self._question: threading.Thread | None = None
        self._told = False

    @property
    def connected(self) -> bool:
        """Whether the client had a connection when it last told; for any thread to ask."""
        return self._lost_at_s is None

    @property
    def config(self) -> Config:
        """What the client has to be configured with; it must be polled."""
        interval_ms = int(LOOK_EVERY_S * 1_000)
        return {"statistics.interval.ms": interval_ms, "stats_cb": self.look}

    def look(self, statistics: str) -> None:
        """Take in the client's statistics (STATISTICS.md of librdkafka)."""
        brokers = [b for b in json.loads(statistics)["brokers"].values() if b["source"] not in _OWN]
        received, self._received = self._received, {b["name"]: b["rx"] for b in brokers}
        heard = any(count > received.get(name, 0) for name, count in self._received.items())
        now_s = self._clock_s()
        if heard or any(b["state"] == "UP" for b in brokers):
            self._lost_at_s = self._answered_at_s = None
            self._confirmed = False
        elif self._lost_at_s is None:
            self._lost_at_s = now_s
        elif self._confirmed:
            self._tell(now_s - self._lost_at_s)
        elif self._answered_at_s is None or now_s - self._answered_at_s >= PATIENCE_S:
            self._ask(self._lost_at_s)

    def _tell(self, lost_s: float) -> None:
        if not self._told:
            self._told = True
            self._on_cut_off(
                f"the Kafka {self._client} has had no connection for {lost_s:.0f} s, though the "
                "brokers answer another client: it does not recover from that by itself "
                "(librdkafka #5301)"
            )

    def _ask(self, lost_at_s: float) -> None:
        """Ask the brokers with another client, on a thread: the answer may take long."""
        if self._question is None or not self._question.is_alive():
            self._question = threading.Thread(
                target=self._wait_for_answer, args=(lost_at_s,), name="kafka-watch", daemon=True
            )
            self._question.start()

    def _wait_for_answer(self, lost_at_s: float) -> None:
        answered = brokers_answer(self._options)
        if self._lost_at_s != lost_at_s:
            return  # it was connected meanwhile
        if not answered:
            self._answered_at_s = None
        elif self._answered_at_s is None:
            self._answered_at_s = self._clock_s()
        else:
            self._confirmed = True


def brokers_answer(options: KafkaOptions) -> bool:
    """Ask for metadata with a client of its own; return whether it named any broker."""
    try:
        config: dict[str, Any] = {**admin_config(options), "log_level": _LOG_CRITICAL}
        metadata = AdminClient(config).list_topics(timeout=_ANSWER_TIMEOUT_S)
    except KafkaException:
        return False
    return bool(metadata.brokers)
