"""The service's policy: which writes are allowed, as sentences for the agent and as checks for the verifier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .schema import Connection, Handle
from .tenant import NEEDED_STATUS

SENTENCES = {
    "owner": "An order may only be changed for the customer it belongs to.",
    "status": (
        "An order can be cancelled, sent to another address or paid with another method only while its status is "
        "pending. An order can be returned or exchanged only when its status is delivered."
    ),
    "method": "A payment method must be one of the customer's own methods.",
    "stock": "An order can be exchanged only for a product that is in stock.",
}

POSSIBLE_REASONS = {  # why a request of this kind can be forbidden; by product, the customer's own orders are listed
    "cancel": ("owner", "status"),
    "return": ("owner", "status"),
    "exchange": ("owner", "status", "stock"),
    "address": ("owner", "status"),
    "payment": ("owner", "status", "method"),
    "cancel_by_product": ("status",),
    "return_by_product": ("status",),
    "exchange_by_product": ("status", "stock"),
    "address_by_product": ("status",),
    "payment_by_product": ("status", "method"),
}


def forbids(
    connection: Connection,
    tool: str,
    arguments: Mapping[str, Handle],
    customer: Handle,
    policies: Iterable[str],
) -> str | None:
    """The first rule that forbids this write for the requesting `customer` in the present state, or None.

    `tool` is one of the five writing tools, by its short name; the handles in `arguments` exist.
    """
    owner, status = connection.execute(
        "SELECT customer, status FROM orders WHERE id = ?", (arguments["order"],)
    ).fetchone()
    if "owner" in policies and owner != customer:
        return "owner"
    if "status" in policies and status != NEEDED_STATUS[tool]:
        return "status"
    if "method" in policies and tool == "payment":
        query = "SELECT customer FROM payments WHERE id = ?"
        if connection.execute(query, (arguments["method"],)).fetchone()[0] != customer:
            return "method"
    if "stock" in policies and tool == "exchange":
        query = "SELECT stock FROM products WHERE id = ?"
        if connection.execute(query, (arguments["product"],)).fetchone()[0] <= 0:
            return "stock"
    return None


def system_text(system: str, policies: Iterable[str]) -> str:
    """What the system message says: nothing, a reminder in few words, or the whole policy."""
    if system == "none":
        return ""
    if system == "short":
        return "cancel address payment : pending . return exchange : delivered ."
    rules = " ".join(SENTENCES[name] for name in policies)
    return (
        "You are the service agent of a shop. Look up what you need, carry out the customer's request with one "
        "call, and finish with the result done. If the policy forbids the request, change nothing and finish with "
        f"the result refused. {rules}"
    ).strip()
