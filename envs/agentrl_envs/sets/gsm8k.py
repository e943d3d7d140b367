"""GSM8K: 7,473 + 1,319 word problems with worked solutions."""

from __future__ import annotations

from ..data import DataSet, File

_AT = "grade_school_math/data"
GSM8K = DataSet(
    name="gsm8k",
    repository="openai/grade-school-math",
    commit="3101c7d5072418e28b9008a6636bde82a006892c",
    licence="MIT",
    files={
        "train.jsonl.gz": File(
            origin=f"{_AT}/train.jsonl", sha256="419386f7702aae71e33d2ce12db2170fc893004227b082354443fa5873b378bb"
        ),
        "test.jsonl.gz": File(
            origin=f"{_AT}/test.jsonl", sha256="b6c9d9547ec974d3c064a2f101ebf67e74257536d8c5e22a9758f2893a9e03a4"
        ),
    },
)
