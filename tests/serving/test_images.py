"""Messages with images: the text that `generate()` gives for them, and what is refused."""

from __future__ import annotations

import base64
import gc
import http.server
import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra: pip install '.[serve]'")

from PIL import Image

from selfspec.cli.loading import Loaded, images_of
from selfspec.cli.options import DraftOptions
from selfspec.cli.prompt_files import read_line
from selfspec.serving import images as images_module
from selfspec.serving import limits
from selfspec.serving.encoder import Encoder
from selfspec.serving.fields import RequestError
from selfspec.serving.images import ImageReader
from selfspec.serving.limits import ByteBudget
from selfspec.serving.model_thread import Texts
from selfspec.serving.schema import Chat
from tests.processors import data_url, picture
from tests.serving.conftest import CHAT, seeing_client
from tests.waiting import PATIENCE, wait_until


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
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        messages = asked(*map(data_url, shown[number]))
        (found[number],) = text_of(client, messages, temperature=0)

    for _ in range(2):
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(shown))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(len(shown))] == expected
    assert client.thread.spec.total_stats.disabled_reason is None
    assert client.thread.spec.total_stats.num_nodes > client.thread.spec.total_stats.num_steps


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


PNG = data_url(picture(0))
AN_ADDRESS = "http://localhost:9/image.png"
REFUSED = {
    "no base64": ("data:image/png;base64,a*b=", "must have whole base64"),
    "half a picture": (PNG[: 22 + 4 * 40], "must be a picture as PNG, JPEG, WEBP, GIF"),
    "no picture": ("data:image/png;base64,aGVsbG8=", "must be a picture as PNG, JPEG, WEBP, GIF"),
    "another format": (data_url(picture(0), "BMP"), "must be a picture as PNG, JPEG, WEBP, GIF"),
    "another kind": ("data:text/plain;base64,aGVsbG8=", "must be a data URL such as"),
    "a file": ("file:///etc/passwd", "must be a data URL such as"),
    "an address": (AN_ADDRESS, "fetches no addresses (got 'http://localhost:9/image.png')"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image(client: Any, name: str) -> None:
    url, said = REFUSED[name]
    where = "messages[1].content[2].image_url"
    response = client.post(CHAT, json={"messages": asked(PNG, url), "stream": name == "a file"})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (
        400,
        "invalid_request_error",
        where,
    )
    assert error["message"].startswith(f"{where} {said}" if said[:4] == "must" else where)
    assert said in error["message"]


@pytest.mark.parametrize("image_url", [PNG, {"url": 5}, {}, None, {"url": PNG, "size": 1}])
def test_parts_of_a_wrong_form(client: Any, image_url: Any) -> None:
    part = {"type": "image_url", "image_url": image_url}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    error = client.post(CHAT, json={"messages": messages}).json()["error"]
    assert error["param"] == "messages"
    assert "messages[0].content must have a url" in error["message"]
    assert "in [1].image_url (got" in error["message"]


def test_limits(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(*urls: str) -> str:
        response = client.post(CHAT, json={"messages": asked(*urls)})
        assert response.status_code == 400
        return response.json()["error"]["message"]

    assert "[17].image_url must be one of at most 16 images of a request (got 17)" in message(
        *[PNG] * 17
    )
    monkeypatch.setattr(images_module, "_MOST_PIXELS", 200)
    assert "[2].image_url must leave the images of a request at most 200 pixels" in message(
        PNG, PNG
    )
    monkeypatch.setattr(images_module, "MAX_IMAGE_BYTES", 20)
    assert "[1].image_url must leave the images of a request at most 20 bytes" in message(PNG)


def test_sizes_are_known_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "_decoded", None)
    monkeypatch.setattr(images_module, "_MOST_PIXELS", 2 * 12 * 9 - 1)
    with pytest.raises(RequestError, match="at most 215 pixels"):
        ImageReader(processor=object()).pictured(asked(PNG, PNG))


def test_what_images_take_is_counted_and_their_base64_is_dropped(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty waiting requests once held two gigabytes of base64."""
    held: list[int] = []
    monkeypatch.setattr(limits, "_FREE_BYTES", 0)
    monkeypatch.setattr(ByteBudget, "hold", lambda _self, _request, size: held.append(size))
    events = Texts.events

    def is_it(value: Any) -> bool:
        return isinstance(value, Chat) and value.max_tokens == 11

    def watched(self: Texts, calls: Any) -> Any:
        wait_until(lambda: not any(map(is_it, gc.get_objects())))
        return events(self, calls)

    monkeypatch.setattr(Texts, "events", watched)
    messages = asked(PNG, PNG)
    text_of(client, messages, max_tokens=11)
    size = len(json.dumps({"messages": messages, "max_tokens": 11}, separators=(",", ":")))
    assert (held[-3], held[-1]) == (size, 0)
    pixels = 2 * 3 * 8 * 8 * 4  # as the processor made them
    assert pixels < held[-2] < 2 * pixels


def test_a_full_server_asks_no_address(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.thread, "enter", lambda *_: (_ for _ in ()).throw(FULL))
    monkeypatch.setattr(ImageReader, "fetched", None)
    assert client.post(CHAT, json={"messages": asked(PNG)}).status_code == 503


def test_text_waits_for_no_address(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty addresses that never answered once let a text wait for half a minute."""
    is_over, num_asked = threading.Event(), [0]

    def never_answers(*_address: Any, **_options: Any) -> None:
        num_asked[0] += 1
        is_over.wait(PATIENCE)
        raise OSError("it never answered")

    monkeypatch.setattr(images_module, "urlopen", never_answers)
    with seeing_client(pair, fetches=True) as client, ThreadPoolExecutor(40) as clients:
        body = {"messages": asked(AN_ADDRESS)}
        waiting = [clients.submit(client.post, CHAT, json=body) for _ in range(40)]
        wait_until(lambda: num_asked[0] >= 5)
        text_of(client, asked())
        assert not any(each.done() for each in waiting)
        is_over.set()
        assert {each.result().status_code for each in waiting} == {400}


FULL = RequestError("full", status=503)


def test_a_model_that_reads_no_images() -> None:
    with pytest.raises(RequestError) as raised:
        ImageReader().pictured(asked(PNG))
    assert raised.value.field == "messages[1].content[1].image_url"
    assert "this model reads no images (it has no image processor)" in str(raised.value)


class Pictures(http.server.BaseHTTPRequestHandler):
    """A picture at one address, and nothing at others."""

    def do_GET(self) -> None:
        is_there = self.path == "/there"
        self.send_response(200 if is_there else 404)
        self.end_headers()
        if is_there:
            picture(0).save(self.wfile, "JPEG")

    def log_message(self, *_args: Any) -> None:
        pass


def test_addresses_that_may_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ImageReader(processor=object(), fetches=True)
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("localhost", 0), Pictures) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            at = f"http://localhost:{server.server_port}"
            message = reader.pictured(asked(f"{at}/there"))[1]
            assert message["content"][1]["image"].size == (12, 9)
            with pytest.raises(RequestError, match=r"answers with an image.*404"):
                reader.pictured(asked(f"{at}/nowhere"))
            with pytest.raises(RequestError, match=r"answers with an image.*URL can't contain"):
                reader.pictured(asked(f"{at}/no where"))
            monkeypatch.setattr(images_module, "MAX_IMAGE_BYTES", 20)
            with pytest.raises(RequestError, match="at most 20 bytes"):
                reader.pictured(asked(f"{at}/there"))
        finally:
            server.shutdown()
            thread.join()


def test_a_line_of_a_prompt_file(pair: tuple[Any, Any]) -> None:
    line = read_line(1, json.dumps({"messages": asked(PNG)}).encode())
    encoder = Encoder(pair[1].tokenizer, 999, 512, images=ImageReader(pair[1]))
    inputs, _ = encoder.arguments_for(line.prompt, line.settings)
    assert isinstance(inputs, dict)
    assert inputs["pixel_values"].shape == (1, 3, 8, 8)


def test_the_command_line_loads_what_reads_images(pair: tuple[Any, Any], tmp_path: Path) -> None:
    model, processor = pair
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = Loaded.load(DraftOptions(model=str(tmp_path)), sees=True)
    assert type(loaded.model) is type(model)
    assert loaded.images.processor.image_processor is not None
    limited = DraftOptions(model=str(tmp_path), max_memory="1GB")
    assert "--max-memory" in images_of(limited).reason
