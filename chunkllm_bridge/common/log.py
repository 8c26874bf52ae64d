"""Loggers: events with fields, handed to the standard `chunkllm` logger. Nothing here configures logging."""

from __future__ import annotations

import logging
from typing import cast

import structlog

ROOT = "chunkllm"


def naming_the_caller(logger: object, method: str, text: object) -> tuple[tuple[object], dict[str, int]]:
    """Have the record name the line that logged, not structlog's: three of its frames stand between."""
    return (text,), {"stacklevel": 4}


def get_logger(room: str, **bound: object) -> structlog.stdlib.BoundLogger:
    """A logger for one room of the house, e.g. `get_logger("host", rank=0)`. Adapters give `chunkllm` its handlers."""
    logger = structlog.wrap_logger(
        logging.getLogger(f"{ROOT}.{room}"),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True),
            naming_the_caller,
        ],
    )
    return cast(structlog.stdlib.BoundLogger, logger.bind(**bound))
