"""2WikiMultihopQA: passages to search in, and questions whose reasoning steps name a title and a supporting snippet."""

from __future__ import annotations

import ast
from typing import Any

from ..data import DataSet, File

_IRCOT = ("StonyBrookNLP/ircot", "3c1820f698eea5eeddb4fba3c56b64c961e063e4")
_AT = "prompt_generator/data_annotations"


def records(text: str) -> list[dict[str, Any]]:
    """The records of an annotation file. Of Jsonnet it uses literals, `#` comments and null: what Python reads too."""
    return ast.literal_eval(_Null().visit(ast.parse(text, mode="eval")))


class _Null(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Constant(None), node) if node.id == "null" else node


TWOWIKI = DataSet(
    name="twowiki",
    repository="OSU-NLP-Group/HippoRAG",
    commit="c617143f01477243992a63b2e2151cc003dd3b21",
    licence="Apache-2.0 (questions, annotations), CC BY-SA (passages)",
    files={
        "corpus.json": File(
            origin="reproduce/dataset/2wikimultihopqa_corpus.json",
            sha256="cda3b0514e9ca7f173367bea8b2d07fabad8e3bd798c4a55a20cb0efaff48dd8",
        ),
        "ircot_annotations_2wikimultihopqa.jsonnet": File(
            origin=f"{_AT}/2wikimultihopqa.jsonnet",
            sha256="24ea72683b9375b5e590c99fa8ebeb13b2808428ca547c02a7c08e6ae218232a",
            elsewhere=_IRCOT,
        ),
        "ircot_annotations_hotpotqa.jsonnet": File(
            origin=f"{_AT}/hotpotqa.jsonnet",
            sha256="43d06784c3dfd3ccd18d6691a9267fab6c4b69fb755eea7d174f77fae6937a6e",
            elsewhere=_IRCOT,
        ),
    },
)
