"""Messages with images: the text that `generate()` gives for them, and what is refused."""

from __future__ import annotations

import base64
import gc
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from selfspec.cli.loading import images_of
from selfspec.cli.options import WriteOptions
from selfspec.cli.writer import load_writer
from selfspec.serving import images as images_module
from selfspec.serving import limits
from selfspec.serving.fields import RequestError
from selfspec.serving.images import ImageReader
from selfspec.serving.limits import ByteBudget
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.schema import Chat
from tests.processors import data_url, picture
from tests.serving.conftest import CHAT, seeing_client
from tests.waiting import wait_until

PNG = data_url(picture(0))


@pytest.fixture(scope="module")
def client(pair: tuple[Any, Any]) -> Iterator[Any]:
    with seeing_client(pair) as client:
        yield client


def asked(*urls: str, text: str = "the fox") -> list[dict[str, Any]]:
    """Messages with a text, and then images."""
    images = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    return [
        {"role": "system", "content": "brown"},
        {"role": "user", "content": [{"type": "text", "text": text}, *images]},
    ]


def text_of(client: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    response = client.post(CHAT, json={"messages": messages, "max_tokens": 12, **options})
    assert response.status_code == 200, response.text
    return [choice["message"]["content"] for choice in response.json()["choices"]]


def text_alone(pair: tuple[Any, Any], *images: Any, text: str = "the fox") -> str:
    """What stock writes about the images."""
    model, processor = pair
    content = [{"type": "text", "text": text}, *({"type": "image", "image": i} for i in images)]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "brown"}]},
        {"role": "user", "content": content},
    ]
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True, **options)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_texts_are_those_of_generate(client: Any, pair: tuple[Any, Any]) -> None:
    """Of different images after the same text, again and again, and of text alone between them."""
    shown = [[picture(0)], [picture(1)], [], [picture(1), picture(0)], [picture(0)]]
    expected = [text_alone(pair, *each) for each in shown]
    assert len(set(expected)) == 4

    def ask(pictures: list[Any]) -> Any:
        return text_of(client, asked(*map(data_url, pictures)), temperature=0)[0]

    for _ in range(2):
        with ThreadPoolExecutor(len(shown)) as clients:
            assert list(clients.map(ask, shown)) == expected
    assert client.thread.spec.total_stats.disabled_reason is None
    assert client.thread.spec.total_stats.num_nodes > client.thread.spec.total_stats.num_steps


def test_tokens_of_a_model_that_sees(client: Any, pair: tuple[Any, Any]) -> None:
    for messages in (asked(), asked(PNG, PNG)):
        told = client.post("/tokenize", json={"messages": messages})
        usage = client.post(CHAT, json={"messages": messages, "max_tokens": 1}).json()["usage"]
        assert (told.status_code, told.json()["count"]) == (200, usage["prompt_tokens"])
    place = pair[0].config.image_token_index
    assert told.json()["tokens"].count(place) == 8


def test_samples_of_one_image(client: Any) -> None:
    messages = asked(data_url(picture(0)))
    both = text_of(client, messages, n=2, seed=3, temperature=1)
    assert both[0] != both[1]
    assert text_of(client, messages, seed=4, temperature=1) == both[1:]


def test_an_image_is_turned_upright_as_transformers_does(
    client: Any, pair: tuple[Any, Any]
) -> None:
    data, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    picture(0).save(data, "PNG", exif=exif)
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    (found,) = text_of(client, asked(url), temperature=0)
    assert found == text_alone(pair, picture(0).transpose(Image.Transpose.ROTATE_270))


REFUSED = {
    "no base64": ("data:image/png;base64,a*b=", "must have whole base64"),
    "half a picture": (PNG[: 22 + 4 * 40], "must be a picture as PNG, JPEG, WEBP, GIF"),
    "no picture": ("data:image/png;base64,aGVsbG8=", "must be a picture as PNG, JPEG, WEBP, GIF"),
    "another format": (data_url(picture(0), "BMP"), "must be a picture as PNG, JPEG, WEBP, GIF"),
    "another kind": ("data:text/plain;base64,aGVsbG8=", "must be a data URL such as"),
    "a file": ("file:///etc/passwd", "must be a data URL such as"),
    "an address": ("http://localhost:9/image.png", "no addresses are fetched (got 'http://"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image(client: Any, name: str) -> None:
    url, said = REFUSED[name]
    response = client.post(CHAT, json={"messages": asked(PNG, url), "stream": name == "a file"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert error["message"].startswith("image 2 of messages must ")
    assert said in error["message"]


def test_a_template_gets_only_the_names_that_it_uses(client: Any, tmp_path: Path) -> None:
    """The processor would fetch and open images, and follow the other names too."""
    url, path = "http://localhost:9/a.png", tmp_path / "a.png"
    picture(3).save(path)
    expected = text_of(client, asked(PNG), temperature=0)
    for options in (
        *({"images": [url]}, {"images": [str(path)]}, {"videos": [url]}, {"audio": url}),
        *({"size": {"height": 16, "width": 16}}, {"truncation": True, "max_length": 1}),
        *({"text_kwargs": {"padding": "x"}}, {"images_kwargs": {"size": 5}}),
    ):
        found = text_of(client, asked(PNG), temperature=0, chat_template_kwargs=options)
        assert found == expected, options
        body = {"input": "the fox", "max_output_tokens": 1, "chat_template_kwargs": options}
        assert client.post("/v1/responses", json=body).json()["usage"]["input_tokens"] == 5


@pytest.mark.parametrize("image_url", [PNG, {"url": 5}, {}, None])
def test_parts_of_a_wrong_form(client: Any, image_url: Any) -> None:
    part = {"type": "image_url", "image_url": image_url}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    error = client.post(CHAT, json={"messages": messages}).json()["error"]
    assert error["param"] == "messages"
    assert error["message"].startswith("messages[0].content[1].image_url")


def test_limits(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(*urls: str) -> str:
        response = client.post(CHAT, json={"messages": asked(*urls)})
        assert response.status_code == 400
        return response.json()["error"]["message"]

    assert "image 17 of messages must be left out" in message(*[PNG] * 17)
    monkeypatch.setattr(images_module, "_MOST_PIXELS", 2 * 12 * 9 - 1)
    assert "image 2 of messages must leave the images of a request at most 215" in message(PNG, PNG)


def test_what_images_take_is_counted_and_their_base64_is_dropped(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty waiting requests once held two gigabytes of base64."""
    held: list[int] = []
    monkeypatch.setattr(limits, "_FREE_BYTES", 0)
    monkeypatch.setattr(ByteBudget, "hold", lambda _self, _request, size: held.append(size))
    add = ModelThread.add

    def is_it(value: Any) -> bool:
        return isinstance(value, Chat) and value.max_tokens == 11

    def watched(self: ModelThread, prompt: Any) -> None:
        wait_until(lambda: not any(map(is_it, gc.get_objects())))
        add(self, prompt)

    monkeypatch.setattr(ModelThread, "add", watched)
    messages = asked(PNG, PNG)
    text_of(client, messages, max_tokens=11)
    size = len(json.dumps({"messages": messages, "max_tokens": 11}, separators=(",", ":")))
    assert (held[-3], held[-1]) == (size, 0)
    pixels = 2 * 3 * 8 * 8 * 4  # as the processor made them
    assert pixels < held[-2] < 2 * pixels


def test_a_model_that_reads_no_images() -> None:
    with pytest.raises(RequestError) as raised:
        ImageReader().pictured(asked(PNG))
    assert raised.value.field == "messages"
    said = "must be left out, since this model reads no images (it has no image processor)"
    assert str(raised.value) == f"image 1 of messages {said}"


def test_the_command_line_loads_what_reads_images(pair: tuple[Any, Any], tmp_path: Path) -> None:
    model, processor = pair
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = load_writer(WriteOptions(model=str(tmp_path)), sees=True)
    assert type(loaded.model) is type(model)
    assert loaded.images.processor.image_processor is not None
    limited = WriteOptions(model=str(tmp_path), max_memory="1GB")
    assert "--max-memory" in images_of(limited).reason
