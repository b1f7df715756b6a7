"""A framework's version that nobody has tried is named once, beside those that were; and importing us imports none."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from scaler_triton.integrations import versions

ROOT = Path(__file__).parents[2]
UNTRIED = "accelerate {} is installed; scaler_triton was tested with accelerate 1.13.0 to"


@pytest.mark.parametrize(
    ("package", "found", "named"),
    [
        ("accelerate", {"accelerate": "1.14.0+cu130"}, ""),
        ("accelerate", {"accelerate": "1.13.0"}, ""),
        ("accelerate", {"accelerate": "1.100"}, UNTRIED.format("1.100")),
        ("accelerate", {"accelerate": "1.9"}, UNTRIED.format("1.9")),
        ("accelerate", {}, ""),  # a copy without a version
        # Fabric may be installed by itself; beside the whole it does not count.
        ("pytorch-lightning", {"lightning-fabric": "2.4"}, "lightning-fabric 2.4 is installed; "),
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.check(package)
        versions.check(package)
    assert [str(each.message).startswith(named) for each in caught] == [True] * bool(named)
    assert all(each.filename == __file__ for each in caught)


def test_what_is_claimed_is_what_is_run():
    pins = [(ROOT / name).read_text() for name in ("constraints-oldest.txt", "constraints.txt")]
    oldest, newest = (dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE)) for text in pins)
    assert {package: (oldest[package], newest[package]) for package in versions.TESTED} == versions.TESTED


def test_the_package_imports_no_framework():
    code = (
        "import sys, scaler_triton, scaler_triton.integrations.lightning; scaler_triton.GradScaler\n"
        "names = {'accelerate', 'lightning', 'pytorch_lightning', 'lightning_fabric', 'transformers'}\n"
        "assert not names & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=True)
