"""Spans: half-open ranges [start, end) of whole numbers, as pairs."""

MARGIN = 2


def merge(spans):
    """The union of the spans as sorted, disjoint pairs. Spans that touch become one; empty ones vanish."""
    merged = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered(spans):
    """How many whole numbers lie in at least one of the spans."""
    return sum(end - start for start, end in merge(spans))


def gaps(spans, start, end):
    """The parts of [start, end) that no span covers, in order."""
    free = []
    position = start
    for first, last in merge(spans):
        if first >= end:
            break
        if first > position:
            free.append((position, first))
        position = max(position, last)
    if position < end:
        free.append((position, end))
    return free


def close(one, other):
    """True if the two spans overlap, or if fewer than MARGIN numbers lie between them."""
    distance = max(one[0], other[0]) - min(one[1], other[1])
    return distance < MARGIN


def deepest(spans):
    """The largest number of spans that hold one and the same number; 0 without spans."""
    events = []
    for start, end in spans:
        if start < end:
            events.append((start, 1))
            events.append((end, -1))
    depth = most = 0
    for _, change in sorted(events):
        depth += change
        most = max(most, depth)
    return most
