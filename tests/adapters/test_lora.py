import pytest
import torch

from checkpointing.adapters import AdapterConfig, MergedStateDict, merged_weight
from checkpointing.errors import ConfigError, TensorMismatchError
from tests.tiny import ATTENTION, MLP, random_adapter, random_native
from tests.training.peers import config

CONFIG = config()
QUERY = "layers.0.attn.q_proj"


def test_scale_of_lora_rslora_and_an_alpha_pattern():
    plain = AdapterConfig(16, 32, ("q_proj",))
    rank_stabilised = AdapterConfig(16, 32, ("q_proj",), use_rslora=True)
    pattern = AdapterConfig(16, 32, ("q_proj",), alpha_pattern={QUERY: 64})
    rank = AdapterConfig(16, 32, ("q_proj",), use_rslora=True, rank_pattern={QUERY: 4})
    assert plain.scale(QUERY) == 2
    assert rank_stabilised.scale(QUERY) == 8
    assert pattern.scale(QUERY) == 4 and pattern.scale("layers.1.attn.q_proj") == 2
    assert rank.scale(QUERY) == 16 and rank.scale("layers.1.attn.q_proj") == 8


def test_dora_gives_each_row_its_magnitude():
    # ||(3, 4)|| is 5, so a magnitude of 10 doubles the row.
    nothing = torch.zeros(1, 1), torch.zeros(1, 2)
    merged = merged_weight(
        torch.tensor([[3.0, 4.0]]), nothing[1], nothing[0], 2.0, torch.tensor([10.0])
    )
    assert merged.tolist() == [[6.0, 8.0]]


def test_a_bf16_weight_is_merged_in_fp32_and_rounded_once():
    # 256 + 0.75 + 0.75 is 257.5; a bf16 there has steps of 2, so 258. Rounding after each
    # addition, or rounding the delta first, would give 256.
    weight = torch.tensor([[256.0]], dtype=torch.bfloat16)
    a = torch.tensor([[0.75], [0.75]])
    merged = merged_weight(weight, a, torch.ones(1, 2), 1.0)
    assert merged.dtype == torch.bfloat16 and merged.item() == 258


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_merged_state_dict_is_lazy_and_never_writes_to_its_base(dora):
    base = random_native(CONFIG, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in base.items()}
    adapter_config = AdapterConfig(3, 5, (*ATTENTION, *MLP, "output"), use_dora=dora)
    adapter = random_adapter(CONFIG.dims, adapter_config)
    merged = MergedStateDict(base, adapter, adapter_config)
    assert set(merged) == set(base)
    for name, tensor in merged.items():
        module = name.removesuffix(".weight")
        if f"{module}.lora_a.weight" not in adapter:
            assert torch.equal(tensor, before[name])
            continue
        delta = 5 / 3 * adapter[f"{module}.lora_b.weight"] @ adapter[f"{module}.lora_a.weight"]
        expected = before[name].float() + delta
        if dora:
            expected *= (adapter[f"{module}.magnitude"] / expected.norm(dim=1))[:, None]
        torch.testing.assert_close(tensor, expected.bfloat16(), rtol=2**-7, atol=0)
        tensor.zero_()
    assert all(torch.equal(base[name], before[name]) for name in base)
    assert torch.equal(merged["layers.0.mlp.w1.weight"], merged["layers.0.mlp.w1.weight"])


def test_everything_wrong_with_an_adapter_is_listed_together():
    adapter_config = AdapterConfig(3, 5, ("q_proj", "w2", "k_proj"))
    adapter = random_adapter(CONFIG.dims, AdapterConfig(3, 5, ("q_proj", "w2")))
    del adapter["layers.1.attn.q_proj.lora_b.weight"]
    adapter["layers.2.mlp.w2.lora_a.weight"] = torch.ones(3, 55)
    adapter["layers.9.mlp.w2.lora_a.weight"] = torch.ones(3, 56)
    adapter["layers.0.attn.q_proj.magnitude"] = torch.ones(84)
    adapter["norm.scale"] = torch.ones(42)
    with pytest.raises(TensorMismatchError) as caught:
        MergedStateDict(random_native(CONFIG), adapter, adapter_config)
    assert set(caught.value.problems) == {
        "layers.1.attn.q_proj.lora_b.weight: missing, expected [84, 3]",
        "layers.2.mlp.w2.lora_a.weight: [3, 55], expected [3, 56]",
        "layers.9.mlp.w2: the base has no such linear module",
        "layers.0.attn.q_proj.magnitude: a DoRA magnitude, but the adapter's config says "
        "plain LoRA",
        "norm.scale: not a tensor of an adapter",
        "k_proj: a target module of the adapter without any tensor",
    }


def test_an_adapter_config_reads_torchtunes_four_keys_and_its_own_state():
    four = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "w1"], "peft_type": "LORA"}
    read = AdapterConfig.from_state(four)
    assert (read.r, read.alpha, read.target_modules) == (8, 16, ("q_proj", "w1"))
    full = AdapterConfig(
        8, 16, ("q_proj",), 0.1, True, True, rank_pattern={QUERY: 2}, alpha_pattern={QUERY: 3}
    )
    assert AdapterConfig.from_state(full.to_state()) == full


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"r": 8, "target_modules": []}, r"missing keys \['lora_alpha'\]"),
        ({"r": 8, "lora_alpha": 1, "target_modules": [], "loftq": 1}, r"unknown keys \['loftq'\]"),
        ({"r": 8, "lora_alpha": 1, "target_modules": [], "peft_type": "IA3"}, "'IA3' is not"),
        ({"r": 0, "lora_alpha": 1, "target_modules": []}, "ranks must be at least 1"),
    ],
)
def test_a_wrong_adapter_config_is_refused(state, says):
    with pytest.raises(ConfigError, match=says):
        AdapterConfig.from_state(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_has_the_same_bits_however_many_are_merged_at_once(dtype):
    # A product with a single row is summed in another order from a rank of 8 on.
    generator = torch.Generator().manual_seed(1)
    weight, lora_a, lora_b = (
        torch.randn(shape, generator=generator, dtype=dtype)
        for shape in ((93, 352), (16, 352), (93, 16))
    )
    whole = merged_weight(weight, lora_a, lora_b, 1.5)
    for rows in (1, 2, 31, 46):
        for some in torch.arange(93).split(rows):
            assert torch.equal(merged_weight(weight[some], lora_a, lora_b[some], 1.5), whole[some])
    for some in torch.arange(352).split(117):
        columns = [merged_weight(weight[:, some], lora_a[:, some], lora_b, 1.5), whole[:, some]]
        assert torch.equal(*columns)
    one = merged_weight(weight[:, :1], lora_a[:, :1], lora_b, 1.5)
    assert torch.equal(one, whole[:, :1])
