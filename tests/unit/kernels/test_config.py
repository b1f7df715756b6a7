"""Which configuration a GPU gets: the user's file only if all agrees, a shipped one by name, else the default."""

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from scaler_triton.kernels import lookup, tuned_file
from scaler_triton.kernels.launch_config import DEFAULT, LaunchConfig
from scaler_triton.kernels.lookup import config_for, origin_of, shipped_file, user_file
from scaler_triton.kernels.tuned_file import Origin, TunedFile

pytestmark = pytest.mark.host_only

HERE = Origin("Some GPU", "9.0", "3.7.1", "0123456789abcdef")
USERS, SHIPPED = LaunchConfig(4, 1, 2), LaunchConfig(16, 1, 2)
OTHERS = [replace(HERE, **{field: "other"}) for field in ("device", "capability", "triton", "kernels")]


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Empty folders for the user's files and the shipped ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "cache/scaler_triton/tuned").mkdir(parents=True)
    (tmp_path / "shipped").mkdir()
    lookup.forget()
    yield
    lookup.forget()


def put(path, origin, config):
    tuned_file.write(path, TunedFile(origin, {("check", 2): config}))
    return path


def test_without_files_it_is_the_default():
    assert lookup.lookup(HERE, "check", 2) == (DEFAULT, None)


def test_the_users_file_comes_before_the_shipped_one():
    shipped = put(shipped_file(HERE), HERE, SHIPPED)
    assert lookup.lookup(HERE, "check", 2) == (SHIPPED, shipped)
    users = put(user_file(HERE), HERE, USERS)
    lookup.forget()
    assert lookup.lookup(HERE, "check", 2) == (USERS, users)


@pytest.mark.parametrize(("mode", "itemsize"), [("unscale", 2), ("check", 4)])
def test_another_pass_gets_the_default(mode, itemsize):
    put(user_file(HERE), HERE, USERS)
    put(shipped_file(HERE), HERE, SHIPPED)
    assert lookup.lookup(HERE, mode, itemsize) == (DEFAULT, None)


@pytest.mark.parametrize("origin", OTHERS)
def test_a_users_file_must_agree_in_everything(origin):
    path = put(user_file(HERE), origin, USERS)  # even where it lies in the right place
    put(user_file(origin), origin, USERS)
    with pytest.warns(RuntimeWarning) as caught:
        assert [lookup.lookup(HERE, "check", size) for size in (2, 4)] == [(DEFAULT, None)] * 2
    (warning,) = caught
    (name,) = (field for field in asdict(HERE) if getattr(origin, field) != getattr(HERE, field))
    told = f"{path} is ignored, it was made elsewhere: {name} 'other', here {getattr(HERE, name)!r}"
    assert str(warning.message) == f"the tuned file {told}"


@pytest.mark.parametrize("origin", OTHERS)
def test_a_shipped_file_must_be_for_the_device(origin):
    put(shipped_file(HERE), origin, SHIPPED)
    with pytest.warns(RuntimeWarning, match="made elsewhere: device") if origin.device == "other" else nullcontext():
        assert lookup.lookup(HERE, "check", 2).config == (DEFAULT if origin.device == "other" else SHIPPED)


def test_a_bad_users_file_leaves_the_shipped_one():
    put(shipped_file(HERE), HERE, SHIPPED)
    user_file(HERE).write_text("{}")
    with pytest.warns(RuntimeWarning, match="schema must be 1"):
        assert lookup.lookup(HERE, "check", 2).config == SHIPPED
    assert lookup.lookup(HERE, "check", 2).config == SHIPPED


def test_versions_do_not_overwrite_each_other():
    assert len({user_file(origin) for origin in [HERE, *OTHERS]}) == 4  # a name has one capability


def test_a_cpu_gets_the_default_and_looks_nowhere(monkeypatch):
    monkeypatch.setattr(lookup, "lookup", None)
    assert config_for(torch.device("cpu"), "unscale", 8) == DEFAULT


def test_it_is_looked_up_once(monkeypatch):
    asked = []
    monkeypatch.setattr(lookup, "origin_of", lambda device: asked.append(device) or HERE)
    put(user_file(HERE), HERE, USERS)
    gpu = torch.device("cuda", 3)
    assert [config_for(gpu, "check", 2) for _ in range(3)] == [USERS] * 3
    assert config_for(gpu, "check", 4) == DEFAULT
    assert asked == [gpu, gpu]


@pytest.mark.parametrize(("mode", "itemsize"), [("write", 2), ("check", 3)])
def test_unknown_passes_are_refused(mode, itemsize):
    with pytest.raises(ValueError, match="must be one of"):
        config_for(torch.device("cpu"), mode, itemsize)


@pytest.mark.parametrize("named", ["", "relative/folder"])
def test_the_cache_is_in_the_home_unless_an_absolute_folder_is_named(monkeypatch, tmp_path, named):
    assert lookup.cache_folder() == tmp_path / "cache/scaler_triton/tuned"
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert lookup.cache_folder() == tmp_path / ".cache/scaler_triton/tuned"


def test_a_user_without_a_home_gets_the_default(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert lookup.lookup(HERE, "check", 2) == (DEFAULT, None)


def test_the_hash_is_of_the_kernels_text(monkeypatch, tmp_path):
    for name in lookup.SOURCES:
        (tmp_path / name).write_bytes((lookup.HERE / name).read_bytes())
    before = lookup.kernel_hash()
    monkeypatch.setattr(lookup, "HERE", tmp_path)
    assert lookup.kernel_hash.__wrapped__() == before
    with (tmp_path / lookup.SOURCES[-1]).open("a") as file:
        file.write("#")
    assert lookup.kernel_hash.__wrapped__() != before


@pytest.mark.gpu
def test_the_origin_of_a_gpu():
    import triton

    device = torch.device("cuda", 0)
    major, minor = torch.cuda.get_device_capability(device)
    wanted = Origin(torch.cuda.get_device_name(device), f"{major}.{minor}", triton.__version__, lookup.kernel_hash())
    assert origin_of(device) == wanted
    assert config_for(device, "check", 2) == DEFAULT
