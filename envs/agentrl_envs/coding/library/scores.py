"""Rankings and averages over whole-number scores."""

WINDOW = 3


def top(scores, count):
    """The `count` names with the highest scores, best first; equal scores in alphabetical order."""
    order = sorted(scores, key=lambda name: (-scores[name], name))
    return order[:count]


def ranks(values):
    """Each value's rank, 1 for the highest; equal values share a rank and the next one skips as many."""
    return [1 + sum(other > value for other in values) for value in values]


def median(values):
    """The middle value in order, or half the sum of the two middle ones rounded down; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) // 2


def sums(values):
    """The sum of each WINDOW neighbouring values, from left to right; no values if there are fewer."""
    return [sum(values[start : start + WINDOW]) for start in range(len(values) - WINDOW + 1)]


def best_streak(values):
    """The largest sum of neighbouring values, at least one of them; 0 without values."""
    if not values:
        return 0
    best = current = values[0]
    for value in values[1:]:
        current = max(value, current + value)
        best = max(best, current)
    return best


def histogram(values, width):
    """How many values fall into each class [k * width, (k + 1) * width), as {k: count} without empty classes."""
    counts = {}
    for value in values:
        place = value // width
        counts[place] = counts.get(place, 0) + 1
    return counts
