"""HotpotQA, distractor setting: 70 questions, each with ten paragraphs and the sentences that support its answer."""

from __future__ import annotations

from ..data import DataSet, File

HOTPOTQA = DataSet(
    name="hotpotqa",
    repository="noahshinn/reflexion",  # there in a pickle, which is not read here: the file was converted from it
    commit="218cf0ef1df84b05ce379dd4a8e47f17766733a0",
    licence="CC BY-SA 4.0",
    files={
        "distractor_sample_70.jsonl": File(
            origin=None, sha256="41255381707c7c7d6e2b400f6037d36f269b8121b426b77cfbcc9954389347ab"
        )
    },
)
