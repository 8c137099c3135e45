"""A shape of your own: trees that are broad at the root, and chains below it.

python examples/own_shape.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
from importlib import resources

from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SelfSpec, attach
from selfspec.draft.shape import Shape
from selfspec.draft.tree import TreeGrower


class Broom(Shape):
    """Up to four first tokens, and one token after each other one."""

    def __init__(self, num_first: int = 4) -> None:
        self.num_first = num_first

    def grow(self, grower: TreeGrower) -> None:
        grower.best_first(score=self.score)

    def score(self, chance: float, depth: int, rank: int) -> float | None:
        most = self.num_first if depth == 1 else 1
        return chance if rank < most else None


def main() -> None:
    options = parse_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = attach(AutoModelForCausalLM.from_pretrained(options.model), pack=True)
    spec = SelfSpec(budget="fixed", max_nodes=16, shape=Broom())
    inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, assistant=spec, max_new_tokens=options.max_new_tokens)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
    print(f"[{spec.stats.tokens_per_step:.2f} tokens per step]")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draft a broom.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    parser.add_argument("--prompt", default="def list_files(folder):\n    for name in")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    return parser.parse_args()


if __name__ == "__main__":
    main()
