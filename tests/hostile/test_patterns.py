"""Regular expressions from an adapter_config.json mean what they mean in Python, and never hang."""

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkpointing.adapters.pattern import Pattern
from checkpointing.errors import ConfigError

_NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.31.mlp.down_proj",
    "model.layers.7.mlp.experts.11.gate_proj",
    "model.language_model.layers.3.self_attn.o_proj",
    "model.visual.blocks.3.attn.qkv",
    "model.embed_tokens",
    "lm_head",
    "",
    "two\nlines\n",
    "Ж.٣.x_y-z",
]

_UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
_REAL = [
    _UNSLOTH,
    r"model\.layers\.\d+\.(?:self_attn|mlp)\.(?:q|k|v|o|gate|up|down)_proj",
    r".*\.(q_proj|v_proj)$",
    r"^(model.language_model(?=\.).*\.(o_proj|q_proj|gate_proj))$",
    r"^(?!.*visual).*(?:q_proj|down_proj)",
    r"(?:^|.*\.)layers\.(?:0|[1-3]\d)\..*proj",
    r"(?<=x)y|.*(?<!q)_proj",
    r".*[^.]+\.[a-z_]{4,6}\Z",
]


@pytest.mark.parametrize("expression", _REAL)
def test_expressions_of_peft_axolotl_unsloth_and_swift_mean_the_same(expression):
    pattern = Pattern(expression)
    matches = [bool(re.fullmatch(expression, name)) for name in _NAMES]
    assert [pattern.matches_all(name) for name in _NAMES] == matches
    assert any(matches)
    starts = [bool(re.match(expression, name)) for name in _NAMES]
    assert [pattern.matches_start(name) for name in _NAMES] == starts


_CLASSES = ["[ab]", "[^a]", r"[\d_-]", r"[^\w]", "[a-c1]"]
_LOOKS = ["(?=a)", "(?!b)", "(?<=a)", "(?<!ab)"]
_ATOMS = st.sampled_from(
    ["", *"ab.^$", *(rf"\{char}" for char in "dDwWsSbBAZ.n"), *_CLASSES, *_LOOKS]
)
_REPEATS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{2,}", "{0}"])
_EXPRESSIONS = st.recursive(
    _ATOMS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})")
        | st.tuples(inner, _REPEATS).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
        | inner.map(lambda one: f"(?={one})")
        | inner.map(lambda one: f"(?!{one})")
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("cases", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_expression_means_the_same_as_in_python(cases):
    @settings(max_examples=cases, deadline=None, derandomize=True, database=None)
    @given(_EXPRESSIONS, st.text("ab1_. \n", min_size=1, max_size=7))
    @example("(?:a|){3}b*", "aab")
    @example("(a*)*$", "aab\n")
    def check(expression, name):
        pattern = Pattern(expression)
        assert pattern.matches_all(name) == bool(re.fullmatch(expression, name))
        assert pattern.matches_start(name) == bool(re.match(expression, name))

    check()


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+b",
        "(a|a)*b",
        "(.*)*x",
        "(a?){30}a{30}b",
        ".*" * 60 + "x",
        "((((a*)*)*)*)*b",
        "(a|aa|aaa|aaaa)+b",
        "(?=(a+)+b)(?=(?:(?=a*)*)*)(.*.*.*)*c",
        "(a{1,4000}){1,4000}b",
        "(?:" * 40 + "a*" + ")*" * 40 + "b",
    ],
)
def test_an_expression_that_python_would_try_for_years_is_answered_at_once(expression):
    start = time.perf_counter()
    for name in ("a" * 60, "model.layers.11.self_attn.q_proj" * 2):
        try:
            assert not Pattern(expression).matches_all(name)
        except ConfigError as error:
            assert "takes too long" in str(error)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        (r"(a)\1", "groupref"),
        ("(?>a+)b", "atomic"),
        ("a++", "possessive"),
        ("(?i)q_proj", "flags"),
        ("(?i:q)_proj", "flags"),
        ("(a)?(?(1)b|c)", "groupref_exists"),
        ("(?<=a+)b", "fixed width"),
        ("(", "unterminated"),
        ("a{99999999999}", "no regular expression"),
        ("(" * 5000, "no regular expression"),
    ],
)
def test_what_cannot_be_followed_is_named(expression, says):
    with pytest.raises(ConfigError, match=says):
        Pattern(expression)


def test_a_large_model_is_matched_in_a_moment():
    names = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(48) for e in range(64)]
    pattern = Pattern(_UNSLOTH)
    start = time.perf_counter()
    assert sum(map(pattern.matches_all, names)) == 0
    assert time.perf_counter() - start < 3
