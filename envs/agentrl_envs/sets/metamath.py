"""Metamath databases: a first example, the MIU system, Peano arithmetic, higher-order and quantum logic."""

from __future__ import annotations

from ..data import DataSet, File

METAMATH = DataSet(
    name="metamath",
    repository="metamath/set.mm",
    commit="da128d578f8b6bee36938624b149f689bdfccf51",
    licence="CC0-1.0; peano.mm: GPL",  # as each file's head says
    files={
        name: File(origin=name, sha256=sha256)
        for name, sha256 in {
            "demo0.mm": "c9c62265cf1e1009a7e744b5a45ed0e87d8d78bca644f62ce544660e183860e4",
            "miu.mm": "d7f294477d8c563b70650bb9aff29c6224e023b0b454dbbc0a254cdfbcfab327",
            "peano.mm": "c3c1fc5f2f96d0c74a227e3c0d71d25f3717dce8463a79a26635883af5db9166",
            "hol.mm": "fe9a12501aa5ffd174babaa39a6e6957eabf42603f46c22b382241784bb06aaf",
            "ql.mm": "25ffdfa5afccd13486b2310509f484b38ddda8d77f16135bcb8c115f6f318d33",
        }.items()
    },
)
