"""The two laws of the mapping, for every family, format, module and kind of tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing.adapters import merged_weight
from checkpointing.families import FAMILIES
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.model_config import Dims
from checkpointing.mapping.plan import plan_to_foreign, plan_to_native
from checkpointing.mapping.rules import ADAPTER_PARAMETERS, BIAS, LORA_A, LORA_B, MAGNITUDE, WEIGHT
from checkpointing.mapping.tensors import StateDictSource
from tests.tiny import assert_same_tensors

FORMATS = [(family, name) for family in FAMILIES for name in FAMILIES[family].formats]


@st.composite
def model_dims(draw):
    kv_heads = draw(st.integers(1, 3))
    return Dims(
        layers=draw(st.integers(1, 2)),
        vocab=draw(st.integers(2, 9)),
        hidden=draw(st.integers(2, 9)),
        ffn=draw(st.integers(2, 9)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        tied=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )


def linear_pairs(family: str, name: str, dims: Dims):
    pairs = Layout(FAMILIES[family], name, dims).pairs
    return [pair for pair in pairs if pair.module.takes_adapter]


@pytest.mark.parametrize(("family", "name"), FORMATS)
@settings(max_examples=30, deadline=None)
@given(dims=model_dims(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_to_foreign_and_back_keeps_every_bit_of_a_model(family, name, dims, dtype):
    layout = Layout(FAMILIES[family], name, dims)
    native = {
        f"{pair.native}.{parameter.native}": torch.randn(pair.native_shape(parameter)).to(dtype)
        for pair, parameter in layout.parameters()
    }
    source = StateDictSource(native)
    foreign = dict(plan_to_foreign(layout, source.metas, "native").over(source))
    foreign_source = StateDictSource(foreign)
    back = plan_to_native(layout, foreign_source.metas, "foreign").over(foreign_source)
    assert_same_tensors(dict(back), native)
    again = plan_to_foreign(layout, back.metas, "native").over(back)
    assert_same_tensors(dict(again), foreign)


@pytest.mark.parametrize(("family", "name"), FORMATS)
@settings(max_examples=30, deadline=None)
@given(dims=model_dims(), rank=st.integers(1, 5))
def test_to_foreign_and_back_keeps_every_bit_of_an_adapter(family, name, dims, rank):
    for pair in linear_pairs(family, name, dims):
        out, in_ = pair.native_shape(WEIGHT)
        shapes = {LORA_A: (rank, in_), LORA_B: (out, rank), MAGNITUDE: (out,), BIAS: (out,)}
        for parameter in (*ADAPTER_PARAMETERS, BIAS):
            native = torch.randn(shapes[parameter])
            assert torch.equal(
                pair.to_native(pair.to_foreign(native, parameter), parameter), native
            )


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(("family", "name"), FORMATS)
@settings(max_examples=30, deadline=None)
@given(dims=model_dims(), rank=st.integers(1, 5), scale=st.floats(0.1, 8))
def test_converting_then_merging_is_merging_then_converting(family, name, dora, dims, rank, scale):
    for pair in linear_pairs(family, name, dims):
        out, in_ = pair.native_shape(WEIGHT)
        weight = torch.randn(out, in_, dtype=torch.float64)
        a = torch.randn(rank, in_, dtype=torch.float64)
        b = torch.randn(out, rank, dtype=torch.float64)
        magnitude = torch.rand(out, dtype=torch.float64) + 0.5 if dora else None
        merged_first = pair.to_foreign(merged_weight(weight, a, b, scale, magnitude), WEIGHT)
        converted_first = merged_weight(
            pair.to_foreign(weight, WEIGHT),
            pair.to_foreign(a, LORA_A),
            pair.to_foreign(b, LORA_B),
            scale,
            None if magnitude is None else pair.to_foreign(magnitude, MAGNITUDE),
        )
        torch.testing.assert_close(converted_first, merged_first, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("family", "name"), FORMATS)
def test_a_linear_map_computes_the_same_numbers_in_both_layouts(family, name):
    # y = W x + bias: the foreign map of the foreign input is the foreign output.
    dims = Dims(2, 17, 12, 19, 6, 2, 10, attention_bias=True, mlp_bias=True)
    for pair in linear_pairs(family, name, dims):
        out, in_ = pair.native_shape(WEIGHT)
        weight, bias, x = torch.randn(out, in_), torch.randn(out), torch.randn(in_)
        foreign_x = pair.to_foreign(x[None], LORA_A)[0]
        foreign_y = pair.to_foreign(weight, WEIGHT) @ foreign_x + pair.to_foreign(bias, BIAS)
        torch.testing.assert_close(foreign_y, pair.to_foreign(weight @ x + bias, BIAS))
