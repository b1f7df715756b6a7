"""A framework's version that nobody has tried is named once, beside those that were; and importing us imports none."""

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from scaler_triton.integrations import versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("package", "found", "named"),
    [
        ("accelerate", {"accelerate": "1.14.0+cu130"}, ""),
        ("accelerate", {"accelerate": "1.13.0"}, ""),
        ("accelerate", {"accelerate": "1.100"}, "accelerate 1.100 is installed; scaler_triton was tested with"),
        ("accelerate", {"accelerate": "1.9"}, "accelerate 1.9 is installed; scaler_triton was tested with"),
        ("accelerate", {}, ""),  # a copy without a version
        # Fabric may be installed by itself; beside the whole it does not count.
        (
            "pytorch-lightning",
            {"lightning-fabric": "2.4"},
            "lightning-fabric 2.4 is installed; .* lightning-fabric 2.5.0",
        ),
        ("pytorch-lightning", {"lightning-fabric": "2.4", "pytorch-lightning": "2.6"}, ""),
    ],
)
def test_another_version_is_named_once(monkeypatch, package, found, named):
    def version(name: str) -> str:
        if name not in found:
            raise versions.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions, "_warned", set())
    monkeypatch.setattr(versions, "version", version)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            versions.check(package)
        assert [bool(re.match(named, str(warning.message))) for warning in caught] == [True] * bool(named)
        assert all(warning.filename == __file__ for warning in caught)
        named = ""


def pins(path: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / path).read_text(), re.MULTILINE))


def test_what_is_claimed_is_what_is_run():
    oldest, newest = pins("constraints-oldest.txt"), pins("constraints.txt")
    assert {package: (oldest[package], newest[package]) for package in versions.TESTED} == versions.TESTED
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, asked in (entry.split(">=") for entry in extras["frameworks"]):
        assert package not in versions.TESTED or versions.TorchVersion(versions.TESTED[package][0]) == asked
    text = "".join((ROOT / "docs" / page).read_text() for page in ("checkpoints.md", "start.md"))
    named = dict(re.findall(r"(Composer|DeepSpeed|Megatron-Core|MONAI|mmengine|open_clip|timm)\s(\d[.\d]+\d)", text))
    packages, run = (
        {"Composer": "mosaicml", "open_clip": "open-clip-torch"},
        pins("tests/frameworks/peers/packages.txt"),
    )
    assert len(named) == 7
    assert {name: run[packages.get(name, name.lower())] for name in named} == named


def test_the_package_imports_no_framework():
    code = (
        "import sys, scaler_triton, scaler_triton.integrations.lightning; scaler_triton.GradScaler\n"
        "names = {'accelerate', 'lightning', 'pytorch_lightning', 'lightning_fabric', 'transformers'}\n"
        "assert not names & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=True)
