"""The demo as a newcomer runs it: what it prints, what it writes, and that it leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from ops.kafka.node import KafkaNode
from tests.harness.demo_process import DEADLINE_S, DemoProcess

QUICK = ("--engine", "simulated", "--size", "200", "--seconds", "1")


@pytest.mark.mock_broker
def test_every_query_gets_one_result_and_nothing_is_left_behind(tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    with DemoProcess(*QUICK, "--json", str(figures_file)) as demo:
        assert demo.ended() == 0, demo.output
        assert demo.processes() == []
        assert list(demo.folder.iterdir()) == []
        output = demo.output
    steps = re.findall(r"^ *\d+\.\d s  (.*)$", output, re.MULTILINE)
    assert steps[0].startswith("embedded Kafka broker at 127.0.0.1:")
    assert "keeps about 5 MB a partition" in steps[0]
    assert steps[-1] == "stopping"
    assert "queries, each with exactly one result" in output
    assert "Nearest to" not in output
    assert "No nearest texts: the simulated engine's vectors have no meaning" in output

    figures = json.loads(figures_file.read_text())
    delivery = figures["delivery"]
    assert delivery["sent"] == delivery["results_ok"] > 200
    assert (delivery["results_error"], delivery["missing"], delivery["duplicates"]) == (0, 0, 0)
    assert figures["flood_queries"] == 200
    # 200 inputs went through the passes of the flood, no fewer and no more.
    assert figures["passes"] * figures["pass_queries_mean"] == pytest.approx(200)
    target = figures["batch_tokens_target_min"]
    assert 0 < figures["pass_tokens_mean"] <= target == figures["batch_tokens_target_max"] == 600
    assert figures["pass_fill_ratio"] == pytest.approx(figures["pass_tokens_mean"] / 600)
    latency = figures["paced_latency"]
    assert 0 < latency["p50_ms"] <= latency["p90_ms"] <= latency["p99_ms"]
    assert figures["one_by_one_queries"] == 200
    assert figures["cosine_min"] >= 0.9999
    assert figures["estimate_error_after_ratio"] > 0
    assert figures["estimate_error_before_ratio"] > 0


@pytest.mark.mock_broker
def test_figures_on_standard_output_are_all_there_is_on_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aggregator", "demo", *QUICK, "--json", "-"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["flood_queries"] == 200
    assert "exactly one result" in done.stderr


def test_figures_that_cannot_be_written_are_refused_before_anything_starts(tmp_path: Path) -> None:
    missing = tmp_path / "nope" / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "aggregator", "demo", *QUICK, "--json", str(missing)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"{missing} can't be written: No such file or directory" in done.stderr


@pytest.mark.mock_broker
@pytest.mark.torch
def test_with_the_real_model_the_neighbours_mean_something(tmp_path: Path) -> None:
    queries = tmp_path / "queries.txt"
    groups = {
        "cooking": ["how to bake sourdough bread", "recipe for bread with yeast", "baking a loaf"],
        "space": [
            "when is the next lunar eclipse",
            "eclipse of the moon dates",
            "moon shadow date",
        ],
        "money": ["should i pay off my mortgage early", "home loan early repayment", "loan payoff"],
    }
    queries.write_text("\n".join(text for texts in groups.values() for text in texts), "utf-8")
    figures_file = tmp_path / "figures.json"
    with DemoProcess(
        "--queries", str(queries), "--seconds", "1", "--json", str(figures_file)
    ) as demo:
        assert demo.ended() == 0, demo.output
    figures = json.loads(figures_file.read_text())
    assert figures["engine"]["model"] == "all-MiniLM-L6-v2"
    assert figures["engine"]["dimensions"] == 384
    assert figures["cosine_min"] >= 0.9999
    assert len(figures["neighbourhoods"]) == 3
    for neighbourhood in figures["neighbourhoods"]:
        (group,) = (texts for texts in groups.values() if neighbourhood["text"] in texts)
        nearest = [near["text"] for near in neighbourhood["nearest"][:2]]
        assert set(nearest) <= set(group), neighbourhood


@pytest.mark.mock_broker
@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("embedded Kafka broker", "ctrl-c"),
        ("model server at", "ctrl-c"),
        ("model server at", "SIGKILL"),
        ("model server ready", "ctrl-c"),
        ("warm up", "ctrl-c"),
        ("warm up", "SIGTERM"),
        ("warm up", "SIGKILL"),
    ],
)
def test_it_leaves_no_process_whenever_it_is_ended(moment: str, how: str) -> None:
    with DemoProcess(*QUICK) as demo:
        demo.wait_for(moment)
        if how == "ctrl-c":
            demo.ctrl_c()
        else:
            demo.process.send_signal(signal.Signals[how])
        status = demo.ended()
        demo.until_gone()
        if how == "SIGKILL":
            assert status == -signal.SIGKILL
        else:
            assert (status, list(demo.folder.iterdir())) == (130, []), demo.output
            assert demo.output.rstrip().endswith("stopped")


@pytest.mark.mock_broker
def test_keep_says_how_to_send_and_ctrl_c_ends_it() -> None:
    with DemoProcess(*QUICK, "--keep") as demo:
        demo.wait_for("Ctrl-C ends it all")
        # Pasted as it stands, by a shell that knows no command of ours.
        command = demo.wait_for(r"\n +(\S.* send -b .*)").group(1)
        sent = subprocess.run(
            ["sh", "-c", command],
            env={**os.environ, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert sent.returncode == 0, sent.stderr
        assert "384 dims" in sent.stdout
        for tool in ("aggregator tail -b", "kcat -P -b", "kcat -C -q -b", "grpcurl -plaintext"):
            assert tool in demo.output
        demo.ctrl_c()
        assert demo.ended() == 0, demo.output
        assert (demo.processes(), list(demo.folder.iterdir())) == ([], [])


@pytest.mark.mock_broker
def test_a_query_without_a_vector_fails_the_demo_and_says_why(tmp_path: Path) -> None:
    queries = tmp_path / "queries.txt"
    queries.write_text(f"fine\n{'x' * 200_000}\n")
    with DemoProcess(*QUICK, "--queries", str(queries)) as demo:
        assert demo.ended() == 1, demo.output
        # How many are sent in the paced phase follows from the capacity of the moment.
        counts = r"\d+ of \d+  [1-9]\d* errors?, 0 without a result, 0 doubled"
        assert re.search(counts, demo.output), demo.output
        assert "Error: not every query got exactly one vector; the first error: " in demo.output
        assert "INVALID_ARGUMENT  INVALID_FIELD (field text)" in demo.output


@pytest.mark.mock_broker
def test_a_model_that_is_not_there_is_told_with_the_servers_log() -> None:
    with DemoProcess("--model", "./no-such-folder") as demo:
        assert demo.ended() == 1
        assert "Error: the model server ended by itself with status 1" in demo.output
        assert "no-such-folder" in demo.output
        (folder,) = demo.folder.iterdir()
        assert f"The logs are in {folder}" in demo.output
        assert (folder / "model-server.log").exists()
        assert demo.processes() == []


@pytest.mark.kafka
def test_with_a_kafka_that_is_there_it_keeps_to_topics_of_its_own(
    kafka: KafkaNode, tmp_path: Path
) -> None:
    figures_file = tmp_path / "figures.json"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    before = admin.list_topics(timeout=10).topics.keys()
    # The second run finds its topics, and the results of the first one.
    for _ in range(2):
        with DemoProcess(
            *QUICK, "--broker", kafka.bootstrap_servers, "--json", str(figures_file)
        ) as demo:
            assert demo.ended() == 0, demo.output
            assert f"Kafka at {kafka.bootstrap_servers}, topics aggregator-demo." in demo.output
        figures = json.loads(figures_file.read_text())
        assert figures["broker"] == kafka.bootstrap_servers
        delivery = figures["delivery"]
        assert delivery["sent"] == delivery["results_ok"] > 200
        assert (delivery["results_error"], delivery["duplicates"]) == (0, 0)
    made = admin.list_topics(timeout=10).topics.keys() - before - {"__consumer_offsets"}
    assert made == {f"aggregator-demo.{name}" for name in ("queries", "results", "dlq")}


def test_a_broker_that_is_not_there_is_one_clear_line() -> None:
    with DemoProcess(*QUICK, "--broker", "127.0.0.1:1") as demo:
        assert demo.ended() == 1
        assert "Error: no Kafka broker answers at 127.0.0.1:1\n" in demo.output
        assert demo.processes() == []


def test_queries_that_cant_be_read_are_refused_at_once(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    with DemoProcess("--queries", str(empty)) as demo:
        assert demo.ended() == 1
        expected = "one a line is expected, or id TAB text"
        assert demo.output == f"Error: {empty} holds no queries: {expected}\n"
        assert list(demo.folder.iterdir()) == []
