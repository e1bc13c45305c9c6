from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing.families import FAMILIES, MODEL_TYPES
from checkpointing.families.llama import LLAMA
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.rules import Rule
from tests.mapping.dims import dims_of


def changed(format: str, **change):
    rules = LLAMA.formats[format]
    return {**LLAMA.formats, format: change["rules"](rules)}


def test_a_table_that_forgets_a_module_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match=r"rules for hf: not exactly one rule each: .*norm"):
        replace(LLAMA, formats=changed("hf", rules=lambda rules: rules[:10] + rules[11:]))


def test_a_table_that_names_a_tensor_twice_is_refused():
    twice = Rule("output", "lm_head")
    with pytest.raises(ValueError, match=r"rules for hf: named twice \['output'\]"):
        replace(LLAMA, formats=changed("hf", rules=lambda rules: (*rules, twice)))


def test_a_table_with_an_unknown_place_in_a_name_is_refused():
    wrong = Rule("norm", "model.{block}.norm")
    with pytest.raises(ValueError, match=r"unknown place \['model.{block}.norm'\]"):
        replace(LLAMA, formats=changed("hf", rules=lambda rules: (*rules[:10], wrong, *rules[11:])))


def test_a_rule_that_loses_the_layer_is_refused():
    wrong = Rule("layers.{layer}.attn.q_proj", "model.q_proj")
    with pytest.raises(ValueError, match="loses layer or expert"):
        replace(LLAMA, formats=changed("hf", rules=lambda r: (r[0], wrong, *r[2:])))


@pytest.mark.parametrize("rotates", [{"rotates_halves": True}, {"hf_rotates_halves": False}])
def test_a_table_that_permutes_rows_where_both_rotate_alike_is_refused(rotates):
    with pytest.raises(ValueError, match="rows are permuted if and only if one of"):
        replace(LLAMA, **rotates)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_tensor_has_one_name_in_each_layout(family, data):
    dims = data.draw(dims_of(family))
    for name in FAMILIES[family].formats:
        parameters = list(Layout(FAMILIES[family], name, dims).parameters())
        native = {(p.native_name(pair.native), pair.expert) for pair, p in parameters}
        assert len(native) == len(parameters)
        places = {(p.foreign_name(pair.foreign), pair.start) for pair, p in parameters}
        assert len(places) == len(parameters)


def test_every_model_type_of_torchtune_stands_for_a_family():
    assert set(MODEL_TYPES.values()) <= set(FAMILIES)
