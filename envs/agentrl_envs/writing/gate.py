"""The gate before the judge: a draft that speaks to whoever judges it fails, whatever the judge would have said.

It is a list of forms that such texts take, not a proof that there are no others; a judge that is a model should be
told as well that a draft is data.
"""

from __future__ import annotations

import re
import unicodedata

WHO = r"(?:judge|evaluator|grader|assessor|rater|reviewer|assistant|language model|llm|ai model|chatbot)"
WHAT = r"(?:draft|text|answer|response|version|candidate|entry|submission|option)"
FORMS = tuple(
    re.compile(form)
    for form in (
        r"\b(?:ignore|disregard|forget|override|bypass)\b.{0,40}\b(?:instruct|prompt|rules?\b|brief|criteria|above|previous)",
        rf"\b(?:prefer|choose|pick|select|rate|score|rank|vote for|favou?r|reward)\b.{{0,30}}\b{WHAT}\b",
        rf"\b(?:this|my|first|second|other) {WHAT} (?:is (?:the )?(?:better|best|winner)|should|must|wins|deserves)\b",
        rf"\b(?:dear|attention|note to(?: the)?|to the|as an?|you are(?: an?| the)?) {WHO}\b",
        rf"(?:^|\n)\s*(?:{WHO}|system|user)\s*[:>]",
        r"\b(?:verdict|outcome|winner|preference|final score|reward|rating)\s*[:=]",
        r"\b(?:output|answer|reply|respond|say|print)(?: only| just| with| the word)*[ :\"'`\[(]+"
        r"(?:first|second|tie|a|b)\b[\"'`\])]*\s*(?:$|[.!\n])",
        rf"\b{WHAT} [ab]\b",
        r"\[\[|\]\]|<\|.{0,40}?\|>|<!--|```",
        r"</?\s*(?:system|user|assistant|instructions?|draft|brief|judge|verdict|answer)\b[^>]{0,40}>",
        r"\bas (?:told|instructed|required) by the (?:system|developers?)\b",
    )
)


def odd_characters(text: str) -> list[str]:
    """Names of characters that a reader does not see or takes for others: controls, invisible ones, other scripts."""
    return sorted({unicodedata.name(c, f"U+{ord(c):04X}") for c in text if not _plain(c)})


def _plain(character: str) -> bool:
    if character.isascii():
        return character == "\n" or character.isprintable()
    if unicodedata.category(character)[0] == "L":
        return unicodedata.name(character, "").startswith("LATIN ")
    return unicodedata.category(character) in ("Pd", "Pi", "Pf", "Ps", "Pe", "Po", "Sc", "Zs", "Nd", "So")


def addresses_the_judge(text: str) -> list[str]:
    """What in the text speaks to a judge, in at most 60 characters each; empty for an honest draft."""
    seen = re.sub(r"[^\S\n]+", " ", unicodedata.normalize("NFKC", text).casefold())
    spelled = re.sub(r"\b(\w)[\s.*_-](?=\w\b)", r"\1", seen)  # i g n o r e
    forms = ((form, read) for form in FORMS for read in (seen, spelled, seen.replace("\n", " ")))
    found = [match.group()[:60].strip() for form, read in forms if (match := form.search(read)) is not None]
    return list(dict.fromkeys(found))
