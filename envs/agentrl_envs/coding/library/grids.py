"""Grids: lists of rows of equal length."""


def turn(rows):
    """The grid turned by a quarter, clockwise."""
    return [list(row) for row in zip(*rows[::-1], strict=True)]


def neighbours(rows, row, column):
    """The sum of the up to eight cells around a cell, without the cell itself."""
    total = 0
    for r in range(max(0, row - 1), min(len(rows), row + 2)):
        for c in range(max(0, column - 1), min(len(rows[0]), column + 2)):
            if r != row or c != column:
                total += rows[r][c]
    return total


def paths(rows):
    """In how many ways one gets from the upper left to the lower right cell, moving right or down over zeros."""
    ways = [0] * len(rows[0])
    ways[0] = 1
    for row in rows:
        for column, cell in enumerate(row):
            if cell != 0:
                ways[column] = 0
            elif column > 0:
                ways[column] += ways[column - 1]
    return ways[-1]


def area(rows, row, column):
    """How many cells are reached from a cell over sides, through cells of its own value; the cell counts."""
    wanted = rows[row][column]
    seen = {(row, column)}
    waiting = [(row, column)]
    while waiting:
        r, c = waiting.pop()
        for place in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)):
            inside = 0 <= place[0] < len(rows) and 0 <= place[1] < len(rows[0])
            if inside and place not in seen and rows[place[0]][place[1]] == wanted:
                seen.add(place)
                waiting.append(place)
    return len(seen)


def saddle(rows):
    """The first (row, column) whose cell is the smallest of its row and the largest of its column, or None."""
    for r, row in enumerate(rows):
        for c, cell in enumerate(row):
            if cell == min(row) and cell == max(other[c] for other in rows):
                return (r, c)
    return None
