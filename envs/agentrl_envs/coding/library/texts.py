"""Small operations on words and lines."""

WIDTH = 12


def wrap(text):
    """The words of the text in lines of at most WIDTH characters, as full as possible; a longer word has its own."""
    lines = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = word
        else:
            line = line + " " + word if line else word
    if line:
        lines.append(line)
    return lines


def longest_run(text):
    """The length of the longest run of one and the same character; 0 for an empty text."""
    longest = current = 0
    previous = None
    for character in text:
        if character == previous:
            current += 1
        else:
            current = 1
        longest = max(longest, current)
        previous = character
    return longest


def rotate(text, shift):
    """Lower-case letters moved `shift` places on in the alphabet, around its end; all others stay."""
    moved = []
    for character in text:
        if "a" <= character <= "z":
            place = (ord(character) - ord("a") + shift) % 26
            moved.append(chr(ord("a") + place))
        else:
            moved.append(character)
    return "".join(moved)


def compress(text):
    """Each run of a character as the character, followed by its length where that is more than 1."""
    parts = []
    start = 0
    for place in range(1, len(text) + 1):
        if place == len(text) or text[place] != text[start]:
            length = place - start
            parts.append(text[start] + (str(length) if length > 1 else ""))
            start = place
    return "".join(parts)


def common(one, other):
    """The length of the longest text that both begin with."""
    length = 0
    while length < len(one) and length < len(other) and one[length] == other[length]:
        length += 1
    return length
