"""Every block of Python on the pages runs, with a tiny model in place of those that it names."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import selfspec
from eval.papers.ghidorah import FittedTree
from eval.papers.self_draft import CorpusCache
from tests.test_pages import TODAY

PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What blocks with these words need is not installed for the fast tests: tests/clients runs them.
OF_OTHER_PROGRAMS = ("OpenAI", "GRPOTrainer", "langchain_", "lm_eval", "outlines", "smolagents")
PACKAGES = ("torchao", "xgrammar")  # Blocks that need them run where they are installed.
PAGES = {page.name: PYTHON.findall(page.read_text(encoding="utf-8")) for page in TODAY}


@pytest.fixture
def reader(chat_folder, tmp_path, monkeypatch) -> Iterator[dict[str, Any]]:
    """The names that blocks take from the text around them, in a folder with the files there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    answers = iter(["the quick", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    root = logging.getLogger()
    handlers, ours = list(root.handlers), logging.getLogger("selfspec").level
    yield {"selfspec": selfspec, "chat_folder": chat_folder, **known(chat_folder)}
    root.handlers = handlers
    logging.getLogger("selfspec").setLevel(ours)


def known(folder: str) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, small, adapted = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(3))
    ids = tokenizer("def read(self, size")["input_ids"]
    spec = selfspec.SelfSpec()
    spec.learned(model.config.vocab_size)
    spec.save_pretrained("my-cache", tokenizer=tokenizer)
    FittedTree((0, 1), (0, 0), (0.5, 0.25)).save("tree.json")
    Path("OANC").mkdir()
    Path("OANC/a.txt").write_text("the quick brown fox\n", encoding="utf-8")
    peft.get_peft_model(adapted, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained("mine")
    return {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "adapter": "mine",
        "corpus": CorpusCache([ids, ids]),
        "inputs": tokenizer("the quick brown", return_tensors="pt"),
        "messages": [{"role": "user", "content": "the fox"}],
        "model": selfspec.attach(model),
        "name": folder,
        "old_ids": ids,
        "old_text": "the quick brown fox",
        "peft": peft,
        "pipe": pipeline("text-generation", model=model, tokenizer=tokenizer),
        "pipeline": pipeline,
        "prompt": "the quick",
        "small": small,
        "spec": spec,
        "text": "the lazy dog",
        "tokenizer": tokenizer,
    }


def seeing() -> dict[str, Any]:
    """The same for a page about images."""
    pytest.importorskip("PIL", reason="needs the extra: pip install '.[serve]'")
    from tests.processors import picture, seeing_pair

    model, processor = seeing_pair()
    picture().save("page-1.png")
    return {"model": selfspec.attach(model), "processor": processor, "spec": selfspec.SelfSpec()}


# peft reads a name that transformers 5.23 has deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
@pytest.mark.parametrize("page", [name for name, blocks in PAGES.items() if blocks])
def test_the_blocks_of_a_page_run(page: str, reader: dict[str, Any]) -> None:
    for block in PAGES[page]:
        missing = [name for name in PACKAGES if name in block and find_spec(name) is None]
        if missing or any(word in block for word in OF_OTHER_PROGRAMS):
            continue
        if re.search(r"\bprocessor\b", block):
            reader |= seeing()
        exec(compile(briefly(block), f"a block of {page}", "exec"), reader)


def briefly(block: str) -> str:
    """With the tiny model and few tokens."""
    block = re.sub(r'"(HuggingFaceTB/[^"]+|your/model)"', "chat_folder", block)
    block = re.sub(r"max_new_tokens=\d+", "max_new_tokens=4", block)
    return block.replace("range(100)", "range(2)")


def test_what_a_page_names_is_there_after_an_import_of_selfspec() -> None:
    """Such as `selfspec.cache.load_cache`, though nobody has imported `selfspec.cache`."""
    names = {
        name
        for page in TODAY
        for name in re.findall(r"\bselfspec((?:\.[A-Za-z]\w*)+)", page.read_text(encoding="utf-8"))
    }
    assert ".cache.load_cache" in names
    for name in names:
        room, *parts = name.strip(".").split(".")
        if find_spec(f"selfspec.{room}") is not None:
            value = selfspec.__getattr__(room)
            for part in parts:
                value = getattr(value, part)
