"""Shows, step by step, which tokens were drafted, which were accepted, and where they came from.

python examples/drafted_tokens.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
from importlib import resources

from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SelfSpec, StepRecord, attach


def main() -> None:
    options = parse_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = attach(AutoModelForCausalLM.from_pretrained(options.model), pack=True)
    spec = SelfSpec()

    def show(record: StepRecord) -> None:
        """Prints one step: the tree's size, the accepted drafts, and the model's own token."""
        accepted = record.committed_ids[: record.num_accepted]
        own = record.committed_ids[record.num_accepted :]
        sources = {
            evidence.source
            for node in record.accepted_nodes()
            for evidence in record.tree.evidence[node]
        }
        print(
            f"{len(record.tree) - 1:3} drafted, accepted {tokenizer.decode(accepted)!r} "
            f"({', '.join(sorted(sources)) or 'nothing'}), then {tokenizer.decode(own)!r}"
        )

    inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)
    with spec.listening(show):
        ids = model.generate(**inputs, assistant=spec, max_new_tokens=options.max_new_tokens)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
    print(f"[{spec.stats.tokens_per_step:.2f} tokens per step]")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Watch drafts being accepted.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    parser.add_argument("--prompt", default="def list_files(folder):\n    for name in")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    return parser.parse_args()


if __name__ == "__main__":
    main()
