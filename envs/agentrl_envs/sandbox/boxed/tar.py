"""A tar in one form only: ustar headers, GNU long names, no times, owner 0. Equal entries give equal bytes.

The standard library's `tarfile` reads what is written here; `unpack` reads what it, git and tar write of files,
directories and links. Written by hand since the library's is slow to load and takes 60 us an entry.
"""

_BLOCK = 512
FILE, LINK, DIRECTORY, FIFO = b"0", b"2", b"5", b"6"
_LONG_NAME, _LONG_LINK = b"L", b"K"


class Malformed(ValueError):
    """Not a tar, or one that holds what a workspace cannot."""


def _padded(data):
    return data + bytes(-len(data) % _BLOCK)


def header(name, kind, mode, size, target=b""):
    """The header of one entry, preceded by those of names that do not fit."""
    long = b""
    for value, mark in ((name, _LONG_NAME), (target, _LONG_LINK)):
        if len(value) > 100:
            long += header(b"././@LongLink", mark, 0o644, len(value) + 1) + _padded(value + b"\0")
    number = b"%011o\0" % size if size < 1 << 33 else b"\x80" + size.to_bytes(11, "big")
    block = b"%s%07o\0%s%s%s%s        %s%s" % (
        name[:100].ljust(100, b"\0"), mode, b"0000000\0" * 2, number, b"0" * 11, b"\0", kind,
        target[:100].ljust(100, b"\0"),
    )  # fmt: skip
    block = (block + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2).ljust(_BLOCK, b"\0")
    return long + block[:148] + b"%06o\0 " % sum(block) + block[156:]


def pack(entries):
    """The tar of (name, kind, mode, data or target) in the order given: sort them for a form that is unique."""
    return b"".join(pieces(entries))


def pieces(entries):
    """The same, not yet joined."""
    out = []
    for name, kind, mode, data in entries:
        if kind == FILE:
            out += [header(name, kind, mode, len(data)), data, bytes(-len(data) % _BLOCK)]
        else:
            out.append(header(name, kind, mode, 0, data if kind == LINK else b""))
    out.append(bytes(2 * _BLOCK))
    return out


def unpack(archive):
    """The entries of a tar, names made relative: (name, kind, mode, data or target). Malformed where it is none."""
    at, long = 0, {}
    while at + _BLOCK <= len(archive):
        block = archive[at : at + _BLOCK]
        if not any(block):
            return
        if sum(block[:148]) + sum(block[156:]) + 256 != _number(block[148:156]):
            raise Malformed(f"not a tar: a header's checksum at byte {at} does not fit")
        size, kind = _number(block[124:136]), block[156:157]
        data = archive[at + _BLOCK : at + _BLOCK + size]
        if len(data) != size:
            raise Malformed("a tar that ends within a file")
        at += _BLOCK + size + -size % _BLOCK
        if kind in (_LONG_NAME, _LONG_LINK):
            long[kind] = data.rstrip(b"\0")
        elif kind == b"x":
            long.update(_pax(data))
        elif kind != b"g":
            yield _entry(block, kind, data, long)
            long = {}
    if at != len(archive) or not at:
        raise Malformed("a tar that ends within a header")


def _entry(block, kind, data, long):
    name, prefix = block[:100].split(b"\0")[0], block[345:500].split(b"\0")[0]
    if prefix and block[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    name = long.get(_LONG_NAME, name)
    target = long.get(_LONG_LINK, block[157:257].split(b"\0")[0])
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name.startswith(b"/") or b".." in parts:
        raise Malformed(f"a tar with a name outside of it: {name!r}")
    kind = FILE if kind in (b"\0", b"7") else kind
    if kind not in (FILE, LINK, DIRECTORY, FIFO):
        raise Malformed(f"a tar with {name!r}, neither a file, a directory, a symbolic link nor a fifo")
    mode = _number(block[100:108]) & 0o777
    return b"/".join(parts), kind, mode, target if kind == LINK else data if kind == FILE else b""


def _number(field):
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise Malformed(f"not a tar: {digits!r} is no number")
    return int(digits or b"0", 8)


def _pax(data):
    found, at = {}, 0
    while at < len(data):
        size = data[at:].split(b" ", 1)[0]
        if not size.isdigit() or not int(size):
            raise Malformed("not a tar: a record without a length")
        key, _, value = data[at : at + int(size)][len(size) + 1 : -1].partition(b"=")
        mark = {b"path": _LONG_NAME, b"linkpath": _LONG_LINK}.get(key)
        if mark:
            found[mark] = value
        at += int(size)
    return found
