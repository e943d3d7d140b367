"""QuixBugs: classic algorithms with a defect in one line each, their repair, and test cases.

One line of JSON per program, made from the repository's python_programs, correct_python_programs, json_testcases and
python_testcases.
"""

from ..data import DataSet, File

QUIXBUGS = DataSet(
    name="quixbugs",
    repository="jkoppel/QuixBugs",
    commit="4257f44b0ff1181dedaedee6a447e133219fcebf",
    licence="MIT",
    files={
        "programs.jsonl.gz": File(
            origin=None, sha256="8a7dc8b44ec2223caaecd91a539bcd82097be8d42905e5e7c382b62d2a079ee5"
        )
    },
)
