"""Which groups there are: both protocols, and both kinds of delivery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from tests.chaos.arena import Delivery, FleetOptions, Protocol

DELIVERIES: tuple[Delivery, ...] = get_args(Delivery)
MEMBERS: dict[Protocol, int] = {"classic": 2, "consumer": 3}


def fleets(deliveries: Sequence[Delivery], *, seed: int, rate: float) -> list[FleetOptions]:
    """Two groups a delivery: two members by the classic protocol, three by KIP-848."""
    return [
        FleetOptions(
            name=f"{protocol}-{delivery.split('_')[-1]}" if len(deliveries) > 1 else protocol,
            protocol=protocol,
            delivery=delivery,
            members=members,
            rate=rate,
            seed=seed + number,
        )
        for delivery in deliveries
        for number, (protocol, members) in enumerate(MEMBERS.items())
    ]
