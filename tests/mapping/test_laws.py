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
from checkpointing.mapping.tensors import Rows, StateDictSource
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


def pieces(rows: Rows, factor: int) -> list[Tensor]:
    """All rows, as many units at a time."""
    step = factor * rows.unit
    return [rows.read(a, min(a + step, rows.count)) for a in range(0, rows.count, step)]


@pytest.mark.parametrize(("family", "name"), FORMATS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), factor=st.integers(1, 3))
def test_a_model_that_is_converted_a_few_rows_at_a_time_is_the_same(family, name, data, factor):
    layout = Layout(FAMILIES[family], name, data.draw(dims_of(family)))
    source = StateDictSource(random_tensors(layout, torch.bfloat16))
    foreign = plan_to_foreign(layout, source.metas, "native").over(source)
    native = plan_to_native(layout, foreign.metas, "foreign").over(foreign)
    for converted in (foreign, native):
        for tensor in converted:
            whole = converted[tensor]
            if whole.dim():
                assert converted.rows(tensor).count == whole.shape[0]
                assert torch.equal(torch.cat(pieces(converted.rows(tensor), factor)), whole)


def test_what_can_be_had_in_how_few_rows():
    """By hand: rows of a head move together, parts of a fused tensor and experts come apart."""
    units = {
        ("llama", "layers.0.attn.q_proj.weight"): 6,  # RoPE's order, heads of width 6
        ("llama", "layers.0.mlp.w1.weight"): 1,
        ("phi3", "layers.0.attn.k_proj.weight"): 1,
        ("phi3", "layers.0.mlp.w3.weight"): 1,
        ("mixtral", "layers.0.mlp.experts.gate_proj"): 1,  # one expert
    }
    for (family, tensor), unit in units.items():
        sizes = {"layers": 1, "vocab": 11, "hidden": 20, "ffn": 14, "heads": 4, "kv_heads": 2}
        experts = {"experts": 3, "expert_ffn": 14, "expert_layers": (0,)}
        dims = Dims(**sizes, head_dim=6, **(experts if family == "mixtral" else {}))
        layout = Layout(FAMILIES[family], "hf", dims)
        source = StateDictSource(random_tensors(layout, torch.float32))
        foreign = plan_to_foreign(layout, source.metas, "native").over(source)
        native = plan_to_native(layout, foreign.metas, "foreign").over(foreign)
        assert native.rows(tensor).unit == unit


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(("family", "name"), FORMATS)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), rank=st.integers(1, 5), factor=st.integers(1, 3))
def test_a_merge_of_a_few_rows_at_a_time_is_the_same(family, name, dora, data, rank, factor):
    dims = data.draw(dims_of(family))
    for pair in adapted_pairs(family, name, dims):
        kind = pair.module.adapter
        if (dims.tied and kind is EMBEDDING_ADAPTER) or (dora and kind.magnitude is None):
            continue
        config = AdapterConfig(rank, 2, (pair.native.rsplit(".")[-1],), use_dora=dora)
        shapes = {p: pair.native_shape(p, rank) for p in (kind.weight, *config.parameters(kind))}
        tensors = {
            p.native_name(pair.native): torch.randn(shape, dtype=torch.float64) + 0.1
            for p, shape in shapes.items()
        }
        weight = kind.weight.native_name(pair.native)
        base = {weight: tensors.pop(weight)}
        if kind is EMBEDDING_ADAPTER:
            base["output.weight"] = torch.zeros(1)
        rows = MergedStateDict(base, tensors, config).rows(weight)
        factors = [tensors[p.native_name(pair.native)] for p in config.parameters(kind)]
        a, b, *magnitude = (
            tensor.permute(sorted(range(tensor.dim()), key=lambda d: MATRIX.index(p.axes[d])))
            for p, tensor in zip(config.parameters(kind), factors, strict=True)
        )
        order = sorted(
            range(len(kind.weight.axes)), key=lambda d: MATRIX.index(kind.weight.axes[d])
        )
        expected = merged_weight(
            base[weight].permute(order), a, b, config.scale(pair.native), *magnitude
        ).permute([order.index(d) for d in range(len(order))])
        torch.testing.assert_close(
            torch.cat(pieces(rows, factor)), expected, rtol=1e-12, atol=1e-12
        )
