"""vLLM on CPU, controlled by one JSON object per line on standard input; the child process of `vllm_arm`.

vLLM's own interpreter runs this file, which imports nothing from this repository. Seconds are CPU time of this process
around vLLM's calls. vLLM runs in this process with one thread and without compilation.
"""

import json
import os
import sys
import time

sys.path.pop(0)  # this folder's trl.py and others would hide packages of the same name
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
)  # fmt: skip


def main():
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output goes to standard error

    def answer(**values):
        print(json.dumps(values), file=answers, flush=True)

    try:
        import vllm
        from safetensors.torch import load_file
    except Exception as error:
        return answer(error=f"{type(error).__name__}: {error}")
    settings = json.loads(sys.stdin.readline())
    llm = vllm.LLM(
        skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=True, seed=0,
        logprobs_mode="processed_logprobs", **settings,
    )  # fmt: skip
    answer(version=vllm.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        if "weights" in request:
            state = load_file(request["weights"])  # the trainer's, in memory: not counted
            begin = time.process_time()
            weights = {"weights_iterator": iter(state.items()), "is_checkpoint_format": True}
            llm.collective_rpc("reload_weights", kwargs=weights)
            llm.reset_prefix_cache()
            answer(cpu_s=time.process_time() - begin)
        else:
            answer(**_generate(vllm, llm, request))


def _generate(vllm, llm, request):
    params = [
        vllm.SamplingParams(
            temperature=1.0, max_tokens=limit, n=request["n"], ignore_eos=True, detokenize=False, logprobs=0
        )
        for limit in request["lengths"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    begin = time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    cpu_s = time.process_time() - begin
    first = outputs[0].outputs[0]
    logprobs = [entry[token].logprob for entry, token in zip(first.logprobs, first.token_ids, strict=True)]
    made = sum(len(response.token_ids) for output in outputs for response in output.outputs)
    return {"cpu_s": cpu_s, "tokens": made, "token_ids": list(first.token_ids), "logprobs": logprobs}


if __name__ == "__main__":
    main()
