"""The words that generated trees are made of; those of one split are in no other."""

from __future__ import annotations

SPLITS = ("train", "validation", "heldout")
FOLDERS = {
    "train": ("reports", "drafts", "media", "notes", "backup", "source", "export", "inbox"),
    "validation": ("ledgers", "sketches", "audio", "memos", "vault", "modules"),
    "heldout": ("invoices", "outlines", "video", "letters", "storage", "scripts", "intake"),
}
STEMS = {
    "train": ("alpha", "summary", "invoice", "plan", "photo", "budget", "index", "contact", "draft", "agenda", "table"),
    "validation": ("beta", "overview", "receipt", "scheme", "picture", "quota", "register", "person"),
    "heldout": ("gamma", "digest", "voucher", "layout", "image", "target", "catalog", "member", "sample"),
}
WORDS = {
    "train": ("error", "ready", "blue", "north", "open", "copper", "seven", "late", "round", "quiet"),
    "validation": ("warning", "closed", "green", "south", "steel", "eleven", "early"),
    "heldout": ("failure", "waiting", "amber", "west", "silver", "twelve", "flat", "loud"),
}
SERVICES = {
    "train": ("crawler", "indexer", "mailer", "watcher"),
    "validation": ("fetcher", "merger", "sender"),
    "heldout": ("scanner", "packer", "poster"),
}
EXTENSIONS = ("txt", "log", "csv", "md", "dat", "cfg")
