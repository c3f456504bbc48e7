"""Runs loops over XofFixedKeyAes128 with the processor's own AES, compiled.

A block is mixed, enciphered and used without leaving the registers, where a library reads and
writes memory between two steps. These are x86 instructions (`has_aes` of `compiled.py`); their time
does not depend on what they encipher, and no table is looked up. Each loop is defined under its
name, in NumPy over the library's AES, where it is used; tests hold both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from keyhole.compiled import processor

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"

_ONE, _BLOCK = np.uint64(1), 16  # bytes of a block
_ROUNDS = 10
_WORD, _INDEX = ir.IntType(64), ir.IntType(32)


def _widest() -> int:
    """Blocks in one instruction."""
    has = processor()
    return 4 if {"vaes", "avx512f"} <= has else 2 if {"vaes", "avx2"} <= has else 1


_WIDEST = _widest()
_SUFFIX = {1: "", 2: ".256", 4: ".512"}  # of the names of instructions, by blocks
_MANY = 4 * _WIDEST  # blocks that are enciphered side by side: an instruction waits for the last


def _vector(blocks: int) -> Any:
    return ir.VectorType(_WORD, 2 * blocks)


def _emit_load(builder: Any, kind: Any, address: Any, offset: int) -> Any:
    at = builder.inttoptr(builder.add(address, _WORD(offset)), kind.as_pointer())
    return builder.load(at, align=1)


def _emit_store(builder: Any, value: Any, address: Any, offset: int) -> None:
    at = builder.inttoptr(builder.add(address, _WORD(offset)), value.type.as_pointer())
    builder.store(value, at, align=1)


def _emit_repeat(builder: Any, block: Any, blocks: int) -> Any:
    """The same block, side by side."""
    places = ir.Constant(ir.VectorType(_INDEX, 2 * blocks), [0, 1] * blocks)
    return builder.shuffle_vector(block, ir.Constant(block.type, ir.Undefined), places)


def _emit_lanes(builder: Any, value: Any, kind: Any) -> Any:
    """The same number in every lane of a vector."""
    out = ir.Constant(kind, ir.Undefined)
    for lane in range(kind.count):
        out = builder.insert_element(out, value, _INDEX(lane))
    return out


def _emit_round(builder: Any, state: Any, key: Any, is_last: bool = False) -> Any:
    """One round of AES on every block of a vector."""
    kind = state.type
    name = "llvm.x86.aesni.aesenc" + ("last" if is_last else "") + _SUFFIX[kind.count // 2]
    step = builder.module.declare_intrinsic(name, [], ir.FunctionType(kind, [kind, kind]))
    return builder.call(step, [state, key])


def _emit_stream(builder: Any, seed: Sequence[Any], blocks: int) -> Sequence[Any]:
    """Some blocks of the output of a seed, as vectors: of the address of its keys, its two halves,
    and the number of the first block."""
    keys, low, high, first = seed
    width = min(blocks, _WIDEST)
    block = builder.insert_element(ir.Constant(_vector(1), ir.Undefined), high, _INDEX(0))
    both = builder.xor(builder.xor(high, low), first)
    block = _emit_repeat(builder, builder.insert_element(block, both, _INDEX(1)), width)
    # A group starts at a multiple of its length, so that numbers of its blocks differ in low bits.
    numbers = [
        ir.Constant(_vector(width), [n for i in range(width) for n in (0, at + i)])
        for at in range(0, blocks, width)
    ]
    mixed = [builder.xor(block, each) for each in numbers]
    turns = [
        _emit_repeat(builder, _emit_load(builder, _vector(1), keys, at * _BLOCK), width)
        for at in range(_ROUNDS + 1)
    ]
    states = [builder.xor(each, turns[0]) for each in mixed]
    for key in turns[1:_ROUNDS]:
        states = [_emit_round(builder, each, key) for each in states]
    states = [_emit_round(builder, each, turns[_ROUNDS], is_last=True) for each in states]
    return [builder.xor(*both) for both in zip(states, mixed, strict=True)]


def _type_write(blocks: int) -> Any:
    def typed(_: Any, keys: Any, low: Any, high: Any, first: Any, out: Any) -> Any:
        """Writes blocks of the output of a seed, from block `first` on, to their place behind an
        address."""

        def emit(context: Any, builder: Any, __: Any, args: Any) -> Any:
            *seed, out = args
            out = builder.add(out, builder.mul(seed[-1], _WORD(_BLOCK)))
            for place, value in enumerate(_emit_stream(builder, seed, blocks)):
                _emit_store(builder, value, out, place * value.type.count * 8)
            return context.get_dummy_value()

        return types.void(keys, low, high, first, out), emit

    return intrinsic(typed)


def _type_add(blocks: int) -> Any:
    def typed(
        _: Any, keys: Any, low: Any, high: Any, first: Any, more: Any, mask: Any, total: Any
    ) -> Any:
        """Adds blocks of the output of a seed, from block `first` on, to their place behind
        `total`, and those behind `more` where the mask is all ones; it is an element of the ring,
        or zero."""

        def emit(context: Any, builder: Any, __: Any, args: Any) -> Any:
            *seed, more, ones, total = args
            offset, lane = builder.mul(seed[-1], _WORD(_BLOCK)), ir.IntType(mask.bitwidth)
            more, total = builder.add(more, offset), builder.add(total, offset)
            for place, value in enumerate(_emit_stream(builder, seed, blocks)):
                at, kind = place * value.type.count * 8, value.type
                ring = ir.VectorType(lane, kind.count * 64 // mask.bitwidth)
                masks = _emit_lanes(builder, ones, ring)
                added = builder.and_(_emit_load(builder, ring, more, at), masks)
                added = builder.add(added, builder.bitcast(value, ring))
                added = builder.add(added, _emit_load(builder, ring, total, at))
                _emit_store(builder, added, total, at)
            return context.get_dummy_value()

        return types.void(keys, low, high, first, more, mask, total), emit

    return intrinsic(typed)


def _type_sub(_: Any, word: Any) -> Any:
    """The S-box on each of 4 bytes: of a block of equal columns, the last round moves none."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        columns, zero = ir.VectorType(_INDEX, 4), ir.Constant(_vector(1), [0, 0])
        block = _emit_lanes(builder, args[0], columns)
        block = _emit_round(builder, builder.bitcast(block, _vector(1)), zero, is_last=True)
        return builder.extract_element(builder.bitcast(block, columns), _INDEX(0))

    return types.uint32(types.uint32), emit


_write_two, _write_many, _write_one = (_type_write(n) for n in (2, _MANY, 1))
_add_one, _add_some, _add_many = (_type_add(n) for n in (1, _WIDEST, _MANY))
_sub: Any = intrinsic(_type_sub)


@njit(cache=True, nogil=True)
def _address(array):
    """Where an array begins, for as long as its name is still used: numba frees it then. Signed,
    as the sum of a signed and an unsigned number is a float."""
    return np.int64(array.ctypes.data)


@njit(cache=True, nogil=True)
def round_keys(keys):
    """The keys of all rounds (FIPS 197, section 5.2), (n, 11, 2) uint64, of keys (n, 16) uint8."""
    out = np.empty((len(keys), _ROUNDS + 1, 2), np.uint64)
    for place in range(len(keys)):
        _write_round_keys(keys[place], out[place])
    return out


@njit(cache=True, nogil=True)
def _write_round_keys(key, out):
    """The same for one."""
    words = np.empty(4 * _ROUNDS + 4, np.uint32)
    constant = np.uint32(1)
    for i in range(len(words)):
        if i < 4:
            word = np.uint32(0)
            for byte in range(4):
                word |= np.uint32(key[4 * i + byte]) << np.uint32(8 * byte)
        else:
            word = words[i - 1]
            if i % 4 == 0:
                word = _sub(np.uint32(word >> np.uint32(8)) | np.uint32(word << np.uint32(24)))
                word = np.uint32(word ^ constant)
                constant = np.uint32(0x1B if constant == np.uint32(0x80) else 2 * constant)
            word ^= words[i - 4]
        words[i] = word
        if i % 2:
            out[i // 4, i % 4 // 2] = np.uint64(word) << np.uint64(32) | np.uint64(words[i - 1])


@njit(cache=True, nogil=True)
def stretch(key, seeds, out):
    """Runs `stretch` of `prg.py`."""
    keys, blocks = round_keys(key.reshape(1, 16)), out.shape[1] // 2
    many = blocks // _MANY * _MANY
    for row in range(len(seeds)):
        low, high, own, to = seeds[row, 0], seeds[row, 1], _address(keys), _address(out[row])
        for at in range(0, many, _MANY):
            _write_many(own, low, high, at, to)
        for at in range(many, blocks - 1, 2):
            _write_two(own, low, high, at, to)
        if blocks % 2:
            _write_one(own, low, high, blocks - 1, to)


@njit(cache=True, nogil=True)
def follow(key, leaves, seeds, control, seed_words, bit_words):
    """Runs `follow` of `dpf.py`."""
    keys, zero = round_keys(key.reshape(1, 16)), np.uint64(0)
    made = np.empty((2, 2, 2), np.uint64)  # of party, side and half
    bits = np.empty((2, 2), np.bool_)
    depth = seed_words.shape[1]
    for i in range(len(leaves)):
        for level in range(depth):
            right = leaves[i] >> (depth - 1 - level) & 1
            for party in range(2):
                low, high = seeds[party, i, 0], seeds[party, i, 1]
                _write_two(_address(keys), low, high, zero, _address(made[party]))
                for side in range(2):
                    bits[party, side] = made[party, side, 0] & _ONE != 0
                    made[party, side, 0] &= ~_ONE
            for half in range(2):
                seed_words[i, level, half] = made[0, 1 - right, half] ^ made[1, 1 - right, half]
            for side in range(2):
                bit_words[i, level, side] = bits[0, side] ^ bits[1, side] ^ (side == right)
            for party in range(2):
                mask = zero - np.uint64(control[party, i])
                for half in range(2):
                    word = seed_words[i, level, half] & mask
                    seeds[party, i, half] = made[party, right, half] ^ word
                control[party, i] = bits[party, right] ^ (
                    control[party, i] & bit_words[i, level, right]
                )


@njit(cache=True, nogil=True)
def descend(key, seeds, party, seed_words, bit_words, nodes, control):
    """Runs `descend` of `dpf.py`: a level over the one before it, from its end to its start."""
    keys, zero = round_keys(key.reshape(1, 16)), np.uint64(0)
    made = np.empty((2, 2), np.uint64)  # of side and half
    needed, depth = control.shape[1], seed_words.shape[1]
    for i in range(len(seeds)):
        own, bits = nodes[i], control[i]
        own[0, 0], own[0, 1], bits[0] = seeds[i, 0], seeds[i, 1], party
        for level in range(depth):
            kept = -(-needed >> (depth - 1 - level))
            for j in range((kept + 1) // 2 - 1, -1, -1):
                is_set = bits[j]
                mask = zero - np.uint64(is_set)
                _write_two(_address(keys), own[j, 0], own[j, 1], zero, _address(made))
                for side in range(min(2, kept - 2 * j)):
                    low, child = made[side, 0], 2 * j + side
                    bits[child] = (low & _ONE != 0) ^ (is_set & bit_words[i, level, side])
                    own[child, 0] = (low & ~_ONE) ^ (seed_words[i, level, 0] & mask)
                    own[child, 1] = made[side, 1] ^ (seed_words[i, level, 1] & mask)


@njit(cache=True, nogil=True)
def add_streams(total, keys, seeds, control, corrections, members):
    """Runs `add_streams` of `two_servers/server.py`."""
    blocks = corrections.shape[2] * corrections.itemsize // _BLOCK
    size = len(members) // corrections.shape[1]
    many, some = blocks // _MANY * _MANY, blocks // _WIDEST * _WIDEST
    turns = round_keys(keys)
    row, zero = np.zeros(corrections.shape[2], total.dtype), total.dtype.type(0)
    for place in range(len(members)):
        for client in range(len(keys)):
            own, to = _address(turns[client]), _address(row)
            more = _address(corrections[client, place // size])
            low, high = seeds[client, place, 0], seeds[client, place, 1]
            mask = total.dtype.type(zero - total.dtype.type(control[client, place]))
            for at in range(0, many, _MANY):
                _add_many(own, low, high, at, more, mask, to)
            for at in range(many, some, _WIDEST):
                _add_some(own, low, high, at, more, mask, to)
            for at in range(some, blocks):
                _add_one(own, low, high, at, more, mask, to)
        key = members[place]
        if key >= 0:
            for j in range(total.shape[1]):
                total[key, j] += row[j]
        row[:] = 0
