"""Settings: sources and their order, short forms, unknown names, relations, secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aggregator.settings import HIDDEN, SettingsError, load_settings, printable


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGGREGATOR_MODELS", "minilm=localhost:50051")


def test_defaults_and_short_models() -> None:
    settings = load_settings()
    assert settings.models["minilm"].servers == ("localhost:50051",)
    assert settings.model_default == "minilm"
    assert settings.window_records_max == 10_000


@pytest.mark.parametrize(
    "text",
    [
        "a=x:1,y:2; b=z:3",
        '{"a": {"servers": ["x:1", "y:2"]}, "b": {"servers": "z:3"}}',
    ],
)
def test_models_take_the_short_form_or_json(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("AGGREGATOR_MODELS", text)
    monkeypatch.setenv("AGGREGATOR_DEFAULT_MODEL", "b")
    settings = load_settings()
    assert settings.models["a"].servers == ("x:1", "y:2")
    assert settings.models["b"].servers == ("z:3",)


def test_nested_variables_add_to_the_short_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGGREGATOR_MODELS__minilm__REVISION", "abc")
    model = load_settings().models["minilm"]
    assert (model.revision, model.servers) == ("abc", ("localhost:50051",))


@pytest.mark.parametrize("text", ["ce_*, x", '["ce_*", "x"]'])
def test_lists_take_commas_or_json(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("AGGREGATOR_HEADERS_DROP", text)
    assert load_settings().headers_drop == ("ce_*", "x")


def test_environment_overrides_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "aggregator.toml"
    config.write_text(
        'ttl_ms = 5\nlead_ms = 4\n[kafka]\nlinger.ms = 3\n"fetch.wait.max.ms" = 9\n'
        '[models.other]\nservers = ["o:1"]\n'
    )
    monkeypatch.setenv("AGGREGATOR_TTL_MS", "7")
    monkeypatch.setenv("AGGREGATOR_KAFKA__linger.ms", "1")
    monkeypatch.setenv("AGGREGATOR_DEFAULT_MODEL", "other")
    settings = load_settings(config)
    assert (settings.ttl_ms, settings.lead_ms) == (7, 4)
    assert settings.kafka == {"linger.ms": "1", "fetch.wait.max.ms": 9}
    assert sorted(settings.models) == ["minilm", "other"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AGGREGATOR_TTL", "5", "did you mean AGGREGATOR_TTL_MS"),
        ("aggregator_ttl", "5", "unknown setting aggregator_ttl"),
        ("AGGREGATOR_TTL_MS__X", "5", "unknown setting"),
        ("AGGREGATOR_MODELS__minilm__SERVER", "x:1", "unknown setting"),
        ("AGGREGATOR_GRPC_PORT", "50051", "unknown setting AGGREGATOR_GRPC_PORT"),
        ("AGGREGATOR_TTL_MS", "soon", "ttl_ms: "),
        ("AGGREGATOR_TTL_MS", "-1", "ttl_ms: "),
        ("AGGREGATOR_MODELS", "minilm", "neither JSON nor NAME=HOST:PORT"),
        ("AGGREGATOR_MODELS", "{", "not JSON"),
        ("AGGREGATOR_MODELS", "minilm=", "models.minilm.servers"),
        ("AGGREGATOR_POLL_RECORDS_MAX", "2000000", "less than or equal to 1000000"),
        ("AGGREGATOR_DRAIN_DEADLINE_MS", "9" * 15, "less than or equal to 604800000"),
        ("AGGREGATOR_MODELS", "minilm=localhost", "not HOST:PORT"),
        ("AGGREGATOR_MODELS", "a=localhost:1,b=localhost:2", "models are separated by ';'"),
        ("AGGREGATOR_MODELS", "a=x:1;b=y:1", "default_model is required"),
        ("AGGREGATOR_DEFAULT_MODEL", "other", "default_model 'other' is not in models"),
        ("AGGREGATOR_RESULTS_TOPIC", "queries", "must differ"),
        ("AGGREGATOR_RESULTS_TOPIC", "re sults", "not a Kafka topic name"),
        ("AGGREGATOR_POLL_RECORDS_MAX", "10001", "poll_records_max must be at most"),
        ("AGGREGATOR_REVOKE_DEADLINE_MS", "75001", "a quarter of max_poll_interval_ms"),
        ("AGGREGATOR_METRICS_LISTEN", "9464", "metrics_listen: '9464' is not HOST:PORT"),
        ("AGGREGATOR_METRICS_LISTEN", "\udcff:9464", "metrics_listen: '\\udcff:9464': no such"),
        ("AGGREGATOR_METRICS_LISTEN", "a" * 64 + ":9464", "no such host can be"),
        ("AGGREGATOR_METRICS_LISTEN", "localhost:²", "not HOST:PORT"),
        ("AGGREGATOR_LEAD_MS", "inf", "lead_ms: "),
        ("AGGREGATOR_LEAD_MS", "nan", "lead_ms: "),
        ("AGGREGATOR_KAFKA", '{"linger.ms": NaN}', "kafka.linger.ms."),
        ("AGGREGATOR_INSTANCE_NAME", "a" * 1_001, "instance_name: "),
        ("AGGREGATOR_GROUP_ID", "a" * 1_001, "group_id: "),
        # Model servers take no more, whatever an aggregator lets through.
        ("AGGREGATOR_TEXT_BYTES_MAX", "131073", "text_bytes_max: Input should be less than or"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names_in_the_file_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "aggregator.toml"
    config.write_text("ttl = 5\n")
    with pytest.raises(SettingsError, match=r"ttl: unknown setting, did you mean ttl_ms\?$"):
        load_settings(config)
    config.write_text('[models.minilm]\nservers = ["a:1"]\nrevison = "1"\n')
    with pytest.raises(SettingsError, match=r"revison: unknown setting, did you mean revision\?$"):
        load_settings(config)


def test_a_model_may_be_its_servers_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AGGREGATOR_MODELS")
    config = tmp_path / "aggregator.toml"
    config.write_text('[models]\nminilm = "a:1,b:2"\n')
    assert load_settings(config).models["minilm"].servers == ("a:1", "b:2")
    config.write_text('[models]\nminilm = ["a:1"]\n')
    assert load_settings(config).models["minilm"].servers == ("a:1",)
    config.write_text("[models]\nminilm = 50051\n")
    with pytest.raises(SettingsError, match=r"^models\.minilm: neither .HOST:PORT.* nor a table"):
        load_settings(config)


def test_of_a_list_with_a_wrong_item_only_the_item_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGGREGATOR_MODELS", "minilm=localhost")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert str(caught.value) == "models.minilm.servers.0: 'localhost' is not HOST:PORT"


def test_models_are_required_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGGREGATOR_MODELS")
    with pytest.raises(SettingsError, match="models: required, such as AGGREGATOR_MODELS="):
        load_settings()
    assert load_settings(models_required=False).models == {}


def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing\.toml"):
        load_settings(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AGGREGATOR_SERVICE_HOST", "10.0.0.1"),
        ("AGGREGATOR_SERVICE_PORT", "9464"),
        ("AGGREGATOR_SERVICE_PORT_METRICS", "9464"),
        ("AGGREGATOR_PORT", "tcp://10.0.0.1:9464"),
        ("AGGREGATOR_PORT_9464_TCP", "tcp://10.0.0.1:9464"),
        ("AGGREGATOR_PORT_50051_TCP_PROTO", "tcp"),
        ("AGGREGATOR_METRICS_PORT_9464_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_what_kubernetes_injects_is_ignored(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert load_settings().ttl_ms == 60_000


def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGGREGATOR_KAFKA__sasl.password", "hunter2")
    monkeypatch.setenv("AGGREGATOR_KAFKA__sasl.username", "me")
    shown = printable(load_settings())
    assert "hunter2" not in shown
    assert json.loads(shown)["kafka"] == {"sasl.password": HIDDEN, "sasl.username": "me"}


def exactly_once(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    monkeypatch.setenv("AGGREGATOR_DELIVERY", "exactly_once")
    for name, value in settings.items():
        monkeypatch.setenv(f"AGGREGATOR_{name.upper()}", value)


def test_exactly_once_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().delivery == "at_least_once"
    exactly_once(monkeypatch, instance_name="aggregator-0")
    settings = load_settings()
    assert (settings.delivery, settings.transaction_timeout_ms) == ("exactly_once", 10_000)
    assert json.loads(printable(settings))["delivery"] == "exactly_once"


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({}, "instance_name is required with delivery = exactly_once"),
        ({"instance_name": "a/b"}, "instance_name must not contain '/'"),
        ({"instance_name": "a", "transaction_timeout_ms": "999"}, "transaction_timeout_ms must be"),
        (
            {"instance_name": "a", "max_poll_interval_ms": "15000", "session_timeout_ms": "6000"}
            | {"revoke_deadline_ms": "3750", "transaction_timeout_ms": "11250"},
            "revoke_deadline_ms + transaction_timeout_ms must be less than max_poll_interval_ms",
        ),
    ],
)
def test_exactly_once_needs_a_name_and_time(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], fault: str
) -> None:
    exactly_once(monkeypatch, **settings)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert fault in str(caught.value)
