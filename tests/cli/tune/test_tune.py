"""`selfspec tune`, from prompts to a cache that serves."""

from __future__ import annotations

import json

import pytest
import torch

from selfspec import ConfigError, SelfSpec, attach
from selfspec.cache import load_cache
from tests.caches import contents

LINES = [
    {"prompt": "def read(self, size"},
    {"messages": [{"role": "user", "content": "the lazy fox"}]},
    {"turns": ["class Queue", "and then?"]},
]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n")
    return path


def test_a_cache_that_serves(run, tmp_path, data, chat_folder, loaded):
    """It is said how long it takes; the tree is the same every time, and so is the text."""
    options = (chat_folder, "--data", data, "--max-new-tokens", 24, "--width", 6)
    for number, name in enumerate(("one", "one", "other")):  # The second time it is replaced.
        report = tmp_path / f"{number}.html"
        result = run("tune", *options, "--out", tmp_path / name, "--report", report)
        assert result.exit_code == 0, result.stderr
    assert "minutes at most" in result.stderr
    assert "3/3" in result.stderr
    assert "kept" in result.stdout
    page = report.read_text()
    assert "<svg" in page
    assert page.count("<table>") == 3
    held = load_cache(tmp_path / "one")
    assert held.fitted == load_cache(tmp_path / "other").fitted
    assert held.fitted.width == 6
    spec = SelfSpec.from_pretrained(tmp_path / "one", budget="fitted")
    ids = torch.tensor([loaded.tokenizer("def read(self, size")["input_ids"]])
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    stock = loaded.model.generate(ids, **arguments)
    assert torch.equal(attach(loaded.model).generate(ids, assistant=spec, **arguments), stock)
    assert 1 < spec.stats.nodes_per_step <= 6
    spec.save_pretrained(tmp_path / "later")
    assert load_cache(tmp_path / "later").fitted == held.fitted


def test_what_is_wrong_is_told_before_the_model_is_loaded(fails, tmp_path, data, chat_folder):
    out = (chat_folder, "--out", tmp_path / "new")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    assert "--data, line 2: " in fails("tune", "--data", bad, *out)
    bad.write_text("\n")
    assert "--data must have a prompt" in fails("tune", "--data", bad, *out)
    message = fails("tune", "--data", data, *out, "--report", tmp_path / "none" / "r.html")
    assert message.startswith("error: --report must be a file in a folder that exists")
    assert not (tmp_path / "new").exists()


def test_without_a_fitted_tree_the_budget_is_refused():
    cold, other = SelfSpec(budget="fitted"), SelfSpec.from_contents(contents(fitted=None))
    other.config = cold.config
    for spec, got in ((cold, "no cache"), (other, "a cache without one")):
        with pytest.raises(ConfigError, match=rf"needs a cache .*\(got {got}\); make one"):
            spec.memory(50)
