"""MBPP: 974 small programs, each with a sentence that says what it does and tests; data under CC-BY-4.0 (Google).

A mirror of google-research/google-research's `mbpp.jsonl`.
"""

from ..data import DataSet, File

MBPP = DataSet(
    name="mbpp",
    repository="deepseek-ai/DeepSeek-Coder",
    commit="2f9fd85927c669dae3c0fbb2d607274023af243e",
    licence="CC-BY-4.0",
    files={
        "mbpp.jsonl": File(
            origin="Evaluation/MBPP/data/mbpp.jsonl",
            sha256="617f6ebec652e031765d5a06323b77e672fd4e95b9e816ffb7a36de26d28a181",
        )
    },
)
