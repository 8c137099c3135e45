"""Saves what a model's own answers have taught, and starts the next process with it.

python examples/own_answers_cache.py --model HuggingFaceTB/SmolLM2-135M-Instruct

`selfspec batch` answers many prompts, and `selfspec cache build` makes a cache of its answers.
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
    "def find_files(folder):\n    for name in os.listdir(folder):\n        if",
)
LATER = (
    "def read_bytes(path):\n    with open(path, 'rb') as file:\n        return",
    "def list_files(folder):\n    for name in",
)


def main() -> None:
    options = parse_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = attach(AutoModelForCausalLM.from_pretrained(options.model), pack=True)

    def tokens_per_step(spec: SelfSpec, prompts: tuple[str, ...]) -> float:
        for prompt in prompts:
            inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
            model.generate(**inputs, assistant=spec, max_new_tokens=options.max_new_tokens)
        return spec.total_stats.tokens_per_step

    # Under a fixed budget the figures do not depend on a clock.
    cold, learning = (SelfSpec(budget="fixed", max_nodes=16) for _ in range(2))
    tokens_per_step(learning, EARLIER)
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "my-cache.safetensors"
        learning.save_pretrained(path, tokenizer=tokenizer)
        warm = SelfSpec.from_pretrained(path, tokenizer=tokenizer, config=cold.config)
        print(f"without a cache: {tokens_per_step(cold, LATER):.2f} tokens per step")
        print(f"with the cache:  {tokens_per_step(warm, LATER):.2f} tokens per step")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build, save and use a cache of own answers.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    parser.add_argument("--max-new-tokens", type=int, default=48)
    return parser.parse_args()


if __name__ == "__main__":
    main()
