"""The decoder on many ranks: the same numbers as in one process, and a share of the memory.

Each test runs in real processes, which find each other over gloo.
"""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch

from checkpointing import AdapterConfig
from checkpointing.errors import ConfigError
from tests.families import variants
from tests.sharded_worker import Job
from tests.test_sharded_save import check_same
from tests.tiny import ATTENTION, EXPERTS, MLP, write_hf
from tests.training.parallel_worker import (
    Setup,
    errors_of_a_step,
    logits_without_adapter,
    parallelize_quantized,
    rows_read,
    save_model,
    states,
)
from tests.training.peers import config, hf_model

# Of the largest element: fp32 rounds to 6e-8 of each, sums are in another order on many ranks, and
# there are about twenty layers of them one upon another. What is measured is up to 4e-6.
ROUNDING = 1e-5
LORA = AdapterConfig(4, 6, (*ATTENTION, *MLP))
DORA = AdapterConfig(4, 6, (*ATTENTION, *MLP), use_dora=True)
EXPERTS_LORA = AdapterConfig(4, 6, (*ATTENTION, *EXPERTS))
BOTH_ENDS = (*ATTENTION, "tok_embeddings", "output")
CUT_BY_TENSOR_PARALLELISM = (*(f"{name}.weight" for name in (*ATTENTION, *MLP)), *EXPERTS)
ADAPTERS = {
    "LoRA with biases": AdapterConfig(4, 6, (*ATTENTION, *MLP), lora_bias=True),
    "LoRA at both ends": AdapterConfig(4, 6, BOTH_ENDS),
    "DoRA at both ends": AdapterConfig(4, 6, BOTH_ENDS, use_dora=True),
    "modules trained whole": AdapterConfig(
        4, 6, ATTENTION, modules_to_save=("tok_embeddings", "output", "w2", "norm")
    ),
}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def job(request, tmp_path_factory):
    job = Job(request.param, tmp_path_factory.mktemp("job"))
    yield job
    job.stop()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Bases by name, each written when it is first asked for."""
    directory = tmp_path_factory.mktemp("bases")

    def base(name):
        path = directory / name
        if path.exists():
            return path
        if name == "odd heads":
            write_hf(hf_model(config(kv_heads=3)), path)
        elif name == "odd columns":
            write_hf(hf_model(config(ffn=55)), path)
        elif name == "even vocabulary":
            write_hf(hf_model(config(vocab=134)), path)
        elif name == "eight heads":
            biases = {"attention_bias": True, "mlp_bias": True}
            wide = config(hidden=48, heads=8, kv_heads=4, **biases)
            write_hf(hf_model(wide), path)
        elif name == "eight heads, experts":
            heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 10}
            sizes = {**variants.SIZES, **variants.QWEN_EXPERTS, **heads}
            write_hf(variants.random_model("qwen3_moe", sizes), path)
        elif name.startswith("mixtral, experts: "):
            experts = {"num_local_experts": int(name[-1]), "num_experts_per_tok": 1}
            write_hf(variants.random_model("mixtral", {**variants.SIZES, **experts}), path)
        else:
            variants.write(name, path)
        return path

    return base


def check_step(job, setup, **arguments):
    tokens = variants.tokens(batch=8)
    for errors in job.run(errors_of_a_step, setup=setup, tokens=tokens, **arguments):
        assert isinstance(errors, dict), errors
        assert {name: e for name, e in errors.items() if not e < ROUNDING} == {}
        assert len(errors) > 10


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize(
    "name, adapter",
    [
        ("even vocabulary", None),
        ("llama, biases", LORA),
        ("llama, biases", DORA),
        ("llama, tied", None),
        pytest.param("llama, tied", DORA, marks=pytest.mark.slow),
        ("qwen2", LORA),
        ("qwen3", None),
        pytest.param("gemma2", None, marks=pytest.mark.slow),
        ("gemma2", LORA),
        pytest.param("olmo2", None, marks=pytest.mark.slow),
        ("olmo2", DORA),
        ("phi3", LORA),
        ("mixtral", EXPERTS_LORA),
        pytest.param("qwen3_moe", None, marks=pytest.mark.slow),
        ("qwen3_moe", EXPERTS_LORA),
    ],
)
def test_a_step_is_that_of_one_process(job, bases, name, adapter, tensor_parallel):
    check_step(job, Setup(bases(name), tensor_parallel, adapter))


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_step_with_every_kind_of_adapter(job, bases, kind, tensor_parallel):
    check_step(job, Setup(bases("even vocabulary"), tensor_parallel, ADAPTERS[kind]))


@pytest.mark.parametrize("adapter", [None, LORA, DORA])
def test_a_step_where_a_head_lies_on_two_ranks(job, bases, adapter):
    check_step(job, Setup(bases("odd heads"), 1, adapter))


@pytest.mark.parametrize("name", ["even vocabulary", "llama, tied", "qwen3_moe"])
def test_ranks_without_a_label_take_part(job, bases, name):
    check_step(job, Setup(bases(name), len(job) // 2, None), first_is_idle=True)


@pytest.mark.parametrize(
    "name, adapter",
    [("eight heads", LORA), ("eight heads", DORA), ("eight heads, experts", EXPERTS_LORA)],
)
def test_all_ranks_share_each_matrix_and_drop_the_same(job, bases, name, adapter):
    # As one process does, since all see the same data.
    check_step(job, Setup(bases(name), len(job), replace(adapter, dropout=0.3)))


@pytest.mark.slow
@pytest.mark.parametrize("job", [2], indirect=True)  # each process compiles for itself, for long
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_step_of_compiled_layers(job, bases, tensor_parallel):
    check_step(job, Setup(bases("even vocabulary"), tensor_parallel, LORA, compiles=True))


def test_fewer_experts_than_ranks(job, bases):
    setup = Setup(bases(f"mixtral, experts: {len(job) - 1}"), 1, EXPERTS_LORA)
    check_step(job, setup)
    for others, parts in job.run(states, setup=setup):
        assert others == []
        stacked = [(shape, own) for shape, own in parts.values() if len(shape) == 3]
        assert len(stacked) == 3 * 9, "three weights of three layers, each with an A and a B"
        assert all(prod(own) * len(job) == prod(shape) for shape, own in stacked)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize(
    "name, adapter, dtype",
    [
        ("even vocabulary", ADAPTERS["DoRA at both ends"], torch.float32),
        ("even vocabulary", DORA, torch.bfloat16),
        ("llama, tied", LORA, torch.float32),
        ("llama, biases", ADAPTERS["modules trained whole"], torch.float32),
        ("phi3", ADAPTERS["LoRA with biases"], torch.bfloat16),
        ("qwen3_moe, some layers dense", EXPERTS_LORA, torch.float32),
    ],
)
def test_what_is_loaded_and_drawn_is_what_one_process_has(
    job, bases, name, adapter, dtype, tensor_parallel
):
    setup = Setup(bases(name), tensor_parallel, adapter, dtype)
    answers = job.run(states, setup=setup)
    numbers = Counter()
    for others, parts in answers:
        assert others == []
        numbers.update({tensor: prod(own) for tensor, (_, own) in parts.items()})
    groups = len(job) // tensor_parallel
    for tensor, (shape, _) in answers[0][1].items():
        if tensor_parallel == 1 or tensor.endswith(CUT_BY_TENSOR_PARALLELISM):
            assert numbers[tensor] == prod(shape), f"{tensor}: every number lies on one rank"
        else:
            assert numbers[tensor] in (prod(shape), prod(shape) * tensor_parallel)
    if tensor_parallel == 1:
        for shape, own in answers[0][1].values():
            assert own == (-(-shape[0] // groups), *shape[1:])


def test_each_rank_reads_only_its_rows(job, bases):
    answers = job.run(rows_read, setup=Setup(bases("odd heads")))
    for rank, read in enumerate(answers):
        for name, rows in read.items():
            # As torch.chunk cuts; of queries and keys only whole heads can be read.
            count = {"vocab": 131, "query": 84, "key": 42, "ffn": 56, "hidden": 42}[_rows(name)]
            unit = 14 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1
            chunk = -(-count // len(job))
            first, last = min(rank * chunk, count), min((rank + 1) * chunk, count)
            expected = range(first // unit * unit, -(-last // unit) * unit)
            assert rows == set(expected if first < last else ()), name


def _rows(name):
    if name in ("tok_embeddings.weight", "output.weight"):
        return "vocab"
    module = name.split(".")[-2]
    sizes = {"q_proj": "query", "k_proj": "key", "v_proj": "key", "w1": "ffn", "w3": "ffn"}
    return sizes.get(module, "hidden")


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_base_computes_alone_and_all_stays_cut(job, bases, tensor_parallel):
    setup = Setup(bases("even vocabulary"), tensor_parallel, ADAPTERS["modules trained whole"])
    for error, whole in job.run(logits_without_adapter, setup=setup, tokens=variants.tokens()):
        assert error < ROUNDING
        assert whole == []


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize(
    "name, adapter",
    [
        ("even vocabulary", None),
        ("llama, biases", LORA),
        ("phi3", DORA),
        ("qwen3_moe", EXPERTS_LORA),
    ],
)
def test_what_is_saved_is_what_one_process_saves(
    job, bases, tmp_path, name, adapter, tensor_parallel
):
    setup = Setup(bases(name), tensor_parallel, adapter)
    saved, *_ = job.run(save_model, setup=setup, out=tmp_path / "out", on_many=True)
    alone = [tmp_path / f"alone {rank}" for rank in range(len(job))]
    whole, *_ = job.run(_save_alone, alone, setup=setup)
    check_same(saved, whole)


def _save_alone(out, setup):
    return save_model(setup, out, on_many=False)


def errors(answers, text):
    for found, message in answers:
        assert found is ConfigError, message
        assert text in message


def test_layouts_that_do_not_fit_are_refused(job, bases):
    many = len(job)
    tokens = variants.tokens()
    wrong = Setup(bases("odd heads"), 3)
    errors(
        job.run(errors_of_a_step, setup=wrong, tokens=tokens),
        f"tensor_parallel_dim=3: the job has {many} ranks",
    )
    errors(
        job.run(errors_of_a_step, setup=Setup(bases("odd heads"), 2), tokens=tokens),
        "tensor_parallel_dim=2: cannot share 3 key-value heads evenly",
    )
    errors(
        job.run(errors_of_a_step, setup=Setup(bases("odd columns"), 2), tokens=tokens),
        "cannot share 55 columns within a feed-forward layer evenly",
    )


def test_a_base_in_nf4_is_refused(job, bases):
    answers = job.run(parallelize_quantized, base=bases("even vocabulary"))
    errors(answers, "model.quantize_base=True: a base in NF4 cannot be cut")
