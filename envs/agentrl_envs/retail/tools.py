"""The retail service's tools as the policy sees them."""

from __future__ import annotations

from typing import Any

from agentrl_jax.protocol import Tool

TRANSFER = "transfer_to_human_agents"
REASONS = ("no longer needed", "ordered by mistake")
ADDRESS = ("address1", "address2", "city", "country", "state", "zip")
WRITES = frozenset(
    {
        "cancel_pending_order", "modify_pending_order_address", "modify_pending_order_items",
        "modify_pending_order_payment", "modify_user_address", "return_delivered_order_items",
        "exchange_delivered_order_items",
    }
)  # fmt: skip


def _tool(
    name: str, description: str, *texts: str, lists: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Tool:
    properties: dict[str, Any] = {key: {"type": "string"} for key in texts}
    properties |= {key: {"type": "array", "items": {"type": "string"}} for key in lists}
    if "reason" in properties:
        properties["reason"]["enum"] = list(REASONS)
    required = [key for key in properties if key not in optional]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name=name, description=description, parameters=schema, writes=name in WRITES)


_SWAP = ("item_ids", "new_item_ids")
TOOLS: tuple[Tool, ...] = (
    _tool("find_user_id_by_email", "Find a user's id by email.", "email"),
    _tool("find_user_id_by_name_zip", "Find a user's id by name and zip code.", "first_name", "last_name", "zip"),
    _tool("get_user_details", "A user's profile, payment methods and orders.", "user_id"),
    _tool("get_order_details", "An order's items, status, address and payments.", "order_id"),
    _tool("get_product_details", "A product's variants: options, price, availability.", "product_id"),
    _tool("list_all_product_types", "All products and their ids."),
    _tool("calculate", "Evaluate an arithmetic expression.", "expression"),
    _tool("cancel_pending_order", "Cancel a pending order.", "order_id", "reason"),
    _tool("modify_pending_order_address", "Change a pending order's address.", "order_id", *ADDRESS),
    _tool("modify_pending_order_items", "Change items of a pending order for other variants of the same products.",
          "order_id", "payment_method_id", lists=_SWAP),
    _tool("modify_pending_order_payment", "Change how a pending order is paid.", "order_id", "payment_method_id"),
    _tool("modify_user_address", "Change a user's default address.", "user_id", *ADDRESS),
    _tool("return_delivered_order_items", "Return items of a delivered order.", "order_id", "payment_method_id",
          lists=("item_ids",)),
    _tool("exchange_delivered_order_items", "Exchange items of a delivered order for other variants.",
          "order_id", "payment_method_id", lists=_SWAP),
    _tool(TRANSFER, "Hand over to a person: only if the request is outside of what the tools can do.", "summary"),
    _tool("finish", "End the conversation, telling the customer what was asked.", "answer", optional=("answer",)),
)  # fmt: skip
BY_NAME = {tool.name: tool for tool in TOOLS}
