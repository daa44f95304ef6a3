"""What the settings become for the parts of a process."""

from __future__ import annotations

import pytest

from aggregator.runtime.process import kafka_options
from aggregator.settings import AggregatorSettings


@pytest.mark.parametrize(
    ("outage_ms_max", "message_timeout_ms"),
    [(1, 1_000), (4_000, 1_000), (32_000, 8_000), (120_000, 30_000), (300_000, 30_000)],
)
def test_the_client_gives_a_record_up_well_before_an_outage_is_too_long(
    outage_ms_max: int, message_timeout_ms: int
) -> None:
    settings = AggregatorSettings(sink_outage_ms_max=outage_ms_max)
    assert kafka_options(settings).message_timeout_ms == message_timeout_ms
