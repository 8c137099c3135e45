"""Whether a draft model's forwards pay: what they cost, and how many tokens they bring.

Knows seconds, scores and counts; not what a draft model is.
"""

from __future__ import annotations

from typing import NamedTuple

from selfspec.cost.ledger import Ledger, MeanRatio

# The share of what a forward's scores promise that comes true, before anything was counted.
_PRIOR_SHARE = 0.7
# What is assumed at first counts as much as this many tokens or forwards.
_PRIOR = 4.0
# Each later token or forward leaves an earlier one this share of its weight.
_FADE = 0.97
# One of this many steps goes without the draft model, so that it is known what it gains.
_WITHOUT_EVERY = 32
# After this many steps in which nothing seemed to pay, one forward is tried.
_TRY_EVERY = 32
# After this many calls whose prompt seemed too dear, one is read: the first may have been slow.
_READ_EVERY = 16
# A forward that is far off counts as this many times the mean at most.
_FAR = 1.5
# Of a token's time, what a draft model saves at best is taken to be this share.
_HOPED = 0.5
# A forward over more tokens catches up with the text and tells nothing of what a level costs.
_LEVEL = 16


class PacedStep(NamedTuple):
    """What a step took and brought, and the draft model's part in it."""

    drafted: bool  # Did it look for drafts at all?
    seconds: float  # Of its forward.
    reading: float  # Seconds of the draft model.
    promised: float  # The scores of what the draft model read.
    num_tokens: int
    num_named: int  # Accepted tokens that the draft model named.


class Pacing:
    """What one draft model costs and brings beside one model; outlives calls.

    Safe to use from several threads: news that two of them bring at once may be lost, no more.
    """

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._share = _mean(_PRIOR_SHARE)  # Of promised tokens that were accepted.
        self._forward: MeanRatio | None = None  # Seconds of a forward over a level.
        self._prompt: MeanRatio | None = None  # Seconds for each token of a prompt.
        self._token: MeanRatio | None = None  # Seconds for each token, all told.
        self._token_without: MeanRatio | None = None  # The same in steps without a draft model.
        self._num_steps = 0
        self._num_unread = 0  # Steps since the last forward.
        self._num_refused = 0  # Prompts since the last one that was read.

    def may_read(self, plain_seconds: float) -> bool:
        """Shall this step ask the draft model? Asked once in each step that looks for drafts.

        `plain_seconds` is what a plain step of the model takes.
        """
        if self._token is None or self._token_without is None:
            self._token = _mean(plain_seconds)
            self._token_without = _mean(plain_seconds)
        self._num_steps += 1
        goes_without = self._num_steps % _WITHOUT_EVERY == 0
        return not goes_without and self._ledger.room(plain_seconds) > 0

    def pays(self, promised: float) -> bool:
        """Does a forward pay, by the sum of the scores of the nodes that it reads?"""
        if self._forward is None or self._token is None or self._num_unread >= _TRY_EVERY:
            return True
        return self._share.value * promised * self._token.value > self._forward.value

    def pays_to_begin(self, num_tokens: int, num_left: float) -> bool:
        """May what is left to write bring back the time that a prompt of this many tokens takes?

        Asked once for each prompt. The first one is read in any case: it shows what reading takes.
        """
        if self._prompt is None or self._token_without is None:
            return True
        pays = self._prompt.value * num_tokens < _HOPED * self._token_without.value * num_left
        is_due = self._num_refused >= _READ_EVERY
        self._num_refused = 0 if pays or is_due else self._num_refused + 1
        return pays or is_due

    def observe_prompt(self, seconds: float, num_tokens: int) -> None:
        """Takes in what reading a prompt took; to read it is the price of having a draft model."""
        self._prompt = self._prompt or MeanRatio(seconds / num_tokens, weight=_PRIOR, fade=1.0)
        self._prompt.observe(seconds, num_tokens)

    def observe_forward(self, seconds: float, num_tokens: int) -> float:
        """Takes in what a draft model's forward over `num_tokens` took.

        Returns the seconds that are set against it: a slow moment of the machine is not its fault.
        """
        self._num_unread = 0
        if num_tokens > _LEVEL:
            return seconds
        if self._forward is None:
            self._forward = _mean(seconds, weight=1.0)
        seconds = min(seconds, _FAR * self._forward.value)
        self._forward.observe(seconds, 1)
        return seconds

    def observe_step(self, step: PacedStep) -> None:
        """Takes in what a step took and brought."""
        self._num_unread += 1
        if self._token is None or self._token_without is None:
            return
        seconds, saved = step.seconds + step.reading, 0.0
        if step.promised:
            saved = step.num_tokens * self._token_without.value - seconds
            self._share.observe(step.num_named, step.promised)
        elif step.drafted:
            self._token_without.observe(seconds, step.num_tokens)
        if step.drafted:
            self._token.observe(seconds, step.num_tokens)
        self._ledger.observe(seconds, saved)


def _mean(value: float, weight: float = _PRIOR) -> MeanRatio:
    return MeanRatio(value, weight=weight, fade=_FADE)
