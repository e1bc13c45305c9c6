"""A small byte-level tokenizer with a chat template, as a Hugging Face directory has them."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<unk>", "<|start|>", "<|end|>")
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|start|>system\nBe brief.<|end|>\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONVERSATION = [
    {"role": "user", "content": "  Name two colours, "},
    {"role": "assistant", "content": "\n\nRed and blue: \u00fc \u2713."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "Welcome  "},
]


def write_tokenizer(directory: Path, template: str | None = TEMPLATE) -> Path:
    """Writes ``tokenizer.json`` and its side files; 300 tokens at most."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Takes white space out of the offsets, as the tokenizers of GPT-2 and Llama 3 do.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet
    )
    text = "the user and the assistant name colours: red, blue. Thanks! Welcome. Be brief.\n\n"
    tokenizer.train_from_iterator([text * 20], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": SPECIAL[2]}
    names = {"bos_token": SPECIAL[1], "eos_token": end, "pad_token": SPECIAL[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
