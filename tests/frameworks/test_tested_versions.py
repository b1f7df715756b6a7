"""A framework's version that nobody has tried is named once, beside those that were."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path

import pytest

from scaler_triton.integrations import versions

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test be the first to warn."""
    monkeypatch.setattr(versions, "_warned", set())


def declare(monkeypatch: pytest.MonkeyPatch, oldest: str, newest: str, installed: str = "2.13.0") -> None:
    monkeypatch.setitem(versions.TESTED, "torch", (oldest, newest))
    monkeypatch.setattr(versions, "version", lambda package: installed)


@pytest.mark.parametrize(("oldest", "newest"), [("2.13.0", "2.13.0"), ("2.9.1", "2.13.0"), ("2.13", "2.100")])
def test_a_tested_version_is_no_news(monkeypatch, oldest, newest):
    declare(monkeypatch, oldest, newest)
    versions.check("torch")


@pytest.mark.parametrize("installed", ["2.13.0+cu130", "2.13.0+local.1"])
def test_who_built_it_makes_no_difference(monkeypatch, installed):
    declare(monkeypatch, "2.13.0", "2.13.0", installed)
    versions.check("torch")


@pytest.mark.parametrize(("oldest", "newest"), [("2.9.1", "2.12.9"), ("2.13.1", "2.14.0")])
def test_another_one_is_named_once_with_those_that_were(monkeypatch, oldest, newest):
    declare(monkeypatch, oldest, newest)
    text = f"torch 2.13.0 is installed; scaler_triton was tested with torch {oldest} to {newest}"
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$") as caught:
        versions.check("torch")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check("torch")


def test_a_copy_without_a_version_passes(monkeypatch):
    monkeypatch.setitem(versions.TESTED, "nobody-wrote-this", ("1", "2"))
    versions.check("nobody-wrote-this")


def test_fabric_may_be_installed_by_itself(monkeypatch):
    def version(package: str) -> str:
        if package != "lightning-fabric":
            raise versions.PackageNotFoundError(package)
        return "2.4.0"

    monkeypatch.setattr(versions, "version", version)
    text = "lightning-fabric 2.4.0 is installed; scaler_triton was tested with lightning-fabric 2.5.0 to"
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}") as caught:
        versions.check("pytorch-lightning")
    assert caught[0].filename == __file__


def test_beside_the_whole_it_does_not_count(monkeypatch):
    found = {"lightning-fabric": "2.4.0", "pytorch-lightning": versions.TESTED["pytorch-lightning"][1]}
    monkeypatch.setattr(versions, "version", found.__getitem__)
    versions.check("pytorch-lightning")


@pytest.mark.parametrize(("name", "which"), [("constraints-oldest.txt", 0), ("constraints.txt", 1)])
def test_nothing_older_or_newer_is_claimed_than_what_is_run(name, which):
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE))
    assert {package: pins[package] for package in versions.TESTED} == {
        package: both[which] for package, both in versions.TESTED.items()
    }


def test_pages_name_the_versions_that_are_run_beside_ours():
    pins = (ROOT / "tests/frameworks/peers/packages.txt").read_text()
    text = "".join((ROOT / "docs" / page).read_text() for page in ("checkpoints.md", "start.md"))
    packages = {"Composer": "mosaicml", "open_clip": "open-clip-torch"}
    named = dict(re.findall(r"(Composer|DeepSpeed|Megatron-Core|MONAI|mmengine|open_clip|timm)\s(\d[.\d]+\d)", text))
    assert len(named) == 7
    for name, number in named.items():
        assert f"\n{packages.get(name, name.lower())}=={number}\n" in pins


def test_the_development_environment_asks_for_the_oldest_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = dict(entry.split(">=") for entry in extras["frameworks"])
    for package in asked.keys() & versions.TESTED.keys():
        assert versions.TorchVersion(versions.TESTED[package][0]) == asked[package]
