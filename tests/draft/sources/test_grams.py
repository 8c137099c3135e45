"""N-gram queues equal a plain dict of lists, whatever is added, and never outgrow their bounds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from selfspec.draft.sources.grams import GramQueues

MAX_KEYS, MAX_GRAMS = 3, 4
tokens = st.integers(0, 5)
grams = st.lists(tokens, min_size=2, max_size=4)


class QueuesMachine(RuleBasedStateMachine):
    """Beside the queues stand a dict of lists, the freshest first, and the keys by last use."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = GramQueues(max_keys=MAX_KEYS, max_grams=MAX_GRAMS)
        self.plain: dict[int, list[tuple[int, ...]]] = {}

    @rule(gram=grams)
    def add(self, gram):
        self.queues.add(gram)
        key, tail = gram[0], tuple(gram[1:])
        held = self.plain.pop(key, [])
        held = [tail, *(other for other in held if other != tail)]
        self.plain[key] = held[:MAX_GRAMS]  # now the last of the dict: the freshest key
        while len(self.plain) > MAX_KEYS:
            del self.plain[next(iter(self.plain))]

    @rule(key=tokens)
    def look(self, key):
        """Looking freshens nothing."""
        self.queues.behind(key)

    @invariant()
    def holds_the_same(self):
        for key in range(6):
            assert self.queues.behind(key) == self.plain.get(key, [])


TestQueues = QueuesMachine.TestCase
TestQueues.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
