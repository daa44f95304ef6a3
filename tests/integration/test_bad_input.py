"""Bad input of every kind, end to end on real Apache Kafka: one record in, one result out.

Everything is sent to one stack, poison between sound queries, before the first test; the tests
judge what came of it (`tests.harness.bad_input_stack`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ops.kafka.node import KafkaNode
from tests.conftest import topic_factory
from tests.harness.bad_input import JSON, PROTOBUF, Case
from tests.harness.bad_input_faults import LIES, MATES, ONE_OF_TWO
from tests.harness.bad_input_records import FLOOD, LONG_KEY
from tests.harness.bad_input_stack import CASES, SOUND, Evidence, Record, observe

pytestmark = pytest.mark.kafka

GOOD = {**SOUND, **MATES}
LETTERED = {name: case for name, case in CASES.items() if case.outcome.stage}
ERRORS = "__aggregator.errors."


@pytest.fixture(scope="module")
def evidence(kafka: KafkaNode, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    folder: Path = tmp_path_factory.mktemp("bad-input")
    return observe(kafka.bootstrap_servers, topic_factory(kafka), folder)


def default_id(evidence: Evidence, name: str) -> str:
    return f"{evidence.topics[0]}-0-{evidence.offset_of(name)}"


@pytest.mark.parametrize("name", CASES)
def test_it_has_one_result_as_the_contract_says(evidence: Evidence, name: str) -> None:
    case, record = CASES[name], evidence.result_of(name)
    check_value(case, record)
    identifier = case.id if case.id is not None else default_id(evidence, name)
    assert record.result is not None
    assert record.result.id == identifier
    assert record.result.fields["source"]["topic"] == evidence.topics[0]
    assert record.key == (identifier.encode() if case.key is None or case.bare else case.key)
    assert record.headers == [
        ("content-type", PROTOBUF if case.protobuf else JSON),
        ("embedding-status", case.outcome.code.encode()),
        ("embedding-id", identifier.encode()),
        *case.passed_on,
    ]


def check_value(case: Case, record: Record) -> None:
    result, outcome = record.result, case.outcome
    assert result is not None
    error = result.fields.get("error", {"reason": "OK"})
    told = (result.status, error["reason"], error.get("field"))
    assert told == (outcome.code, case.reason, case.field), error
    if case.reason == "OK":
        assert result.vector is not None
        assert result.fields["model_revision"]
        assert case.tokens in {None, result.tokens}
        assert case.dimensions in {None, len(result.vector)}
        return
    assert error["code"] == outcome.code
    assert 0 < len(error["message"]) <= 500
    assert error["retryable"] is outcome.retryable
    assert ("retry_after_ms" in error) == outcome.retry_after
    assert error.get("retry_after_ms", 1) > 0


@pytest.mark.parametrize("name", LETTERED)
def test_its_dead_letter_is_the_record_and_why(evidence: Evidence, name: str) -> None:
    case, letter = CASES[name], evidence.letter_of(name)
    assert letter is not None
    assert told_in(letter) == told_of(evidence, name, case)
    attempts = int(letter.header(ERRORS + "attempts") or b"")
    assert attempts == case.attempts or (case.attempts is None and attempts >= 0)
    assert letter.header(ERRORS + "message")
    sent_ms = evidence.sent_ms[evidence.offset_of(name)]
    assert letter.header(ERRORS + "timestamp") == str(sent_ms).encode()
    if case.letter_bare:
        check_bare(case, letter, default_id(evidence, name))
    else:
        assert (letter.key, letter.value) == (case.key, case.value)
        assert letter.headers[: len(case.headers)] == case.headers


def check_bare(case: Case, letter: Record, identifier: str) -> None:
    large = case.key is not None and len(case.key) > len(LONG_KEY)
    assert letter.key == (identifier.encode() if large else case.key)
    assert letter.value is None
    assert case.value is not None
    digest = hashlib.sha256(case.value).hexdigest()
    assert letter.header(ERRORS + "value.size") == str(len(case.value)).encode()
    assert letter.header(ERRORS + "value.sha256") == digest.encode()
    assert letter.headers[: len(case.passed_on)] == case.passed_on


def told_in(letter: Record) -> dict[str, bytes | None]:
    names = ("topic", "partition", "offset", "stage", "code", "reason")
    return {name: letter.header(ERRORS + name) for name in names}


def told_of(evidence: Evidence, name: str, case: Case) -> dict[str, bytes]:
    told = {
        "topic": evidence.topics[0],
        "partition": "0",
        "offset": str(evidence.offset_of(name)),
        "stage": case.outcome.stage,
        "code": case.outcome.code,
        "reason": case.reason,
    }
    return {key: value.encode() for key, value in told.items()}


def test_nothing_else_is_a_dead_letter(evidence: Evidence) -> None:
    lettered = {evidence.sent[offset] for offset in evidence.letters}
    assert lettered == {*LETTERED, *FLOOD}


def test_every_record_has_one_result(evidence: Evidence) -> None:
    assert {offset: len(records) for offset, records in evidence.results.items()} == dict.fromkeys(
        evidence.sent, 1
    )
    assert len(evidence.sent) == len(CASES) + len(FLOOD) + len(GOOD) + 1 + len(evidence.recovered)


def test_a_flood_of_garbage_is_refused_record_by_record(evidence: Evidence) -> None:
    statuses = {
        record.result and record.result.fields["error"]["reason"] for record in flood(evidence)
    }
    assert statuses == {"UNDECODABLE"}


def flood(evidence: Evidence) -> list[Record]:
    offsets = [offset for offset, name in evidence.sent.items() if name in FLOOD]
    return [record for offset in offsets for record in evidence.results[offset]]


def test_poison_fails_none_of_its_mates(evidence: Evidence) -> None:
    assert failed(evidence, list(GOOD)) == []


def failed(evidence: Evidence, names: list[str]) -> list[str]:
    """Those that have no vector."""
    found = [(name, evidence.result_of(name).result) for name in names]
    return [
        f"{name}: {result and result.as_line()}"
        for name, result in found
        if not (result and result.ok)
    ]


def test_mates_of_poison_have_the_vector_that_they_have_alone(evidence: Evidence) -> None:
    vectors = [evidence.result_of(name).result for name in SOUND]
    assert len({tuple(result.fields["embedding"]) for result in vectors if result}) == 1


def test_afterwards_all_is_well(evidence: Evidence) -> None:
    assert failed(evidence, evidence.recovered) == []
    assert len(evidence.recovered) == len(LIES)
    assert evidence.committed == evidence.end
    assert (evidence.alive, evidence.server_alive) == (True, True)
    assert evidence.exit_status == 0
    bugs = [line for line in evidence.lines if "bug" in str(line.get("event")) or "text" in line]
    assert bugs == []


def test_a_bad_answer_is_retried_on_another_server(evidence: Evidence) -> None:
    told = [server.lies_told for server in evidence.liars if server.model == ONE_OF_TWO]
    assert sorted(told) == [0, 1]
