"""An adapter that PEFT made and saved, for every family, as the start of native training."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from checkpointing import FullModelHFCheckpointer
from checkpointing.adapters import AdapterConfig
from checkpointing.training import add_adapter, build_decoder
from checkpointing.training.lora import load_adapter
from tests.families.variants import VARIANTS, compared, peer, tokens, write

KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_it_computes_the_same_natively_and_written_back(tmp_path, name, kind):
    write(name, tmp_path / "base")
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        task_type="SEQ_CLS" if "classifier" in name else "CAUSAL_LM",
        init_lora_weights=False,
        **KINDS[kind],
    )
    if kind == "dora" and "expert" in str(VARIANTS[name]):
        # PEFT refuses DoRA on experts.
        config.target_modules = ["q_proj", "k_proj", "o_proj"]
    torch.manual_seed(5)
    made = get_peft_model(peer(name), config)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if "lora_magnitude" in parameter_name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "lora_" in parameter_name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(tmp_path / "adapter")
    expected = made.double()(tokens()).logits.detach()

    checkpointer = FullModelHFCheckpointer(
        tmp_path / "base",
        output_dir=tmp_path / "out",
        adapter_checkpoint=tmp_path / "adapter",
    )
    state = checkpointer.load_checkpoint()
    native = build_decoder(checkpointer.model_config, state["model"], torch.float64)
    add_adapter(native, AdapterConfig.from_state(state["adapter_config"]))
    load_adapter(native, state["adapter"])
    with torch.no_grad():
        assert compared(native.double().eval()(tokens()), expected).abs().max() < 1e-5
        saved = checkpointer.save_checkpoint(state, epoch=0, adapter_only=True)
        again = PeftModel.from_pretrained(peer(name), saved).double()
        assert (again(tokens()).logits - expected).abs().max() < 1e-5
