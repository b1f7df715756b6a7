"""Runs compiled kernels without a GPU: the PTX that Triton made, instruction by instruction, on this process's tensors.

What a GPU would refuse or leave undefined is a Fault: memory outside the tensors of a launch, a misaligned access, two
warps that touch the same bytes with no barrier between, two programs that do at all, threads of a program that part.
"""

import functools
import re
from typing import NamedTuple

import numpy as np
import ptx_ops
from ptx_memory import Fault, Memory, Races, Shared, check_programs
from ptx_ops import ARITHMETIC, UNSIGNED, decode, encode, width_of

_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*?);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_MOST_INSTRUCTIONS = 100_000
_LANES = 32


class Registers:
    """Bits, `[threads]` or one for all: bool for a predicate, else unsigned integers of the register's width."""

    def __init__(self, widths, threads, block):
        """`widths`: of the registers whose names begin so."""
        self.all_threads = np.ones(threads, dtype=np.bool_)
        self._threads = threads
        unwritten = np.full(threads, 0xA5A5A5A5A5A5A5A5)  # nothing to rely on
        self._unwritten = {f"%{prefix}": unwritten.astype(UNSIGNED[width]) for prefix, width in widths.items()}
        self._constants = {}
        self._held = {
            "%tid.x": np.arange(threads, dtype=np.uint32),
            "%ctaid.x": np.full(threads, block, dtype=np.uint32),
            "global_smem": np.zeros(threads, dtype=np.uint32),  # shared memory begins at 0
        }

    def held(self, name):
        found = self._held.get(name)
        return self._unwritten[name.rstrip("0123456789")] if found is None else found

    def bits(self, operand, width):
        """The operand's lowest `width` bits."""
        if operand[0] in "%g":
            return self.held(operand).astype(UNSIGNED[width], copy=False)
        if (operand, width) not in self._constants:
            number = int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand.rstrip("U"), 0)
            self._constants[operand, width] = np.full(self._threads, number % (1 << width), dtype=UNSIGNED[width])
        return self._constants[operand, width]

    def read(self, operand, kind):
        """The operand's numbers of a type such as s32."""
        return decode(self.bits(operand, width_of(kind)), kind)

    def write_bits(self, name, bits, active):
        """Set a register's bits in the threads that are active; `_` is no register. No array is written to again."""
        if name != "_":
            old = self.held(name)
            assert bits.dtype == old.dtype, f"{name} is of {old.dtype}, not {bits.dtype}"
            assert bits.shape == old.shape or active is not self.all_threads
            self._held[name] = bits if active is self.all_threads else np.where(active, bits, old)

    def write(self, name, numbers, kind, active):
        """As `write_bits`, of numbers as wide as the type or wider."""
        self.write_bits(name, encode(numbers, kind), active)


class Instruction(NamedTuple):
    guard: str | None  # the predicate that says which threads take part
    negated: bool
    name: str
    kinds: tuple[str, ...]  # what follows the name, dot by dot
    operands: tuple[str, ...]


class Block:
    """One program of a kernel. All threads take each instruction together, so control flow must be the same in all.

    An instruction `name` is the method `_name`, or else one of `ARITHMETIC`."""

    def __init__(self, kernel, number, params, memory, *, watched=True):
        """`watched`: note who touches what, which takes time."""
        self.kernel = kernel
        self.params = params
        self.warps = np.arange(kernel.threads) // _LANES
        self.registers = Registers(kernel.register_widths, kernel.threads, number)
        self.memories = {"global": memory, "shared": Shared(kernel.shared_bytes)}
        self.races = {space: Races() for space in self.memories} if watched else {}
        self.place = 0

    def run(self):
        for _ in range(_MOST_INSTRUCTIONS):
            it = self.kernel.instructions[self.place]
            self.place += 1
            if it.name == "ret":
                return
            _method_of(it.name)(self, it, self._active(it))
        raise Fault(f"no end after {_MOST_INSTRUCTIONS} instructions")

    def _active(self, it):
        if it.guard is None:
            return self.registers.all_threads
        return self.registers.held(it.guard) != it.negated

    # Computing

    def _compute(self, it, active):
        """The last type is that of all operands."""
        result, *sources = it.operands
        kind = it.kinds[-1]
        if kind.endswith("x2"):
            self._compute_both(it, active)
        else:
            numbers = ARITHMETIC[it.name](*(self.registers.read(source, kind) for source in sources))
            self.registers.write(result, numbers, kind, active)

    def _compute_both(self, it, active):
        """Two numbers in each register."""
        result, *sources = it.operands
        if it.name == "abs":  # of 16 bits each
            bits = self.registers.bits(sources[0], 32) & np.uint32(0x7FFF7FFF)
        else:
            assert it.kinds[-1] == "f32x2"
            numbers = ARITHMETIC[it.name](*(ptx_ops.halves(self.registers.bits(source, 64)) for source in sources))
            bits = ptx_ops.joined(*encode(numbers.T.copy(), "f32"))
        self.registers.write_bits(result, bits, active)

    def _fma(self, it, active):
        if it.kinds[-1] not in ("f16", "bf16"):
            self._compute(it, active)
            return
        result, a, b, added = it.operands  # factors of 16 bits, but all else is fp32
        factors = (self.registers.read(each, it.kinds[-1]).astype(np.float32) for each in (a, b))
        self.registers.write(result, ptx_ops.fma(*factors, self.registers.read(added, "f32")), "f32", active)

    def _mul(self, it, active):
        if it.kinds[0] == "hi":
            a, b = (self.registers.read(each, it.kinds[-1]) for each in it.operands[1:])
            high = a.astype(object) * b.astype(object) >> width_of(it.kinds[-1])  # Python's integers are exact
            self.registers.write(it.operands[0], high.astype(a.dtype), it.kinds[-1], active)
            return
        if it.kinds[0] != "wide":
            self._compute(it, active)
            return
        result, a, b, *added = it.operands
        narrow = it.kinds[-1]
        wide = f"{narrow[0]}{2 * width_of(narrow)}"
        a, b = (self.registers.read(each, narrow).astype(f"{narrow[0].replace('s', 'i')}8") for each in (a, b))
        self.registers.write(result, a * b + sum(self.registers.read(each, wide) for each in added), wide, active)

    _mad = _mul

    def _shl(self, it, active):
        result, source, amount = it.operands
        kind = it.kinds[-1]
        shifted = ptx_ops.shift(it.name, self.registers.read(source, kind), self.registers.bits(amount, 32))
        self.registers.write(result, shifted, kind, active)

    _shr = _shl

    def _bfe(self, it, active):
        result, *sources = it.operands
        bits = ptx_ops.extract_field(*(self.registers.bits(source, 32) for source in sources))
        self.registers.write_bits(result, bits, active)

    def _prmt(self, it, active):
        result, *sources = it.operands
        bits = ptx_ops.permute_bytes(*(self.registers.bits(source, 32) for source in sources))
        self.registers.write_bits(result, bits, active)

    def _setp(self, it, active):
        """Of two numbers in each register the lower ones decide the first predicate."""
        results, a, b = it.operands
        test, kind = it.kinds
        kind = kind.removesuffix("x2")
        for number, result in enumerate(results.split("|")):
            numbers = (self._part_of(operand, number, kind) for operand in (a, b))
            self.registers.write_bits(result, ptx_ops.compare(test, *numbers), active)

    def _part_of(self, operand, number, kind):
        if number == 0:
            return self.registers.read(operand, kind)
        width = width_of(kind)
        return ptx_ops.decode(encode(self.registers.bits(operand, 2 * width) >> np.uint32(width), f"b{width}"), kind)

    def _selp(self, it, active):
        result, a, b, chosen = it.operands
        a, b = (self.registers.bits(each, width_of(it.kinds[-1])) for each in (a, b))
        self.registers.write_bits(result, np.where(self.registers.held(chosen), a, b), active)

    def _cvt(self, it, active):
        assert set(it.kinds[:-2]) <= {"rn", "rzi"}
        to, of = it.kinds[-2:]
        result, *sources = it.operands
        bits = [encode(self.registers.read(source, of), to.removesuffix("x2")) for source in sources]
        self.registers.write_bits(result, ptx_ops.joined(*reversed(bits)) if to.endswith("x2") else bits[0], active)

    def _mov(self, it, active):
        result, source = it.operands
        width = width_of(it.kinds[-1])
        if source.startswith("{"):
            bits = ptx_ops.joined(*(self.registers.bits(part, width // 2) for part in _inside(source)))
        else:
            bits = self.registers.bits(source, width)
        parts = _inside(result)
        if len(parts) == 1:  # perhaps a predicate
            self.registers.write_bits(result, bits, active)
            return
        share = width // len(parts)
        for number, part in enumerate(parts):
            self.registers.write_bits(part, encode(bits >> bits.dtype.type(number * share), f"b{share}"), active)

    # Threads together

    def _bra(self, it, active):
        together = active.all()
        if active.any() != together:
            raise Fault(f"the threads of a program part at {it.operands[0]}")
        if together:
            self.place = self.kernel.labels[it.operands[0]]

    def _bar(self, it, active):
        for races in self.races.values():
            races.barrier()

    def _shfl(self, it, active):
        assert it.kinds in (("sync", "bfly", "b32"), ("sync", "idx", "b32"))
        result, source, lanes, clamp, _ = it.operands
        assert clamp == "31"  # all lanes of a warp are one segment
        threads, lanes = np.arange(self.kernel.threads), self.registers.bits(lanes, 32).astype(np.int64)
        others = threads ^ lanes if it.kinds[1] == "bfly" else threads - threads % _LANES + lanes % _LANES
        self.registers.write_bits(result, self.registers.bits(source, 32)[others], active)

    def _redux(self, it, active):
        _, name, kind = it.kinds
        reduce = {"max.s32": np.maximum, "max.f32": np.fmax, "add.s32": np.add}[f"{name}.{kind}"]
        result, source, _ = it.operands
        of_warps = reduce.reduce(self.registers.read(source, kind).reshape(-1, _LANES), axis=1)
        self.registers.write(result, np.repeat(of_warps, _LANES), kind, active)

    # Memory

    def _ld(self, it, active):
        results, place = it.operands
        if it.kinds[0] == "param":
            value = np.full(self.kernel.threads, self.params[place.strip("[]")], dtype=np.int64)
            self.registers.write(results, value, it.kinds[-1], active)
            return
        results = _inside(results)
        addresses, size = self._touch(it, place, len(results), active, writes=False)
        loaded = self.memories[it.kinds[0]].load(addresses, size)
        for result, column in zip(results, np.split(loaded, len(results), axis=1), strict=True):
            bits = self.registers.held(result).copy()
            bits[active] = column.copy().view(bits.dtype).ravel()
            self.registers.write_bits(result, bits, active)

    def _st(self, it, active):
        place, sources = it.operands
        sources = _inside(sources)
        addresses, _ = self._touch(it, place, len(sources), active, writes=True)
        columns = [self.registers.bits(source, width_of(it.kinds[-1]))[active] for source in sources]
        self.memories[it.kinds[0]].store(addresses, np.stack(columns, axis=1).view(np.uint8))

    def _touch(self, it, place, count, active, *, writes):
        """The addresses of the threads that are active, and the bytes at each."""
        addresses = self._addresses(place)[active]
        size = count * width_of(it.kinds[-1]) // 8
        if self.races:
            moved = self.races[it.kinds[0]].note(addresses, self.warps[active], size, writes)
            if it.kinds[0] == "global":
                self.kernel.moved["stored" if writes else "loaded"] += moved
        return addresses, size

    def _addresses(self, place):
        base, offset = _base_and_offset(place)
        return self.registers.bits(base, 64) + offset

    def _atom(self, it, active):
        """One thread after the other; who does it at once with others races with nobody."""
        *_, name, kind = it.kinds
        *result, place, source = it.operands
        memory, addresses, numbers = self.memories["global"], self._addresses(place), self.registers.read(source, kind)
        for thread in np.flatnonzero(active):
            here = addresses[[thread]]
            old = memory.load(here, numbers.itemsize).view(numbers.dtype).ravel()
            memory.store(here, ARITHMETIC[name](old, numbers[[thread]]).view(np.uint8).reshape(1, -1))
            for register in result:
                self.registers.write(register, old, kind, np.arange(len(active)) == thread)

    _red = _atom  # which keeps nothing of what there was


@functools.cache
def _method_of(name):
    """What does an instruction."""
    return getattr(Block, f"_{name}", Block._compute)


@functools.cache
def _inside(operand):
    """The registers of `{a, b}`, or the one."""
    return tuple(each.strip() for each in operand.strip("{} ").split(","))


@functools.cache
def _base_and_offset(place):
    """The register of `[a + 4]`, and the bytes beyond what it holds."""
    base, _, offset = place.strip("[] ").partition("+")
    return base.strip(), np.int64(int(offset or 0)).astype(np.uint64)


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
