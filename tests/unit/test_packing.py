"""The packing rule, by exact counts and by estimates."""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.core.packing import Packer, PackLimits, Room

WIDE = PackLimits(tokens=100, inputs=1000, size_bytes=1 << 20)


@dataclass
class Item:
    """A candidate."""

    estimate: float
    variance: float = 0.0
    text_bytes: int = 1
    passed_over: bool = False


def packed(
    sizes: list[float], *, limits: PackLimits = WIDE, deviations: float = 0.0, look_ahead: int = 0
) -> Packer[Item]:
    packer: Packer[Item] = Packer(limits, deviations=deviations, look_ahead=look_ahead)
    packer.feed([Item(size, variance=size) for size in sizes])
    return packer


def taken(packer: Packer[Item]) -> list[float]:
    return [item.estimate for item in packer.taken]


def test_a_pass_is_filled_in_order_and_ended_by_what_does_not_fit() -> None:
    room = Room(PackLimits(tokens=10, inputs=9, size_bytes=99))
    assert [room.add(4), room.add(6), room.add(1)] == [True, True, False]
    assert (room.tokens, room.inputs) == (10, 2)


def test_a_single_longer_text_goes_alone() -> None:
    room = Room(PackLimits(tokens=10, inputs=9, size_bytes=99))
    assert room.add(50)
    assert not room.add(1)
    assert taken(packed([150.0, 1.0])) == [150.0]


def test_a_pass_keeps_to_inputs_and_bytes() -> None:
    room = Room(PackLimits(tokens=100, inputs=2, size_bytes=10))
    assert [room.add(1, 6), room.add(1, 5), room.add(1, 4), room.add(1, 0)] == [
        True,
        False,
        True,
        False,
    ]


def test_without_look_ahead_a_claim_is_a_prefix() -> None:
    assert taken(packed([40, 50, 20, 5])) == [40, 50]


def test_look_ahead_fills_what_is_left_and_keeps_order() -> None:
    packer = packed([40, 50, 20, 5, 5], look_ahead=3)
    assert taken(packer) == [40, 50, 5, 5]
    assert [item.estimate for item in packer.skipped] == [20]
    assert packer.overtaken == 1


def test_look_ahead_is_bounded() -> None:
    packer = packed([90, 20, 30, 40, 5], look_ahead=2)
    assert taken(packer) == [90]
    assert len(packer.skipped) <= 2
    assert packer.overtaken == 0


def test_one_that_was_passed_over_before_ends_the_claim() -> None:
    packer: Packer[Item] = Packer(WIDE, look_ahead=8)
    candidates = [Item(90), Item(20, passed_over=True), Item(5)]
    assert packer.feed(candidates) == 1
    assert packer.full


def test_the_margin_grows_with_the_root_of_the_summed_variance() -> None:
    # 9 texts of 10 tokens, variance 10 each: 90 + 1 x sqrt(90) = 99.5 fits, a tenth does not.
    assert len(taken(packed([10.0] * 20, deviations=1.0))) == 9
    assert len(taken(packed([10.0] * 20))) == 10


def test_a_claim_keeps_to_inputs_and_bytes() -> None:
    few = PackLimits(tokens=100, inputs=3, size_bytes=1 << 20)
    assert len(taken(packed([1.0] * 9, limits=few, look_ahead=9))) == 3
    short = PackLimits(tokens=100, inputs=9, size_bytes=4)
    assert len(taken(packed([1.0] * 9, limits=short, look_ahead=9))) == 4


def test_feeding_goes_on_where_it_stopped() -> None:
    packer: Packer[Item] = Packer(WIDE, look_ahead=1)
    assert packer.feed([Item(30), Item(30)]) == 2
    assert packer.feed([Item(30), Item(30), Item(9), Item(9)]) == 3  # taken, skipped, taken, end
    assert taken(packer) == [30, 30, 30, 9]
    assert packer.feed([Item(9)]) == 0


def test_what_was_skipped_can_be_forgotten_between_kinds() -> None:
    packer = packed([90, 20], look_ahead=4)
    packer.forget_skipped()
    packer.feed([Item(5)])
    assert taken(packer) == [90, 5]
    assert packer.skipped == []
    assert packer.overtaken == 0
