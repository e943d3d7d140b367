"""Length-prefixed frames of byte fields over a descriptor: whatever a command prints, a frame ends where it says.

The reader bounds what it takes, since the writer may have been taken over.
"""

import struct

LARGEST = 1 << 31
_WORD = struct.Struct("<I")


class Broken(Exception):
    """The other side is gone, or does not speak the protocol."""


def unpack(body):
    """The fields of a body; Broken where they do not fill it exactly."""
    at, fields = 4, []
    if len(body) < 4:
        raise Broken("a frame without a field count")
    for _ in range(min(_WORD.unpack_from(body)[0], len(body) // 4)):
        if at + 4 > len(body):
            raise Broken("a frame whose fields run over its end")
        size = _WORD.unpack_from(body, at)[0]
        at += 4
        fields.append(body[at : at + size])
        at += size
    if at != len(body) or len(fields) != _WORD.unpack_from(body)[0]:
        raise Broken("a frame whose fields do not fill it")
    return fields


def pieces(*parts):
    """A whole frame in pieces, to be written in turn. A part is bytes, str, int, or a list of bytes that make one."""
    out, total = [b"", _WORD.pack(len(parts))], 4
    for part in parts:
        if not isinstance(part, bytes | list):
            part = str(part).encode("utf-8", "surrogateescape")
        inner = part if isinstance(part, list) else [part]
        size = sum(map(len, inner))
        out.append(_WORD.pack(size))
        out += inner
        total += 4 + size
    out[0] = _WORD.pack(total)
    return out


def frame(*parts):
    """A whole frame, ready to be written."""
    return b"".join(pieces(*parts))


def size_of(prefix, largest=LARGEST):
    """The body's size that a prefix of four bytes announces."""
    size = _WORD.unpack(prefix)[0]
    if size > largest:
        raise Broken(f"a frame of {size} bytes, at most {largest}")
    return size
