"""Where a text ends: lengths, end tokens, stop strings, also in the middle of an accepted path."""

from __future__ import annotations

from typing import Any

import pytest

from selfspec import SelfSpec, attach
from tests.fakes import PAD, VOCAB, attached_model, new_model, prompt, tiny_model, tiny_tokenizer
from tests.lossless.same import (
    GREEDY,
    MODES,
    NUM_COLUMNS,
    SAMPLE,
    Call,
    knowing,
    late_token,
    run,
    run_both,
    slow,
)


def knowing_all(model: Any, inputs: dict[str, Any], options: dict[str, Any], **knobs: Any) -> Any:
    """A `SelfSpec` whose accepted paths run past every limit below."""
    return knowing(run(model, inputs, **options).ids, inputs, **knobs)


@pytest.mark.parametrize("max_nodes", [slow(2), 5, slow(16)])
def test_every_length(max_nodes: int, call: Call) -> None:
    """The last tree is cut at each of its levels."""
    model, inputs, options = tiny_model(), call.inputs, call.options
    spec = knowing_all(model, inputs, options, max_nodes=max_nodes)
    for length in range(1, 13):
        run_both(model, inputs, spec, max_new_tokens=length, drafts=False, **options)


@pytest.mark.parametrize("pad", [PAD, slow(None)], ids=["pad", "no-pad"])
def test_end_token_anywhere(pad: int | None, call: Call) -> None:
    """Each token of the last row's text is the end token once."""
    model, inputs, options = tiny_model("qwen2"), call.inputs, call.options
    options = options | ({} if pad is not None else {"pad_token_id": None})
    spec = knowing_all(model, inputs, options)
    text = run(model, inputs, **options).ids[-1, NUM_COLUMNS:].tolist()
    for eos in dict.fromkeys(text[:12]):
        run_both(model, inputs, spec, eos_token_id=eos, drafts=False, **options)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_nothing_but_the_end(num_rows: int) -> None:
    """The prompt's forward brings the end token for every row: no tree is ever grown."""
    both = run_both(
        tiny_model(), prompt(num_rows), eos_token_id=list(range(VOCAB)), drafts=False, **SAMPLE
    )
    assert both.stats.num_steps == 0
    assert both.ours.ids.shape[1] == NUM_COLUMNS + 1


def test_rows_that_end_far_apart() -> None:
    """One row ends at once and one never: the others leave the batch while it goes on."""
    model, inputs = tiny_model("mistral"), prompt(3)
    for options in MODES.values():
        texts = run(model, inputs, **options).ids[:, NUM_COLUMNS:]
        for row in range(3):
            eos = [int(texts[row, 0]), late_token(texts[(row + 1) % 3].tolist())]
            run_both(model, inputs, eos_token_id=eos, drafts=False, **options)


@pytest.mark.parametrize(
    ("mode", "eos"), [("greedy", 2), ("sample", None), slow("greedy", None), slow("sample", 2)]
)
@pytest.mark.parametrize("num_rows", [slow(1), 3])
def test_stop_strings(num_rows: int, eos: int | None, mode: str) -> None:
    """Strings cut out of the text, from inside one token into another."""
    model, tokenizer = attached_model("gpt-neox"), tiny_tokenizer()
    inputs, options = prompt(num_rows), MODES[mode] | {"eos_token_id": eos}
    ids = run(model, inputs, **options).ids
    spec = knowing(ids, inputs)
    text = tokenizer.decode(ids[-1, NUM_COLUMNS:])
    for start in range(1, 30, 7):
        stops = [text[start : start + 3], "never to be said"]
        asked = {"stop_strings": stops, "tokenizer": tokenizer, "drafts": False, **options}
        run_both(model, inputs, spec, entrance="assistant", **asked)


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_num_return_sequences(num_rows: int, num_sequences: int) -> None:
    model, inputs = tiny_model("gemma3"), prompt(num_rows)
    options = SAMPLE | {"num_return_sequences": num_sequences, "eos_token_id": [7, 8, 9]}
    run_both(model, inputs, drafts=False, **options)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
def test_sequences_of_one_prompt_read_it_once(name: str) -> None:
    """Where ids and padding alone decide on what is read."""
    model, inputs = new_model(name), prompt(2)
    shapes: list[tuple[int, ...]] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _output: shapes.append(tuple(args[0].shape))
    )
    options = {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 3}
    attach(model).generate(**inputs, **options, assistant=SelfSpec(trust_hooks=True))
    hook.remove()
    num_tokens = inputs["input_ids"].shape[1]
    num_read = [rows for rows, width in shapes if width == num_tokens]
    assert num_read == [6 if name == "qwen3-next" else 2]


@pytest.mark.parametrize("length", [1, slow(2), slow(3), 60])
@pytest.mark.parametrize("name", ["llama", "mistral", "llama4", "gemma3", "gpt2", "gpt-oss"])
def test_prompts_of_any_length(name: str, length: int, call: Call) -> None:
    """A single token; and many times the window."""
    run_both(tiny_model(name), prompt(call.num_rows, length), **call.options)


def test_no_prompt_at_all() -> None:
    """generate() makes one of the first token's id."""
    model = tiny_model("gpt2")
    run_both(model, {}, bos_token_id=5, max_new_tokens=12, **GREEDY)


@pytest.mark.parametrize("name", ["input_ids", "inputs"])
def test_prompt_without_mask(name: str, call: Call) -> None:
    ids = prompt(call.num_rows)["input_ids"].clamp(min=1)
    run_both(tiny_model(), {name: ids}, **call.options)


@pytest.mark.parametrize("chunk", [1, 4, 16, 100])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prompt_read_in_chunks(name: str, chunk: int, call: Call) -> None:
    run_both(tiny_model(name), call.inputs, prefill_chunk_size=chunk, **call.options)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_holes_in_the_mask(name: str) -> None:
    """Masked columns in the middle of a prompt stay unseen."""
    inputs = prompt(3)
    inputs["attention_mask"][:, [9, 12]] = 0
    for options in MODES.values():
        run_both(tiny_model(name), inputs, **options)
