"""Answers prompts with OpenVINO, in an environment that has it; the method `openvino` starts it.

Reads a prompt from each line of its standard input, and prints the new ids. Imports nothing of this
project, which need not be installed there.
"""

from __future__ import annotations

import json
import sys

import numpy as np


def main(folder: str, threads: str) -> None:
    """Says in a first line that the model is loaded."""
    import openvino_genai
    from openvino import Tensor, __version__

    pipeline = openvino_genai.LLMPipeline(folder, "CPU", INFERENCE_NUM_THREADS=int(threads))
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos = False, True
    print(json.dumps({"version": __version__}), flush=True)
    for job in map(json.loads, sys.stdin):
        ids, config.max_new_tokens = np.array([job["ids"]], dtype=np.int64), job["max_new_tokens"]
        inputs = openvino_genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids)))
        (new_ids,) = pipeline.generate(inputs, config).tokens
        print(json.dumps({"ids": list(map(int, new_ids))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
