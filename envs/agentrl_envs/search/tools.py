"""The tools, as the policy sees them and as they act on an episode's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl_jax.protocol import Status, Tool, ToolCall

from .adversarial import TIMEOUT_EVERY
from .index import Index

State = dict[str, Any]
MAX_QUERY, MAX_QUOTE, MAX_ANSWER, MAX_SHOWN, MAX_PREVIEW, MAX_CITATIONS = 300, 400, 200, 3000, 90, 12


def _tool(name: str, description: str, **texts: tuple[str, int]) -> Tool:
    properties = {
        key: {"type": "string", "description": said, "maxLength": most} for key, (said, most) in texts.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(texts), "additionalProperties": False}
    return Tool(name=name, description=description, parameters=schema)


TOOLS: tuple[Tool, ...] = (
    _tool("search", "Find documents by words.", query=("A few words, such as a name.", MAX_QUERY)),
    _tool("open", "Read a document.", document=("The number that a search gave, such as d12.", 12)),
    _tool(
        "cite",
        "Give evidence for the answer. The quote must be copied word by word from a document that you have opened.",
        document=("The document's number.", 12),
        quote=("At least four words, at most one or two sentences.", MAX_QUOTE),
    ),
    _tool("answer", "Give the answer and end the task.", text=("A name, a date, yes or no: no sentence.", MAX_ANSWER)),
)
BY_NAME = {tool.name: tool for tool in TOOLS}


class Reply(NamedTuple):
    text: str
    status: Status = Status.OK


@dataclass(slots=True)
class Invalid(Exception):
    """What is wrong with a call, in words that help to do better."""

    said: str


def arguments(call: ToolCall) -> Mapping[str, str]:
    """The call's arguments, all of them texts of a bearable length. Raises `Invalid`."""
    tool = BY_NAME.get(call.name)
    if tool is None:
        raise Invalid(f"unknown tool {str(call.name)[:40]!r}; the tools are {', '.join(BY_NAME)}")
    wanted = tool.parameters["properties"]
    if set(call.arguments) != set(wanted):
        raise Invalid(f"{call.name} takes exactly: {', '.join(wanted)}")
    for key, value in call.arguments.items():
        if not isinstance(value, str):
            raise Invalid(f"{key} must be a text")
        if len(value) > wanted[key]["maxLength"]:
            raise Invalid(f"{key} is longer than {wanted[key]['maxLength']} characters")
        if not value.isascii() and not _encodable(value):
            raise Invalid(f"{key} is not valid Unicode")
    return call.arguments  # type: ignore[return-value]


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def execute(index: Index, results: int, state: State, call: ToolCall) -> Reply:
    """Carries out one call and changes the state. A call that is wrong changes nothing."""
    try:
        given = arguments(call)
        if call.name == "search":
            return _search(index, results, state, given["query"])
        if call.name == "open":
            return _open(index, state, given["document"])
        if call.name == "cite":
            return _cite(index, state, given["document"], given["quote"])
        state["answer"] = given["text"]
        return Reply("answered")
    except Invalid as error:
        return Reply(f"error: {error.said}", Status.INVALID_ACTION)


def _search(index: Index, results: int, state: State, query: str) -> Reply:
    state["searches"] += 1
    if state["timeouts"] and state["searches"] % TIMEOUT_EVERY == 1:
        return Reply("error: the search timed out; try again", Status.TIMEOUT)
    found = index.search(query, results)
    if not found:
        return Reply("nothing found; try other words")
    lines = [f"{document.id} | {document.title} | {_cut(document.text, MAX_PREVIEW)}" for document in found]
    return Reply("\n".join(lines))


def _open(index: Index, state: State, handle: str) -> Reply:
    document = index.document(handle)
    if document is None:
        raise Invalid(f"there is no document {handle!r}; open a number that a search gave")
    if handle in state["gone"]:
        return Reply(f"error: {handle} is gone for good; there may be a copy elsewhere", Status.DENIED)
    if handle in state["flaky"]:
        state["flaky"].remove(handle)
        return Reply(f"error: {handle} did not answer in time; try again", Status.TIMEOUT)
    if handle not in state["opened"]:
        state["opened"].append(handle)
    shown = _cut(document.text, MAX_SHOWN)
    status = Status.OK if shown == document.text else Status.TRUNCATED
    return Reply(f"{document.title} (from: {document.origin})\n{shown}", status)


def _cite(index: Index, state: State, handle: str, quote: str) -> Reply:
    """Takes the quote down as it is: whether it stands in the document is for the verifier to see."""
    if index.document(handle) is None:
        raise Invalid(f"there is no document {handle!r}")
    if handle not in state["opened"]:
        raise Invalid(f"open {handle} before you cite it")
    if not quote.strip():
        raise Invalid("the quote is empty")
    if len(state["citations"]) >= MAX_CITATIONS:
        raise Invalid(f"at most {MAX_CITATIONS} quotes may be cited")
    state["citations"].append([handle, quote])
    return Reply(f"cited {handle}")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."
