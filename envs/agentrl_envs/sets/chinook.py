"""Chinook: a digital media shop as one SQLite database - artists, albums, tracks, customers, invoices."""

from __future__ import annotations

from ..data import DataSet, File

CHINOOK = DataSet(
    name="chinook",
    repository="lerocha/chinook-database",
    commit="7f67772503d71ba90f19283c38e93923addb43fa",
    licence="MIT",
    files={
        "Chinook_Sqlite.sqlite": File(
            origin="ChinookDatabase/DataSources/Chinook_Sqlite.sqlite",
            sha256="7651ba378ac2fcd0dfc3c66fb101f7a7eed3ba39a612ec642b96e20702061f15",
        ),
    },
)
