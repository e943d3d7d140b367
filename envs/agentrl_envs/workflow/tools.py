"""The tools: one table, shown to the policy in one of two dialects (short names, or the names of a real service).

The service is permissive: a write that the policy forbids is carried out if it is possible at all. Keeping the
policy is the agent's job, and the verifier sees what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl_jax.protocol import Status, Tool, ToolCall

from . import schema
from .schema import Change, Handle

Arguments = Mapping[str, Handle]
RESULTS = ("done", "refused")
HELD_IN = {
    "order": "orders", "customer": "customers", "product": "products", "address": "addresses", "method": "payments",
}  # fmt: skip


class Reply(NamedTuple):
    """What one call led to. `read` names the record revealed, `finished` the result of `finish`."""

    text: str
    status: Status = Status.OK
    read: str | None = None
    changes: tuple[Change, ...] = ()
    finished: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One tool: its name in both dialects, its arguments by role, and what it does."""

    name: str
    real: str
    description: str
    roles: tuple[str, ...]
    writes: bool
    run: Callable[[schema.Connection, Arguments], Reply]


def _order(connection: schema.Connection, arguments: Arguments) -> Reply:
    row = connection.execute("SELECT * FROM orders WHERE id = ?", (arguments["order"],)).fetchone()
    handle, customer, product, status, payment, address = row
    text = f"order {handle} customer {customer} product {product} status {status} payment {payment} address {address}"
    return Reply(text, read=f"order {handle}")


def _customer(connection: schema.Connection, arguments: Arguments) -> Reply:
    handle = arguments["customer"]
    methods = connection.execute("SELECT id FROM payments WHERE customer = ? ORDER BY id", (handle,))
    orders = connection.execute(
        "SELECT o.id, p.name, o.status FROM orders o JOIN products p ON p.id = o.product "
        "WHERE o.customer = ? ORDER BY o.id",
        (handle,),
    )
    words = [f"customer {handle} methods", *(str(row[0]) for row in methods), "orders"]
    words += [f"{noun} {order} {status}" for order, noun, status in orders]
    return Reply(" ".join(words), read=f"customer {handle}")


def _product(connection: schema.Connection, arguments: Arguments) -> Reply:
    handle = arguments["product"]
    noun, stock = connection.execute("SELECT name, stock FROM products WHERE id = ?", (handle,)).fetchone()
    return Reply(f"product {handle} {noun} {'in stock' if stock > 0 else 'sold out'}", read=f"product {handle}")


def _cancel(connection: schema.Connection, arguments: Arguments) -> Reply:
    order = arguments["order"]
    product, stock = connection.execute(
        "SELECT p.id, p.stock FROM orders o JOIN products p ON p.id = o.product WHERE o.id = ?", (order,)
    ).fetchone()
    changes = (Change("orders", order, "status", "cancelled"), Change("products", product, "stock", stock + 1))
    return Reply(f"order {order} cancelled", changes=changes)


def _return(_: schema.Connection, arguments: Arguments) -> Reply:
    order = arguments["order"]
    return Reply(f"order {order} returned", changes=(Change("orders", order, "status", "returned"),))


def _exchange(connection: schema.Connection, arguments: Arguments) -> Reply:
    order, product = arguments["order"], arguments["product"]
    (stock,) = connection.execute("SELECT stock FROM products WHERE id = ?", (product,)).fetchone()
    changes = (
        Change("orders", order, "status", "exchanged"),
        Change("orders", order, "product", product),
        Change("products", product, "stock", stock - 1),
    )
    return Reply(f"order {order} product {product} exchanged", changes=changes)


def _address(_: schema.Connection, arguments: Arguments) -> Reply:
    order, address = arguments["order"], arguments["address"]
    return Reply(f"order {order} address {address}", changes=(Change("orders", order, "address", address),))


def _payment(_: schema.Connection, arguments: Arguments) -> Reply:
    order, method = arguments["order"], arguments["method"]
    return Reply(f"order {order} payment {method}", changes=(Change("orders", order, "payment", method),))


def _finish(_: schema.Connection, arguments: Arguments) -> Reply:
    return Reply("finished", finished=str(arguments["result"]))


TABLE: dict[str, Row] = {
    row.name: row
    for row in (
        Row("order", "get_order", "Look up an order.", ("order",), False, _order),
        Row("customer", "get_customer", "Look up a customer's methods and orders.", ("customer",), False, _customer),
        Row("product", "get_product", "Look up whether a product is in stock.", ("product",), False, _product),
        Row("cancel", "cancel_order", "Cancel an order.", ("order",), True, _cancel),
        Row("return", "return_order", "Return an order.", ("order",), True, _return),
        Row("exchange", "exchange_order", "Exchange an order for a product.", ("order", "product"), True, _exchange),
        Row("address", "change_address", "Send an order to another address.", ("order", "address"), True, _address),
        Row("payment", "change_payment", "Pay an order with another method.", ("order", "method"), True, _payment),
        Row("finish", "finish", "Say that the request is done, or refused.", ("result",), False, _finish),
    )
}
WRITES = tuple(name for name, row in TABLE.items() if row.writes)
LOOKUPS = ("order", "customer", "product")
_BY_REAL = {row.real: name for name, row in TABLE.items()}


def argument(handles: str, tool: str, role: str) -> str:
    """The argument's name in this dialect: `id` of a short lookup, `order_id` of a real one."""
    if role == "result":
        return role
    if handles == "real":
        return f"{role}_id"
    return "id" if tool in LOOKUPS else role


def call(handles: str, tool: str, **arguments: Handle) -> ToolCall:
    """A call of `tool` (its short name, arguments by role) as this dialect writes it."""
    row = TABLE[tool]
    return ToolCall(
        name=row.real if handles == "real" else tool,
        arguments={argument(handles, tool, role): arguments[role] for role in row.roles},
    )


def describe(handles: str) -> tuple[Tool, ...]:
    """The table as the policy sees it, with JSON Schema parameters."""
    handle = {"type": "string"} if handles == "real" else {"type": "integer", "minimum": 0, "maximum": 99}
    result = {"type": "string", "enum": list(RESULTS)}
    tools = []
    for name, row in TABLE.items():
        properties: dict[str, Any] = {
            argument(handles, name, role): dict(result if role == "result" else handle) for role in row.roles
        }
        parameters = {
            "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
        }  # fmt: skip
        shown = row.real if handles == "real" else name
        tools.append(Tool(name=shown, description=row.description, parameters=parameters, writes=row.writes))
    return tuple(tools)


def resolve(connection: schema.Connection, handles: str, asked: ToolCall) -> tuple[Row, Arguments] | str:
    """The tool and its arguments by role with every handle known to exist, or a few words on what is wrong."""
    name = _BY_REAL.get(asked.name) if handles == "real" else asked.name
    row = TABLE.get(name) if name is not None else None
    if row is None:
        return "error unknown tool"
    shown = {argument(handles, row.name, role): role for role in row.roles}
    if set(asked.arguments) != set(shown):
        return "error arguments : " + " ".join(shown)
    arguments: dict[str, Handle] = {}
    for key, role in shown.items():
        value = asked.arguments[key]
        if role == "result":
            if value not in RESULTS:
                return "error result : done or refused"
        else:
            if isinstance(value, bool) or not isinstance(value, str if handles == "real" else int):
                return f"error {role}"
            if not _exists(connection, role, value):
                return f"no {role} {str(value)[:24]}".encode(errors="replace").decode()  # half a character is no text
        arguments[role] = value  # type: ignore[assignment]
    return row, arguments


def _exists(connection: schema.Connection, role: str, handle: Handle) -> bool:
    try:
        found = connection.execute(f"SELECT 1 FROM {HELD_IN[role]} WHERE id = ?", (handle,)).fetchone()
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate or a 65-bit number cannot name anything
        return False
    return found is not None


def execute(connection: schema.Connection, resolved: tuple[Row, Arguments] | str) -> Reply:
    """Carries out a resolved call; what could not be resolved changes nothing."""
    if isinstance(resolved, str):
        return Reply(resolved, Status.INVALID_ACTION)
    row, arguments = resolved
    reply = row.run(connection, arguments)
    schema.apply(connection, reply.changes)
    if reply.finished is not None:
        connection.execute("INSERT INTO episode VALUES ('finished', ?)", (reply.finished,))
    return reply
