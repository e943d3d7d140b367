"""Days of the Gregorian calendar; no use of the clock."""

LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def leap(year):
    """True for years with 366 days: divisible by 4 but not by 100, or divisible by 400."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def length(year, month):
    """The number of days of a month, 1..12."""
    if month == 2 and leap(year):
        return 29
    return LENGTHS[month - 1]


def day_of_year(year, month, day):
    """The day's number in its year, 1 for the first of January."""
    return sum(length(year, earlier) for earlier in range(1, month)) + day


def later(year, month, day, days):
    """The date (year, month, day) that lies `days` >= 0 days after the given one."""
    day += days
    while day > length(year, month):
        day -= length(year, month)
        month += 1
        if month > 12:
            month = 1
            year += 1
    return (year, month, day)


def quarter(month):
    """1 for January to March, 4 for October to December."""
    return (month - 1) // 3 + 1
