"""What the recipes write, in the hands of transformers and PEFT."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpointing import FullModelHFCheckpointer
from checkpointing.adapters import AdapterConfig
from checkpointing.training import add_adapter, build_decoder, load_adapter
from tests.training import peers, runs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return runs.write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def run_directory(base, tmp_path):
    """Where a run of one epoch with large steps leaves its checkpoint."""

    def run(kind, *overrides):
        runs.run(kind, base, tmp_path, *overrides, "epochs=1", "optimizer.lr=0.01")
        return tmp_path / "epoch_0"

    return run


def logits(model):
    # In fp64, so that a difference is an error and not noise.
    with torch.no_grad():
        found = model.double().eval()(peers.tokens())
    return getattr(found, "logits", found)


def native_model(base, output_dir):
    """The native model with the adapter that a resumed run would start from."""
    checkpointer = FullModelHFCheckpointer(
        base, output_dir=output_dir, should_load_recipe_state=True
    )
    state = checkpointer.load_checkpoint()
    model = build_decoder(checkpointer.model_config, state["model"], torch.float32)
    if "adapter" in state:
        add_adapter(model, AdapterConfig.from_state(state["adapter_config"]))
        load_adapter(model, state["adapter"])
    return model


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.use_dora=True",),
        ("model.use_rslora=True", "model.apply_lora_to_output=True"),
        ("model.lora_attn_modules=[k_proj,output_proj]", "model.apply_lora_to_mlp=False"),
    ],
    ids=["lora", "dora", "rslora with output", "k and output_proj"],
)
def test_a_lora_run_serves_in_peft_and_merged_with_the_native_logits(
    base, run_directory, overrides
):
    checkpoint = run_directory("lora", *overrides)
    native = logits(native_model(base, checkpoint.parent))
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = logits(peft.PeftModel.from_pretrained(model, checkpoint))
    merged = logits(AutoModelForCausalLM.from_pretrained(checkpoint / "merged"))
    assert (adapted - plain).abs().max() > 0.1
    assert (adapted - native).abs().max() < 1e-5
    assert (merged - native).abs().max() < 1e-5


def test_a_full_run_is_a_directory_that_transformers_loads(base, run_directory):
    checkpoint = run_directory("full")
    native = logits(native_model(base, checkpoint.parent))
    found = logits(AutoModelForCausalLM.from_pretrained(checkpoint))
    assert (found - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.1
    assert (found - native).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(checkpoint)("red")["input_ids"]
