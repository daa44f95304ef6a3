"""Structured logs on standard error, as JSON lines or for a console.

Standard error, so that standard output holds only what a command was asked for. Loggers are handed
in; only structlog's and the standard library's own configuration is global, set once at start.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Literal, TextIO

import structlog

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger, Processor

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
    log_format: Literal["json", "console"], level: str, stream: TextIO | None = None
) -> Logger:
    """Configure structlog; returns the logger to hand on. `level` is one of LEVELS."""
    out = stream if stream is not None else sys.stderr
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        processors.append(structlog.dev.ConsoleRenderer(colors=out.isatty()))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    logger: Logger = structlog.get_logger()
    return logger
