"""Text as it may be sent: nothing of a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from selfspec.serving.text import TextStream
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()


@given(
    text=st.text(alphabet="abé", max_size=30),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    stream, sent = TextStream(TOKENIZER, stops), ""
    for token_id in TOKENIZER(text)["input_ids"]:
        if stream.is_stopped:
            break
        sent += stream.add([token_id])
        assert not any(stop in sent for stop in stops)
    is_there = any(stop in text for stop in stops)
    assert stream.is_stopped == is_there
    # A stop string that is complete ends the text, even if a longer one began before it.
    sent += stream.end()
    assert text.startswith(sent) if is_there else sent == text
