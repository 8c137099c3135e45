"""Images in messages: from what a request names to pictures, within limits."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.request import urlopen

from selfspec.errors import one_line
from selfspec.serving.schema import RequestError

MAX_IMAGE_BYTES = 32 << 20  # Of all images of a request together, and so are the next two.
_MOST_PIXELS = 50_000_000
_MOST_IMAGES = 16
_MOST_PIXELS_OF_ALL = 4 * _MOST_PIXELS  # Of all requests that were not answered yet.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PATIENCE = 10.0  # An address must answer within 10 seconds, and send all within 10 more.
_CHUNK = 1 << 16
_IN_DATA = re.compile(r"data:image/[\w.+-]+;base64,(?P<base64>.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of conversations for a model's processor; asks addresses if it `fetches`.

    Without a processor, `reason` says why there is none, and images are refused.
    """

    processor: Any = None
    reason: str = "it has no image processor"
    fetches: bool = False

    def fetched(self, prompt: Any) -> Any:
        """The same prompt with the data of its images. Their sizes are checked; none is decoded."""
        found = list(_images_in(prompt))
        urls = [(where, part["image_url"]["url"]) for where, part in found if "image_url" in part]
        if not urls:
            return prompt
        if self.processor is None:
            rule = "must be left out, since this model reads no images"
            raise _wrong(urls[0][0], f"{rule} ({self.reason})")
        if len(urls) > _MOST_IMAGES:
            rule = f"must be one of at most {_MOST_IMAGES} images of a request"
            raise _wrong(urls[_MOST_IMAGES][0], f"{rule} (got {len(urls)})")
        left = {"bytes": MAX_IMAGE_BYTES, "pixels": _MOST_PIXELS}
        return _with_images(prompt, [self._part(where, url, left) for where, url in urls])

    def pictured(self, prompt: Any) -> Any:
        """The same prompt, with pictures where its messages have images."""
        prompt = self.fetched(prompt)
        found = list(_images_in(prompt))
        images = [{"type": "image", "image": _decoded(where, part)} for where, part in found]
        return _with_images(prompt, images) if images else prompt

    def _part(self, where: str, url: str, left: dict[str, int]) -> dict[str, Any]:
        """The part of an image, which takes its share of what is left for the request."""
        data = self._data(where, url, left["bytes"])
        if len(data) > left["bytes"]:
            raise _too_large(where, f"{MAX_IMAGE_BYTES} bytes")
        left["bytes"] -= len(data)
        with _opened(where, data) as image:
            num_pixels = image.width * image.height
        left["pixels"] -= num_pixels
        if left["pixels"] < 0:
            raise _too_large(where, f"{_MOST_PIXELS} pixels")
        return {"type": "data", "data": data, "pixels": num_pixels}

    def _data(self, where: str, url: str, most: int) -> bytes:
        if found := _IN_DATA.fullmatch(url):
            try:
                return base64.b64decode(found["base64"], validate=True)
            except ValueError as error:
                raise _wrong(where, f"must have whole base64 after its comma ({error})") from None
        if not url[:8].lower().startswith(("http://", "https://")):
            form = "data:image/png;base64,..."
            raise _wrong(where, f"must be a data URL such as {form!r} (got {url!r:.80})")
        if not self.fetches:
            rule = "must be a data URL, since this server fetches no addresses"
            raise _wrong(where, f"{rule} (got {url!r:.80}); selfspec serve has --fetch-images")
        return _fetched(where, url, most)


def has_images(prompt: Any) -> bool:
    return any(_images_in(prompt))


def check_pixels(prompts: Iterable[Any], others: int) -> int:
    """How many pixels the fetched images of prompts have; refuses too many beside `others`."""
    number = sum(int(part.get("pixels", 0)) for each in prompts for _, part in _images_in(each))
    if number and number + others > _MOST_PIXELS_OF_ALL:
        rule = f"the images of all requests may have {_MOST_PIXELS_OF_ALL} pixels at a time"
        raise RequestError(f"{rule}; ask again later", status=503, code="overloaded")
    return number


def _images_in(prompt: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    is_chat = isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)
    for number, message in enumerate(prompt if is_chat else ()):
        if isinstance(message["content"], list):
            for index, part in enumerate(message["content"]):
                if part["type"] != "text":
                    yield f"messages[{number}].content[{index}].image_url", part


def _with_images(prompt: Any, images: Sequence[dict[str, Any]]) -> Any:
    """The same messages, with these parts in place of their images, in order."""
    left = iter(images)
    return [
        {**each, "content": [part if part["type"] == "text" else next(left) for part in parts]}
        if isinstance(parts := each["content"], list)
        else each
        for each in prompt
    ]


def _fetched(where: str, url: str, most: int) -> bytes:
    """What an address answers, up to one byte more than it may."""
    data, end = bytearray(), monotonic() + _PATIENCE
    try:
        with urlopen(url, timeout=_PATIENCE) as response:
            while (chunk := response.read1(_CHUNK)) and len(data) <= most:
                data += chunk
                if monotonic() > end:
                    raise TimeoutError("it took too long")
    except (OSError, ValueError) as error:
        rule = f"must be an address that answers with an image ({one_line(error):.120})"
        raise _wrong(where, rule) from None
    return bytes(data)


def _decoded(where: str, part: dict[str, Any]) -> Any:
    """The picture of a part upright and in RGB, as transformers loads it from a file."""
    from PIL import ImageOps

    with _opened(where, part["data"]) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _opened(where: str, data: bytes) -> Iterator[Any]:
    """A picture of which the header was read. Inside, whatever goes wrong is its own fault."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(where, f"{_MOST_PIXELS} pixels") from None
    except Exception:  # Whatever a decoder finds wrong.
        rule = f"must be a picture as {', '.join(_FORMATS)}"
        raise _wrong(where, f"{rule} (got {len(data)} bytes that can't be read as one)") from None


def _too_large(where: str, most: str) -> RequestError:
    return _wrong(where, f"must leave the images of a request at most {most} together (got more)")


def _wrong(where: str, rule: str) -> RequestError:
    return RequestError(f"{where} {rule}", field=where)
