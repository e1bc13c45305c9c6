"""The wheel: what is in it, and what it needs."""

import json
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import distribution, packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.peers.environment import ROOT, build_wheel, run

NEEDED_TO_IMPORT = ("torch", "safetensors", "huggingface_hub")

IMPORT_ALONE = """
import json, sys

class Blocker:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is blocked")

wheel, blocked = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, wheel)
sys.meta_path.insert(0, Blocker(set(blocked)))
import checkpointing
for name in checkpointing.__all__:
    getattr(checkpointing, name)
print(checkpointing.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.getbasetemp() / "wheel")


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources(directory, pattern):
    """Files below a directory of the checkout, relative to it."""
    return {
        path.relative_to(ROOT / directory).as_posix() for path in (ROOT / directory).rglob(pattern)
    }


def with_requirements(names):
    """Distributions and, all the way down, what they need."""
    found = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found.add(name)
            for text in distribution(name).requires or ():
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    waiting.append(requirement.name)
    return found


def test_every_module_of_the_package_is_in_the_wheel(names):
    modules = {f"checkpointing/{name}" for name in sources("checkpointing", "*.py")}

    assert modules <= names
    assert {"checkpointing/py.typed", "checkpointing/training/demo_instruct.jsonl"} <= names


def test_recipes_and_configs_travel_inside_the_package(names):
    recipes = {f"checkpointing/recipes/{name}" for name in sources("recipes", "*.py")}
    configs = {f"checkpointing/configs/{name}" for name in sources("configs", "*.yaml")}

    assert recipes and configs
    assert recipes | configs <= names


def test_nothing_else_is_in_the_wheel(names):
    assert {name.split("/")[0] for name in names} == {
        "checkpointing",
        *(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA")),
    }
    assert not [name for name in names if {"tests", "__pycache__"} & set(name.split("/"))]
    inside = {name.rsplit(".", 1)[-1] for name in names if name.startswith("checkpointing/")}
    assert inside == {"py", "typed", "yaml", "jsonl"}


def test_the_licence_and_the_command_are_in_the_wheel(wheel, names):
    (licence,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
    (commands,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        assert "tune = checkpointing.cli.main:main" in archive.read(commands).decode()


def test_transformers_and_peft_are_no_requirements(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    always = {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }

    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert {"torch", "torchao", "safetensors", "huggingface-hub", "omegaconf"} <= always
    assert not {"transformers", "peft", "gguf", "datasets"} & always


def test_the_package_is_imported_with_torch_safetensors_and_huggingface_hub_alone(wheel, tmp_path):
    allowed = with_requirements(NEEDED_TO_IMPORT)
    blocked = [
        module
        for module, owners in packages_distributions().items()
        if module != "checkpointing" and not allowed & {canonicalize_name(each) for each in owners}
    ]
    assert {"transformers", "peft", "torchao", "omegaconf", "tokenizers"} <= set(blocked)

    arguments = (wheel, json.dumps(blocked))
    printed = run(sys.executable, "-P", "-c", IMPORT_ALONE, *arguments, cwd=tmp_path)

    assert printed.strip() == f"{wheel}/checkpointing/__init__.py"
