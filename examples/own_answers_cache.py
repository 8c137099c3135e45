"""Saves what a model's own answers have taught, and starts the next process with it.

python examples/own_answers_cache.py --model HuggingFaceTB/SmolLM2-135M-Instruct

`selfspec cache build` with the recipe own-answers.toml does the same for thousands of prompts, and
counts phrases too.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib import resources
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SelfSpec, attach

EARLIER = (
    "def read_lines(path):\n    with open(path) as file:\n        return",
    "def find_files(folder, suffix):\n    found = []\n    for name in os.listdir(folder):\n       ",
    "class TestStack(unittest.TestCase):\n    def test_push(self):\n        stack =",
)
LATER = (
    "def read_bytes(path):\n    with open(path, 'rb') as file:\n        return",
    "def list_files(folder):\n    for name in",
    "class TestQueue(unittest.TestCase):\n    def test_put(self):\n        queue =",
)


def main() -> None:
    options = parse_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = attach(AutoModelForCausalLM.from_pretrained(options.model))

    def tokens_per_step(spec: SelfSpec, prompts: tuple[str, ...]) -> float:
        for prompt in prompts:
            inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
            model.generate(**inputs, assistant=spec, do_sample=False, max_new_tokens=48)
        return spec.total_stats.tokens_per_step

    # Under a fixed budget each step drafts 16 tokens, so that the figures do not depend on a clock.
    cold, learning = (SelfSpec(budget="fixed", max_nodes=16) for _ in range(2))
    tokens_per_step(learning, EARLIER)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "my-cache"
        learning.save_pretrained(folder, tokenizer=tokenizer)
        warm = SelfSpec.from_pretrained(folder, tokenizer=tokenizer, config=cold.config)
        print(f"without a cache: {tokens_per_step(cold, LATER):.2f} tokens per step")
        print(f"with the cache:  {tokens_per_step(warm, LATER):.2f} tokens per step")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build, save and use a cache of own answers.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
