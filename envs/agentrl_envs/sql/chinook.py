"""Chinook, a media shop's database: generated questions over real data. The artist, country, person or other value
that a question names belongs to one split."""

from __future__ import annotations

import hashlib
import random
from functools import cache
from typing import NamedTuple

from agentrl_jax.protocol import Task

from .. import data
from ..sets.chinook import CHINOOK
from .domains import SPLITS
from .engine import Reader
from .verifier import decidable

FILE = "Chinook_Sqlite.sqlite"
NEAR = ("train", "train", "train", "validation", "heldout")  # the split of a value, by its hash


class Template(NamedTuple):
    kind: str
    values: str  # a query of the values that {v} can be
    question: str
    gold: str


_COUNTRIES = "SELECT DISTINCT Country FROM Customer"
_CUSTOMERS = "SELECT DISTINCT Email FROM Customer"
_GENRES = "SELECT Name FROM Genre"
_ARTISTS = "SELECT r.Name FROM Artist r JOIN Album a ON a.ArtistId = r.ArtistId GROUP BY r.ArtistId HAVING count(*) > 2"
_ALBUMS = "SELECT a.Title FROM Album a JOIN Track t ON t.AlbumId = a.AlbumId GROUP BY a.AlbumId HAVING count(*) > 4"
_LISTS = "SELECT Name FROM Playlist GROUP BY Name HAVING count(*) = 1"
_OF_ARTIST = "FROM Track t JOIN Album a ON a.AlbumId = t.AlbumId JOIN Artist r ON r.ArtistId = a.ArtistId"
_SOLD = "FROM InvoiceLine l JOIN Track t ON t.TrackId = l.TrackId"
TEMPLATES = (
    Template("count", _COUNTRIES, "How many customers live in {v}?",
             "SELECT count(*) FROM Customer WHERE Country = {q}"),
    Template("list", _COUNTRIES, "Give the first and last names of the customers from {v}, sorted by last name.",
             "SELECT FirstName, LastName FROM Customer WHERE Country = {q} ORDER BY LastName"),
    Template("sum", _COUNTRIES, "What is the total of all invoices billed to {v}?",
             "SELECT sum(Total) FROM Invoice WHERE BillingCountry = {q}"),
    Template("top", _COUNTRIES, "Which customer from {v} has spent most in all? Give the email address and the sum.",
             "SELECT c.Email, sum(i.Total) FROM Customer c JOIN Invoice i ON i.CustomerId = c.CustomerId "
             "WHERE c.Country = {q} GROUP BY c.CustomerId ORDER BY sum(i.Total) DESC LIMIT 1"),
    Template("join", _COUNTRIES, "Give the email addresses of the support representatives of customers from {v}, "
             "each once.",
             "SELECT DISTINCT e.Email FROM Employee e JOIN Customer c ON c.SupportRepId = e.EmployeeId "
             "WHERE c.Country = {q}"),
    Template("above", _CUSTOMERS, "How many invoices of the customer {v} exceed the average total of all invoices?",
             "SELECT count(*) FROM Invoice i JOIN Customer c ON c.CustomerId = i.CustomerId "
             "WHERE c.Email = {q} AND i.Total > (SELECT avg(Total) FROM Invoice)"),
    Template("distinct", _CUSTOMERS, "How many different genres has the customer {v} bought tracks of?",
             f"SELECT count(DISTINCT t.GenreId) {_SOLD} JOIN Invoice i ON i.InvoiceId = l.InvoiceId "
             "JOIN Customer c ON c.CustomerId = i.CustomerId WHERE c.Email = {q}"),
    Template("last", _CUSTOMERS, "Give date and total of the three latest invoices of the customer {v}, latest first.",
             "SELECT i.InvoiceDate, i.Total FROM Invoice i JOIN Customer c ON c.CustomerId = i.CustomerId "
             "WHERE c.Email = {q} ORDER BY i.InvoiceDate DESC LIMIT 3"),
    Template("average", _GENRES, "What is the average length in milliseconds of tracks of the genre {v}?",
             "SELECT avg(t.Milliseconds) FROM Track t JOIN Genre g ON g.GenreId = t.GenreId WHERE g.Name = {q}"),
    Template("group", _GENRES, "For each media type, how many tracks of the genre {v} are there? Give the media type's "
             "name and the number, only for media types that occur.",
             "SELECT m.Name, count(*) FROM Track t JOIN Genre g ON g.GenreId = t.GenreId "
             "JOIN MediaType m ON m.MediaTypeId = t.MediaTypeId WHERE g.Name = {q} GROUP BY m.MediaTypeId"),
    Template("none", _GENRES, "How many tracks of the genre {v} were never sold?",
             "SELECT count(*) FROM Track t JOIN Genre g ON g.GenreId = t.GenreId WHERE g.Name = {q} AND NOT EXISTS "
             "(SELECT 1 FROM InvoiceLine l WHERE l.TrackId = t.TrackId)"),
    Template("having", _ARTISTS, "Which albums of {v} have more than ten tracks? Give title and number of tracks.",
             f"SELECT a.Title, count(*) {_OF_ARTIST} WHERE r.Name = {{q}} GROUP BY a.AlbumId HAVING count(*) > 10"),
    Template("list", _ARTISTS, "List the names of the five longest tracks of {v}, the longest first.",
             f"SELECT t.Name {_OF_ARTIST} WHERE r.Name = {{q}} ORDER BY t.Milliseconds DESC LIMIT 5"),
    Template("sum", _ARTISTS, "How many tracks of {v} were sold, counting quantities? If none, say 0.",
             f"SELECT coalesce(sum(l.Quantity), 0) {_SOLD} JOIN Album a ON a.AlbumId = t.AlbumId "
             "JOIN Artist r ON r.ArtistId = a.ArtistId WHERE r.Name = {q}"),
    Template("longest", _ALBUMS, "Which tracks of the album {v} are longer than its average? Give their names.",
             "SELECT t.Name FROM Track t JOIN Album a ON a.AlbumId = t.AlbumId WHERE a.Title = {q} "
             "AND t.Milliseconds > (SELECT avg(u.Milliseconds) FROM Track u WHERE u.AlbumId = a.AlbumId)"),
    Template("join", _LISTS, "For each genre, how many tracks of it are on the playlist {v}? Give genre and number, "
             "the highest number first, only genres that occur.",
             "SELECT g.Name, count(*) FROM Playlist p JOIN PlaylistTrack x ON x.PlaylistId = p.PlaylistId "
             "JOIN Track t ON t.TrackId = x.TrackId JOIN Genre g ON g.GenreId = t.GenreId WHERE p.Name = {q} "
             "GROUP BY g.GenreId ORDER BY count(*) DESC"),
)  # fmt: skip


def database(task: Task) -> bytes:
    return _file()


def tasks(split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct questions in an order that depends on `seed`; ValueError if there are fewer."""
    if split not in SPLITS:
        raise ValueError(f"sql: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    pairs = [(i, v) for i, template in enumerate(TEMPLATES) for v in _values(template.values) if _split(v) == split]
    found: list[Task] = []
    for index, value in random.Random(f"{split}/{seed}").sample(pairs, len(pairs)):
        if len(found) == count:
            break
        task = _task(split, index, value)
        if task is not None:
            found.append(task)
    if len(found) < count:
        raise ValueError(f"sql: {count} tasks of {split!r} asked for, but there are {len(found)}")
    return tuple(found)


@cache
def _file() -> bytes:
    return data.load(CHINOOK)[FILE]


@cache
def _values(sql: str) -> tuple[str, ...]:
    reader = Reader(_file())
    try:
        return tuple(sorted(str(row[0]) for row in reader.run(sql).rows))
    finally:
        reader.close()


def _split(value: str) -> str:
    return NEAR[hashlib.blake2b(value.encode(), digest_size=8).digest()[0] % len(NEAR)]


@cache
def _task(split: str, index: int, value: str) -> Task | None:
    """The task, or None where nothing is found or the result could be written down."""
    template = TEMPLATES[index]
    gold = template.gold.replace("{q}", "'" + value.replace("'", "''") + "'")
    name = f"chinook-{index}-{hashlib.blake2b(value.encode(), digest_size=4).hexdigest()}"
    reader = Reader(_file())
    try:
        result = reader.run(gold)
    finally:
        reader.close()
    if not result.rows or result.rows == [(None,)] or not decidable(_file(), gold, name):
        return None
    made = {
        "database": "chinook", "question": template.question.replace("{v}", value), "gold": gold, "seed": name,
        "tables": sorted(result.tables), "calls": 3,
    }  # fmt: skip
    return Task(id=name, split=split, kind=template.kind, data=made)
