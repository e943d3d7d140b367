"""The replicas' typed APIs, as tables: for each entity its key, and what can be added, changed and removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, str]  # name -> text, integer, boolean, texts or time


def _of(names: str, kind: str = "text") -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


@dataclass(frozen=True, slots=True)
class Entity:
    """`add`: the fields of a new row, the first `needed` of them required; `change`: what may be changed later.

    `mine`: the field that holds who acts; `new`: what a new row has beside the given; `child_of`: (field, entity) -
    a new row that belongs to a new row of that entity is a part of it.
    """

    table: str
    noun: str
    key: tuple[str, ...]
    add: Fields = field(default_factory=dict)
    needed: int = 0
    change: Fields = field(default_factory=dict)
    remove: bool = False
    mine: str = ""
    new: Mapping[str, Any] = field(default_factory=dict)
    child_of: tuple[str, str] | None = None


_MEMBER = ("channel_id", "user_id")
_REACTION = ("message_id", "user_id", "reaction_type")
_LABELLED = ("issue_id", "issue_label_id")
_EVENT = {**_of("summary"), **_of("start end", "time"), **_of("description location status color_id visibility"),
          **_of("transparency"), **_of("recurrence", "texts")}  # fmt: skip
_FILE = {**_of("name parent_id description item_status"), **_of("tags", "texts"), **_of("shared_link")}
_TRASHABLE = {"item_status": "active", "description": ""}

SERVICES: dict[str, tuple[Entity, ...]] = {
    "slack": (
        Entity("users", "user", ("user_id",)),
        Entity("channels", "channel", ("channel_id",),
               needed=1,
               add={**_of("channel_name topic_text purpose_text"), **_of("is_private is_dm is_gc", "boolean")},
               change={**_of("channel_name topic_text purpose_text"), **_of("is_archived", "boolean")},
               new={"is_private": False, "is_dm": False, "is_gc": False, "is_archived": False}),
        Entity("channel_members", "channel_member", _MEMBER, add=_of("channel_id user_id"), needed=2, remove=True,
               child_of=("channel_id", "channels")),
        Entity("messages", "message", ("message_id",), add=_of("channel_id message_text parent_id blocks"), needed=2,
               change=_of("message_text blocks"), remove=True, mine="user_id"),
        Entity("message_reactions", "reaction", _REACTION, add=_of("message_id reaction_type"), needed=2, remove=True,
               mine="user_id"),
    ),
    "linear": (
        Entity("users", "user", ("id",)),
        Entity("teams", "team", ("id",), add=_of("name key description"), needed=2),
        Entity("team_memberships", "team_membership", ("id",), add=_of("teamId userId"), needed=2, remove=True),
        Entity("workflow_states", "workflow_state", ("id",), add=_of("teamId name type color"), needed=3,
               change=_of("name color archivedAt")),
        Entity("issue_labels", "label", ("id",), add=_of("name color teamId description"), needed=1,
               change=_of("name color description archivedAt")),
        Entity("issue_label_issue_association", "issue_label", _LABELLED, add=_of("issue_id issue_label_id"), needed=2,
               remove=True),
        Entity("issues", "issue", ("id",),
               needed=2, add={**_of("teamId title description assigneeId stateId parentId dueDate"),
                              **_of("priority", "integer")},
               mine="creatorId",
               change={**_of("title description teamId assigneeId stateId parentId dueDate archivedAt"),
                       **_of("priority", "integer")}),
        Entity("comments", "comment", ("id",), add=_of("issueId body"), needed=2, change=_of("body archivedAt"),
               remove=True, mine="userId", new={"archivedAt": None}),
        Entity("issue_relations", "issue_relation", ("id",), add=_of("issueId relatedIssueId type"), needed=3,
               change=_of("type archivedAt"), remove=True, new={"archivedAt": None}),
    ),
    "calendar": (
        Entity("calendar_users", "user", ("id",)),
        Entity("calendars", "calendar", ("id",), add=_of("summary description time_zone location"), needed=1,
               change={**_of("summary description time_zone location"), **_of("deleted", "boolean")}, remove=True,
               mine="owner_id", new={"deleted": False}),
        Entity("calendar_list_entries", "calendar_list_entry", ("id",),
               add={**_of("calendar_id color_id"), **_of("selected hidden", "boolean")}, needed=1,
               change={**_of("color_id"), **_of("selected hidden deleted", "boolean")}, remove=True, mine="user_id",
               new={"selected": True, "hidden": False, "deleted": False}, child_of=("calendar_id", "calendars")),
        Entity("calendar_events", "event", ("id",), needed=4,
               add={**_of("calendar_id"), **_EVENT, **_of("id ical_uid")},
               change={**_of("calendar_id"), **_EVENT}, remove=True, mine="creator_id", new={"status": "confirmed"}),
        Entity("calendar_event_attendees", "attendee", ("event_id", "email"), add=_of("event_id email"), needed=2,
               remove=True, new={"response_status": "needsAction"}, child_of=("event_id", "calendar_events")),
        Entity("calendar_acl_rules", "acl_rule", ("calendar_id", "id"), needed=3,
               add=_of("calendar_id scope_value role"), remove=True,
               change={**_of("role"), **_of("deleted", "boolean")}, new={"scope_type": "user", "deleted": False}),
        Entity("calendar_settings", "setting", ("id",)),
        Entity("calendar_channels", "watch", ("id",), needed=1,
               add=_of("resource_uri resource_id address"),
               remove=True, mine="user_id"),
    ),
    "box": (
        Entity("box_users", "user", ("id",)),
        Entity("box_folders", "folder", ("id",), add=_of("name parent_id description"), needed=2,
               change=_FILE, new=_TRASHABLE),
        Entity("box_files", "file", ("id",), add=_of("name parent_id content description"), needed=3,
               change={**_FILE, **_of("content")}, new={**_TRASHABLE, "version_number": "1"}),
        Entity("box_comments", "comment", ("id",), add=_of("item_id message"), needed=2, change=_of("message"),
               remove=True, mine="created_by_id"),
        Entity("box_tasks", "task", ("id",), add=_of("item_id message action"), needed=2,
               change={**_of("message"), **_of("is_completed", "boolean")}, remove=True, mine="created_by_id",
               new={"is_completed": False}),
        Entity("box_hubs", "hub", ("id",), add=_of("title description"), needed=1, change=_of("title description"),
               mine="created_by_id"),
        Entity("box_hub_items", "hub_item", ("id",), add=_of("hub_id item_id item_type"), needed=3, remove=True),
    ),
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "time": {
        "type": "object",
        "properties": {"dateTime": {"type": "string"}, "timeZone": {"type": "string"}},
        "required": ["dateTime", "timeZone"],
        "additionalProperties": False,
    },
}


def fits(kind: str, value: Any) -> bool:
    if kind == "texts":
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if kind == "time":
        return isinstance(value, Mapping) and set(value) == {"dateTime", "timeZone"} and all(
            isinstance(part, str) for part in value.values()
        )  # fmt: skip
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31
    return isinstance(value, bool if kind == "boolean" else str)


def key_of(entity: Entity, row: Mapping[str, Any]) -> str:
    return " ".join(str(row[name]) for name in entity.key)
