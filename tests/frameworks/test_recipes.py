"""Every recipe of the documentation runs, says what its page promises, and is shown on a page."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import STRICT

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RANKS = 1 if torch.cuda.is_available() else 2  # NCCL takes one rank a GPU


@dataclass(frozen=True)
class Recipe:
    """What a recipe needs, and what it prints.

    Args:
        says: parts of the output.
        ranks: how many torchrun starts; 0: it runs alone.
        needs: the packages it imports.
        ignored: the beginnings of third-party warnings that are no errors here.
        leaves: what it writes.
        arguments: of its command line.
    """

    says: tuple[str, ...]
    ranks: int = 0
    needs: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def python(self) -> list[str]:
        """The command that runs a file with warnings as errors."""
        filters = [option for known in self.ignored for option in ("-W", f"ignore:{known}")]
        if torch.cuda.is_available():  # other packages are there, and what they use may be deprecated
            filters += ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [sys.executable, *STRICT, *filters, *(launcher if self.ranks else ())]

    def run(self, name: str, folder: Path, **variables: str) -> str:
        """Run it in `folder` with warnings as errors; return its output."""
        for package in self.needs:
            if find_spec(package) is None:
                pytest.skip(f"needs {package}")
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
        done = subprocess.run(
            [*self.python, str(DOCS / "recipes" / name), *self.arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


ON_CPU = ("'pin_memory' argument is set as true but no accelerator is found",)  # the Trainer's data loader
DYNAMO = ("`torch.jit.script_method` is", "Guards may run slower on Python 3.13.0")  # torch's, about itself
LIGHTNING = (
    "The 'train_dataloader' does not have many workers",  # advice
    "`isinstance(treespec, LeafSpec)` is deprecated",  # torch's, about Lightning
)
SKIPS = tuple(f"rank {rank}, step 10: {who} skipped" for rank in range(RANKS) for who in ("actor", "critic"))

RECIPES = {
    "step.py": Recipe(("step 30 was skipped", "0.weight   Inf")),
    "with_accelerate.py": Recipe(("step 3 was skipped", "updates=64, "), needs=("accelerate",), leaves=("checkpoint",)),
    "trainer.py": Recipe(
        ("ScalerStats(updates=20, ",), needs=("accelerate", "transformers"), ignored=ON_CPU, leaves=("counting",)
    ),
    "with_lightning.py": Recipe(("The last skip",), needs=("lightning",), ignored=LIGHTNING),
    "with_fabric.py": Recipe(("The last skip",), needs=("lightning",), ignored=LIGHTNING),
    "verl_style.py": Recipe(SKIPS, ranks=RANKS),
    "dinov2_style.py": Recipe(("step 39: backbone ",), ranks=RANKS),
    "compile.py": Recipe(("scale 1024.0\n",), ignored=DYNAMO, arguments=("aot_eager",)),
}
CHECKPOINT = "checkpoint.py"  # runs twice: the test below


@pytest.fixture(autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchrun leave its folder for logs among the files of the tests."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))


@pytest.mark.native
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_does_what_it_says(name: str, tmp_path: Path) -> None:
    printed = RECIPES[name].run(name, tmp_path)
    assert [text for text in RECIPES[name].says if text not in printed] == []
    assert {path.name for path in tmp_path.iterdir()} == set(RECIPES[name].leaves)


@pytest.mark.heavy
@pytest.mark.distributed
def test_accelerates_recipe_trains_on_two_ranks(tmp_path: Path) -> None:
    """As `accelerate launch` starts it on two GPUs."""
    recipe = Recipe(("step 3 was skipped", "updates=32, skipped=2,"), ranks=2, needs=("accelerate",))
    printed = recipe.run("with_accelerate.py", tmp_path, CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
    assert [text for text in recipe.says if printed.count(text) != 1] == []  # said by one rank only


@pytest.mark.distributed
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    on_cpu = {"CUDA_VISIBLE_DEVICES": ""}  # two ranks even where there is one GPU
    first = Recipe((), ranks=2, arguments=(str(tmp_path),)).run(CHECKPOINT, tmp_path, **on_cpu)
    assert first == "3 updates, scale 512.0\n" * 2
    # as torchrun would
    alone = on_cpu | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert Recipe((), arguments=(str(tmp_path),)).run(CHECKPOINT, tmp_path, **alone) == "6 updates, scale 2048.0\n"


@pytest.mark.parametrize("gpu", [False, True])
def test_what_others_call_deprecated_is_no_error_beside_a_gpu(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    program = "import warnings; warnings.warn('an old name', DeprecationWarning)"
    done = subprocess.run([*Recipe(()).python, "-c", program], capture_output=True, text=True, check=False)
    assert ("an old name" in done.stderr) is not gpu
    assert (done.returncode == 0) is gpu


@pytest.mark.parametrize("name", ["verl_style.py", "dinov2_style.py", CHECKPOINT])
def test_a_rank_has_its_gpu_before_anything_is_on_one(name: str) -> None:
    """FSDP2 moves shards to the current GPU, which a mesh chooses by the rank, but only if no GPU was used before."""
    source = (DOCS / "recipes" / name).read_text()
    chosen = [source.find(call) for call in ("cuda.set_device(", "init_device_mesh(") if call in source]
    used = [source.find(use) for use in (".to(device)", "device=device") if use in source]
    assert min(chosen) < min(used)


def test_every_recipe_is_run_and_shown() -> None:
    files = {path.name for path in (DOCS / "recipes").iterdir() if path.suffix == ".py"}
    assert files == {*RECIPES, CHECKPOINT}
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert [name for name in files if f"{{literalinclude}} recipes/{name}\n" not in pages] == []
