"""A tuned file: what is written is read, and what cannot be believed is ignored with one warning."""

import json
import os
import warnings
from pathlib import Path

import pytest

from scaler_triton.kernels import tuned_file
from scaler_triton.kernels.launch_config import CANDIDATES, ITEMSIZES, MODES
from scaler_triton.kernels.lookup import SHIPPED
from scaler_triton.kernels.tuned_file import Origin, TunedFile

pytestmark = pytest.mark.host_only

KEYS = [(mode, itemsize) for mode in MODES for itemsize in ITEMSIZES]
TUNED = TunedFile(Origin("NVIDIA H200", "9.0", "3.7.1", "0123456789abcdef"), dict(zip(KEYS, CANDIDATES, strict=False)))
ENTRY = {"mode": "check", "itemsize": 2, "num_warps": 8, "vectors": 1, "unroll": 4}


@pytest.fixture(autouse=True)
def nothing_remembered():
    tuned_file.read.cache_clear()
    yield
    tuned_file.read.cache_clear()


def content(**changes):
    data = {"schema": 1, "device": "D", "capability": "9.0", "triton": "3", "kernels": "a", "chosen": [ENTRY]}
    return json.dumps({name: value for name, value in (data | changes).items() if value is not None}).encode()


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "gpu.json"
    tuned_file.write(path, TUNED, provenance={"date": "today"}, measured=[{"ms": 1.5}, {"ms": 2}])
    assert tuned_file.read(path) == TUNED
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    assert data["provenance"] == {"date": "today"}
    assert data["measured"] == [{"ms": 1.5}, {"ms": 2}]
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["gpu.json"]


def test_a_change_of_one_configuration_is_a_change_of_one_line(tmp_path):
    path, key = tmp_path / "gpu.json", KEYS[0]
    tuned_file.write(path, TUNED)
    before = path.read_text().splitlines()
    tuned_file.write(path, TunedFile(TUNED.origin, {**TUNED.chosen, key: CANDIDATES[-1]}))
    after = path.read_text().splitlines()
    assert len(after) == len(before)
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
    assert sum('"mode"' in line for line in after) == len(KEYS)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "gpu.json"
    tuned_file.write(path, TUNED)
    with pytest.raises(TypeError):
        tuned_file.write(path, TUNED, measured=[object()])
    assert tuned_file.read(path) == TUNED
    assert os.listdir(tmp_path) == ["gpu.json"]


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    path = tmp_path / "gpu.json"
    path.write_bytes(content())
    replace = os.replace

    def look_and_replace(new, old):
        assert path.read_bytes() == content()
        assert tuned_file.parse(Path(new).read_bytes()) == TUNED
        replace(new, old)

    monkeypatch.setattr(os, "replace", look_and_replace)
    tuned_file.write(path, TUNED)
    assert tuned_file.read(path) == TUNED


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "Expecting value"),
        (b'{"schema": "\xff"}', "decode"),
        (b"[" * 100_000, "recursion|Stack overflow"),  # before and from Python 3.14 on
        (b"[]", "the file must be a dict, got list"),
        (b'{"schema": NaN}', "NaN is not a number"),
        (content(schema=2), "schema must be 1, got 2"),
        (content(schema=True), "schema must be 1, got True"),
        (content(schema=None), "schema must be 1, got None"),
        (content(device=None), "device must be a str"),
        (content(device=""), "device must have 1 to 200 characters"),
        (content(triton=3), "triton must be a str, got int"),
        (content(kernels="a" * 201), "kernels must have 1 to 200 characters, got 201"),
        (content(chosen={}), "chosen must be a list, got dict"),
        (content(chosen=[[]]), "an entry of chosen must be a dict"),
        (content(chosen=[ENTRY, ENTRY]), "two entries"),
        (content(chosen=[ENTRY | {"mode": "write"}]), "mode must be one of"),
        (content(chosen=[ENTRY | {"mode": ["check"]}]), "mode must be one of"),
        (content(chosen=[ENTRY | {"itemsize": 2.0}]), "itemsize must be one of"),
        (content(chosen=[ENTRY | {"num_warps": 64}]), "num_warps must be an int from 1 to 32, got 64"),
        (content(chosen=[ENTRY | {"num_warps": 6}]), "num_warps must be a power of two, got 6"),
        (content(chosen=[ENTRY | {"vectors": "__import__('os')"}]), "vectors must be an int"),
        (content(chosen=[{"mode": "check", "itemsize": 2, "num_warps": 8}]), "vectors must be an int"),
        (content() + b" " * tuned_file.SIZE_LIMIT, "larger than"),
    ],
)
def test_what_cannot_be_believed_is_ignored_with_one_warning(tmp_path, text, said):
    path = tmp_path / "gpu.json"
    path.write_bytes(text)
    with pytest.warns(RuntimeWarning, match=f"gpu.json is ignored: .*({said})"):
        assert tuned_file.read(path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned_file.read(path) is None


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        assert tuned_file.read(tmp_path / "pipe.json") is None


def test_no_file_is_no_news(tmp_path):
    (tmp_path / "file").touch()
    assert tuned_file.read(tmp_path / "none.json") is None
    assert tuned_file.read(tmp_path / "file" / "none.json") is None


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "../../etc/passwd", "..", "a\0b", "x" * 300])
def test_a_file_stays_in_its_folder(tmp_path, name):
    path = tmp_path / f"{tuned_file.file_stem(name)}.json"
    path.touch()
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_files_are_right(path):
    tuned = tuned_file.parse(path.read_bytes())
    assert path.stem == tuned_file.file_stem(tuned.origin.device)
    assert sorted(tuned.chosen) == sorted(KEYS)
