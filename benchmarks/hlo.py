"""What a compiled program does, read off its text: matmul work with loops multiplied out, buffers, collectives.

The compiler's own `cost_analysis()` counts the body of a loop once.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ARRAY = re.compile(r"\w+\[([\d,]*)\]")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:body|calls|to_apply|called_computations|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
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
                known = _TRIPS.search(operation.text)
                total += (int(known[1]) if known else trips) * sum(called)
            elif called:
                total += max(called) if operation.kind == "conditional" else sum(called)
        return total

    return work(entry)


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
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    return [
        (operation.kind, max(map(_elements, _ARRAY.findall(operation.text.split(operation.kind + "(")[0]))))
        for operations in parse(text)[1].values()
        for operation in operations
        if operation.kind.removesuffix("-start") in kinds
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
        labels = re.search(r"dim_labels=\w+_(\w+)->\w+", operation.text)
        right = shapes[operation.operands[1]]
        outputs = right[labels[1].index("o")] if labels else 1
        return 2.0 * math.prod(operation.shape) * math.prod(right) / outputs
    return 0.0


def _first_shape(result: str) -> tuple[int, ...]:
    found = _ARRAY.search(result)
    return tuple(int(n) for n in found[1].split(",") if n) if found else ()


def _elements(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)
