"""A tiny model behind the application, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("fastapi", reason="needs the extra: pip install 'selfspec[serve]'")

from starlette.testclient import TestClient

from selfspec import SelfSpec
from selfspec.serving.app import application
from selfspec.serving.calls import Limits
from selfspec.serving.model_thread import ModelThread

NAME = "tiny"


class Served:
    """A model that answers, and a client."""

    def __init__(
        self,
        folder: str,
        *,
        max_positions: int | None = 512,
        gate: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.spec = SelfSpec(max_nodes=6, budget="fixed")
        options = {"max_rows": 3, "max_memory": 1 << 24, **options}
        self.thread = ModelThread(self.model, self.tokenizer, self.spec, **options)
        limits = Limits(self.model.config.vocab_size, max_positions)
        self.app = application(self.thread, name=NAME, limits=limits, **(gate or {}))
        self.client = TestClient(self.app, base_url="http://localhost")

    def ask(self, path: str, **body: Any) -> Any:
        """The answer's JSON; the request must succeed."""
        response = self.client.post(f"/v1/{path}", json={"model": NAME, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def alone(self, ids: list[int], seed: int = 0, **options: Any) -> list[int]:
        """What stock's own call writes."""
        torch.manual_seed(seed)
        inputs = torch.tensor([ids])
        output = type(self.model).generate(
            self.model,
            inputs,
            attention_mask=torch.ones_like(inputs),
            tokenizer=self.tokenizer,
            **options,
        )
        return output[0, len(ids) :].tolist()

    def text_alone(self, ids: list[int], seed: int = 0, **options: Any) -> str:
        """The same as text."""
        return self.tokenizer.decode(self.alone(ids, seed, **options), skip_special_tokens=True)


@pytest.fixture(scope="module")
def served(chat_folder: str) -> Iterator[Served]:
    served = Served(chat_folder)
    served.thread.start()
    with served.client:
        yield served
