"""How much of the processor other programs leave."""

from selfspec.machine import busy
from selfspec.machine.busy import is_busy, processor_share


def test_the_share_of_the_processor_is_one_at_most():
    assert 0 < processor_share() < 1.2


def test_a_processor_that_others_use_is_busy(monkeypatch):
    shares = iter([0.79, 0.81])
    monkeypatch.setattr(busy, "processor_share", lambda: next(shares))
    assert is_busy()
    assert not is_busy()
