"""The server of transformers, whose model drafts: the one place that knows how it is built."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers.cli.serve import Serve

from selfspec import SelfSpec, StepRecord, attach

__all__ = ["DraftingServer"]

# How long an answer that can't be broken off may hold up the end, in seconds.
_PATIENCE = 5


class DraftingServer(Serve):  # type: ignore[misc]
    """Answers over HTTP with one model, for which `spec` drafts; loads the model when it is made.

    `options` go to transformers: host, port, device and dtype.
    """

    def __init__(self, model: str, spec: SelfSpec, **options: Any) -> None:
        super().__init__(force_model=model, non_blocking=True, **options)
        self._spec = spec
        _attach_what_is_loaded(self._model_manager, spec)
        self.server.config.timeout_graceful_shutdown = _PATIENCE
        self.server.config.app.add_api_route("/selfspec/stats", self.stats, methods=["GET"])

    def start_server(self) -> None:
        """Does nothing. transformers calls it at the end of the constructor."""

    def run(self) -> None:
        """Listens and answers, until Ctrl-C raises `KeyboardInterrupt`."""
        with self._spec.listening(self._break_off_at_the_end):
            self.server.run()

    def stats(self) -> dict[str, Any]:
        """What was counted over all answers that ended so far."""
        return self._spec.total_stats.as_dict()

    def _break_off_at_the_end(self, _record: StepRecord) -> None:
        """Called in each step. Its error is what the client of an answer in the making gets."""
        if self.server.should_exit:
            from fastapi import HTTPException

            raise HTTPException(503, "the server is being stopped")


def _attach_what_is_loaded(models: Any, spec: SelfSpec) -> None:
    """Makes `spec` the default assistant of the model, also when it was unloaded and read anew."""
    load = models.load_model_and_processor

    def load_and_attach(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        model, processor = load(*args, **kwargs)
        return attach(model, spec), processor

    models.load_model_and_processor = load_and_attach
    for held in models.loaded_models.values():
        _try_out(attach(held.model, spec), spec)


def _try_out(model: Any, spec: SelfSpec) -> None:
    """Finds out what the model can verify, before the first answer waits for it.

    In a thread that ends. Otherwise this one would keep OpenMP's threads for ever. Together with
    those of the thread that answers they would be more than there are cores, and OpenMP then puts
    threads to sleep between any two operations.
    """
    with ThreadPoolExecutor(1) as aside:
        aside.submit(spec.ability, model).result()
