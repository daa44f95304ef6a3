"""Structured logs on standard error, as JSON lines or for a console.

Loggers are handed in; nothing here is global but structlog's own configuration, which is set once
at start. Standard error, so that standard output holds only what a command was asked for.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO

import orjson
import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger, Processor

    Logger = FilteringBoundLogger
else:
    Logger = Any

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure_logs(
    log_format: Literal["json", "console"], level: str, *, stream: TextIO | None = None
) -> Logger:
    """Configure structlog and return the root logger.

    Args:
        log_format: One JSON object a line, or coloured columns when a terminal is attached.
        level: One of LEVELS; what is below it costs next to nothing.
        stream: Where to; standard error when absent. Must be a text layer over a binary file.
    """
    out = stream or sys.stderr
    shared: list[Processor] = [structlog.processors.add_log_level]
    factory: Any
    if log_format == "json":
        shared.append(_json_line)
        # Bytes to the file beneath the text: there is a line for each claim.
        factory = structlog.BytesLoggerFactory(file=out.buffer)
    else:
        shared.append(structlog.processors.TimeStamper(fmt="iso", utc=True))
        shared.append(structlog.dev.ConsoleRenderer(colors=out.isatty()))
        factory = structlog.PrintLoggerFactory(file=out)
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    logger: Logger = structlog.get_logger()
    return logger


def _json_line(logger: Any, method: str, event: EventDict) -> bytes:
    """In one step, since there is a line for each claim: the time, a traceback if any, the JSON."""
    event["timestamp"] = datetime.now(UTC).replace(tzinfo=None).isoformat("T", "microseconds") + "Z"
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    return orjson.dumps(event, default=repr)


def librdkafka_logger(log: Logger) -> logging.Logger:
    """What Kafka's clients log, from any thread, as lines of ours."""
    logger = logging.Logger("librdkafka", logging.INFO)
    logger.addHandler(_Forward(log))
    return logger


def silent_logger() -> logging.Logger:
    """For a client of a command, whose errors are raised and told in one line."""
    logger = logging.Logger("librdkafka")
    logger.addHandler(logging.NullHandler())
    return logger


class _Forward(logging.Handler):
    """Passes lines on; lost connections (FAIL) as debug only, since the client reports them too."""

    def __init__(self, log: Logger) -> None:
        super().__init__()
        self._log_to = log

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        worth_it = record.levelno >= logging.WARNING and not line.startswith("FAIL ")
        say = self._log_to.warning if worth_it else self._log_to.debug
        say("librdkafka", line=line)
