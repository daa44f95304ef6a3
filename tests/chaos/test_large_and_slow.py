"""Results too large for their topic, backlogs, and model servers slower than anything expects.

Each is the small form of what `make bench-backlog` and `make soak` do for longer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from rich.console import Console

from ops.bench.backlog import run as work_off
from ops.bench.common import process_cpu_s, read_queries
from ops.bench.rss import rss_bytes
from ops.kafka.node import KafkaNode
from tests.conftest import running_node
from tests.harness.accounts import Sent
from tests.harness.kafka_stack import Stack
from tests.harness.ledger import Ledger
from tests.harness.processes import CommandProcess, free_port, simulated_server

pytestmark = [pytest.mark.kafka, pytest.mark.chaos]

MEBIBYTE = 1024 * 1024
RSS_MIB_MAX = 384
"""130 at rest, and what a few thousand queries take."""


@pytest.fixture
def node() -> Iterator[KafkaNode]:
    """One whose topics nobody else uses."""
    with running_node() as node:
        yield node


def send(ledger: Ledger, name: str, partition: int = 0, **fields: object) -> None:
    value = json.dumps({"text": f"about {name}", **fields}).encode()
    ledger.produce(Sent(name=name, value=value, reasons=ANY), partition)


ANY = frozenset({"OK", "EXPIRED", "RESULT_TOO_LARGE"})


def reasons(ledger: Ledger) -> dict[str, list[str]]:
    return {
        ledger.accounts.sent[place].name: [answer.reason for answer in answers]
        for place, answers in ledger.accounts.answers.items()
    }


def rebalances(process: CommandProcess) -> list[str]:
    """What became of the assignment after the first one."""
    events = [str(line.get("event")) for line in process.lines]
    return [event for event in events if event.startswith("partitions ")][1:]


# Large ------------------------------------------------------------------------------------------


def test_results_that_a_topic_no_longer_takes_are_named_one_by_one(kafka: KafkaNode) -> None:
    """The limit is lowered while an aggregator, which asked for it at its start, is at work.

    The broker then refuses whole produce batches for being batches, and records for their size.
    """
    port = free_port()
    settings = {"MODEL_SERVER_SIMULATED__DIMENSIONS": "512"}
    with simulated_server(port, **settings):
        stack = Stack(kafka.bootstrap_servers, port)
        with closing(stack.ledger()) as ledger, stack.aggregator() as process:
            send(ledger, "before")
            ledger.flush()
            ledger.wait_for_all()
            stack.configure(stack.names.results, "max.message.bytes", "3500")
            for number in range(400):
                # 512 numbers of float32 as base64 are 2.7 kB, as an array 5 kB and more.
                form = "array" if number % 10 == 0 else "base64"
                send(ledger, f"{form} {number}", number % 4, format=form)
            ledger.flush()
            ledger.wait_for_all()
            assert process.terminate() == 0
        ledger.accounts.close_period()
        assert ledger.accounts.judge() == []
        assert ledger.duplicates == 0
        found = reasons(ledger)
        large = {name for name, given in found.items() if given == ["RESULT_TOO_LARGE"]}
        assert large == {name for name in found if name.startswith("array")}
        assert {tuple(found[name]) for name in found.keys() - large} == {("OK",)}
        errors = [r.fields["error"] for rs in ledger.results.values() for r in rs if not r.ok]
        assert {error["code"] for error in errors} == {"OUT_OF_RANGE"}


# A backlog --------------------------------------------------------------------------------------


def test_a_backlog_is_answered_within_bounded_memory(node: KafkaNode) -> None:
    records = 20_000
    verdict = work_off(
        node.bootstrap_servers, read_queries(None, 4_000), records, Console(quiet=True)
    )
    assert (verdict.answered, verdict.failed, verdict.duplicates) == (records, 0, 0)
    assert verdict.idle_mib < verdict.peak_mib <= verdict.bound_mib


# Slow -------------------------------------------------------------------------------------------


def test_a_server_a_hundred_times_slower_loses_nothing(kafka: KafkaNode) -> None:
    """What has a time to live ends by that and by nothing else; the rest waits, in little memory.

    The aggregator knows the server as one that takes 15 ms a pass; then texts come of which every
    one takes as long as that, some ninety a pass.
    """
    ttl_ms, port = 4_000, free_port()
    stack = Stack(kafka.bootstrap_servers, port)
    slow = {
        "MODEL_SERVER_BATCH_TOKENS_TARGET": "600",
        "MODEL_SERVER_SIMULATED__FIXED_MS": "15",
        "MODEL_SERVER_SIMULATED__SLOW_MS": "15",
        "MODEL_SERVER_SIMULATED__FAULTS": json.dumps({"[[slow]]": "slow"}),
    }
    with (
        simulated_server(port, **slow),
        closing(stack.ledger()) as ledger,
        stack.aggregator(AGGREGATOR_TTL_MS="0") as process,
    ):
        for number in range(200):
            send(ledger, f"fast {number}", number % 4)
        ledger.flush()
        ledger.wait_for_all()
        for number in range(450):
            text = f"{number} [[slow]]"
            if number % 3 == 0:
                send(ledger, f"patient {number}", number % 4, text=text)
            else:
                send(ledger, f"hasty {number}", number % 4, text=text, ttl_ms=ttl_ms)
        ledger.flush()
        cpu_s, began = process_cpu_s(process.process.pid), time.monotonic()
        ledger.wait_for_all()
        cpu_s, waited_s = process_cpu_s(process.process.pid) - cpu_s, time.monotonic() - began
        assert rss_bytes(process.process.pid) < RSS_MIB_MAX * MEBIBYTE
        assert process.terminate() == 0
    ledger.accounts.close_period()
    assert ledger.accounts.judge() == []
    assert (ledger.duplicates, rebalances(process)) == (0, [])
    # A loop that spins takes a core; this one waits for answers.
    assert cpu_s < waited_s / 3
    found = reasons(ledger)
    assert {tuple(given) for name, given in found.items() if "hasty" not in name} == {("OK",)}
    hasty = [found[name] for name in found if "hasty" in name]
    assert hasty.count(["EXPIRED"]) + hasty.count(["OK"]) == len(hasty)
    # A pass at least is in time, and of six not all.
    assert 30 <= hasty.count(["OK"]) < len(hasty)
    assert ledger.accounts.expired_early(ttl_ms) == []


def test_work_longer_than_the_poll_interval_is_no_rebalance(kafka: KafkaNode) -> None:
    """The consumer's thread goes on polling while a pass takes longer than it may not poll."""
    poll_ms, pass_ms, port = 3_000, 5_000, free_port()
    settings = {
        "AGGREGATOR_MAX_POLL_INTERVAL_MS": str(poll_ms),
        "AGGREGATOR_SESSION_TIMEOUT_MS": str(poll_ms),
        "AGGREGATOR_REVOKE_DEADLINE_MS": "700",
    }
    slow = {
        "MODEL_SERVER_SIMULATED__FAULTS": json.dumps({"[[slow]]": "slow"}),
        "MODEL_SERVER_SIMULATED__SLOW_MS": str(pass_ms),
    }
    stacks = [Stack(kafka.bootstrap_servers, port, name) for name in ("classic", "consumer")]
    with ExitStack() as cleanup:
        cleanup.enter_context(simulated_server(port, **slow))
        running = [
            (
                cleanup.enter_context(closing(stack.ledger())),
                cleanup.enter_context(stack.aggregator(**settings)),
            )
            for stack in stacks
        ]
        for ledger, process in running:
            process.wait_for(lambda line: line.get("event") == "partitions assigned")
            for number in range(200):
                text = {"text": "[[slow]]"} if number == 100 else {}
                send(ledger, str(number), number % 4, **text)
            ledger.flush()
        for ledger, process in running:
            ledger.wait_for_all()
            assert process.terminate() == 0
            ledger.accounts.close_period()
            assert ledger.accounts.judge() == []
            assert (ledger.duplicates, ledger.errors, rebalances(process)) == (0, [], [])
            assert ledger.committed() == ledger.sent_ends()
