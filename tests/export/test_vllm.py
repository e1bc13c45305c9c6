"""The real vLLM in a process of its own: after every sync it computes what the model computes."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from checkpointing import AdapterConfig
from checkpointing.cli.demo import DIRECTORY_NAME
from checkpointing.storage.cache import cache_dir
from tests.cli.command import tune
from tests.export.live import KINDS
from tests.export.vllm_environment import vllm_environment
from tests.families.variants import SIZES, random_model
from tests.peers.environment import build_wheel

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("vllm_worker.py")
# vLLM's attention on processors takes heads of 32 and 64 elements, among others. Qwen2 has no
# width of its own for them.
LLAMA = {**SIZES, "hidden_size": 84, "head_dim": 32, "intermediate_size": 116}
QWEN2 = {
    **SIZES,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "intermediate_size": 116,
    "tie_word_embeddings": True,
}
GEMMA2 = {**LLAMA, "sliding_window": 7, "query_pre_attn_scalar": 20}
# Its q, k and v are one tensor, of which an adapter has three times the rank.
PHI3 = {**QWEN2, "tie_word_embeddings": False}
EXPERTS = {**LLAMA, "hidden_size": 96, "moe_intermediate_size": 64, "num_experts": 5}
SEQUENCES = [[5, 9, 3, 77, 30, 4, 120], [8, 2, 8], [11 + 7 * i % 113 for i in range(90)]]
PROMPTS = [SEQUENCES[2], [7, 100, 34]]
ALL = AdapterConfig(4, 6, ("q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"))
TOLERANCE = 1e-5


class VLLMError(Exception):
    """What was raised in vLLM's process: the name of its class, and its message."""


class VLLM:
    """The test's side of the process; its methods are the worker's."""

    def __init__(self, process):
        self._process = process

    def __getattr__(self, function):
        def call(**arguments):
            self._process.stdin.write(
                json.dumps({"function": function, "arguments": arguments}, default=str) + "\n"
            )
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, "vLLM's process ended"
            reply = json.loads(line)
            if "error" in reply:
                raise VLLMError(": ".join(reply["error"]))
            return reply["result"]

        return call


@contextmanager
def running(python: Path, directory: Path, base: Path, **options) -> Iterator[VLLM]:
    """vLLM on the model in a directory."""
    log = directory / f"{base.name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(python), "-P", str(WORKER)],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        vllm = VLLM(process)
        print(f"vLLM started in {vllm.start(base=base, options=options):.1f} s")
        yield vllm
    finally:
        process.communicate()


def write_model(model_type: str, options: dict, directory: Path) -> Path:
    """A model whose weights are half as large as elsewhere in the tests.

    The native model itself differs from its fp64 by 1.5e-5 otherwise, which is rounding.
    """
    model = random_model(model_type, options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def python(directory):
    return vllm_environment(build_wheel(directory / "wheel"))


@pytest.fixture(scope="module")
def llama(python, directory):
    base = write_model("llama", LLAMA, directory / "llama")
    other = write_model("llama", {**LLAMA, "intermediate_size": 118}, directory / "other")
    with running(python, directory, base) as vllm:
        vllm.policy(name="policy", base=base, config=ALL.to_state())
        vllm.policy(name="other", base=other, config=ALL.to_state())
        vllm.policy(name="dora", base=base, config=KINDS["dora"].to_state())
        yield vllm


@pytest.fixture(scope="module")
def tied(python, directory):
    base = write_model("qwen2", QWEN2, directory / "qwen2")
    with running(python, directory, base) as vllm:
        vllm.policy(name="policy", base=base, config=KINDS["rslora, patterns"].to_state())
        head = AdapterConfig(4, 6, ("tok_embeddings", "q_proj"))
        vllm.policy(name="embedding", base=base, config=head.to_state())
        yield vllm


@pytest.fixture(scope="module")
def adapted(python, directory):
    base = write_model("llama", LLAMA, directory / "adapted")
    other = write_model("llama", {**LLAMA, "intermediate_size": 114}, directory / "narrower")
    deeper = write_model("llama", {**LLAMA, "num_hidden_layers": 5}, directory / "deeper")
    options = {"enable_lora": True, "max_lora_rank": 8}
    with running(python, directory, base, **options) as vllm:
        for name, config in KINDS.items():
            vllm.policy(name=name, base=base, config=config.to_state())
        vllm.policy(name="other", base=other, config=ALL.to_state())
        vllm.policy(name="deeper", base=deeper, config=ALL.to_state())
        head = AdapterConfig(4, 6, ("tok_embeddings", "output"))
        vllm.policy(name="embedding and head", base=base, config=head.to_state())
        vllm.policy(name="large", base=base, config=AdapterConfig(9, 6, ("w2",)).to_state())
        yield vllm


@pytest.fixture
def version():
    """Numbers that count up for all tests."""
    return next(_VERSIONS)


_VERSIONS = iter(range(1, 10**6, 10))


def difference(found, expected):
    assert [len(row) for row in found] == [len(row) for row in expected]
    pairs = [pair for rows in zip(found, expected, strict=True) for pair in zip(*rows, strict=True)]
    return max(abs(a - b) for a, b in pairs)


def check_same(vllm, policy, tolerance=TOLERANCE):
    expected = vllm.native_logprobs(policy=policy, sequences=SEQUENCES)
    found = difference(vllm.logprobs(sequences=SEQUENCES), expected)
    print(f"differs by {found:.1e}")
    assert found < tolerance
    base = vllm.native_logprobs(policy=policy, sequences=SEQUENCES, adapter=False)
    assert difference(base, expected) > 0.1


def check_generated(vllm, policy, version, tolerance=TOLERANCE):
    """What it writes after prompts that its cache may hold is of the new weights too."""
    sampling = {"max_new_tokens": 5, "temperature": 0.7, "top_k": 50, "seed": 3}
    written = vllm.generate(prompts=PROMPTS, samples=2, sampling=sampling)
    for prompt, completions in zip(PROMPTS, written, strict=True):
        for each in completions:
            whole = [*prompt, *each["tokens"]]
            (expected,) = vllm.native_logprobs(policy=policy, sequences=[whole])
            assert difference([each["logprobs"]], [expected[len(prompt) - 1 :]]) < tolerance
            assert each["version"] == version and len(each["tokens"]) == 5
    assert written == vllm.generate(prompts=PROMPTS, samples=2, sampling=sampling)
    assert written[0][0]["tokens"] != written[0][1]["tokens"]


def show(way, sent):
    print(f"{way}: {sent['nbytes'] / 1e6:.2f} MB in {1e3 * sent['seconds']:.0f} ms")


def check_round(vllm, policy, way, version):
    """Two syncs of different values, with prompts in the cache before each."""
    for number, seed in enumerate((21, 22)):
        vllm.cached_tokens(prompt=PROMPTS[0])
        assert vllm.cached_tokens(prompt=PROMPTS[0]) >= 64
        vllm.shake(policy=policy, seed=seed)
        sent = vllm.sync(policy=policy, way=way, version=version + number)
        show(way, sent)
        check_generated(vllm, policy, version + number)
        check_same(vllm, policy)
    return sent


def test_merged_weights_are_what_the_engine_computes_with(llama, version):
    for policy in ("dora", "policy"):
        sent = check_round(llama, policy, "merged", version)
        held = llama.held_digests()
        assert held == sent["digests"] and len(held) == 30
        version += 2


def test_a_tied_head_is_replaced_too(tied, version):
    for policy in ("policy", "embedding"):
        sent = check_round(tied, policy, "merged", version)
        held = tied.held_digests()
        assert held == sent["digests"]
        assert held["lm_head.weight"] == held["model.embed_tokens.weight"]
        version += 2


def test_weights_of_another_model_are_refused_before_the_first(llama, version):
    llama.shake(policy="policy", seed=4)
    llama.sync(policy="policy", way="merged", version=version)
    before = llama.held_digests()
    for act in (
        lambda: llama.sync(policy="other", way="merged", version=version + 1),
        lambda: llama.load_merged(policy="other"),
    ):
        with pytest.raises(VLLMError, match=r"TensorMismatchError: .*(?s:.)*\[118, 84\]"):
            act()
    with pytest.raises(VLLMError, match=r"ConfigError: .*bfloat16.*float32"):
        llama.load_merged(policy="policy", dtype="bfloat16")
    assert llama.held_digests() == before and llama.state()["version"] == version
    check_same(llama, "policy")


def test_a_stream_that_was_read_or_closed_is_no_new_version(llama, version):
    llama.shake(policy="policy", seed=4)
    llama.sync(policy="policy", way="merged", version=version)
    read = "ConfigError: vLLM: the stream was read already; make another one"
    closed = "UnusableEngineError: vLLM: the stream was closed before its end"
    assert llama.spent_sync(policy="policy", version=version + 1) == [read, read, closed]
    assert llama.state()["version"] == version
    llama.sync(policy="policy", way="merged", version=version + 1)
    check_same(llama, "policy")


def test_without_its_head_a_tied_model_is_refused(tied, version):
    tied.shake(policy="policy", seed=4)
    tied.sync(policy="policy", way="merged", version=version)
    with pytest.raises(VLLMError, match=r"TensorMismatchError: (?s:.)*lm_head.weight"):
        tied.load_merged(policy="policy")
    check_same(tied, "policy")


@pytest.mark.parametrize(
    "last",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("model", ["llama", "tied"])
def test_after_a_broken_sync_nothing_is_computed_until_a_whole_one(request, model, last, version):
    vllm = request.getfixturevalue(model)
    vllm.shake(policy="policy", seed=5)
    vllm.sync(policy="policy", way="merged", version=version)
    for seeds in ((6,), (7, 8)):
        for seed in seeds:
            vllm.shake(policy="policy", seed=seed)
            with pytest.raises(VLLMError, match="OSError: the disk went away"):
                vllm.broken_sync(policy="policy", version=version + 1, last=last)
            assert vllm.state()["version"] == version
            with pytest.raises(VLLMError, match=r"UnusableEngineError: .*the last sync broke off"):
                vllm.logprobs(sequences=SEQUENCES)
            with pytest.raises(VLLMError, match="UnusableEngineError"):
                vllm.generate(prompts=PROMPTS, samples=1, sampling={"max_new_tokens": 2})
        vllm.shake(policy="policy", seed=9)
        version += 1
        sent = vllm.sync(policy="policy", way="merged", version=version)
        assert vllm.held_digests() == sent["digests"]
        check_same(vllm, "policy")


def test_an_adapter_is_computed_with_whole_and_the_old_one_is_gone(adapted, version):
    directories = []
    for policy in ("lora", "embedding and head", "rslora, patterns"):
        check_round(adapted, policy, "adapter", version)
        state = adapted.state()
        assert len(state["loras"]) == 1
        directories.append(Path(state["directory"]))
        version += 2
    assert [each.parent.exists() for each in directories] == [False, False, True]
    adapted.shake(policy="lora", seed=9)
    adapted.sync(policy="lora", way="adapter", version=version)
    assert not directories[-1].parent.exists()
    check_same(adapted, "lora")


def test_an_adapter_that_would_not_be_computed_with_is_refused(adapted, version):
    adapted.shake(policy="lora", seed=10)
    adapted.sync(policy="lora", way="adapter", version=version)
    state = adapted.state()
    for policy, error in {
        "dora": "ConfigError: the adapter has DoRA",
        "modules trained whole": "ConfigError: the adapter has .*modules_to_save",
        "other": r"TensorMismatchError: .*another base(?s:.)*\[4, 114\], and .*\[84, 116\]",
        "deeper": r"TensorMismatchError: (?s:.)*mlp.*the engine has no such module \(\* is 3, 4\)",
        "large": "LoRA rank 9",
    }.items():
        with pytest.raises(VLLMError, match=error):
            adapted.sync(policy=policy, way="adapter", version=version + 1)
        assert adapted.state() == state
        check_same(adapted, "lora")
    with pytest.raises(VLLMError, match="ConfigError: this engine holds an adapter"):
        adapted.sync(policy="lora", way="merged", version=version + 1)
    check_same(adapted, "lora")


def test_an_engine_that_was_not_started_for_adapters_says_so(llama, version):
    with pytest.raises(VLLMError, match=r"ConfigError: .*enable_lora=True.*at least 4"):
        llama.sync(policy="policy", way="adapter", version=version)


@pytest.mark.parametrize(
    "model_type, options",
    [("gemma2", GEMMA2), ("phi3", PHI3)],
    ids=["tied, without a head", "fused"],
)
def test_other_models_take_adapters_and_merged_weights(
    python, directory, model_type, options, version
):
    base = write_model(model_type, options, directory / model_type)
    with running(python, directory, base, enable_lora=True, max_lora_rank=16) as vllm:
        vllm.policy(name="policy", base=base, config=ALL.to_state())
        check_round(vllm, "policy", "adapter", version)
        place = Path(vllm.state()["directory"])
        # The same LLM; that it is enabled for adapters does not matter.
        assert vllm.renew() == [] and not place.exists()
        check_round(vllm, "policy", "merged", version)
        with pytest.raises(VLLMError, match="ConfigError: this engine holds merged weights"):
            vllm.sync(policy="policy", way="adapter", version=version + 5)


def test_merged_experts_are_refused_on_processors(python, directory, version):
    """vLLM takes them without a word, and its logprobs are off by 3."""
    base = write_model("qwen3_moe", {**EXPERTS, "num_experts_per_tok": 3}, directory / "experts")
    with running(python, directory, base) as vllm:
        vllm.policy(name="policy", base=base, config=AdapterConfig(4, 6, ("q_proj",)).to_state())
        with pytest.raises(VLLMError, match=r"ConfigError: .*wrong ones"):
            vllm.sync(policy="policy", way="merged", version=version)
        expected = vllm.native_logprobs(policy="policy", sequences=SEQUENCES, adapter=False)
        assert difference(vllm.logprobs(sequences=SEQUENCES), expected) < TOLERANCE


@pytest.fixture(scope="module")
def smollm2(directory):
    """The demo model, from the cache or fetched."""
    cached = cache_dir() / DIRECTORY_NAME
    if cached.is_dir():
        return cached
    done = tune("download", "demo", env={"TUNEPOINT_CACHE": str(directory)})
    assert done.returncode == 0, done.stderr
    return directory / DIRECTORY_NAME


def test_a_real_model(python, directory, smollm2, version):
    with running(python, directory, smollm2, enable_lora=True, max_lora_rank=16) as vllm:
        config = AdapterConfig(16, 32, ALL.target_modules)
        vllm.policy(name="policy", base=smollm2, config=config.to_state())
        for way in ("adapter", "merged"):
            for number, seed in enumerate((31, 32)):
                # Not so large that the model is none any more.
                vllm.shake(policy="policy", seed=seed, scale=0.1)
                sent = vllm.sync(policy="policy", way=way, version=version + number)
                show(way, sent)
                check_same(vllm, "policy", 1e-4)
            vllm.renew()


def test_an_engine_that_would_give_other_logprobs_is_refused(python, directory):
    base = write_model("llama", LLAMA, directory / "processed")
    with (
        pytest.raises(VLLMError, match="ConfigError: vLLM: gives processed_logprobs"),
        running(python, directory, base, logprobs_mode="processed_logprobs"),
    ):
        pass
