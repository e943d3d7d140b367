"""What a compiled program does, read off its text: matmul work with loops multiplied out, buffers, collectives.

The compiler's own `cost_analysis()` counts the body of a loop once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ARRAY = re.compile(r"\w+\[([\d,]*)\]")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:body|calls|to_apply|called_computations|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_TYPED = re.compile(r"\b([a-z]+\d*)\w*\[([\d,]*)\]")
_NO_ESTIMATE = 1 << 60
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_TRIPS = re.compile(r'known_trip_count"?[:=]\{"?n"?:"?(\d+)')


class Operation(NamedTuple):
    name: str
    kind: str
    shape: tuple[int, ...]  # of the first array of the result
    operands: tuple[str, ...]
    text: str


def parse(text: str) -> tuple[str, dict[str, list[Operation]]]:
    """The entry's name, and every computation's operations.

    A computation ends where the next one begins: attributes of custom calls run over several lines, braces included.
    """
    entry, current = "", ""
    computations: dict[str, list[Operation]] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif current and (found := _OPERATION.match(line)):
            name, result, kind, rest = found.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
            computations[current].append(Operation(name, kind, _first_shape(result), operands, line))
    return entry, computations


def matmul_flops(text: str, trips: int = 1) -> float:
    """Operations of all matrix products. `trips`: how often a loop runs whose length only the data tell."""
    entry, computations = parse(text)

    def work(name: str) -> float:
        shapes = {operation.name: operation.shape for operation in computations[name]}
        total = 0.0
        for operation in computations[name]:
            total += _product(operation, shapes)
            called = [work(c) for c in called_by(operation) if c in computations]
            if operation.kind == "while" and any(called):
                total += _loops(operation, computations, trips) * sum(called)
            elif called:
                total += max(called) if operation.kind == "conditional" else sum(called)
        return total

    return work(entry)


def executed(text: str, trips: int = 1) -> Iterator[tuple[Operation, int]]:
    """Every operation that a run of the program executes, and how often. `trips` as in `matmul_flops`."""
    entry, computations = parse(text)
    times = dict.fromkeys(computations, 0)
    pending = [(entry, 1)]
    while pending:
        name, more = pending.pop()
        times[name] += more
        for operation in computations[name]:
            loops = _loops(operation, computations, trips) if operation.kind == "while" else 1
            pending += [(called, more * loops) for called in called_by(operation) if called in computations]
    for name, operations in computations.items():
        if times[name]:
            yield from ((operation, times[name]) for operation in operations)


def _loops(operation: Operation, computations: dict[str, list[Operation]], trips: int) -> int:
    """How often a loop runs: by its own word, else by the constant that its condition counts up to, else `trips`."""
    if known := _TRIPS.search(operation.text):
        return int(known[1])
    steps = _named(operation, "condition", computations)
    compared = [step for step in steps.values() if step.kind == "compare" and "direction=LT" in step.text]
    if len(compared) != 1 or len(compared[0].operands) != 2:
        return trips
    counter, end = (steps.get(name) for name in compared[0].operands)
    if end is None or end.kind != "constant":
        return trips
    return -(-_constant(end) // _stride(counter, _named(operation, "body", computations)))


def _named(operation: Operation, attribute: str, computations: dict[str, list[Operation]]) -> dict[str, Operation]:
    """The operations of the computation that a loop calls its condition, or its body."""
    found = re.search(rf"{attribute}=%?([\w.\-]+)", operation.text)
    return {step.name: step for step in computations.get(found[1], [])} if found else {}


def _stride(counter: Operation | None, body: dict[str, Operation]) -> int:
    """By how much the body raises the counter: 2 where the compiler has unrolled it once."""
    place = re.search(r"index=(\d+)", counter.text) if counter is not None else None
    root = next((step for step in body.values() if "ROOT" in step.text and step.kind == "tuple"), None)
    if place is None or root is None or int(place[1]) >= len(root.operands):
        return 1
    raised = body.get(root.operands[int(place[1])])
    added = [body[name] for name in raised.operands if name in body] if raised and raised.kind == "add" else []
    return next((_constant(step) for step in added if step.kind == "constant"), 1)


def _constant(step: Operation) -> int:
    found = re.search(r"constant\((\d+)\)", step.text)
    return max(1, int(found[1])) if found else 1


class Collective(NamedTuple):
    """What chips exchange: `bytes` of one execution's whole array, `group` chips taking part, `count` executions."""

    kind: str
    group: int
    bytes: int
    count: int


def exchanges(text: str, devices: int, trips: int = 1) -> list[Collective]:
    """Every collective once, however many operations an asynchronous one is written as."""
    found: dict[tuple[str, str], Collective] = {}
    for operation, count in executed(text, trips):
        kind = operation.kind.removesuffix("-start")
        if kind not in KINDS:
            continue
        channel = re.search(r"channel_id=(\d+)", operation.text)
        arrays = [_bytes(*array) for array in _TYPED.findall(operation.text.split(f" {operation.kind}(")[0])]
        started = operation.kind != kind
        size = max(arrays) if started or kind == "all-gather" else sum(arrays)
        group = _group(operation.text, devices)
        size *= group if kind == "reduce-scatter" else 1
        key = (kind, channel[1] if channel else operation.name)
        if key not in found or found[key].count < count:
            found[key] = Collective(kind, group, size, count)
    return list(found.values())


def cycles(text: str, trips: int = 1) -> float:
    """The compiler's own estimate, loops multiplied out. Kernels carry none, and no wait for other chips is in it."""
    total = 0.0
    for operation, count in executed(text, trips):
        estimate = re.search(r'estimated_cycles"?:"?(\d+)', operation.text)
        if estimate and operation.kind not in ("while", "call", "conditional") and int(estimate[1]) < _NO_ESTIMATE:
            total += count * int(estimate[1])
    return total


def kernels(text: str, trips: int = 1) -> int:
    """How many calls of Pallas kernels a run of the program executes."""
    return sum(count for operation, count in executed(text, trips) if '"tpu_custom_call"' in operation.text)


def _group(text: str, devices: int) -> int:
    """Chips of one group, in any of the ways that replica groups are written."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
        return len(listed[1].split(","))
    if tiled := re.search(r"replica_groups=\[(\d+),(\d+)\]", text):
        return int(tiled[2])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])  # 'axis':(before)size is a part of one
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["32"])[0])
    return _elements(dims) * bits // 8


def largest_buffer(text: str) -> int:
    """Elements of the largest array that the program names."""
    return max(_elements(dims) for dims in _ARRAY.findall(text))


def holds(text: str, rows: int, columns: int) -> bool:
    """Whether any array has both of these dimensions, or as many elements as both make, in whatever shape."""
    for dims in set(_ARRAY.findall(text)):
        sizes = [int(n) for n in dims.split(",") if n]
        both = sizes.count(rows) > (rows == columns) and columns in sizes
        if both or math.prod(sizes) == rows * columns:
            return True
    return False


def collectives(text: str) -> list[tuple[str, int]]:
    """Every collective's kind, and the elements of its result."""
    return [
        (operation.kind, max(map(_elements, _ARRAY.findall(operation.text.split(operation.kind + "(")[0]))))
        for operations in parse(text)[1].values()
        for operation in operations
        if operation.kind.removesuffix("-start") in KINDS
    ]


def called_by(operation: Operation) -> list[str]:
    return [name.strip(" %") for group in _CALLED.findall(operation.text) for name in group.split(",")]


def _product(operation: Operation, shapes: dict[str, tuple[int, ...]]) -> float:
    if operation.kind == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.text)
        left = shapes[operation.operands[0]]
        summed = math.prod(left[int(d)] for d in contracted[1].split(",") if d) if contracted else 1
        return 2.0 * math.prod(operation.shape) * summed
    if operation.kind == "convolution":  # how a TPU's compiler writes a matrix product
        left, right = shapes[operation.operands[0]], shapes[operation.operands[1]]
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.text)
        if labels is None:
            return 0.0
        of = [dict(zip(label, sizes, strict=True)) for label, sizes in zip(
            labels.groups(), (left, right, operation.shape), strict=True)]  # fmt: skip
        places = sorted(label for label in of[1] if label.isdigit())
        window = re.search(r"window=\{([^}]*)\}", operation.text)
        fields = dict(field.split("=") for field in window[1].split()) if window else {}
        taps = math.prod(_taps(of[0][place], of[1][place], of[2][place], fields, n) for n, place in enumerate(places))
        return 2.0 * of[2]["b"] * of[2]["f"] * of[1]["i"] * taps
    return 0.0


def _taps(inputs: int, taps: int, outputs: int, fields: dict[str, str], axis: int) -> int:
    """Pairs of an output's place and a tap that meet an input: a product with two free axes is written as a window
    that mostly lies outside of it."""
    of = lambda name, default: fields[name].split("x")[axis] if name in fields else default  # noqa: E731
    low = int(of("pad", "0_0").split("_")[0])
    stride, spread, apart = (int(of(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    if taps == 1 and low == 0 and spread == 1:
        return outputs
    at = stride * np.arange(outputs)[:, None] + apart * np.arange(taps)[None] - low
    return int(np.sum((at >= 0) & (at % spread == 0) & (at // spread < inputs)))


def _first_shape(result: str) -> tuple[int, ...]:
    found = _ARRAY.search(result)
    return tuple(int(n) for n in found[1].split(",") if n) if found else ()


def _elements(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)
