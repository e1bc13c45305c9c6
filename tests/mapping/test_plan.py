import pytest
import torch

from checkpointing.errors import TensorMismatchError
from checkpointing.families.llama import LLAMA
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.model_config import Dims
from checkpointing.mapping.plan import plan_to_foreign, plan_to_native
from checkpointing.mapping.tensors import StateDictSource, TensorMeta, meta_of
from tests.tiny import random_native
from tests.training.peers import config, hf_model, native_weights

CONFIG = config()
LAYOUT = Layout(LLAMA, "hf", CONFIG.dims)


def hf_metas() -> dict[str, TensorMeta]:
    return {name: meta_of(tensor) for name, tensor in hf_model(CONFIG).state_dict().items()}


def test_all_problems_of_a_checkpoint_are_listed_together():
    metas = hf_metas()
    del metas["model.layers.0.self_attn.v_proj.weight"]
    del metas["model.layers.2.self_attn.v_proj.weight"]
    metas["model.layers.1.mlp.up_proj.weight"] = TensorMeta((55, 42), torch.float32)
    metas["model.layers.1.self_attn.q_norm.weight"] = TensorMeta((14,), torch.float32)
    with pytest.raises(TensorMismatchError) as caught:
        plan_to_native(LAYOUT, metas, "somewhere/base")
    assert set(caught.value.problems) == {
        "model.layers.0.self_attn.v_proj.weight: missing, expected [28, 42]",
        "model.layers.2.self_attn.v_proj.weight: missing, expected [28, 42]",
        "model.layers.1.mlp.up_proj.weight: [55, 42], expected [56, 42]",
        "model.layers.1.self_attn.q_norm.weight: unexpected, [14]",
    }
    message = str(caught.value)
    assert "somewhere/base: 4 problems" in message
    # What is the same in several layers is said once.
    assert "model.layers.*.self_attn.v_proj.weight: missing" in message
    assert "(* is 0, 2)" in message


def test_planning_reads_no_tensor():
    class Headers:
        metas = hf_metas()

        def read(self, name):
            raise AssertionError(f"{name} was read")

    native = plan_to_native(LAYOUT, Headers.metas, "base").over(Headers())
    assert native.metas["layers.1.attn.k_proj.weight"].shape == (28, 42)


def test_native_weights_of_transformers_tensors_are_those_mapped_by_hand():
    model = hf_model(CONFIG)
    source = StateDictSource(model.state_dict())
    native = plan_to_native(LAYOUT, source.metas, "base").over(source)
    expected = native_weights(model, CONFIG)
    assert list(native.metas) == list(random_native(CONFIG))
    for name, tensor in expected.items():
        assert torch.equal(native[name], tensor), name


def test_rope_tables_that_old_checkpoints_store_are_left_out():
    metas = hf_metas()
    metas["model.layers.1.self_attn.rotary_emb.inv_freq"] = TensorMeta((7,), torch.float32)
    plan = plan_to_native(LAYOUT, metas, "base")
    assert not any("inv_freq" in name for planned in plan.tensors for name in planned.sources)


def test_a_planned_source_is_not_changed_and_not_aliased_where_rows_move():
    native = random_native(CONFIG)
    before = {name: tensor.clone() for name, tensor in native.items()}
    foreign = plan_to_foreign(LAYOUT, StateDictSource(native).metas, "x").over(
        StateDictSource(native)
    )
    foreign["model.layers.0.self_attn.q_proj.weight"].zero_()
    assert all(torch.equal(native[name], before[name]) for name in native)


def test_seventy_billion_parameters_are_planned_without_their_memory():
    dims = Dims(80, 128256, 8192, 28672, 64, 8, 128)
    layout = Layout(LLAMA, "hf", dims)
    metas = {
        f"{pair.foreign}.{p.foreign}": TensorMeta(pair.foreign_shape(p), torch.bfloat16)
        for pair, p in layout.parameters()
    }
    plan = plan_to_native(layout, metas, "70B")
    # Meta's Llama 3 70B has 70.6 billion parameters.
    assert sum(planned.meta.nbytes for planned in plan.tensors) == 2 * 70_553_706_496
