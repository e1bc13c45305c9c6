"""Runs the real torchtune for the tests, in an environment of its own.

Reads requests from standard input, one JSON object a line, and answers each with one line. State
dicts travel as files of ``torch.save``.
"""

import gc
import importlib
import inspect
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch
import torchtune
from omegaconf import OmegaConf
from torch.utils.data import Dataset
from torchtune import training
from torchtune.models.convert_weights import tune_to_meta
from torchtune.models.llama3 import llama3
from torchtune.models.t5._component_builders import t5_encoder
from torchtune.modules.model_fusion import DeepFusionModel
from torchtune.modules.peft import get_merged_lora_ckpt

import checkpointing


def import_vision_models():
    """Imports what torchtune itself imports late, without torchvision.

    torchtune needs it for its image transforms, which no test uses, and each build of it fits only
    one build of torch.
    """
    names = ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    absent = {f"torchvision{name}": ModuleType(f"torchvision{name}") for name in names}
    for name, module in absent.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(absent[parent], last, module)
    absent["torchvision.transforms"].InterpolationMode = None
    sys.modules.update(absent)
    importlib.import_module("torchtune.models.clip")
    importlib.import_module("torchtune.models.llama3_2_vision")
    for name in absent:
        del sys.modules[name]


RECIPES = {
    "lora_finetune_single_device": "LoRAFinetuneRecipeSingleDevice",
    "full_finetune_single_device": "FullFinetuneRecipeSingleDevice",
}


class Tokens:
    """What the recipes ask of a tokenizer."""

    pad_id = 0


class Rows(Dataset):
    """Rows of random tokens, of different lengths."""

    def __init__(self, tokenizer, vocab, count):
        generator = torch.Generator().manual_seed(31)
        self.rows = [
            torch.randint(1, vocab, (5 + number % 7,), generator=generator).tolist()
            for number in range(count)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"tokens": self.rows[number], "labels": self.rows[number]}


def save(checkpointer, arguments, state, options):
    """Saves a state dict with a checkpointer; returns the keys that the dict has left."""
    made = getattr(training, checkpointer)(**arguments)
    if checkpointer == "FullModelHFCheckpointer":
        # It writes each tensor into the file of the same number that it has read it from.
        made.load_checkpoint()
    state_dict = torch.load(state, weights_only=True)
    made.save_checkpoint(state_dict, **options)
    return sorted(state_dict)


def load(checkpointer, arguments, into):
    """Loads a checkpoint with a checkpointer, and saves what it gave."""
    torch.save(getattr(training, checkpointer)(**arguments).load_checkpoint(), into)


def load_by_model_type(model_type, arguments, into):
    """Loads with this project's checkpointer, given a member of torchtune's enumeration."""
    member = training.checkpointing.ModelType[model_type]
    made = checkpointing.FullModelHFCheckpointer(model_type=member, **arguments)
    torch.save(made.load_checkpoint(), into)


def signature(checkpointer, method):
    """The parameters of a method, and the defaults of those that have one."""
    parameters = list(
        inspect.signature(getattr(getattr(training, checkpointer), method)).parameters.values()
    )
    return [
        [parameter.name, parameter.default is not parameter.empty, repr(parameter.default)]
        for parameter in parameters
    ]


def merge(weights, adapter, rank, alpha, into):
    """Folds an adapter into native weights as torchtune's recipes do."""
    state_dict = {
        **torch.load(weights, weights_only=True),
        **torch.load(adapter, weights_only=True),
    }
    torch.save(get_merged_lora_ckpt(state_dict, rank=rank, alpha=alpha), into)


def to_meta(weights, into):
    """Renames native weights as Meta's releases name them."""
    torch.save(tune_to_meta(torch.load(weights, weights_only=True)), into)


def logits(sizes, weights, tokens):
    """The logits of torchtune's decoder, into which the native weights must fit exactly."""
    model = llama3(**sizes)
    model.load_state_dict(torch.load(weights, weights_only=True), strict=True)
    with torch.no_grad():
        return model(torch.tensor(tokens)).tolist()


def encode(builder, sizes, weights, tokens):
    """The output of an encoder, into which the native weights must fit exactly."""
    from torchtune.models.clip import clip_text_encoder

    model = {"clip_text_encoder": clip_text_encoder, "t5_encoder": t5_encoder}[builder](**sizes)
    model.load_state_dict(torch.load(weights, weights_only=True), strict=True)
    with torch.no_grad():
        return model(torch.tensor(tokens)).tolist()


def fits_vision_model(encoder, decoder, weights):
    """Puts native weights into a vision model, into which they must fit exactly."""
    from torchtune.models.llama3_2_vision import llama3_2_vision_decoder, llama3_2_vision_encoder

    model = DeepFusionModel(
        decoder=llama3_2_vision_decoder(**decoder), encoder=llama3_2_vision_encoder(**encoder)
    )
    model.load_state_dict(torch.load(weights, weights_only=True), strict=True)


def run_recipe(name, config):
    """Runs one of torchtune's own recipes."""
    path = Path(torchtune.__file__).parents[1] / "recipes" / f"{name}.py"
    cfg = OmegaConf.create(config)
    recipe = runpy.run_path(str(path))[RECIPES[name]](cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


FUNCTIONS = (
    save,
    load,
    load_by_model_type,
    signature,
    merge,
    to_meta,
    logits,
    encode,
    fits_vision_model,
    run_recipe,
)


def main():
    # What torchtune prints must not mix with the answers.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    import_vision_models()
    # torchtune collects garbage after every file that it reads; what was imported is none.
    gc.freeze()
    functions = {function.__name__: function for function in FUNCTIONS}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = functions[request["function"]](**request["arguments"])
            reply = {"result": result}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
