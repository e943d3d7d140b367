"""Small pages of our own, made from a seed. They hold no reward: what was submitted is compared with the request."""

from __future__ import annotations

import html
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KINDS = ("inbox", "login", "profile", "table", "topics")
UNSEEN = ("booking", "wizard")

# No name, topic or product of one split is in another.
PEOPLE = {
    "train": ("Ada", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas"),
    "validation": ("Kenji", "Lucia", "Marek", "Nadia", "Oskar", "Paula"),
    "heldout": ("Quentin", "Rosa", "Stefan", "Tamar", "Ulrich", "Vera"),
}
THINGS = {
    "train": ("apples", "bread", "candles", "drums", "eggs", "flutes", "garlic", "honey", "ink", "jackets"),
    "validation": ("kettles", "lamps", "mirrors", "needles", "oranges", "pencils"),
    "heldout": ("quilts", "ropes", "shoes", "tables", "umbrellas", "violins"),
}
PLACES = {
    "train": ("Aarhus", "Bergen", "Cork", "Delft", "Evora", "Funchal", "Ghent", "Huesca"),
    "validation": ("Izmir", "Jena", "Krakow", "Lugano", "Malmo"),
    "heldout": ("Nantes", "Oulu", "Porto", "Riga", "Split"),
}
SCRIPT = """
const fields = () => Object.fromEntries([...document.querySelectorAll('[name]')]
  .filter((e) => e.type !== 'radio' || e.checked)
  .map((e) => [e.name, e.type === 'checkbox' ? e.checked : e.value]));
const submit = (extra) => { window.submitted = window.submitted || {...fields(), ...extra}; };
const show = (id) => { for (const e of document.querySelectorAll('section')) e.hidden = e.id !== id; };
"""


@dataclass(frozen=True, slots=True)
class Made:
    """A page, what it asks for, what must be submitted, and the reference solution as steps on names."""

    request: str
    body: str
    goal: dict[str, Any]
    steps: list[tuple[str, ...]]  # ("type", name, text), ("select", name, option), ("click", role, name)


@dataclass(frozen=True, slots=True)
class Draw:
    """The words of one split, drawn without repetition."""

    rng: random.Random
    split: str

    def of(self, words: dict[str, tuple[str, ...]], count: int) -> list[str]:
        return self.rng.sample(words[self.split], count)

    def code(self) -> str:
        mark = {"train": "t", "validation": "v", "heldout": "h"}[self.split]
        return mark + "".join(self.rng.choices("bcdfghjkmnpqrstvwxz23456789", k=5))


def make(kind: str, split: str, seed: int) -> Made:
    return MAKERS[kind](Draw(random.Random(f"{kind}/{split}/{seed}"), split))


def document(made: Made) -> str:
    return (
        f"<!DOCTYPE html><html><head><meta charset='utf-8'><title>Page</title><script>{SCRIPT}</script></head>"
        f"<body><p id='query'>{html.escape(made.request)}</p>{made.body}</body></html>"
    )


def _field(label: str, name: str, kind: str = "text") -> str:
    return f"<p><label>{label} <input type='{kind}' name='{name}' autocomplete='off'></label></p>"


def _choice(label: str, name: str, options: list[str]) -> str:
    inner = "".join(f"<option>{option}</option>" for option in ["", *options])
    return f"<p><label>{label} <select name='{name}'>{inner}</select></label></p>"


def _button(text: str, action: str) -> str:
    return f'<button onclick="{action}">{text}</button>'


def _login(draw: Draw) -> Made:
    (name,), code = draw.of(PEOPLE, 1), draw.code()
    body = _field("User", "user") + _field("Password", "password", "password")
    body += f"<p>{_button('Forgot it', 'submit({button: 1})')} {_button('Log in', 'submit()')}</p>"
    return Made(
        f'Log in as user "{name}" with the password "{code}".',
        body,
        {"user": name, "password": code},
        [("type", "User", name), ("type", "Password", code), ("click", "button", "Log in")],
    )


def _profile(draw: Draw) -> Made:
    (name,), places, code = draw.of(PEOPLE, 1), draw.of(PLACES, 4), draw.code()
    place = draw.rng.choice(places)
    body = _field("Name", "name") + _field("Nickname", "nickname") + _choice("City", "city", places)
    body += _button("Save", "submit()") + _button("Delete profile", "submit({deleted: 1})")
    return Made(
        f'Save the profile of {name}, nickname "{code}", who lives in {place}.',
        body,
        {"name": name, "nickname": code, "city": place},
        [("type", "Name", name), ("type", "Nickname", code), ("select", "City", place), ("click", "button", "Save")],
    )


def _topics(draw: Draw) -> Made:
    things, code = draw.of(THINGS, 6), draw.code()
    wanted = sorted(draw.rng.sample(things, draw.rng.randint(1, 3)))
    boxes = "".join(f"<p><label><input type='checkbox' name='{thing}'> {thing}</label></p>" for thing in things)
    body = f"{boxes}{_field('Order number', 'number')}{_button('Order', 'submit()')}"
    return Made(
        f'Order {" and ".join(wanted)}, nothing else, under the order number "{code}".',
        body,
        {**{thing: thing in wanted for thing in things}, "number": code},
        [*(("click", "checkbox", thing) for thing in wanted), ("type", "Order number", code),
         ("click", "button", "Order")],
    )  # fmt: skip


def _table(draw: Draw) -> Made:
    names, places = draw.of(PEOPLE, 4), draw.of(PLACES, 4)
    codes = [draw.code() for _ in names]
    asked = draw.rng.randrange(4)
    rows = "".join(
        f"<tr><td>{name}</td><td>{place}</td><td>{code}</td></tr>"
        for name, place, code in zip(names, places, codes, strict=True)
    )
    body = f"<table><tr><th>Name</th><th>City</th><th>Code</th></tr>{rows}</table>"
    body += _field("Code", "code") + _button("Send", "submit()")
    return Made(
        f"Send the code of the person who lives in {places[asked]}.",
        body,
        {"code": codes[asked]},
        [("type", "Code", codes[asked]), ("click", "button", "Send")],
    )


def _inbox(draw: Draw) -> Made:
    names, things = draw.of(PEOPLE, 4), draw.of(THINGS, 4)
    asked = draw.rng.randrange(4)
    answer = draw.code()
    rows = "".join(f'<p><a href="#" onclick="show(\'m{i}\')">Letter from {n}</a></p>' for i, n in enumerate(names))
    letters = "".join(
        f"<section id='m{i}' hidden><h2>{name} about {thing}</h2>"
        f"<p><label>Answer <input name='answer{i}' autocomplete='off'></label></p>"
        f"{_button('Delete', f'submit({{deleted: {i}}})')}{_button('Send', f'submit({{sent: {i}}})')}</section>"
        for i, (name, thing) in enumerate(zip(names, things, strict=True))
    )
    return Made(
        f'Open the letter from {names[asked]} and send the answer "{answer}".',
        rows + letters,
        {**{f"answer{i}": answer if i == asked else "" for i in range(4)}, "sent": asked},
        [("click", "link", f"Letter from {names[asked]}"), ("type", "Answer", answer), ("click", "button", "Send")],
    )


def _radios(legend: str, name: str, options: list[str]) -> str:
    rows = "".join(f"<p><label><input type='radio' name='{name}' value='{o}'> {o}</label></p>" for o in options)
    return f"<h3>{legend}</h3>{rows}"


def _booking(draw: Draw) -> Made:
    (name,), places, code = draw.of(PEOPLE, 1), draw.of(PLACES, 4), draw.code()
    start, end = draw.rng.sample(places, 2)
    body = _choice("From", "start", places) + _radios("To", "end", places) + _field("Passenger", "name")
    body += _field("Voucher", "voucher") + _button("Book", "submit()")
    return Made(
        f'Book a seat from {start} to {end} for {name} with the voucher "{code}".',
        body,
        {"start": start, "end": end, "name": name, "voucher": code},
        [("select", "From", start), ("click", "radio", end), ("type", "Passenger", name), ("type", "Voucher", code),
         ("click", "button", "Book")],
    )  # fmt: skip


def _wizard(draw: Draw) -> Made:
    (name,), things, code = draw.of(PEOPLE, 1), draw.of(THINGS, 4), draw.code()
    thing = draw.rng.choice(things)
    body = (
        f"<section id='one'>{_field('Name', 'name')}{_button('Next', chr(39).join(('show(', 'two', ')')))}</section>"
        f"<section id='two' hidden>{_radios('Article', 'thing', things)}"
        f"{_button('Back', chr(39).join(('show(', 'one', ')')))}"
        f"{_button('Next', chr(39).join(('show(', 'three', ')')))}</section>"
        f"<section id='three' hidden>{_field('Code', 'code')}{_button('Confirm', 'submit()')}</section>"
    )
    return Made(
        f'Order {thing} for {name} and confirm with the code "{code}".',
        body,
        {"name": name, "thing": thing, "code": code},
        [("type", "Name", name), ("click", "button", "Next"), ("click", "radio", thing), ("click", "button", "Next"),
         ("type", "Code", code), ("click", "button", "Confirm")],
    )  # fmt: skip


MAKERS: dict[str, Callable[[Draw], Made]] = {
    "inbox": _inbox,
    "login": _login,
    "profile": _profile,
    "table": _table,
    "topics": _topics,
    "booking": _booking,
    "wizard": _wizard,
}
