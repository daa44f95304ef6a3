"""The aggregator's settings: the one module that reads the environment.

`AGGREGATOR_*` variables, nested with `__`, over a TOML file, over the defaults below. A name that
no setting has is an error, wherever it stands. Relations between settings are checked here; what
needs a broker to check is checked by the runtime at start. Knows nothing of Kafka's client: the raw
override table is handed on as it is, and the adapter refuses the keys that would break delivery.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

PREFIX = "AGGREGATOR_"
HIDDEN = "**********"
TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
TRANSACTION_TIMEOUT_MS_MIN = 1_000
NAME_CHARACTERS_MAX = 1_000
"""Brokers hang up on a request with a name of 32 KiB, which looks as if none answered."""
TEXT_BYTES_MAX = 131_072
SECRET_WORDS = ("password", "secret", "token", "jaas", "oauthbearer", ".pem")

# What Kubernetes injects into every pod of a namespace for a Service whose name begins with ours.
# `..._PORT` alone could be somebody's misspelt setting, so its value must be one of Kubernetes'.
KUBERNETES_NAME = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
KUBERNETES_PORT = re.compile(rf"{PREFIX}(\w+_)?PORT=(tcp|udp|sctp)://.*")


class SettingsError(Exception):
    """The settings are wrong: the message is one line for people."""


def _topic(value: str) -> str:
    if not TOPIC_NAME.fullmatch(value) or value in (".", ".."):
        raise ValueError("not a Kafka topic name (letters, digits, '.', '_', '-', at most 249)")
    return value


def _host_port(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ValueError(f"{value!r} is not HOST:PORT")
    if "=" in host:  # the next model, after the wrong separator
        raise ValueError(f"{value!r} is not HOST:PORT (models are separated by ';')")
    try:
        host.encode("idna")  # as sockets do
    except UnicodeError as error:
        raise ValueError(f"{value!r}: no such host can be") from error
    return value


Topic = Annotated[str, AfterValidator(_topic)]
HostPort = Annotated[str, AfterValidator(_host_port)]
HostPortOrNone = Annotated[str, AfterValidator(lambda value: value and _host_port(value))]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Millis = Annotated[int, Field(gt=0, le=7 * 86_400_000)]
"""Timers take no more than so long: a week is more than anybody means."""


class ModelSettings(BaseModel):
    """One served model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    servers: Annotated[tuple[HostPort, ...], Field(min_length=1)]
    """Each resolved by DNS again and again; every address found gets a stream."""
    revision: str | None = None
    """Pins the model: a server with another revision is not used."""
    tokenizer: Path | None = None
    """The model's own tokenizer.json, for exact estimates; absent: tiktoken's, calibrated."""

    @model_validator(mode="before")
    @classmethod
    def _servers_alone(cls, value: object) -> object:
        if isinstance(value, str | list):
            return {"servers": value}
        if not isinstance(value, dict | ModelSettings):
            # Pydantic makes a fault of a setting out of this kind of error, not of TypeError.
            raise ValueError(  # noqa: TRY004
                'neither "HOST:PORT[,HOST:PORT...]" nor a table with servers'
            )
        return value

    @field_validator("servers", mode="before")
    @classmethod
    def _commas(cls, value: object) -> object:
        return _comma_list(value) if isinstance(value, str) else value


class AggregatorSettings(BaseSettings):
    """All settings with their defaults. Times end in their unit; sizes are bytes."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    # Kafka.
    bootstrap_servers: str = Field(default="localhost:9092", min_length=1)
    group_id: str = Field(default="aggregator", min_length=1, max_length=NAME_CHARACTERS_MAX)
    instance_name: str | None = Field(default=None, min_length=1, max_length=NAME_CHARACTERS_MAX)
    """Unique in the group; the clients' id towards the brokers. Required for exactly_once, where a
    process fences the one before that had its name.
    """
    group_protocol: Literal["classic", "consumer"] = "classic"
    """classic: cooperative-sticky; consumer: KIP-848, needs brokers of 4.0."""
    queries_topic: Topic = "queries"
    results_topic: Topic = "results"
    dlq_topic: Topic = "queries.dlq"
    poll_records_max: Annotated[int, Field(gt=0, le=1_000_000)] = 1_000
    max_poll_interval_ms: Millis = 300_000
    session_timeout_ms: Millis = 45_000
    max_message_bytes: Positive = 1_048_588
    """Stands in where a topic's max.message.bytes can't be read."""
    kafka: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Raw librdkafka settings for both clients, those that would break delivery refused."""

    # Models.
    models: dict[Annotated[str, Field(min_length=1)], ModelSettings] = Field(default_factory=dict)
    """By served name; required to run. Also as NAME=HOST:PORT[,HOST:PORT...][;NAME=...], or each
    as a list of servers alone."""
    default_model: str | None = None
    """Of queries that name none; required when several models are configured."""
    priority: Literal["interactive", "bulk"] = "interactive"

    # Queries.
    ttl_ms: NotNegative = 60_000
    """0: none."""
    ttl_from: Literal["record", "arrival"] = "record"
    text_bytes_max: Annotated[int, Field(gt=0, le=TEXT_BYTES_MAX)] = TEXT_BYTES_MAX
    """Model servers take no longer ones."""
    headers_bytes_max: NotNegative = 16_384
    headers_drop: tuple[str, ...] = (
        "contentType",
        "content-encoding",
        "__TypeId__",
        "__KeyTypeId__",
        "__ContentTypeId__",
        "__key_schema_id",
        "__value_schema_id",
        "ce_*",
    )

    # Delivery.
    delivery: Literal["at_least_once", "exactly_once"] = "at_least_once"
    """exactly_once: results and offsets as transactions; needs instance_name and real brokers."""
    transaction_timeout_ms: Millis = 10_000
    """exactly_once only: an open transaction of a process that is gone is aborted after this."""
    window_records_max: Positive = 10_000
    """Per partition: records between the committed and the last admitted offset."""
    buffer_bytes_max: Positive = 268_435_456
    """Decoded records and unconfirmed results over all partitions."""
    commit_interval_ms: Millis = 100
    revoke_deadline_ms: Millis = 5_000
    drain_deadline_ms: Millis = 20_000
    """From SIGTERM to the exit, but for 3 s for the last commit and for what does not answer."""
    sink_outage_ms_max: Millis = 300_000
    replay_attempts_max: Positive = 3
    """Dead letters replayed so often are refused by `aggregator dlq replay`."""

    # Dispatch.
    attempts_max: Positive = 5
    lead_ms: Annotated[float, Field(ge=0)] = 3.0
    answer_grace_ms: NotNegative = 2_000
    stream_silence_ms_max: Millis = 15_000
    resolve_interval_ms: Millis = 5_000
    """How often the names of model servers are looked up again."""

    # Telemetry.
    metrics_listen: HostPortOrNone = "127.0.0.1:9464"
    """/metrics, /livez and /readyz; empty: none."""
    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("models", mode="before")
    @classmethod
    def _short_models(cls, value: object) -> object:
        return _models_from_text(value) if isinstance(value, str) else value

    @field_validator("headers_drop", mode="before")
    @classmethod
    def _comma_headers(cls, value: object) -> object:
        return _comma_list(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _relations(self) -> Self:
        topics = [self.queries_topic, self.results_topic, self.dlq_topic]
        if len(set(topics)) != len(topics):
            raise ValueError("queries_topic, results_topic and dlq_topic must differ")
        if self.default_model is not None and self.default_model not in self.models:
            raise ValueError(f"default_model {self.default_model!r} is not in models")
        if self.default_model is None and len(self.models) > 1:
            raise ValueError("default_model is required when several models are configured")
        if self.poll_records_max > self.window_records_max:
            raise ValueError("poll_records_max must be at most window_records_max")
        if self.revoke_deadline_ms * 4 > self.max_poll_interval_ms:
            raise ValueError("revoke_deadline_ms must be at most a quarter of max_poll_interval_ms")
        if self.group_protocol == "classic" and self.session_timeout_ms > self.max_poll_interval_ms:
            raise ValueError("session_timeout_ms must be at most max_poll_interval_ms")
        if self.delivery == "exactly_once":
            self._relations_of_transactions()
        if self.text_bytes_max * 2 > self.buffer_bytes_max:
            raise ValueError("text_bytes_max must be at most half of buffer_bytes_max")
        return self

    def _relations_of_transactions(self) -> None:
        if self.instance_name is None:
            raise ValueError(
                "instance_name is required with delivery = exactly_once: unique in the group, and "
                "the same after a restart"
            )
        if "/" in self.instance_name:
            raise ValueError("instance_name must not contain '/' with delivery = exactly_once")
        if not TRANSACTION_TIMEOUT_MS_MIN <= self.transaction_timeout_ms <= 900_000:
            raise ValueError(
                f"transaction_timeout_ms must be {TRANSACTION_TIMEOUT_MS_MIN} to 900000 "
                "(transaction.max.timeout.ms of the brokers)"
            )
        if self.revoke_deadline_ms + self.transaction_timeout_ms >= self.max_poll_interval_ms:
            raise ValueError(
                "revoke_deadline_ms + transaction_timeout_ms must be less than max_poll_interval_ms"
            )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment over what `load_settings` passes in, which is the file; nothing else."""
        del env_settings, dotenv_settings, file_secret_settings
        return _Environment(settings_cls), init_settings

    @property
    def model_default(self) -> str:
        """The served name of queries that name none."""
        return self.default_model or next(iter(self.models), "")


class _Environment(EnvSettingsSource):
    """Lists and tables from the environment may be JSON, or the short forms of the validators."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        json_like = not isinstance(value, str) or value.lstrip().startswith(("{", "["))
        try:
            if json_like or field_name == "kafka":
                return super().decode_complex_value(field_name, field, value)
            return _models_from_text(value) if field_name == "models" else value
        except json.JSONDecodeError as error:
            raise SettingsError(f"{PREFIX}{field_name.upper()}: not JSON ({error})") from error
        except ValueError as error:
            raise SettingsError(str(error)) from error


def _comma_list(text: str) -> list[str]:
    """A list from JSON, or from commas."""
    if text.lstrip().startswith("["):
        return cast("list[str]", json.loads(text))
    return [item.strip() for item in text.split(",") if item.strip()]


def _models_from_text(text: str) -> dict[str, dict[str, list[str]]]:
    """`name=host:port,host:port;name2=host:port` as a table.

    Raises:
        ValueError: It is not of that form.
    """
    models: dict[str, dict[str, list[str]]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, servers = part.partition("=")
        if not equals or not name.strip():
            raise ValueError("models: neither JSON nor NAME=HOST:PORT[,HOST:PORT...][;NAME=...]")
        models[name.strip()] = {"servers": _comma_list(servers)}
    return models


def load_settings(
    config: Path | None = None, *, models_required: bool = True
) -> AggregatorSettings:
    """Read the environment and, where given, a TOML file that it overrides.

    Args:
        config: A TOML file with the settings' names.
        models_required: Whether settings without a model are an error.

    Raises:
        SettingsError: A name is unknown, a value is wrong, a relation is broken, or the file can't
            be read. The message is one line.
    """
    _refuse_unknown(os.environ)
    table: dict[str, Any] = {}
    if config is not None:
        try:
            table = tomllib.loads(config.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"{config}: {error}") from error
    if isinstance(table.get("kafka"), dict):
        table["kafka"] = _flat(table["kafka"])
    try:
        settings = AggregatorSettings(**table)
    except ValidationError as error:
        raise SettingsError(_one_line(error)) from error
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if models_required and not settings.models:
        raise SettingsError(f"models: required, such as {PREFIX}MODELS=minilm=localhost:50051")
    return settings


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """TOML reads an unquoted `linger.ms = 3` as nested tables; join them to librdkafka's names."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    """Raise SettingsError for a variable that has the prefix but is no setting."""
    fields = AggregatorSettings.model_fields
    for name, value in environment.items():
        upper = name.upper()
        if not upper.startswith(PREFIX):
            continue
        field, nested, _ = upper.removeprefix(PREFIX).lower().partition("__")
        if field in fields and (not nested or field in ("models", "kafka")):
            continue
        if KUBERNETES_NAME.fullmatch(upper) or KUBERNETES_PORT.fullmatch(f"{upper}={value}"):
            continue
        raise SettingsError(f"unknown setting {name}{_hint(field)}")


def _hint(name: str) -> str:
    close = difflib.get_close_matches(name, AggregatorSettings.model_fields, n=1)
    return f", did you mean {PREFIX}{close[0].upper()}?" if close else ""


def _hint_in_file(where: tuple[int | str, ...]) -> str:
    """The same for a name in a file, or in JSON, where names have no prefix."""
    fields = (ModelSettings if where[0] == "models" else AggregatorSettings).model_fields
    close = difflib.get_close_matches(str(where[-1]), fields, n=1)
    return f", did you mean {close[0]}?" if close else ""


def _one_line(error: ValidationError) -> str:
    """Each fault as `name: what`, on one line. Of a list whose items are wrong only they count."""
    found = error.errors(include_url=False)
    inner = {fault["loc"][:end] for fault in found for end in range(1, len(fault["loc"]))}
    faults = []
    for fault in found:
        if fault["loc"] in inner:
            continue
        name = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = f"unknown setting{_hint_in_file(fault['loc'])}"
        faults.append(f"{name}: {message}" if name else message)
    return "; ".join(faults)


def printable(settings: AggregatorSettings) -> str:
    """The settings as JSON for `--print-config`, secrets hidden."""
    table = settings.model_dump(mode="json")
    table["kafka"] = {key: hide(key, value) for key, value in settings.kafka.items()}
    return json.dumps(table, indent=2, ensure_ascii=False)


def hide(key: str, value: object) -> object:
    """The value of a librdkafka setting, or stars when the key names a secret."""
    return HIDDEN if any(word in key.lower() for word in SECRET_WORDS) else value
