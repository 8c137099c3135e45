"""What a call leaves behind it."""

from __future__ import annotations

import gc
import weakref

from selfspec import SelfSpec, attach
from tests.fakes import new_model, prompt
from tests.lossless.same import GREEDY, run


def test_nothing_of_a_call_waits_for_the_garbage_collector() -> None:
    """Neither its KV nor the `SelfSpec`, which saves what it remembers once it is gone."""
    model, spec = attach(new_model()), SelfSpec()
    gone = weakref.ref(spec)
    gc.disable()
    try:
        run(model, prompt(), assistant=spec, **GREEDY)
        del spec
        assert gone() is None
    finally:
        gc.enable()
