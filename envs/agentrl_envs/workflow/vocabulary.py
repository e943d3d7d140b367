"""Texts that together show every word of the environment, for a tokenizer built from words."""

from __future__ import annotations

import re

from . import demonstrations, dry, env, tools, wording
from .options import Options
from .policy import system_text
from .tenant import FIRST_NAMES, LAST_NAMES, METHOD_KINDS, NOUNS, STATUSES


def vocabulary(options: Options) -> tuple[str, ...]:
    """Sentences of all splits, tools and their arguments, observations, statuses, products, the numbers 0 to 99."""
    shown = [
        " ".join((row.real if options.handles == "real" else row.name, "=", *(
            tools.argument(options.handles, row.name, role) for role in row.roles
        )))
        for row in tools.TABLE.values()
    ]  # fmt: skip
    observations = [
        "order customer product status payment address method methods orders in stock sold out",
        "cancelled returned exchanged finished", "no error unknown tool arguments : result : done or refused",
        env.OVER, env.NO_CALL, env.UNREADABLE, *demonstrations.CHATTER, *tools.RESULTS,
    ]  # fmt: skip
    texts = [re.sub(r"{\w+}", " ", template) for template in wording.templates(options.wording)]
    texts += [*shown, *observations, " ".join(NOUNS), " ".join(STATUSES), " ".join(map(str, range(100)))]
    if options.wording == "free":
        texts += [" ".join(FIRST_NAMES), *(" ".join(names) for names in LAST_NAMES.values())]
    if options.handles == "real":
        texts += [" ".join(METHOD_KINDS), "#W addr"]
    if options.dry_run:
        texts += [f"{dry.ARGUMENT} = true false would", dry.FIRST, dry.KIND]
    system = system_text(options.system, options.policies)
    return tuple([*texts, system] if system else texts)
