"""After the first launch Triton's dispatch is left out, unless somebody watches or this Triton cannot do without it."""

import platform
import shutil

import pytest
import triton
from packaging.version import Version

from perf import stub_driver

pytestmark = [
    pytest.mark.host_only,
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64") or shutil.which("gcc") is None,
        reason="the stub driver needs gcc on Linux, x86-64",
    ),
]


@pytest.fixture(scope="module")
def paths(run_compiled, tmp_path_factory):
    return run_compiled("launch_paths.py", stub_driver.environment(tmp_path_factory.mktemp("stub_driver")))


@pytest.mark.parametrize(
    ("case", "launches", "dispatched"),
    [
        ("usual", 4, 1),
        ("hooked", 5, 4),
        ("hooked behind", 5, 4),
        ("without run", 4, 4),
        ("without stream", 4, 4),
        ("refusing", 4, 4),
    ],
)
def test_every_launch_is_the_same_whichever_way_it_takes(paths, case, launches, dispatched):
    assert not paths["interpreted"]
    assert paths[case] == {"dispatched": dispatched, "same": True, "launches": launches}


def test_a_profilers_hook_sees_every_launch(paths):
    assert paths["seen"] == ["_unscale_kernel"] * 3 + ["behind"] * 3


def test_a_refusal_is_remembered(paths):
    assert paths["refusals"] == 1


def test_every_launch_is_made_on_the_tables_device(paths):
    assert paths["elsewhere"] == {"dispatched": 1, "same": True, "launches": 4, "guarded": 4}


def test_the_function_in_c_is_used_where_it_is_known(paths):
    same = {"dispatched": 1, "same": True, "launches": 4}
    assert paths["inner"]["with"] == paths["inner"]["without"] == same
    if Version("3.7") <= Version(triton.__version__) < Version("3.8"):
        assert paths["inner"]["is_known"]


def test_a_later_launch_takes_few_calls(paths):
    ours = [name for name in paths["calls"] if name != "<lambda>"]  # the stand-ins for queries in C
    assert ours == ["launch_unscale", "_launch", "__call__"] or not paths["inner"]["is_known"]
