"""A server that answers as SGLang's documentation says, and computes with transformers and PEFT.

Paths, fields and errors are those of https://docs.sglang.io/docs/advanced_features/lora,
``basic_usage/native_api`` and ``basic_usage/sampling_params``.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flask import Flask, jsonify, request
from peft import PeftModel
from transformers import AutoModelForCausalLM
from werkzeug.serving import make_server

MODEL = "tiny/base"


class SGLang:
    """The server.

    Attributes:
        url: where it listens.
        adapters: directory of each adapter that is loaded, by name.
        asked: path and JSON of every request.
        max_rank: of adapters, as ``--max-lora-rank`` says.
        lists: whether it lists adapters.
        unloads: whether it unloads them.
        api_key: that it wants.
        owner: what it says that it is.
    """

    def __init__(self, base: Path) -> None:
        self.adapters: dict[str, str] = {}
        self.asked: list[tuple[str, Any]] = []
        self.max_rank, self.lists, self.unloads = 8, True, True
        self.api_key: str | None = None
        self.owner = "sglang"
        self.url = ""
        self._base = base
        self._models: dict[str | None, Any] = {}
        self._lock = threading.Lock()

    def models(self) -> Any:
        cards = [{"id": MODEL, "owned_by": self.owner, "root": str(self._base), "parent": None}]
        for name, path in self.adapters.items() if self.lists else ():
            cards.append({"id": name, "owned_by": self.owner, "root": path, "parent": MODEL})
        return jsonify({"object": "list", "data": cards})

    def load(self) -> Any:
        name, path = request.json["lora_name"], request.json["lora_path"]
        try:
            rank = json.loads((Path(path) / "adapter_config.json").read_text())["r"]
        except OSError as error:
            return self._updated(f"Failed to load LoRA adapter {name}: {error}")
        if name in self.adapters:
            return self._updated(f"LoRA adapter {name} is already loaded.")
        if rank > self.max_rank:
            return self._updated(f"LoRA adapter {name} with rank {rank} is incompatible.")
        self.adapters[name] = path
        return self._updated(None)

    def unload(self) -> Any:
        if not self.unloads or request.json["lora_name"] not in self.adapters:
            return self._updated(f"LoRA adapter {request.json['lora_name']} cannot be unloaded.")
        del self.adapters[request.json["lora_name"]]
        return self._updated(None)

    def _updated(self, error: str | None) -> Any:
        result = {"success": error is None, "error_message": error}
        return jsonify({**result, "loaded_adapters": self.adapters}), 400 if error else 200

    def generate(self) -> Any:
        asked = request.json
        name, tokens, settings = asked["lora_path"], asked["input_ids"], asked["sampling_params"]
        if name is not None and name not in self.adapters:
            return jsonify({"error": {"message": f"LoRA adapter {name} is not loaded."}}), 400
        with self._lock, torch.no_grad():
            generator = torch.Generator().manual_seed(settings.get("sampling_seed") or 0)
            model = self._model(name)
            start = asked.get("logprob_start_len", -1)
            given = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            scored = [[None, tokens[0], None]] + [
                [float(given[place, token]), token, None] for place, token in enumerate(tokens[1:])
            ]
            written = []
            while len(written) < settings["max_new_tokens"]:
                logits = model(torch.tensor([[*tokens, *[w[1] for w in written]]])).logits[0, -1]
                warm = logits / settings["temperature"]
                token = int(torch.multinomial(warm.softmax(-1), 1, generator=generator))
                written.append([float(warm.log_softmax(-1)[token]), token, None])
                if token in settings["stop_token_ids"]:
                    break
        info = {"input_token_logprobs": scored[start:] if start >= 0 else []}
        return jsonify({"text": "", "meta_info": {**info, "output_token_logprobs": written}})

    def _model(self, name: str | None) -> Any:
        # By name, whatever was loaded since: so servers keep what they have computed.
        if name not in self._models:
            model = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
            if name is not None:
                model = PeftModel.from_pretrained(model, self.adapters[name])
            self._models[name] = model.eval()
        return self._models[name]

    def check_access(self) -> Any:
        self.asked.append((request.path, request.get_json(silent=True)))
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return jsonify({"error": "Unauthorized"}), 401
        return None


@contextmanager
def sglang_server(base: Path) -> Iterator[SGLang]:
    """A server of the model in a directory, for as long as the block runs."""
    server = SGLang(base)
    app = Flask("sglang")
    app.before_request(server.check_access)
    app.get("/v1/models")(server.models)
    app.post("/load_lora_adapter")(server.load)
    app.post("/unload_lora_adapter")(server.unload)
    app.post("/generate")(server.generate)
    listening = make_server("127.0.0.1", 0, app, threaded=True)
    server.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join()
