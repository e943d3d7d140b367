"""Prices in cents: order lines are (unit price, quantity) pairs."""

BULK = 10
PERCENT = 15
FREE_FROM = 5000
BASE_FEE = 490


def subtotal(lines):
    """The sum of price times quantity over the lines."""
    total = 0
    for price, quantity in lines:
        total += price * quantity
    return total


def discount(lines):
    """PERCENT per cent of the lines with a quantity of at least BULK, rounded down line by line."""
    saved = 0
    for price, quantity in lines:
        if quantity >= BULK:
            saved += price * quantity * PERCENT // 100
    return saved


def shipping(lines, express):
    """BASE_FEE, but nothing when the discounted subtotal reaches FREE_FROM; express adds half of BASE_FEE always."""
    fee = BASE_FEE
    if subtotal(lines) - discount(lines) >= FREE_FROM:
        fee = 0
    if express:
        fee += BASE_FEE // 2
    return fee


def instalments(total, months):
    """The total in `months` payments that differ by at most one cent, the larger ones first."""
    payment = total // months
    rest = total % months
    return [payment + 1 if month < rest else payment for month in range(months)]


def cheapest(offers, quantity):
    """The name of the offer (name, price, minimum) with the lowest price among those whose minimum is met.

    The first in alphabetical order of several; None if there is none.
    """
    best = None
    for name, price, minimum in sorted(offers):
        if quantity < minimum:
            continue
        if best is None or price < best[1]:
            best = (name, price)
    return best[0] if best is not None else None
