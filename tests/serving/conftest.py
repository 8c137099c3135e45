"""A tiny model behind the application, and clients of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("fastapi", reason="needs the extra: pip install 'selfspec[serve]'")

from starlette.testclient import TestClient

from selfspec import SelfSpec
from selfspec.serving.app import application
from selfspec.serving.images import ImageReader
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.prompt_files import Encoder
from tests.processors import seeing_pair

NAME = "tiny"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


class Served:
    """A model that answers, and a client."""

    def __init__(
        self, folder: str, *, max_positions: int | None = 512, gate: Any = None, **options: Any
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.spec = SelfSpec(max_nodes=6, budget="fixed")
        options = {"max_rows": 3, "max_memory": 1 << 24, **options}
        self.thread = ModelThread(self.model, self.tokenizer, self.spec, **options)
        encoder = Encoder(self.tokenizer, self.model.config.vocab_size, max_positions)
        self.app = application(self.thread, name=NAME, encoder=encoder, **(gate or {}))
        self.client = TestClient(self.app, base_url="http://localhost")

    def post(self, path: str, body: Any) -> Any:
        """The response. Bytes are sent as they are, and halves of characters are escaped."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        return self.client.post(path, content=data)

    def ask(self, path: str, **body: Any) -> Any:
        """The answer's JSON; the request must succeed."""
        response = self.post(path, {"model": NAME, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def text_alone(self, ids: list[int], seed: int = 0, **options: Any) -> str:
        """What stock's own call writes."""
        torch.manual_seed(seed)
        inputs = torch.tensor([ids])
        mask = torch.ones_like(inputs)
        output = type(self.model).generate(self.model, inputs, attention_mask=mask, **options)
        return self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)


@contextmanager
def seeing_client(pair: tuple[Any, Any], kind: type[Encoder] = Encoder) -> Iterator[Any]:
    """A client of a model that sees, with its thread."""
    model, processor = pair
    spec = SelfSpec(max_nodes=6, budget="fixed")
    thread = ModelThread(model, processor.tokenizer, spec, max_rows=4, max_memory=1 << 24)
    thread.start()
    vocab_size = model.config.text_config.vocab_size
    encoder = kind(processor.tokenizer, vocab_size, 512, images=ImageReader(processor))
    with TestClient(application(thread, name=NAME, encoder=encoder), "http://localhost") as made:
        made.thread = thread
        yield made


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A model that sees, and its processor."""
    return seeing_pair()


@pytest.fixture(scope="module")
def served(chat_folder: str) -> Iterator[Served]:
    served = Served(chat_folder)
    served.thread.start()
    with served.client:
        yield served
