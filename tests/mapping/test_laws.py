"""The two laws of the mapping, for every family, format, module and kind of tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpointing.adapters import AdapterConfig, MergedStateDict, merged_weight
from checkpointing.families import FAMILIES
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.model_config import Dims
from checkpointing.mapping.plan import plan_to_foreign, plan_to_native
from checkpointing.mapping.rules import BIAS, EMBEDDING_ADAPTER, LORA_A, WEIGHT, Parameter
from checkpointing.mapping.tensors import StateDictSource
from tests.mapping.dims import dims_of, random_tensors
from tests.tiny import assert_same_tensors

FORMATS = [(family, name) for family in FAMILIES for name in FAMILIES[family].formats]


# As a matrix is multiplied, behind the experts that it is one of.
MATRIX = ("expert", "out", "rank", "in")


def adapted_pairs(family: str, name: str, dims: Dims):
    pairs = Layout(FAMILIES[family], name, dims).pairs
    return [pair for pair in pairs if pair.module.adapter is not None]


def as_matrix(tensor: Tensor, parameter: Parameter) -> Tensor:
    """A foreign tensor with the dimensions as they are multiplied."""
    axes = parameter.foreign_axes
    return tensor.permute(sorted(range(len(axes)), key=lambda dim: MATRIX.index(axes[dim])))


@pytest.mark.parametrize(("family", "name"), FORMATS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_to_foreign_and_back_keeps_every_bit_of_a_model(family, name, data, dtype):
    layout = Layout(FAMILIES[family], name, data.draw(dims_of(family)))
    native = random_tensors(layout, dtype)
    source = StateDictSource(native)
    foreign = dict(plan_to_foreign(layout, source.metas, "native").over(source))
    foreign_source = StateDictSource(foreign)
    back = plan_to_native(layout, foreign_source.metas, "foreign").over(foreign_source)
    assert_same_tensors(dict(back), native)
    again = plan_to_foreign(layout, back.metas, "native").over(back)
    assert_same_tensors(dict(again), foreign)


@pytest.mark.parametrize(("family", "name"), FORMATS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), rank=st.integers(1, 5))
def test_to_foreign_and_back_keeps_every_bit_of_an_adapter(family, name, data, rank):
    dims = data.draw(dims_of(family))
    for pair in adapted_pairs(family, name, dims):
        for parameter in (*pair.module.adapter.parameters, *pair.module.parameters_for(dims)):
            native = pair.slice_of(torch.randn(pair.native_shape(parameter, rank)), parameter)
            foreign = pair.to_foreign(native, parameter)
            assert torch.equal(pair.to_native(foreign, parameter), native)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(("family", "name"), FORMATS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), rank=st.integers(1, 5), scale=st.floats(0.1, 8))
def test_converting_then_merging_is_merging_then_converting(family, name, dora, data, rank, scale):
    dims = data.draw(dims_of(family))
    for pair in adapted_pairs(family, name, dims):
        kind = pair.module.adapter
        config = AdapterConfig(rank, scale * rank, (pair.native.rsplit(".")[-1],), use_dora=dora)
        tied_to_head = dims.tied and kind is EMBEDDING_ADAPTER
        if tied_to_head or (dora and kind.magnitude is None):
            continue
        wanted = (kind.weight, *config.parameters(kind))
        names = {p: p.native_name(pair.native) for p in wanted}
        tensors = {
            name: torch.randn(pair.native_shape(p, rank), dtype=torch.float64) + 0.1
            for p, name in names.items()
        }
        head = {"output.weight": torch.randn(1, 1)}
        base = head | {names[kind.weight]: tensors.pop(names[kind.weight])}
        merged = MergedStateDict(base, tensors, config)[names[kind.weight]]

        def foreign(p, pair=pair, tensors=tensors | base, names=names):
            return as_matrix(pair.to_foreign(pair.slice_of(tensors[names[p]], p), p), p)

        merged_first = foreign(kind.weight, tensors={names[kind.weight]: merged})
        converted_first = merged_weight(
            foreign(kind.weight),
            foreign(kind.a),
            foreign(kind.b),
            scale,
            foreign(kind.magnitude) if dora else None,
        )
        torch.testing.assert_close(converted_first, merged_first, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("family", "name"), FORMATS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_linear_map_computes_the_same_numbers_in_both_layouts(family, name, data):
    # y = W x + bias: the foreign map of the foreign input is the foreign output.
    dims = data.draw(dims_of(family))
    for pair in adapted_pairs(family, name, dims):
        if WEIGHT not in pair.module.parameters:
            continue
        out, in_ = pair.native_shape(WEIGHT)
        weight, bias, x = torch.randn(out, in_), torch.randn(out), torch.randn(in_)
        foreign_x = pair.to_foreign(x[None], LORA_A)[0]
        foreign_y = pair.to_foreign(weight, WEIGHT) @ foreign_x + pair.to_foreign(bias, BIAS)
        torch.testing.assert_close(foreign_y, pair.to_foreign(weight @ x + bias, BIAS))
