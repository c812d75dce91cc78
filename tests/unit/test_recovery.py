"""Patience: after how many quiet effective batches more is tried, and again after a failure."""

from dataclasses import dataclass

import pytest
from torch import nn

from gradaccum.recovery import Done, Recovery, TooLarge

pytestmark = pytest.mark.usefixtures("little_to_collect")


@dataclass(frozen=True)
class Level:
    """A cut that is a number: one less after a failure, one more after a quiet while."""

    level: int

    def below(self, count, length):
        return Level(self.level - 1)

    def relaxed(self):
        return Level(self.level + 1)


FULL = TooLarge(count=2, length=1, sample="sample 0", message="full")


def steps_between_failures(room, steps, start=4):
    """Return how many steps there were from each failure to the next."""
    recovery, found, quiet = Recovery(nn.Linear(1, 1)), [], 0
    recovery.cut = Level(start)
    for _ in range(steps):
        done = recovery.run(
            recovery.cut, lambda cut: FULL if cut.level > room else cut.level, learn=True
        )
        quiet += 1
        if done.replays:
            found.append(quiet)
            quiet = 0
    return found


def test_what_fails_again_is_tried_ever_less_often():
    found = steps_between_failures(room=4, steps=33 + 65 + 129 + 257 + 513 + 3 * 1025)
    assert found == [33, 65, 129, 257, 513, 1025, 1025, 1025]


def test_what_has_room_grows_all_the_time():
    assert steps_between_failures(room=10, steps=32 * 6) == []


def test_a_failure_that_nothing_was_tried_before_lengthens_no_patience():
    """As where a longer sample comes along."""
    recovery = Recovery(nn.Linear(1, 1))
    recovery.cut = Level(9)

    def run(room):
        return recovery.run(
            recovery.cut, lambda cut: FULL if cut.level > room else cut.level, learn=True
        )

    for _ in range(32):
        run(9)
    assert recovery.cut == Level(10)
    assert run(9) == Done(value=9, replays=1)  # now it takes 64 quiet ones
    for room in (8, 7, 6, 5):
        assert run(room).replays == 1
    for k in range(64):
        assert recovery.cut == Level(5), k
        run(9)
    assert recovery.cut == Level(6)


def test_what_is_not_to_be_learnt_is_not():
    recovery = Recovery(nn.Linear(1, 1))
    recovery.cut = Level(9)
    for _ in range(99):
        done = recovery.run(
            recovery.cut, lambda cut: FULL if cut.level > 3 else cut.level, learn=False
        )
        assert done == Done(value=3, replays=6)
        assert recovery.cut == Level(9)
