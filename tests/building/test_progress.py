"""Bars that count on where a build goes on, and end a line only where they began one."""

import io

from rich.console import Console

from selfspec.building.progress import Bars


def drawn(use) -> str:
    stream = io.StringIO()
    with Bars(Console(file=stream, width=120, force_terminal=False)) as bars:
        use(bars)
    return stream.getvalue()


def test_nothing_is_drawn_before_the_first_stage():
    assert drawn(lambda bars: None) == ""


def test_a_stage_shows_what_is_done_of_what_and_its_tokens():
    def use(bars):
        bar = bars.stage("counting", 10, done=4, tokens=1000)
        for _ in range(3):
            bar.advance(1, 500)

    text = drawn(use)
    assert "counting" in text
    assert "7/10" in text
    assert "2.5k tokens" in text


def test_a_stage_that_ends_is_whole_however_much_it_was():
    def use(bars):
        bar = bars.stage("reading", 100)
        bar.advance(7)
        bar.end()

    assert "7/7" in drawn(use)
