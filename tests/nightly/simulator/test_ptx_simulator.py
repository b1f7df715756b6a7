"""The simulator finds the faults that it is there for; that it computes right is what the kernels' tests show."""

import pytest
import torch
from kernel_cases import as_bits
from ptx_memory import Fault
from ptx_simulator import Kernel

pytestmark = pytest.mark.host_only

THREADS = 64
FRAME = """
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0
)
.reqntid 64
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
$L__func_begin0:
	ld.param.b64 	%rd1, [k_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd2, %rd1, %rd2;
CODE
	ret;
$L__func_end0:
"""


def run(code, tensor, *, n_programs=1):
    """Run `code` with each thread's element of `tensor`, of 4 bytes, at %rd2, and its number in %r1."""
    kernel = Kernel(FRAME.replace("CODE", code), shared_bytes=512)
    kernel.run(n_programs, [tensor.data_ptr()], [(tensor.data_ptr(), 4 * tensor.numel())])


LOAD, STORE = "ld.global.b32 %r2, [%rd2 + {}];", "st.global.b32 [%rd2 + {}], %r1;"
TO_SHARED = "shl.b32 %r3, %r1, 2;\nst.shared.b32 [%r3], %r1;"
FROM_OTHER_WARP = "sub.s32 %r4, 252, %r3;\nld.shared.b32 %r2, [%r4];"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (LOAD.format(4), "belong to no tensor"),
        (STORE.format(4), "belong to no tensor"),
        (LOAD.format(-4), "belong to no tensor"),
        ("ld.global.v2.b32 {%r2, %r3}, [%rd1 + 4];", "no multiple of 8"),
        (f"{LOAD.format(0)}\n{TO_SHARED}\n{FROM_OTHER_WARP}", "two warps touch"),
        ("ld.global.b32 %r2, [%rd1];\nsetp.eq.b32 %p1, %r1, 0;\n@%p1 st.global.b32 [%rd1], %r2;", "two warps touch"),
        ("setp.eq.b32 %p1, %r1, 0;\n@%p1 bra $L1;\n$L1:", "part at"),
        ("$L1:\nbra.uni $L1;", "no end after"),
    ],
)  # fmt: skip
def test_faults(code, error):
    with pytest.raises(Fault, match=error):
        run(code, torch.zeros(THREADS))


def test_a_barrier_orders_warps():
    run(f"{TO_SHARED}\nbar.sync 0;\n{FROM_OTHER_WARP}\nst.global.b32 [%rd2], %r2;", data := torch.zeros(THREADS))
    assert as_bits(data).tolist() == list(reversed(range(THREADS)))


def test_warps_may_read_the_same_and_one_may_read_what_it_wrote():
    code = "ld.global.b32 %r2, [%rd1];\nst.global.b32 [%rd2 + 256], %r1;\nld.global.b32 %r2, [%rd2 + 256];"
    run(code, torch.zeros(2 * THREADS))


def test_programs_are_in_no_order():
    which = "mov.u32 %r3, %ctaid.x;\nsetp.eq.b32 %p1, %r3, 0;\n@!%p1 bra $L1;"
    code = f"{which}\n{STORE.format(0)}\nbra.uni $L2;\n$L1:\n{LOAD.format(0)}\n$L2:"
    with pytest.raises(Fault, match="another one reads"):
        run(code, torch.zeros(THREADS), n_programs=2)
