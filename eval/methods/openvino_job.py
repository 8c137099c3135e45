"""Answers prompts with OpenVINO, in an environment that has it; `eval bench_openvino` starts it.

Reads the token ids of a prompt from each line of its standard input, and prints the seconds and the
new ids. Imports nothing of this project, which need not be installed there.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

import numpy as np


def main(folder: str, max_new_tokens: str, threads: str) -> None:
    """Says in a first line that the model is loaded."""
    import openvino_genai
    from openvino import Tensor, __version__

    options = {} if threads == "None" else {"INFERENCE_NUM_THREADS": int(threads)}
    pipeline = openvino_genai.LLMPipeline(folder, "CPU", **options)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos = int(max_new_tokens), False, True
    print(json.dumps({"version": __version__}), flush=True)
    for line in sys.stdin:
        ids = np.array([json.loads(line)], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids)))
        start = perf_counter()
        (new_ids,) = pipeline.generate(inputs, config).tokens
        print(json.dumps({"seconds": perf_counter() - start, "ids": new_ids}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
