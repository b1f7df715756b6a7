"""Runs compiled kernels without a GPU: the PTX that Triton made, instruction by instruction, on this process's tensors.

What a GPU would refuse or leave undefined is a Fault: memory outside the tensors of a launch, a misaligned access, two
warps that touch the same bytes with no barrier between, two programs that do at all, threads of a program that part.
"""

import re

import numpy as np
from ptx_block import Block, Instruction
from ptx_memory import Memory, check_programs
from ptx_ops import width_of

_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*?);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


class Kernel:
    """One kernel as compiled for one target.

    Attributes:
        params: their types by name, such as u64, in their order.
        moved: bytes of global memory "loaded" and "stored" in all runs; what threads of a program touch at once, once.
    """

    def __init__(self, ptx, shared_bytes):
        header, body = ptx.split(".visible .entry", 1)[1].split("$L__func_begin0:", 1)
        self.threads = int(re.search(r"\.reqntid (\d+)", header)[1])
        self.params = {name: kind for kind, name in re.findall(r"\.param \.(\w+)[^,\n]*?(\w+_param_\d+)", header)}
        self.shared_bytes = shared_bytes
        registers = re.findall(r"\.reg \.(\w+)\s+%([a-z]+)<", header)
        self.register_widths = {prefix: width_of(kind) for kind, prefix in registers}
        self.instructions, self.labels = _parse(body.split("$L__func_end0", 1)[0])
        self.moved = {"loaded": 0, "stored": 0}

    def run(self, n_programs, params, spans, *, watched=True):
        """Run the programs one after another.

        Args:
            params: addresses and integers, in the kernel's order; those that Triton adds are 0.
            spans: (address, bytes) of all that may be touched.
            watched: whether warps and programs that race are a Fault; without it what moves is not counted either.
        """
        memory = Memory(spans)
        values = dict.fromkeys(self.params, 0) | dict(zip(self.params, params, strict=False))
        with np.errstate(all="ignore"):
            blocks = [Block(self, number, values, memory, watched=watched) for number in range(n_programs)]
            for block in blocks:
                block.run()
        if watched:
            check_programs([block.races["global"] for block in blocks])


def _parse(body):
    """The instructions, and the place of each label among them."""
    instructions, labels = [], {}
    for line in body.splitlines():
        line = line.split("//")[0].strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line and not line.startswith("."):
            negated, guard, name, operands = _INSTRUCTION.fullmatch(line).groups()
            name, *kinds = name.replace("::cta", "").split(".")  # of shared memory; there is no cluster
            operands = tuple(_OPERAND.findall(operands))
            instructions.append(Instruction(guard, negated == "!", name, tuple(kinds), operands))
    return instructions, labels
