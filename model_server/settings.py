"""The model server's settings: the one module that reads the environment.

`MODEL_SERVER_*` variables, nested with `__`, over a TOML file, over the defaults below; options of
the command line go over all. A name that no setting has is an error, wherever it stands, apart from
what Kubernetes injects. Relations that need no model are checked here, the others when it is
loaded.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from model_server.core.limits import TEXT_BYTES_MAX
from model_server.core.saturation import TargetSource

PREFIX = "MODEL_SERVER_"
MEBIBYTE = 1024 * 1024
MESSAGE_BYTES_MAX = 64 * MEBIBYTE
DEFAULT_TARGETS = {
    "torch": 256,
    "sglang": 256,
    "vllm": 256,
    "padded-baseline": 256,
    "simulated": 600,
}
"""Where neither a setting nor a profile of the machine says better; for a real engine, of a CPU."""
DEFAULT_PROFILE_MS_MAX = {**dict.fromkeys(DEFAULT_TARGETS, 2_500), "simulated": 0}
"""The simulated engine's latency is declared: there is nothing to find out."""
SEPARATE_ENGINES = ("sglang", "vllm")
"""Those with processes of their own."""

# What Kubernetes injects into every pod of a namespace for a Service whose name begins with ours.
# `..._PORT` alone could be somebody's misspelt setting, so its value must be one of Kubernetes'.
_KUBERNETES = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?"
    r"|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    rf"|{PREFIX}(\w+_)?PORT=(tcp|udp|sctp)://.*"
)


class SettingsError(Exception):
    """The settings are wrong: the message is one line for people."""


def _host_port(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{value!r} is not HOST:PORT")
    try:
        host.encode("idna")  # as sockets do
    except UnicodeError as error:
        raise ValueError(f"{value!r}: no such host can be") from error
    return value


HostPort = Annotated[str, AfterValidator(_host_port)]
HostPortOrNone = Annotated[str, AfterValidator(lambda value: value and _host_port(value))]
Positive = Annotated[int, Field(gt=0)]
Millis = Annotated[int, Field(gt=0, le=7 * 86_400_000)]
"""Timers take no more than so long: a week is more than anybody means."""
NotNegative = Annotated[float, Field(ge=0)]


class Fault(StrEnum):
    """What a marker in a text does to its pass."""

    RAISE = "raise"
    OUT_OF_MEMORY = "out_of_memory"
    DIE = "die"
    EXIT = "exit"
    SLOW = "slow"
    NAN = "nan"
    SHORT = "short"


class SimulatedSettings(BaseModel):
    """Of the simulated engine; `model_server.engines.simulated` says what they do."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    fixed_ms: NotNegative = 5.0
    slope_us_per_token: NotNegative = 10.0
    knee_tokens: Annotated[int, Field(ge=0)] = 600
    dimensions: Annotated[int, Field(gt=0, le=65_536)] = 384
    matryoshka_dimensions: tuple[Positive, ...] = ()
    input_tokens_max: Annotated[int, Field(ge=4)] = 512
    prompts: dict[str, str] = {}
    tokenizer: Path | None = None
    faults: dict[str, Fault] = {}
    slow_ms: NotNegative = 1_000.0
    out_of_memory_above_tokens: Positive | None = None
    broken_after_passes: Annotated[int, Field(ge=0)] | None = None
    wrong_reference: bool = False

    @field_validator("matryoshka_dimensions", mode="before")
    @classmethod
    def _commas(cls, value: object) -> object:
        if isinstance(value, str) and not value.lstrip().startswith("["):
            return [item.strip() for item in value.split(",") if item.strip()]
        return json.loads(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if any(size >= self.dimensions for size in self.matryoshka_dimensions):
            raise ValueError("matryoshka_dimensions must be smaller than dimensions")
        return self


class ModelServerSettings(BaseSettings):
    """All settings with their defaults. Times end in their unit; sizes are bytes."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    # The model.
    engine: Literal["torch", "sglang", "vllm", "padded-baseline", "simulated"] = "torch"
    """`padded-baseline` is the old way, for comparison only."""
    model: str | None = Field(default=None, min_length=1)
    """A folder, or the id of a model on the hub; required but for the simulated engine."""
    model_revision: str | None = Field(default=None, min_length=1)
    """A commit, tag or branch on the hub."""
    served_model_name: str | None = Field(default=None, min_length=1)
    """What clients call it; absent: the last part of `model`."""
    hub_token: SecretStr | None = None
    """For models on the hub that are not public."""
    pooling: str | None = None
    """For models without `modules.json`."""
    input_tokens_max: Positive | None = None
    """Lowers the model's own maximum."""
    cache_dir: Path | None = None
    """Where golden vectors, hashes and profiles are kept; absent: `token-batching` in the user's
    cache."""
    golden_cosine_min: Annotated[float, Field(gt=0, le=1)] | None = None
    """Agreement demanded of the golden vectors; absent: by precision."""

    # The engine.
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: Annotated[int, Field(ge=0, le=4_096)] = 0
    """0: as many as this process may use. Libraries crash when they can't have as many as asked."""
    simulated: SimulatedSettings = SimulatedSettings()
    # Of engines with processes of their own, as they name them.
    quantization: str | None = Field(default=None, min_length=1)
    tensor_parallel: Positive = 1
    """GPUs that share one model."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of a device's memory, for weights and cache; absent: 0.8, for vllm on a CPU 0.25."""
    attention_backend: str | None = Field(default=None, min_length=1)
    """Absent: by device."""
    engine_start_timeout_ms: Millis = 600_000

    # Passes and requests.
    batch_tokens_target: Positive | None = None
    """Absent: what this machine does best, by a stored profile or one measured at start."""
    batch_tokens_max: Positive | None = None
    """Absent: four targets, or one input of the model's maximum if that is more."""
    pass_ms_max: Annotated[float, Field(gt=0)] = 100.0
    """A measured target is cut to passes of at most this."""
    latency_slack_ratio: Annotated[float, Field(ge=0)] | None = None
    """Where latency has a flat part: how much longer than that a pass may take; absent: the target
    goes by throughput there too."""
    profile_ms_max: Annotated[int, Field(ge=0)] | None = None
    """Time to measure at start where no profile is stored; 0: none; absent: by engine."""
    target_follow: bool = True
    """A measured target follows the machine while it serves."""
    inputs_max: Positive = 1_024
    request_bytes_max: Annotated[int, Field(ge=TEXT_BYTES_MAX, le=MESSAGE_BYTES_MAX // 2)] = (
        16 * MEBIBYTE
    )
    pass_timeout_ms: Millis = 60_000
    drain_deadline_ms: Millis = 20_000

    # Listening and telemetry.
    grpc_listen: HostPort = "127.0.0.1:50051"
    metrics_listen: HostPortOrNone = "127.0.0.1:9465"
    """/metrics, /livez and /readyz; empty: none."""
    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.model is None and self.engine != "simulated":
            raise ValueError(f"model is required for engine {self.engine}: a folder or a hub id")
        if self.engine not in SEPARATE_ENGINES:
            self._refuse_for_engines_of_their_own()
        if self.quantization is not None and self.golden_cosine_min is None:
            raise ValueError("quantization needs golden_cosine_min: how near its vectors must be")
        maximum = self.batch_tokens_max
        target = self.batch_tokens_target
        if maximum is not None and target is not None and maximum < target:
            raise ValueError("batch_tokens_max must be at least batch_tokens_target")
        one = self.input_tokens_max
        if self.engine == "simulated":
            one = min(one or self.simulated.input_tokens_max, self.simulated.input_tokens_max)
        if maximum is not None and one is not None and maximum < one:
            raise ValueError("batch_tokens_max must hold one input of input_tokens_max")
        return self

    def _refuse_for_engines_of_their_own(self) -> None:
        for name in ("quantization", "tensor_parallel", "memory_fraction", "attention_backend"):
            if getattr(self, name) != type(self).model_fields[name].default:
                known = " and ".join(SEPARATE_ENGINES)
                raise ValueError(f"{name} is for engine {known}, not for {self.engine}")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load_settings` passes in: it has merged the sources already."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @property
    def target(self) -> int:
        """Tokens aimed at for a pass, as long as nothing was measured."""
        if self.batch_tokens_target is not None:
            return self.batch_tokens_target
        default = DEFAULT_TARGETS[self.engine]
        return default if self.batch_tokens_max is None else min(default, self.batch_tokens_max)

    @property
    def quick_profile_ms_max(self) -> int:
        """Time to measure at start."""
        if self.profile_ms_max is not None:
            return self.profile_ms_max
        return DEFAULT_PROFILE_MS_MAX[self.engine]

    @property
    def cache_folder(self) -> Path:
        """Where what can be made again is kept."""
        return self.cache_dir or Path.home() / ".cache" / "token-batching"

    @property
    def target_source(self) -> TargetSource:
        """Where `target` comes from."""
        return TargetSource.DEFAULT if self.batch_tokens_target is None else TargetSource.SETTING

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        if self.served_model_name is not None:
            return self.served_model_name
        return Path(self.model).resolve().name if self.model is not None else "simulated"


def load_settings(
    config: Path | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ModelServerSettings:
    """Merge a TOML file, the environment and the command line's options, the later over the former.

    Args:
        config: a TOML file with the settings' names.
        options: what the command line gave; None values count as not given.
        environment: the process's own when absent.

    Raises:
        SettingsError: a name is unknown, a value is wrong, a relation is broken, or the file can't
            be read. The message is one line.
    """
    table: dict[str, Any] = {}
    if config is not None:
        try:
            table = tomllib.loads(config.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"{config}: {error}") from error
    _merge(table, _from_environment(os.environ if environment is None else environment))
    _merge(table, {k: v for k, v in (options or {}).items() if v is not None})
    try:
        return ModelServerSettings(**table)
    except ValidationError as error:
        raise SettingsError(_one_line(error)) from error


def _merge(table: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(table.get(key), dict):
            _merge(table[key], value)
        else:
            table[key] = value


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Our variables as a table; tables among them may be JSON.

    Raises:
        SettingsError: a variable has our prefix but is no setting.
    """
    table: dict[str, Any] = {}
    for name, value in sorted(environment.items()):
        upper = name.upper()
        if not upper.startswith(PREFIX):
            continue
        field, nested, rest = upper.removeprefix(PREFIX).lower().partition("__")
        if field not in ModelServerSettings.model_fields or (nested and field != "simulated"):
            if _KUBERNETES.fullmatch(f"{upper}={value}"):
                continue
            raise SettingsError(f"unknown setting {name}{_hint(field)}")
        if not nested:
            _merge(table, {field: _json(name, value) if field == "simulated" else value})
        elif rest not in SimulatedSettings.model_fields:
            raise SettingsError(f"unknown setting {name}{_hint(rest, SimulatedSettings, field)}")
        else:
            table_like = rest in ("faults", "prompts")
            _merge(table, {field: {rest: _json(name, value) if table_like else value}})
    return table


def _json(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise SettingsError(f"{name}: not JSON ({error})") from error


def _hint(
    name: str, model: type[BaseModel] = ModelServerSettings, nested_in: str | None = None
) -> str:
    close = difflib.get_close_matches(name, model.model_fields, n=1)
    prefix = f"{PREFIX}{nested_in.upper()}__" if nested_in is not None else PREFIX
    return f", did you mean {prefix}{close[0].upper()}?" if close else ""


def _hint_in_file(where: tuple[int | str, ...]) -> str:
    """The same for a name in a file, or in JSON, where names have no prefix."""
    fields = (SimulatedSettings if len(where) > 1 else ModelServerSettings).model_fields
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


def printable(settings: ModelServerSettings) -> str:
    """The settings as JSON for `--print-config`, secrets hidden."""
    return json.dumps(settings.model_dump(mode="json"), indent=2, ensure_ascii=False)
