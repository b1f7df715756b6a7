"""A program: Accelerate's FSDP, in one process on a GPU, with our scaler and with torch's.

    python accelerate_on_gpu.py FSDP_VERSION OPTIMIZER FOLDER

It raises what is not as it should be. Needs this folder, the ranks' tests and the package on the path.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import cases
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate_cases import Job, Report, forget, state_of

from scaler_triton import GradScaler, ShardedGradScaler

BAD_STEPS, STEPS = (1, 4), 6
SCALES = [8.0, 4.0, 4.0, 8.0, 4.0, 4.0]
SKIPPED = [False, True, False, False, True, False]
SCALERS = {1: ShardedGradScaler, 2: GradScaler}
COMPARED = ("scales", "trackers", "skipped", "rates", "digests", "step_counts")


def new_job(version: int, name: str, *, ours: bool = True) -> Job:
    """Start over; only the process group is kept."""
    forget()
    # FSDP1 loads no shards into an optimizer without a state.
    options = {"state_dict_type": "FULL_STATE_DICT", "use_orig_params": True}
    if version == 2:
        options = {"state_dict_type": "SHARDED_STATE_DICT"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False, **options)
    # What one process overflows in, all do: as under DDP.
    return Job(0, "ddp", name, ours=ours, cpu=False, fsdp_plugin=plugin)


def check_kind(job: Job, version: int) -> None:
    """See that this is FSDP on a GPU, and the scaler the one that it needs."""
    accelerator = job.accelerator
    assert accelerator.distributed_type == DistributedType.FSDP, accelerator.distributed_type
    assert accelerator.is_fsdp2 is (version == 2)
    assert dist.get_world_size() == accelerator.num_processes == 1
    assert {parameter.device.type for parameter in job.model.parameters()} == {"cuda"}
    assert type(job.scaler) is SCALERS[version], type(job.scaler)
    assert job.scaler._device == "cuda"


def check_steps(report: Report) -> None:
    """See that each step was clipped by the scaler, in one pass, and that the overflows were skipped."""
    assert report.skipped == SKIPPED, report.skipped
    assert [float.fromhex(scale) for scale in report.scales] == SCALES, report.scales
    assert report.clipped_by_scaler == [None] * STEPS, report.clipped_by_scaler
    assert report.step_counts == [float(SKIPPED.count(False))], report.step_counts


def check_clipped(job: Job, max_norm: float) -> None:
    """Clip once more, and measure what is left."""
    job._backward(STEPS)
    norm = job.accelerator.clip_grad_norm_(job.model.parameters(), max_norm)
    norm = float(norm.full_tensor() if isinstance(norm, cases.DTensor) else norm)
    left = [cases.values_of(p.grad).double().norm() for p in job.model.parameters() if p.grad is not None]
    assert norm > 2 * max_norm, norm
    assert abs(float(torch.stack(left).norm()) / max_norm - 1) < 1e-3, left  # FSDP1's gradients are fp16


def trained(job: Job, steps: range, bad: Collection[int], **options: Any) -> Report:
    """Train, and wait until all is done."""
    report = job.train(steps, bad, **options)
    torch.cuda.synchronize()
    return report


def assert_same(one: Report, other: Report) -> None:
    """See that two runs are the same to the bit; norms may be summed in another order."""
    for name in COMPARED:
        assert getattr(one, name) == getattr(other, name), name


def main(version: int, name: str, folder: str) -> None:
    """Train, beside torch's scaler; then save, and go on from there in another job."""
    job = new_job(version, name)
    check_kind(job, version)
    check_steps(trained(job, range(STEPS), BAD_STEPS))
    check_clipped(job, 0.01)
    if name == "adamw":
        # Nothing is clipped: torch sums norms in fp32. And torch's scaler splits FSDP1's fused optimizers.
        assert_same(*(trained(new_job(version, name, ours=o), range(STEPS), BAD_STEPS, max_norm=1e9) for o in (1, 0)))
    first = new_job(version, name)
    trained(first, range(5), {1})
    first.accelerator.save_state(folder)
    saved, straight = state_of(first), trained(first, range(5, 9), {6})
    second = new_job(version, name)
    second.accelerator.load_state(folder)
    assert state_of(second) == saved
    resumed = trained(second, range(5, 9), {6})
    assert resumed.skipped == [False, True, False, False], resumed.skipped
    assert_same(straight, resumed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
