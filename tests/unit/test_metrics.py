"""The declared table, bounded labels, exposition, and the health endpoints."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import struct
import threading
import urllib.error
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from aggregator.telemetry import metrics as m
from aggregator.telemetry.health import HealthError, HealthServer
from aggregator.telemetry.logs import configure_logs


def exposed(metrics: m.Metrics) -> dict[str, float]:
    """The samples of the exposition, by name with labels."""
    text = m.render(m.registry_of(metrics)).decode()
    return {
        sample.name + (json.dumps(sample.labels, sort_keys=True) if sample.labels else ""): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_is_declared_once_and_named_by_prometheus_rules() -> None:
    names = [metric.name for metric in m.TABLE]
    assert len(set(names)) == len(names) > 20
    for metric in m.TABLE:
        assert metric.name.startswith("aggregator_")
        assert metric.name.endswith("_total") == (metric.kind is m.Kind.COUNTER)
        assert not metric.name.endswith(("_ms", "_us", "_count"))
        assert metric.help.endswith((".", "runs."))
        assert list(metric.bounds) == sorted(metric.bounds)
        for label in metric.labels:
            assert label in ("model", "version") or m.LABEL_VALUES[label]


def test_counters_gauges_and_histograms_are_exposed() -> None:
    metrics = m.Metrics(models=["minilm"], version="1.2.3")
    metrics.add(m.RESULTS, 3, "minilm", "OK")
    metrics.add(m.RESULTS, 2, "minilm", "OK")
    metrics.set(m.BUFFER_BYTES, 7)
    metrics.observe(m.LATENCY_SECONDS, [0.0005, 0.001, 0.02, 1000.0])
    samples = exposed(metrics)
    assert samples['aggregator_results_total{"code": "OK", "model": "minilm"}'] == 5
    assert samples["aggregator_buffer_bytes"] == 7
    assert samples['aggregator_query_seconds_bucket{"le": "0.001"}'] == 2
    assert samples['aggregator_query_seconds_bucket{"le": "0.02"}'] == 3
    assert samples['aggregator_query_seconds_bucket{"le": "+Inf"}'] == 4
    assert samples["aggregator_query_seconds_count"] == 4
    assert samples["aggregator_query_seconds_sum"] == pytest.approx(1000.0215)
    assert samples["aggregator_records_lost_total"] == 0
    assert samples['aggregator_build_info{"version": "1.2.3"}'] == 1
    assert metrics.count(m.LATENCY_SECONDS) == 4


@given(st.lists(st.sampled_from([0.0, 0.001, 0.0011, 0.5, 60.0, 61.0]) | st.floats(0, 100)))
def test_histograms_agree_with_counting_one_by_one(values: list[float]) -> None:
    metrics = m.Metrics(models=[])
    metrics.observe(m.LATENCY_SECONDS, values)
    samples = exposed(metrics)
    for bound in m.LATENCY_SECONDS.bounds:
        counted = samples.get(f'aggregator_query_seconds_bucket{{"le": "{bound}"}}', 0)
        assert counted == sum(value <= bound for value in values)
    assert samples.get("aggregator_query_seconds_count", 0) == len(values)


def test_label_values_outside_their_set_are_counted_together() -> None:
    metrics = m.Metrics(models=["minilm"])
    for number in range(100):
        metrics.add(m.RESULTS, 1, f"made-up-{number}", "OK")
        metrics.observe(m.CLAIM_QUERIES, [1], f"made-up-{number}")
    assert metrics.value(m.RESULTS, m.OTHER, "OK") == 100
    assert metrics.count(m.CLAIM_QUERIES, m.OTHER) == 100
    with pytest.raises(ValueError, match="has the labels"):
        metrics.add(m.RESULTS, 1, "minilm")


def test_logs_are_json_lines() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    configure_logs("json", "info", stream=out).info("claim", claim_id=7, reason="Größe")
    out.seek(0)
    line = json.loads(out.read())
    assert line["reason"] == "Größe"
    assert (line["event"], line["claim_id"], line["level"]) == ("claim", 7, "info")


async def get(port: int, path: str) -> tuple[int, str]:
    def call() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(call)


async def test_health_endpoints() -> None:
    missing: list[str] = []
    metrics = m.Metrics(models=["minilm"])
    registry = m.registry_of(metrics)
    health = HealthServer(
        "127.0.0.1:0",
        loop=asyncio.get_running_loop(),
        missing=lambda: missing,
        refresh=lambda: metrics.set(m.BUFFER_BYTES, 42),
        render=lambda: m.render(registry),
    )
    try:
        assert await get(health.port, "/readyz") == (200, "ok\n")
        missing.append("no server of minilm is ready")
        assert await get(health.port, "/readyz") == (503, "no server of minilm is ready\n")
        assert (await get(health.port, "/livez"))[0] == 200
        assert "aggregator_buffer_bytes 42.0" in (await get(health.port, "/metrics"))[1]
        assert (await get(health.port, "/"))[0] == 404
        with pytest.raises(HealthError, match=r"metrics_listen 127\.0\.0\.1:\d+: Address already"):
            HealthServer(
                f"127.0.0.1:{health.port}",
                loop=asyncio.get_running_loop(),
                missing=list,
                refresh=lambda: None,
                render=lambda: b"",
            )
    finally:
        await asyncio.to_thread(health.close)


async def test_a_client_that_resets_its_connection_leaves_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    health = HealthServer(
        "127.0.0.1:0",
        loop=asyncio.get_running_loop(),
        missing=list,
        refresh=lambda: None,
        render=lambda: b"",
    )
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", health.port)) as client:
            client.send(b"GET /livez")
            # A close that sends RST.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert (await get(health.port, "/livez"))[0] == 200
    for thread in threading.enumerate():
        if "process_request" in thread.name:
            await asyncio.to_thread(thread.join)
    await asyncio.to_thread(health.close)
    assert capfd.readouterr().err == ""
