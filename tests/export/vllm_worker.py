"""Runs the real vLLM for the tests, in an environment of its own.

Reads requests from standard input, one JSON object a line, and answers each with one line.
"""

import json
import os
import sys
import time
import traceback
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

# Read when vLLM is imported. One process, so that tensors are handed over as they are.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# The tests' own models; the packages are those of the environment.
sys.path.append(str(Path(__file__).parents[2]))

import torch
from vllm import LLM

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from checkpointing.export import merged_stream
from checkpointing.export.engines import Sampling, sync
from checkpointing.export.engines.vllm_engine import VLLMEngine
from checkpointing.export.stream import WeightStream
from checkpointing.training import adapter_state_dict, add_adapter, build_decoder
from checkpointing.training.adapter_switch import adapter_off
from tests.export.live import bits, config_for, shake


class BrokenStream(WeightStream):
    """A stream that ends with an error before its tensor of a name."""

    def break_before(self, name):
        self.last = name

    def __next__(self):
        name, tensor = super().__next__()
        if name == self.last:
            raise OSError("the disk went away")
        return name, tensor


class Worker:
    """An engine, and the native models whose weights it gets."""

    def start(self, base, options):
        start = time.perf_counter()
        self.llm = LLM(
            base,
            enforce_eager=True,
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=160,
            block_size=32,
            disable_log_stats=True,
            **options,
        )
        self.engine = VLLMEngine(self.llm)
        self.policies = {}
        return time.perf_counter() - start

    def renew(self):
        """Another engine around the same LLM; returns the adapters that the old one left."""
        self.engine.close()
        self.engine = VLLMEngine(self.llm)
        return list(self.llm.llm_engine.list_loras())

    def policy(self, name, base, config):
        """Adds a native model with an adapter."""
        checkpointer = FullModelHFCheckpointer(base)
        weights = checkpointer.load_checkpoint()["model"]
        model = build_decoder(checkpointer.model_config, weights, torch.float32).eval()
        config = AdapterConfig.from_state(config)
        add_adapter(model, config_for(model.config.dims, config))
        shake(model)
        self.policies[name] = model

    def shake(self, policy, seed, scale=1.0):
        """Gives the adapter other values, of so many times the usual size."""
        shake(self.policies[policy], seed)
        with torch.no_grad():
            for name, tensor in adapter_state_dict(self.policies[policy]).items():
                if "lora_b" in name:
                    tensor.mul_(scale)

    def sync(self, policy, way, version):
        start = time.perf_counter()
        stream = sync(self.policies[policy], self.engine, way, version, "tiny/base")
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "digests": stream.digests, "nbytes": stream.nbytes}

    def load_merged(self, policy, **options):
        """Takes a stream as it is, without what sync does first."""
        dtypes = {name: getattr(torch, value) for name, value in options.items()}
        with merged_stream(self.policies[policy], **dtypes) as stream:
            self.engine.load_merged(stream)

    def spent_sync(self, policy, version):
        """Gives a stream that was read, and one that was closed; returns what was said of them."""
        said = []
        for spend in (list, next, WeightStream.close):
            stream = merged_stream(self.policies[policy], version=version)
            spend(stream)
            try:
                self.engine.load_merged(stream)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    def broken_sync(self, policy, version, last):
        whole = merged_stream(self.policies[policy], tied_head=self.engine.needs_tied_head)
        stream = BrokenStream(whole._content, version)
        stream.break_before(last)
        self.engine.load_merged(stream)

    def state(self):
        adapter = self.engine._adapter
        return {
            "version": self.engine.version,
            "loras": list(self.llm.llm_engine.list_loras()) if adapter else [],
            "directory": adapter and adapter[0].lora_path,
        }

    def logprobs(self, sequences):
        return [row.tolist() for row in self.engine.logprobs(sequences)]

    def native_logprobs(self, policy, sequences, adapter=True):
        """In fp64, so that only the engine's rounding is left in a comparison."""
        model = deepcopy(self.policies[policy]).double()
        with torch.no_grad():
            if adapter:
                return [native(model, sequence) for sequence in sequences]
            with adapter_off(model):
                return [native(model, sequence) for sequence in sequences]

    def generate(self, prompts, samples, sampling):
        found = self.engine.generate(prompts, samples, Sampling(**sampling))
        return [[asdict(each) for each in completions] for completions in found]

    def cached_tokens(self, prompt):
        """How many tokens of a prompt vLLM takes from its cache."""
        (output,) = self.engine._ask([prompt], {"max_tokens": 1})
        return output.num_cached_tokens

    def held_digests(self):
        """A checksum of each tensor that the engine computes with, by transformers' name."""
        import xxhash

        (held,) = self.llm.apply_model(held_tensors)
        return {name: xxhash.xxh3_64_hexdigest(bits(tensor)) for name, tensor in held.items()}


def native(model, sequence):
    values = model(torch.tensor([sequence]))[0, :-1].log_softmax(-1)
    return values.gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0].tolist()


def held_tensors(model):
    """vLLM's tensors as transformers has them: a packed weight is what it does to a unit matrix."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    held = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LinearBase):
            weight = module.quant_method.apply(module, torch.eye(module.input_size), None).T
            parent, _, own = name.rpartition(".")
            parts = model.packed_modules_mapping.get(own, [own])
            sizes = getattr(module, "output_sizes", None) or [module.output_size]
            for part, rows in zip(parts, weight.split(sizes), strict=True):
                held[f"{parent}.{part}.weight"] = rows
            if module.bias is not None:
                for part, rows in zip(parts, module.bias.split(sizes), strict=True):
                    held[f"{parent}.{part}.bias"] = rows
        elif isinstance(module, ParallelLMHead):
            unit = torch.eye(module.embedding_dim)
            weight = module.quant_method.apply(module, unit, None).T
            held[f"{name}.weight"] = weight[: module.org_vocab_size]
        elif isinstance(module, VocabParallelEmbedding):
            held[f"{name}.weight"] = module.weight[: module.org_vocab_size]
        elif name.endswith("norm"):
            held[f"{name}.weight"] = module.weight
    return held


def main():
    worker = Worker()
    # vLLM prints; what is answered has a channel of its own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": getattr(worker, request["function"])(**request["arguments"])}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": [type(error).__name__, str(error)]}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
