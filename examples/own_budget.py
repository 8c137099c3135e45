"""A budget of your own: drafts are wider after they were right, and narrower after they were wrong.

python examples/own_budget.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
from importlib import resources

from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SelfSpec, StepRecord, attach
from selfspec.cost import Budget, Step, StepTime


class Cautious(Budget):
    """Twice the width after a step whose drafts were all right, else half of it."""

    def __init__(self) -> None:
        self.width = 4

    def open(self) -> Cautious:
        return Cautious()  # Each call begins anew.

    def step(self, allowed: int) -> Step:
        return CautiousStep(min(self.width, allowed), self)


class CautiousStep(Step):
    def __init__(self, max_nodes: int, budget: Cautious) -> None:
        super().__init__(max_nodes)
        self.budget = budget

    def observe(self, took: StepTime, records: list[StepRecord]) -> None:
        right = all(record.num_accepted == max(record.tree.depths) for record in records)
        self.budget.width = min(2 * took.width, 64) if right else max(took.width // 2, 2)


def main() -> None:
    options = parse_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = attach(AutoModelForCausalLM.from_pretrained(options.model), pack=True)
    spec = SelfSpec(budget=Cautious())
    inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, assistant=spec, max_new_tokens=options.max_new_tokens)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
    print(f"[{spec.stats.tokens_per_step:.2f} tokens per step]")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draft more after luck.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    parser.add_argument("--prompt", default="def list_files(folder):\n    for name in")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    return parser.parse_args()


if __name__ == "__main__":
    main()
