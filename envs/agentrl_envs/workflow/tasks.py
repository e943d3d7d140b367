"""Tasks: a request, the rows it asks to change, or why it must be refused."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from agentrl_jax.protocol import Task

from . import wording
from .options import LOOKUP, SPLITS, Options
from .policy import POSSIBLE_REASONS
from .schema import Change
from .tenant import Cast, Tenant, build

REFUSED_OF_8 = 3  # 3 of 8 requests must be refused


def tasks(options: Options, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct tasks, the suite's kinds in turn; customers and sentences of one split appear in no other."""
    if split not in SPLITS:
        raise ValueError(f"workflow: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    return tuple(_task(options, split, seed, index) for index in range(count))


def _task(options: Options, split: str, seed: int, index: int) -> Task:
    position = index % len(options.kinds)
    kind = options.kinds[position]
    name = f"{split}-{kind}-{seed}-{index}"
    reason = _reason(options, kind, index // len(options.kinds) + 3 * position + seed)
    tenant_seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    made = build(tenant_seed, split, kind, reason, options.handles)
    rng = random.Random(tenant_seed + 1)
    data = _lookup(rng, split, made.cast) if kind == LOOKUP else _request(rng, options, split, kind, reason, made)
    data.update(tenant=tenant_seed, reason=reason)
    return Task(id=name, split=split, kind=kind, data=data)


def _reason(options: Options, kind: str, turn: int) -> str:
    """Why task number `turn` of its kind must be refused, or "": three of eight are, the reasons in turn."""
    reasons = [name for name in POSSIBLE_REASONS.get(kind, ()) if name in options.policies]
    if not reasons or (turn * 3) % 8 >= REFUSED_OF_8:
        return ""
    return reasons[turn * 3 // 8 % len(reasons)]


def _request(rng: random.Random, options: Options, split: str, kind: str, reason: str, made: Tenant) -> dict[str, Any]:
    cast = made.cast
    intent = kind.removesuffix("_by_product")
    slots = {
        "c": cast.customer, "name": cast.name, "o": cast.order, "p": cast.noun, "n": cast.new_product,
        "a": cast.address, "m": cast.method,
    }  # fmt: skip
    arguments: dict[str, Any] = {"order": cast.order}
    if intent in ("exchange", "address", "payment"):
        role, handle = {
            "exchange": ("product", cast.new_product),
            "address": ("address", cast.address),
            "payment": ("method", cast.method),
        }[intent]
        arguments[role] = handle
    lookups = _lookups(kind, cast)
    if reason in ("owner", "status"):  # the first lookup already says that it must be refused
        lookups = lookups[:1]
    return {
        "text": wording.request(rng, options.wording, split, kind, slots),
        "customer": cast.customer,
        "tool": intent,
        "arguments": arguments,
        "lookups": lookups,
        "goal": [] if reason else [list(change) for change in _goal(intent, made)],
        "finish": "refused" if reason else "done",
        "evidence": _evidence(reason, cast),
        "relevant": [f"{record} {handle}" for record, handle in lookups],
        "calls": len(lookups) + (1 if reason else 2),
    }


def _lookups(kind: str, cast: Cast) -> list[list[Any]]:
    """What must be read to decide, in the order of the reference solution."""
    intent = kind.removesuffix("_by_product")
    lookups: list[list[Any]] = [["order", cast.order] if kind == intent else ["customer", cast.customer]]
    if intent == "exchange":
        lookups.append(["product", cast.new_product])
    if kind == "payment":
        lookups.append(["customer", cast.customer])
    return lookups


def _goal(intent: str, made: Tenant) -> list[Change]:
    """The rows that the request asks to change, from the tenant as generated (the tools have no say in it)."""
    cast = made.cast
    stock = {row[0]: row[3] for row in made.rows["products"]}
    if intent == "cancel":
        restocked = Change("products", cast.product, "stock", stock[cast.product] + 1)
        return [Change("orders", cast.order, "status", "cancelled"), restocked]
    if intent == "return":
        return [Change("orders", cast.order, "status", "returned")]
    if intent == "exchange":
        return [
            Change("orders", cast.order, "product", cast.new_product),
            Change("orders", cast.order, "status", "exchanged"),
            Change("products", cast.new_product, "stock", stock[cast.new_product] - 1),
        ]
    if intent == "address":
        return [Change("orders", cast.order, "address", cast.address)]
    return [Change("orders", cast.order, "payment", cast.method)]


def _evidence(reason: str, cast: Cast) -> list[str]:
    """The records of which one must have been read before the request may be refused for this reason."""
    order, customer, product = f"order {cast.order}", f"customer {cast.customer}", f"product {cast.new_product}"
    return {"": [], "owner": [order, customer], "status": [order, customer], "method": [customer], "stock": [product]}[
        reason
    ]


def _lookup(rng: random.Random, split: str, cast: Cast) -> dict[str, Any]:
    record, handle = rng.choice(
        (("order", cast.order), ("customer", cast.customer), ("product", cast.product), ("product", cast.new_product))
    )
    return {
        "text": wording.lookup(rng, split, record, handle),
        "customer": cast.customer,
        "tool": "",
        "arguments": {},
        "lookups": [[record, handle]],
        "goal": [],
        "finish": "done",
        "evidence": [f"{record} {handle}"],
        "relevant": [f"{record} {handle}"],
        "calls": 2,
    }
