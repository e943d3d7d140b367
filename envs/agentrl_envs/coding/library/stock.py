"""A store room: moves are (item, change) pairs, lots are (quantity, unit cost) pairs, the oldest first."""

LOW = 5
PACK = 6


def levels(moves):
    """The level of each item after all moves; a move that would lead below zero is left out."""
    held = {}
    for item, change in moves:
        level = held.get(item, 0) + change
        if level >= 0:
            held[item] = level
    return held


def orders(held):
    """How many packs of PACK to order of each item below LOW so that it reaches LOW, as {item: packs}."""
    wanted = {}
    for item, level in held.items():
        if level < LOW:
            wanted[item] = (LOW - level + PACK - 1) // PACK
    return wanted


def cost(lots, quantity):
    """What `quantity` pieces cost, taken from the oldest lots first; None if the lots hold fewer."""
    total = 0
    for held, price in lots:
        taken = min(held, quantity)
        total += taken * price
        quantity -= taken
    return total if quantity == 0 else None


def shelf(sizes, room):
    """How many shelves of `room` hold the sizes in the given order, each shelf filled before the next is begun."""
    shelves = 0
    left = 0
    for size in sizes:
        if size > left:
            shelves += 1
            left = room
        left -= size
    return shelves


def turnover(moves):
    """(pieces in, pieces out) over all moves, both counted positive."""
    into = out = 0
    for _, change in moves:
        if change > 0:
            into += change
        else:
            out -= change
    return (into, out)
