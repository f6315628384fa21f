"""An engine with a CPU shadow in processes of its own: ``python shadow_process.py MODEL RANKS`` answers JSON lines.

Each line on standard input is ``[prompt, most tokens]`` or ``"forget"`` (HBM); each answer is ``[tokens, cached]``.
"""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from coda_cli.up.leftovers import remove_shared_memory
from coda_cli.up.process_table import group_members, mapped_shared_memory

START_S = 240


class EngineProcesses:
    """The parent's end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._read() == "ready"

    @classmethod
    @contextmanager
    def running(cls, model_folder: Path, env: Mapping[str, str], ranks: int = 1) -> Iterator["EngineProcesses"]:
        """Engine processes that are killed, with what they left in /dev/shm, when the block ends."""
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        if ranks > 1:
            own["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(ranks))
        process = subprocess.Popen(
            [sys.executable, __file__, str(model_folder), str(ranks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env, **own},
            text=True,
            start_new_session=True,
        )
        try:
            yield cls(process)
        finally:
            kill(process)

    def ask(self, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Return the answer's tokens and how many of the prompt's tokens were cached."""
        tokens, cached = self._exchange([prompt, max_tokens])
        return tokens, cached

    def forget_hbm(self) -> None:
        """Evict every block from HBM."""
        assert self._exchange("forget") is True

    def kill(self) -> None:
        """Kill all of its processes at once, as the kernel or a node's end does."""
        kill(self._process)

    def _exchange(self, question: object) -> object:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> object:
        for line in self._process.stdout:
            if line.startswith(">"):
                return json.loads(line[1:])
        raise AssertionError(f"the engine ended with {self._process.wait()}")


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process group and remove the shared memory that vLLM itself would have removed."""
    made = mapped_shared_memory(group_members(process.pid))
    if group_members(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    remove_shared_memory(made)


def main() -> None:
    """Serve standard input."""
    warnings.simplefilter("ignore")
    os.sched_setaffinity(0, range(int(sys.argv[2]))) if int(sys.argv[2]) > 1 else None
    from vllm import LLM, SamplingParams

    signal.alarm(START_S + 120)
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        max_model_len=1_024,
        kv_cache_memory_bytes=60_000_000,
        tensor_parallel_size=int(sys.argv[2]),
        skip_tokenizer_init=True,
    )
    print('>"ready"', flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if question == "forget":
            print(">" + json.dumps(llm.reset_prefix_cache()), flush=True)
            continue
        prompt, max_tokens = question
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        print(">" + json.dumps([list(output.outputs[0].token_ids), output.num_cached_tokens]), flush=True)


if __name__ == "__main__":
    main()
