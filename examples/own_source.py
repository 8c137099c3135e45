"""A source of your own: it drafts the phrases of a list wherever one of them begins.

python examples/own_source.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
from importlib import resources

from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SelfSpec, attach
from selfspec.draft.sources import Cursor, RowStart, Source
from selfspec.records import Candidate, Evidence, StepRecord

PHRASES = [" os.listdir(folder):", " os.path.join(folder, name)", " os.path.exists(path):"]


class Phrases(Source, Cursor):
    """A state is the phrases that go on at a node. A source without memory is its own cursor."""

    name = "phrases"

    def __init__(self, phrases: list[list[int]], last: int = -1) -> None:
        self.phrases, self.last = phrases, last

    def open(self, row: RowStart) -> Phrases:
        return Phrases(self.phrases, row.prompt_ids[-1])  # A cursor of one row.

    def root(self) -> list[list[int]]:
        return [phrase[1:] for phrase in self.phrases if phrase[0] == self.last]

    def expand(self, state: list[list[int]]) -> list[Candidate]:
        tokens = dict.fromkeys(phrase[0] for phrase in state if phrase)
        return [(token, Evidence(self.name, rank=rank)) for rank, token in enumerate(tokens, 1)]

    def follow(self, state: list[list[int]], token: int) -> list[list[int]]:
        return [phrase[1:] for phrase in state if phrase and phrase[0] == token]

    def observe(self, record: StepRecord) -> None:
        self.last = record.committed_ids[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = attach(AutoModelForCausalLM.from_pretrained(options.model), pack=True)
    source = Phrases([tokenizer(text)["input_ids"] for text in PHRASES])
    spec = SelfSpec(extra_sources=[source], budget="fixed")  # It drafts whether it pays or not.
    prompt = "import os\n\n\ndef read_all(folder):\n    for name in"
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, assistant=spec, max_new_tokens=options.max_new_tokens)
    stats = spec.stats
    brought = f"{stats.accepted_by_source['phrases']} of {stats.drafted_by_source['phrases']}"
    print(f"{tokenizer.decode(ids[0])}\n[{stats.tokens_per_step:.2f} tokens per step]")
    print(f"[of the phrases {brought} drafted tokens were accepted]")


if __name__ == "__main__":
    main()
