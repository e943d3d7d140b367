"""The retail service: lookups and rule-checked changes on one tenant's rows.

A tenant is a dict {"users", "orders", "finished", "answer"}; products are read-only and shared.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, DivisionByZero, InvalidOperation
from typing import Any

from agentrl_jax.protocol import Task, ToolCall

from .tools import BY_NAME, TRANSFER

State = dict[str, Any]


class Invalid(Exception):
    """The call names what does not exist or is malformed."""


class Denied(Exception):
    """The policy forbids the change."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The whole data set; a tenant is cut out of it."""

    users: Mapping[str, Any]
    orders: Mapping[str, Any]
    products: Mapping[str, Any]

    def tenant(self, task: Task) -> State:
        """Only the rows of the user concerned, and of the owners of orders that the annotation names; own copies."""
        ids = {task.data["user_id"]}
        named = {action["kwargs"].get("order_id") for action in task.data["actions"]}
        ids |= {self.orders[order]["user_id"] for order in named if order in self.orders}
        users = {user: self.users[user] for user in sorted(ids)}
        orders = {order: self.orders[order] for user in users.values() for order in user["orders"]}
        return json.loads(json.dumps({"users": users, "orders": orders, "finished": False, "answer": ""}))


def execute(catalogue: Catalogue, state: State, call: ToolCall) -> str:
    """Carries the call out on `state`, returns what it says. Raises `Invalid` or `Denied`, having changed nothing."""
    tool = BY_NAME.get(call.name)
    if tool is None:
        raise Invalid(f"unknown tool {call.name[:40]}")
    properties, given = tool.parameters["properties"], dict(call.arguments)
    if set(given) - set(properties) or set(tool.parameters["required"]) - set(given):
        raise Invalid(f"{tool.name} takes {', '.join(properties) or 'no arguments'}")
    for key, value in given.items():
        listed = properties[key]["type"] == "array"
        if not (isinstance(value, list | tuple) if listed else isinstance(value, str)):
            raise Invalid(f"{key} must be {'a list of texts' if listed else 'a text'}")
        if isinstance(value, list | tuple) and not (value and all(isinstance(item, str) for item in value)):
            raise Invalid(f"{key} must be a list of texts, at least one")
        if value not in properties[key].get("enum", (value,)):
            raise Invalid(f"{key} must be one of {', '.join(properties[key]['enum'])}")
    return _RUN[tool.name](catalogue, state, **given)


def _say(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": "))


def _user(state: State, user_id: str) -> dict[str, Any]:
    if user_id not in state["users"]:
        raise Invalid("user not found")
    return state["users"][user_id]


def _order(state: State, order_id: str, status: str | None = None) -> dict[str, Any]:
    if order_id not in state["orders"]:
        raise Invalid("order not found")
    order = state["orders"][order_id]
    if status is not None and order["status"] != status:
        raise Denied(f"the order is {order['status']}, not {status}")
    return order


def _method(state: State, order: dict[str, Any], method: str) -> dict[str, Any]:
    methods = state["users"][order["user_id"]]["payment_methods"]
    if method not in methods:
        raise Invalid("payment method not found")
    return methods[method]


def _cover(method: dict[str, Any], amount: float) -> None:
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise Denied("the gift card's balance is too low")


def _credit(method: dict[str, Any], amount: float) -> None:
    """Gift cards move at once; cards and accounts are settled outside of the service."""
    if method["source"] == "gift_card":
        method["balance"] = round(method["balance"] + amount, 2)


def _items(order: dict[str, Any], item_ids: list[str]) -> list[dict[str, Any]]:
    """The order's items, each taken at most as often as it was bought."""
    left, taken = list(order["items"]), []
    for wanted in item_ids:
        item = next((item for item in left if item["item_id"] == wanted), None)
        if item is None:
            raise Invalid(f"item {wanted[:20]} not found in the order")
        left.remove(item)
        taken.append(item)
    return taken


def _variants(catalogue: Catalogue, items: list[dict[str, Any]], new_ids: list[str]) -> list[dict[str, Any]]:
    if len(items) != len(new_ids):
        raise Invalid("item_ids and new_item_ids must be equally many")
    chosen = []
    for item, new in zip(items, new_ids, strict=True):
        variant = catalogue.products[item["product_id"]]["variants"].get(new)
        if variant is None:
            raise Denied(f"item {new[:20]} is not of the same product")
        if not variant["available"]:
            raise Denied(f"item {new} is not available")
        chosen.append(variant)
    return chosen


def _find_by_email(_: Catalogue, state: State, email: str) -> str:
    for user_id, user in state["users"].items():
        if user["email"].lower() == email.lower():
            return user_id
    raise Invalid("user not found")


def _find_by_name_zip(_: Catalogue, state: State, first_name: str, last_name: str, zip: str) -> str:
    for user_id, user in state["users"].items():
        name = (user["name"]["first_name"].lower(), user["name"]["last_name"].lower(), user["address"]["zip"])
        if name == (first_name.lower(), last_name.lower(), zip):
            return user_id
    raise Invalid("user not found")


def _user_details(_: Catalogue, state: State, user_id: str) -> str:
    return _say(_user(state, user_id))


def _order_details(_: Catalogue, state: State, order_id: str) -> str:
    return _say(_order(state, order_id))


def _product_details(catalogue: Catalogue, _: State, product_id: str) -> str:
    if product_id not in catalogue.products:
        raise Invalid("product not found")
    return _say(catalogue.products[product_id])


def _product_types(catalogue: Catalogue, _: State) -> str:
    return _say(dict(sorted((product["name"], key) for key, product in catalogue.products.items())))


def _calculate(_: Catalogue, __: State, expression: str) -> str:
    try:
        value = _arithmetic(ast.parse(expression[:200].strip(), mode="eval").body)
    except (SyntaxError, ValueError, InvalidOperation, DivisionByZero, MemoryError, RecursionError):
        raise Invalid("expression may hold numbers, + - * / and brackets") from None
    return str(round(value, 2))


def _arithmetic(node: ast.expr) -> Decimal:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Decimal(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_arithmetic(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_arithmetic(node.left), _arithmetic(node.right))
    raise ValueError(type(node).__name__)


_OPERATORS: dict[type[ast.operator], Callable[[Decimal, Decimal], Decimal]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def _cancel(_: Catalogue, state: State, order_id: str, reason: str) -> str:
    order = _order(state, order_id, "pending")
    paid = [dict(payment) for payment in order["payment_history"]]
    for payment in paid:
        _credit(_method(state, order, payment["payment_method_id"]), payment["amount"])
    order["payment_history"] += [{**payment, "transaction_type": "refund"} for payment in paid]
    order["status"], order["cancel_reason"] = "cancelled", reason
    return f"{order_id} is cancelled"


def _order_address(_: Catalogue, state: State, /, order_id: str, **address: str) -> str:
    _order(state, order_id, "pending")["address"] = address
    return f"{order_id} has a new address"


def _user_address(_: Catalogue, state: State, /, user_id: str, **address: str) -> str:
    _user(state, user_id)["address"] = address
    return f"{user_id} has a new address"


def _order_payment(_: Catalogue, state: State, order_id: str, payment_method_id: str) -> str:
    order = _order(state, order_id, "pending")
    new = _method(state, order, payment_method_id)
    first = order["payment_history"][0]
    if len(order["payment_history"]) != 1:
        raise Denied("the payment was changed before")
    if first["payment_method_id"] == payment_method_id:
        raise Denied("the new payment method must be another one")
    amount = first["amount"]
    _cover(new, amount)
    _credit(new, -amount)
    _credit(_method(state, order, first["payment_method_id"]), amount)
    order["payment_history"] += [
        {"transaction_type": "payment", "amount": amount, "payment_method_id": payment_method_id},
        {"transaction_type": "refund", "amount": amount, "payment_method_id": first["payment_method_id"]},
    ]
    return f"{order_id} is paid with {payment_method_id}"


def _difference(
    catalogue: Catalogue, state: State, order: dict, item_ids: list[str], new_item_ids: list[str], method_id: str
) -> tuple[list, list, dict, float]:
    items = _items(order, item_ids)
    variants = _variants(catalogue, items, new_item_ids)
    method = _method(state, order, method_id)
    pairs = zip(items, variants, strict=True)
    difference = round(sum(variant["price"] - item["price"] for item, variant in pairs), 2)
    _cover(method, difference)
    return items, variants, method, difference


def _order_items(
    catalogue: Catalogue, state: State, order_id: str, item_ids: list[str], new_item_ids: list[str],
    payment_method_id: str,
) -> str:  # fmt: skip
    order = _order(state, order_id, "pending")
    found = _difference(catalogue, state, order, item_ids, new_item_ids, payment_method_id)
    items, variants, method, difference = found
    for item, variant in zip(items, variants, strict=True):
        item.update(item_id=variant["item_id"], price=variant["price"], options=variant["options"])
    _credit(method, -difference)
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"] += [
        {"transaction_type": kind, "amount": abs(difference), "payment_method_id": payment_method_id}
    ]
    order["status"] = "pending (items modified)"
    return f"{order_id} has its items modified; price difference {difference}"


def _exchange(
    catalogue: Catalogue, state: State, order_id: str, item_ids: list[str], new_item_ids: list[str],
    payment_method_id: str,
) -> str:  # fmt: skip
    order = _order(state, order_id, "delivered")
    *_, difference = _difference(catalogue, state, order, item_ids, new_item_ids, payment_method_id)
    order.update(
        status="exchange requested",
        exchange_items=sorted(item_ids),
        exchange_new_items=sorted(new_item_ids),
        exchange_payment_method_id=payment_method_id,
        exchange_price_difference=difference,
    )
    return f"{order_id} is to be exchanged; price difference {difference}"


def _return(_: Catalogue, state: State, order_id: str, item_ids: list[str], payment_method_id: str) -> str:
    order = _order(state, order_id, "delivered")
    _items(order, item_ids)
    method = _method(state, order, payment_method_id)
    if method["source"] != "gift_card" and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        raise Denied("the refund must go to the original payment method or to a gift card")
    order.update(status="return requested", return_items=sorted(item_ids), return_payment_method_id=payment_method_id)
    return f"{order_id} is to be returned"


def _finish(_: Catalogue, state: State, answer: str = "") -> str:
    state["finished"], state["answer"] = True, answer
    return "finished"


def _transfer(_: Catalogue, state: State, summary: str) -> str:
    state["finished"] = True
    return "transferred"


_RUN: dict[str, Callable[..., str]] = {
    "find_user_id_by_email": _find_by_email,
    "find_user_id_by_name_zip": _find_by_name_zip,
    "get_user_details": _user_details,
    "get_order_details": _order_details,
    "get_product_details": _product_details,
    "list_all_product_types": _product_types,
    "calculate": _calculate,
    "cancel_pending_order": _cancel,
    "modify_pending_order_address": _order_address,
    "modify_pending_order_items": _order_items,
    "modify_pending_order_payment": _order_payment,
    "modify_user_address": _user_address,
    "return_delivered_order_items": _return,
    "exchange_delivered_order_items": _exchange,
    TRANSFER: _transfer,
    "finish": _finish,
}
