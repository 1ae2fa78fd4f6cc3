"""A program that uses vLLM offline: generates twice with the same prompts, and lets its parent disturb the second run.

One JSON line on stdout before each run and one after: {"run": n} and {"tokens": [[...], ...]}. It waits for a line on
stdin before the second run and before it ends.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=8,
        block_size=32,
        kv_cache_memory_bytes=64 * 1024 * 1024,
        seed=1,
    )
    sampling = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [*range(8, 136), 200 + number]} for number in range(4)]
    for run in (1, 2):
        print(json.dumps({"run": run}), flush=True)
        sys.stdin.readline()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        print(json.dumps({"tokens": [list(output.outputs[0].token_ids) for output in outputs]}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
