"""The embedded tiny model's card, written from the numbers of the run that made it."""

from __future__ import annotations

import textwrap

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [python, tiny, selfspec]
---
# tiny

A very small language model that writes Python-looking text, and nothing more. It is there for the
demos and the tests of selfspec, which need a real model that loads in a moment.

| | |
|---|---|
| architecture | {architecture} |
| tokenizer | byte-level BPE, {vocabulary:,} tokens |
| data | {data} |
| files | {num_files:,} for training, {num_validation_files:,} held out |
| tokens | {num_tokens:,} for training, {num_validation_tokens:,} held out |
| training | {steps:,} steps, {tokens:,} tokens seen, {minutes:.0f} minutes |
| final training loss | {train_loss:.3f} nats a token (mean of the last {num_losses} steps) |
| final validation loss | {validation_loss:.3f} nats a token (windows of {seq_len} tokens) |

Left out of the data: tests, build settings, and files that are mostly tables of numbers.

## Licence
{licence}

## Made by
    {command}
"""

ARCHITECTURE = (
    "Llama, {parameters:,} parameters, {num_hidden_layers} layers, hidden {hidden_size}, "
    "{num_attention_heads} heads of {head_dim}, intermediate {intermediate_size}, "
    "{max_position_embeddings:,} positions, rope theta 10000, tied embeddings, bf16"
)
STDLIB = "the sources of the standard library of Python {version} (PSF licence)"
STDLIB_LICENCE = (
    "The sources are under the PSF licence (PSF-2.0), copyright of the Python Software Foundation. "
    "The weights are under Apache-2.0, like the project they belong to."
)


def origin(*, is_stdlib: bool, version: str) -> dict[str, str]:
    """Where the data comes from, and its licence."""
    if not is_stdlib:
        return {"data": "the .py files of a folder", "licence": "That of the sources."}
    return {"data": STDLIB.format(version=version), "licence": textwrap.fill(STDLIB_LICENCE, 100)}


def command(options: dict[str, object]) -> str:
    """The run's command line, the names of its folders left open.

    >>> command({"out": "a", "steps": 3, "minutes": None, "seq_len": 8, "compile": True})
    'python -m eval train_tiny --out FOLDER --steps 3 --seq-len 8 --compile'
    """
    given = {name: value for name, value in options.items() if value not in (None, False)}
    given |= {name: "FOLDER" for name in ("out", "sources") if name in given}
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in given.items()
    ]
    return " ".join(["python -m eval train_tiny", *words])
