"""Numbers and their written forms."""

WEIGHT = 3


def digits(number, base):
    """The digits of a number >= 0 in the given base, the most significant first; [0] for 0."""
    if number == 0:
        return [0]
    found = []
    while number > 0:
        found.append(number % base)
        number //= base
    return found[::-1]


def check_digit(text):
    """The digit that makes the weighted sum of all digits a multiple of 10.

    Of the text's digits, the first counts once, the second WEIGHT times, the third once, and so on; the check digit
    itself counts once.
    """
    total = 0
    for place, character in enumerate(text):
        total += int(character) * (WEIGHT if place % 2 == 1 else 1)
    return (10 - total % 10) % 10


def roman(number):
    """A number from 1 to 399 in Roman numerals."""
    steps = (
        (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
    )  # fmt: skip
    written = ""
    for value, letters in steps:
        while number >= value:
            written += letters
            number -= value
    return written


def factors(number):
    """The prime factors of a number >= 2 in ascending order, each as often as it divides."""
    found = []
    factor = 2
    while factor * factor <= number:
        if number % factor == 0:
            found.append(factor)
            number //= factor
        else:
            factor += 1
    if number > 1:
        found.append(number)
    return found


def gray(number):
    """The number's Gray code: neighbours differ in one bit."""
    return number ^ (number >> 1)
