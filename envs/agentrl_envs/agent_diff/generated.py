"""A small generated workspace with channels, people and messages, and requests over it, for machines without the data
set. Names of one split appear in no other."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from agentrl_jax.protocol import Task

from .tenant import Row

SPLITS = ("train", "validation", "heldout")
ME = "U0"
_PEOPLE = {
    "train": ("Ada Holm", "Ben Costa", "Cem Dahl", "Dia Farah", "Eva Grant", "Finn Lund", "Gus Joshi", "Ida Keller"),
    "validation": ("Jan Marsh", "Kai Noor", "Lou Okafor", "Mia Petit", "Nils Moreau"),
    "heldout": ("Ova Quist", "Pia Reyes", "Rui Sato", "Sia Tanaka", "Tom Urban", "Uma Vance"),
}
_CHANNELS = {
    "train": ("garden", "kitchen", "printing", "travel", "hiring", "payroll", "design", "support"),
    "validation": ("archive", "books", "cycling", "drama", "energy"),
    "heldout": ("film", "games", "health", "inbox", "jazz", "kayak"),
}
_TEXTS = (
    "the boiler is repaired", "lunch is at noon", "the report is late", "we need new chairs", "the demo went well",
    "who has the keys", "the office is closed on friday", "please read the draft", "the server was restarted",
    "tickets are booked", "the invoice is paid", "parking is full", "the meeting moved", "coffee is out again",
)  # fmt: skip
_EMOJI = ("eyes", "tada", "rocket", "heart", "wave")
KINDS = (
    "post", "reply", "react", "edit", "delete", "invite", "kick", "topic", "rename", "archive", "create", "direct",
)  # fmt: skip


def tasks(split: str, count: int, seed: int) -> tuple[Task, ...]:
    if split not in SPLITS:
        raise ValueError(f"agent_diff: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    return tuple(_task(split, seed, index) for index in range(count))


def rows(key: int, split: str) -> list[tuple[str, str, Row]]:
    """The workspace of a task."""
    rng = random.Random(key)
    people = rng.sample(_PEOPLE[split], 4)
    users = [ME, *(f"U{rng.randrange(1000, 10_000)}{i}" for i in range(4))]
    made: list[tuple[str, str, Row]] = []
    for user, name in zip(users, ("Assistant", *people), strict=True):
        made.append(("users", user, {"user_id": user, "real_name": name, "username": name.lower().replace(" ", ".")}))
    for number, name in enumerate(rng.sample(_CHANNELS[split], 4)):
        channel = f"C{rng.randrange(1000, 10_000)}{number}"
        row = {"channel_id": channel, "channel_name": name, "is_private": False, "is_dm": False, "is_gc": False}
        made.append(("channels", channel, {**row, "is_archived": False, "topic_text": f"about {name}"}))
        for user in (ME, *rng.sample(users[1:], 2)):
            made.append(("channel_members", f"{channel} {user}", {"channel_id": channel, "user_id": user}))
        for place, text in enumerate(rng.sample(_TEXTS, 4)):
            message = f"17000{number}000{place}.{rng.randrange(1000, 10_000)}"
            author = ME if place == 0 else rng.choice(users[1:])
            row = {"message_id": message, "channel_id": channel, "user_id": author, "message_text": text}
            made.append(("messages", message, row))
    return made


def _task(split: str, seed: int, index: int) -> Task:
    kind = KINDS[index % len(KINDS)]
    name = f"{split}-{kind}-{seed}-{index}"
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    tables: dict[str, list[Row]] = {}
    for entity, _, row in rows(key, split):
        tables.setdefault(entity, []).append(row)
    prompt, reference, assertion = _REQUESTS[kind](random.Random(key + 1), tables, split)
    data = {
        "service": "slack", "me": ME, "prompt": prompt, "assertions": [{**a, "expected_count": 1} for a in assertion],
        "ignored": ["updated_at"], "reference": reference, "calls": 2 * len(reference) + 1, "tenant": [key, split],
    }  # fmt: skip
    return Task(id=name, split=split, kind=kind, data=data)


Made = tuple[str, list[tuple[str, dict[str, Any]]], list[dict[str, Any]]]
Held = dict[str, list[Row]]


def _eq(**fields: Any) -> dict[str, Any]:
    return {name: {"eq": value} for name, value in fields.items()}


def _said(diff: str, entity: str, where: dict[str, Any], **expected: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"diff_type": diff, "entity": entity, "where": where}
    if expected:
        made["expected_changes"] = {name: {"to": {"eq": value}} for name, value in expected.items()}
    return made


def _name(tables: Held, channel: str) -> str:
    return next(row["channel_name"] for row in tables["channels"] if row["channel_id"] == channel)


def _post(rng: random.Random, tables: Held, split: str) -> Made:
    channel, text = rng.choice(tables["channels"]), rng.choice(_TEXTS)
    fields = {"channel_id": channel["channel_id"], "message_text": text}
    return (
        f"Post the message '{text}' in #{channel['channel_name']}.",
        [("add_message", fields)],
        [_said("added", "messages", _eq(**fields, user_id=ME))],
    )


def _reply(rng: random.Random, tables: Held, split: str) -> Made:
    message = rng.choice(tables["messages"])
    fields = {"channel_id": message["channel_id"], "message_text": "done", "parent_id": message["message_id"]}
    return (
        f"Reply 'done' to '{message['message_text']}' in #{_name(tables, message['channel_id'])}.",
        [("add_message", fields)],
        [_said("added", "messages", _eq(**fields, user_id=ME))],
    )


def _react(rng: random.Random, tables: Held, split: str) -> Made:
    message, emoji = rng.choice(tables["messages"]), rng.choice(_EMOJI)
    fields = {"message_id": message["message_id"], "reaction_type": emoji}
    return (
        f"React with :{emoji}: to '{message['message_text']}' in #{_name(tables, message['channel_id'])}.",
        [("add_reaction", fields)],
        [_said("added", "message_reactions", _eq(**fields, user_id=ME))],
    )


def _edit(rng: random.Random, tables: Held, split: str) -> Made:
    message = rng.choice([row for row in tables["messages"] if row["user_id"] == ME])
    text = rng.choice([text for text in _TEXTS if text != message["message_text"]])
    key = {"message_id": message["message_id"]}
    return (
        f"Change your message '{message['message_text']}' in #{_name(tables, message['channel_id'])} to '{text}'.",
        [("change_message", {**key, "message_text": text})],
        [_said("changed", "messages", _eq(**key), message_text=text)],
    )


def _delete(rng: random.Random, tables: Held, split: str) -> Made:
    message = rng.choice([row for row in tables["messages"] if row["user_id"] == ME])
    key = {"message_id": message["message_id"]}
    return (
        f"Delete your message '{message['message_text']}' in #{_name(tables, message['channel_id'])}.",
        [("remove_message", key)],
        [_said("removed", "messages", _eq(**key))],
    )


def _seat(rng: random.Random, tables: Held, member: bool) -> tuple[Row, Row]:
    seats = {(row["channel_id"], row["user_id"]) for row in tables["channel_members"]}
    pairs = [(c, u) for c in tables["channels"] for u in tables["users"]
             if u["user_id"] != ME and ((c["channel_id"], u["user_id"]) in seats) is member]  # fmt: skip
    return rng.choice(pairs)


def _invite(rng: random.Random, tables: Held, split: str) -> Made:
    channel, user = _seat(rng, tables, False)
    fields = {"channel_id": channel["channel_id"], "user_id": user["user_id"]}
    return (
        f"Add {user['real_name']} to #{channel['channel_name']}.",
        [("add_channel_member", fields)],
        [_said("added", "channel_members", _eq(**fields))],
    )


def _kick(rng: random.Random, tables: Held, split: str) -> Made:
    channel, user = _seat(rng, tables, True)
    fields = {"channel_id": channel["channel_id"], "user_id": user["user_id"]}
    return (
        f"Remove {user['real_name']} from #{channel['channel_name']}.",
        [("remove_channel_member", fields)],
        [_said("removed", "channel_members", _eq(**fields))],
    )


def _channel(rng: random.Random, tables: Held, prompt: str, field: str, value: Any) -> Made:
    channel = rng.choice(tables["channels"])
    key = {"channel_id": channel["channel_id"]}
    return (
        prompt.format(channel=channel["channel_name"]),
        [("change_channel", {**key, field: value})],
        [_said("changed", "channels", _eq(**key), **{field: value})],
    )


def _topic(rng: random.Random, tables: Held, split: str) -> Made:
    text = rng.choice(_TEXTS)
    return _channel(rng, tables, f"Set the topic of #{{channel}} to '{text}'.", "topic_text", text)


def _rename(rng: random.Random, tables: Held, split: str) -> Made:
    name = f"{rng.choice(_CHANNELS[split])}-{rng.randrange(10, 100)}"
    return _channel(rng, tables, f"Rename #{{channel}} to #{name}.", "channel_name", name)


def _archive(rng: random.Random, tables: Held, split: str) -> Made:
    return _channel(rng, tables, "Archive #{channel}.", "is_archived", True)


def _create(rng: random.Random, tables: Held, split: str) -> Made:
    name, text = f"{rng.choice(_CHANNELS[split])}-{rng.randrange(10, 100)}", rng.choice(_TEXTS)
    fields = {"channel_name": name, "is_private": True, "topic_text": text}
    return (
        f"Create a private channel #{name} with the topic '{text}'.",
        [("add_channel", fields)],
        [_said("added", "channels", _eq(**fields))],
    )


def _direct(rng: random.Random, tables: Held, split: str) -> Made:
    """Two writes: a topic, and the reaction that says so."""
    message = rng.choice(tables["messages"])
    text, emoji = rng.choice(_TEXTS), rng.choice(_EMOJI)
    key = {"channel_id": message["channel_id"]}
    mark = {"message_id": message["message_id"], "reaction_type": emoji}
    return (
        f"Set the topic of #{_name(tables, message['channel_id'])} to '{text}' and react with :{emoji}: to "
        f"'{message['message_text']}' there.",
        [("change_channel", {**key, "topic_text": text}), ("add_reaction", mark)],
        [_said("changed", "channels", _eq(**key), topic_text=text), _said("added", "message_reactions", _eq(**mark))],
    )


_REQUESTS = {
    "post": _post, "reply": _reply, "react": _react, "edit": _edit, "delete": _delete, "invite": _invite, "kick": _kick,
    "topic": _topic, "rename": _rename, "archive": _archive, "create": _create, "direct": _direct,
}  # fmt: skip
