"""How large models are saved by many ranks, planned without weights, and without the other ranks.

Torch's fake process group makes one process a rank of any number of them. The figures are those of
``docs/scale.md``.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import pytest

BF16 = 2
HEAD_DIM, KEY_VALUE, VOCAB = 128, 1024, 128256
FILE_BYTES = 5 * 10**9

# What is planned, in a process of its own, since it becomes a rank.
PLAN = """
import json, resource, sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from checkpointing import AdapterConfig, MergedStateDict
from checkpointing.formats.base import OpenModel, plan_foreign
from checkpointing.mapping.model_config import Dims, ModelConfig
from checkpointing.storage.new_file import PlacedTensor
from checkpointing.storage.shared_work import Work
from checkpointing.storage.write import plan_shards
from checkpointing.training import (
    adapter_state_dict, add_adapter, base_state_dict, empty_decoder, make_mesh, parallelize,
)

sizes, tensor_parallel, most = json.loads(sys.argv[1])
ranks = sizes.pop("ranks")
dist.init_process_group("fake", rank=ranks - 3, world_size=ranks, store=FakeStore())
dims = Dims(**sizes, tied=False)
config = ModelConfig("llama", dims, 1e-5, rope_theta=5e5, rope_scaling=None, max_seq_len=8192)
model = empty_decoder(config, torch.bfloat16)
names = ("q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3")
add_adapter(model, AdapterConfig(16, 32, names))
parallelize(model, make_mesh(torch.device("cpu"), tensor_parallel))
native = base_state_dict(model)
merged = MergedStateDict(native, adapter_state_dict(model), model.adapter_config)
foreign = plan_foreign(merged, OpenModel(native, config), "hf")
share = sum(one.to_local().nbytes for one in native.values())
written, gathered, files, largest = [0] * ranks, [0] * ranks, 0, 0
for names in plan_shards(foreign.metas, most):
    files += 1
    placed = [PlacedTensor(name, foreign.metas[name], 0) for name in names]
    work = Work(placed, foreign, ranks)
    for rank, parts in work.readable.items():
        written[rank] += sum(part.nbytes for part in parts)
    for one in work.gathered:
        largest = max(largest, one.place.nbytes)
        for rank in one.ranks:
            gathered[rank] += one.place.nbytes
            written[rank] += sum(part.nbytes for part in one.shares[rank])
json.dump(
    {"written": written, "gathered": gathered, "files": files, "largest": largest, "share": share,
     "total": sum(meta.nbytes for meta in foreign.metas.values()),
     "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024},
    sys.stdout,
)
"""


@dataclass(frozen=True)
class Job:
    layers: int
    hidden: int
    heads: int
    ffn: int
    ranks: int
    vocab: int = VOCAB
    kv_heads: int = KEY_VALUE // HEAD_DIM
    head_dim: int = HEAD_DIM


LLAMA_70B = Job(80, 8192, 64, 28672, ranks=64)
LLAMA_405B = Job(126, 16384, 128, 53248, ranks=512)


def plan(job: Job, tensor_parallel: int):
    argument = json.dumps([asdict(job), tensor_parallel, FILE_BYTES])
    done = subprocess.run(
        [sys.executable, "-c", PLAN, argument], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def model_bytes(job: Job) -> int:
    attention = 2 * job.hidden * job.hidden + 2 * KEY_VALUE * job.hidden
    layer = attention + 3 * job.hidden * job.ffn + 2 * job.hidden
    return BF16 * (job.layers * layer + 2 * VOCAB * job.hidden + job.hidden)


@pytest.mark.slow
@pytest.mark.parametrize("job", [LLAMA_70B, LLAMA_405B], ids=["70B on 64", "405B on 512"])
def test_a_save_of_a_model_under_fsdp_and_tensor_parallelism(job):
    tensor_parallel = 8
    found = plan(job, tensor_parallel)
    rows = job.ranks // tensor_parallel  # into which FSDP cuts
    assert found["total"] == sum(found["written"]) == model_bytes(job)

    # Of the matrices whose columns are cut, each rank gathers the rows of its own place in FSDP; of
    # those whose heads are cut by FSDP, all of its place in tensor parallelism. Nothing else.
    columns = BF16 * job.layers * job.hidden * (job.hidden + job.ffn) // rows
    of_heads = [
        BF16 * job.layers * size * job.hidden // tensor_parallel
        for size in (job.hidden, KEY_VALUE)
        if size // job.ranks % HEAD_DIM
    ]
    assert set(found["gathered"]) == {columns + sum(of_heads)}
    assert found["largest"] <= 64 << 20
    assert max(found["written"]) < 2 * model_bytes(job) / job.ranks
    # What a rank holds is its share, and of the embedding and the norms that of its place in FSDP.
    whole_in_tensor_parallel = BF16 * VOCAB * job.hidden
    share = model_bytes(job) / job.ranks
    assert found["share"] < share + whole_in_tensor_parallel / rows * 1.01


@pytest.mark.slow
def test_a_save_of_a_model_under_fsdp_alone():
    job = LLAMA_70B
    found = plan(job, 1)
    assert sum(found["written"]) == model_bytes(job)
    # FSDP leaves whole heads of the queries on each of 64 ranks, and cuts those of the 8 keys.
    keys = BF16 * job.layers * KEY_VALUE * job.hidden
    assert set(found["gathered"]) == {keys}
    assert found["largest"] == keys / job.layers
