"""The shape of a program, and which one a GPU gets: the user's file, else a shipped one, else the default."""

import itertools
import json
import warnings

import pytest
import torch

from scaler_triton.kernels import config
from scaler_triton.kernels.config import DEFAULT, SPAN_BYTES, LaunchConfig, config_for, tuned_for

pytestmark = pytest.mark.host_only

GPU, KEY = "Some GPU", ("check", 2, "mixed")
USERS, SHIPPED = LaunchConfig(4, 1, 2), LaunchConfig(16, 1, 2)
PACKAGED = config.SHIPPED


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Empty folders for the user's files and the shipped ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(config, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "cache/scaler_triton/tuned").mkdir(parents=True)
    (tmp_path / "shipped").mkdir()
    config.read.cache_clear()
    yield
    config.read.cache_clear()


def users_file():
    return config.user_file(GPU)


def shipped_file():
    return config.SHIPPED / config.file_name(GPU)


def entry(shape):
    numbers = [shape.num_warps, shape.vectors, shape.unroll]
    return {"mode": "check", "itemsize": 2, "workload": "mixed", "config": numbers}


def put(path, shape):
    path.write_text(json.dumps({"gpu": GPU, "configs": [entry(shape)], "measured": [1]}))


@pytest.mark.parametrize("numbers", [(0, 1, 1), (3, 1, 1), (64, 1, 1), (1, 16, 1), (1, 6, 1), (1, 1, 0), (1, 1, 17)])
def test_what_triton_has_no_blocks_for_is_refused(numbers):
    with pytest.raises(ValueError, match=r"must be .* got \d+ x \d+ x \d+"):
        LaunchConfig(*numbers)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_chunks(itemsize):
    assert DEFAULT.chunk_elements(itemsize) * itemsize == 16 * 1024
    assert LaunchConfig(1, 1, 1).chunk_elements(itemsize) == 32 * 16 // itemsize
    assert LaunchConfig(32, 8, 16).chunk_elements(itemsize) == 32 * 32 * 8 * 16 * 16 // itemsize
    assert LaunchConfig(32, 8, 16).chunk_elements(2) <= 2**20  # as the sum of a chunk's squares relies on


def test_a_list_is_a_span_from_a_mean_size_on():
    limit = SPAN_BYTES // 2
    lists = [limit], [limit - 1], [2 * limit, 0], [2 * limit, 0, 0], []
    assert [config.workload_of(2, numels) for numels in lists] == ["span", "mixed", "span", "mixed", "mixed"]


def test_the_users_file_comes_before_the_shipped_one_and_the_default_last():
    assert tuned_for(GPU, KEY) == (DEFAULT, None)
    for path, shape in ((shipped_file(), SHIPPED), (users_file(), USERS)):
        put(path, shape)
        config.read.cache_clear()
        assert tuned_for(GPU, KEY) == (shape, path)
    for other in (("unscale", 2, "mixed"), ("check", 4, "mixed"), ("check", 2, "span")):
        assert tuned_for(GPU, other) == (DEFAULT, None)


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "[]", "{}", "[" * 100_000, json.dumps({"gpu": GPU}), json.dumps({"gpu": "Other", "configs": []}),
        *(
            json.dumps({"gpu": GPU, "configs": [{**entry(USERS), "config": numbers}]})
            for numbers in ([3, 1, 1], [8.0, 2, 2], "8x2", None, [8, 2, 2, 2])
        ),
        json.dumps({"gpu": GPU, "configs": [{"mode": "check"}]}),
    ],
)  # fmt: skip
def test_a_broken_or_foreign_file_is_ignored_with_one_warning(text):
    put(shipped_file(), SHIPPED)
    users_file().write_text(text)
    with pytest.warns(RuntimeWarning, match="is ignored") as caught:
        assert [tuned_for(GPU, KEY)[0] for _ in range(3)] == [SHIPPED] * 3
    assert len(caught) == 1
    assert str(users_file()) in str(caught[0].message)


def test_a_gpu_is_looked_up_by_its_name_and_workload(monkeypatch):
    monkeypatch.setattr(config, "_name_of", {torch.device("cuda", 3): GPU}.__getitem__)
    put(users_file(), USERS)
    assert config_for(torch.device("cuda", 3), "check", 2, [10] * 2000) == USERS
    assert config_for(torch.device("cuda", 3), "check", 2, [2**24]) == DEFAULT
    assert config_for(torch.device("cpu"), "check", 2, [10]) == DEFAULT


@pytest.mark.parametrize("named", ["", "relative/folder"])
def test_the_cache_is_in_the_home_unless_an_absolute_folder_is_named(monkeypatch, tmp_path, named):
    assert users_file().parent == tmp_path / "cache/scaler_triton/tuned"
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert users_file().parent == tmp_path / ".cache/scaler_triton/tuned"


def test_shipped_files_are_read_whole():
    for path in PACKAGED.glob("*.json"):
        data = json.loads(path.read_text())
        assert path.name == config.file_name(data["gpu"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = config.read(path, data["gpu"])
        assert len(found) == len(data["configs"])
        assert found.keys() <= {*itertools.product(config.MODES, config.ITEMSIZES, config.WORKLOADS)}
