"""The simulator computes what a GPU would, and finds the faults that it is there for."""

import numpy as np
import pytest
import torch
from kernel_cases import as_bits
from ptx_memory import Fault
from ptx_simulator import Kernel

pytestmark = pytest.mark.host_only

THREADS = 64
FRAME = """
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .u64 k_param_1
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


def run(code, tensor, *, n_programs=1, param=0):
    """Run `code` with each thread's element of `tensor`, of 4 bytes, at %rd2, and its number in %r1."""
    kernel = Kernel(FRAME.replace("CODE", code), shared_bytes=512)
    kernel.run(n_programs, [tensor.data_ptr(), param], [(tensor.data_ptr(), 4 * tensor.numel())])


# What the kernels' own tests, which compare with torch to the bit, would not show of every Triton.
@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("shl.b32 %r2, %r1, 33;", lambda thread: 0),
        ("sub.s32 %r3, %r1, 9;\nshr.s32 %r2, %r3, 40;", lambda thread: -(thread < 9)),
        ("mov.b32 %r3, 9;\nmov.b32 %r4, 5;\nmax.f32 %r2, %r1, %r3, %r4;", lambda thread: max(thread, 9)),
        ("shfl.sync.bfly.b32 %r2, %r1, 8, 31, -1;", lambda thread: thread ^ 8),
        (
            "add.s32 %r3, %r1, 33;\nshfl.sync.idx.b32 %r2, %r1, %r3, 31, -1;",
            lambda thread: thread & 32 | thread + 1 & 31,
        ),
        ("redux.sync.max.f32 %r2, %r1, -1;", lambda thread: thread | 31),  # of subnormals
        ("redux.sync.add.s32 %r2, %r1, -1;", lambda thread: 32 * (thread & ~31) + 31 * 16),
        ("mov.b32 %r3, 0f7FC00000;\nsetp.neu.f32 %p1, %r3, %r3;\nselp.b32 %r2, 1, 2, %p1;", lambda thread: 1),
        ("mov.b32 %r3, 0f7FC00000;\nsetp.ge.f32 %p1, %r3, 0f00000000;\nselp.b32 %r2, 1, 2, %p1;", lambda thread: 2),
        ("mov.b32 %r3, 0x7E003C00;\nsetp.nan.f16x2 %p1|%p2, %r3, %r3;\nselp.b32 %r2, 4, 8, %p1;", lambda thread: 8),
        ("mov.b32 %r3, 0x7E003C00;\nsetp.nan.f16x2 %p1|%p2, %r3, %r3;\nselp.b32 %r2, 4, 8, %p2;", lambda thread: 4),
        ("ld.param.b64 %rd3, [k_param_1];\ncvt.u32.u64 %r2, %rd3;", lambda thread: 77),
        ("mov.b32 %r2, 5;\nsetp.lt.u32 %p1, %r1, 3;\n@!%p1 mov.b32 %r2, 7;", lambda thread: 5 if thread < 3 else 7),
        # 1 + 3 * 2**-8 is a tie; the first of two is the upper half; a fused product is rounded once, not to zero.
        ("mov.b32 %r3, 0f3F818000;\ncvt.rn.bf16.f32 %rs1, %r3;\ncvt.u32.u16 %r2, %rs1;", lambda thread: 0x3F82),
        ("cvt.rn.f16x2.f32 %r2, 0f3F800000, 0f40000000;", lambda thread: 0x3C004000),
        ("mov.b32 %r3, 0f3F800001;\nfma.rn.f32 %r2, %r3, %r3, 0fBF800002;", lambda thread: 0x28800000),
    ],
)
def test_instructions(code, want):
    data = torch.zeros(THREADS, dtype=torch.int32)
    run(f"{code}\nst.global.b32 [%rd2], %r2;", data, param=77)
    assert data.tolist() == [want(thread) for thread in range(THREADS)]


def test_one_thread_after_the_other_at_an_atomic():
    data = torch.tensor([5, 0], dtype=torch.int32)
    largest = "atom.global.gpu.relaxed.max.s32 %r2, [%rd1 + 0], %r1;"
    run(f"{largest}\nmov.b32 %r3, 64;\nred.global.gpu.relaxed.or.b32 [%rd1 + 4], %r3;", data)
    assert data.tolist() == [63, 64]


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


def test_what_nobody_wrote_is_no_zero():
    data = torch.zeros(THREADS)
    run("st.global.b32 [%rd2], %r8;", data)
    assert np.all(data.numpy() != 0)
