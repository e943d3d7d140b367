"""The tokenizer that the fields of a GGUF file describe, with the splitting rule of the model it belongs to."""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from agentrl_jax.errors import UserError

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # token types
_SPACE = "▁"

# How text is cut before merges apply. Llama 3 takes digits in threes, Qwen one by one.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2 = _WORDS % "{1,3}", _WORDS % ""


class Side(NamedTuple):
    """What lies beside tokenizer.json: tokenizer_config.json, generation_config.json, the chat template."""

    tokenizer: dict[str, Any]
    generation: dict[str, Any]
    template: str | None


def tokenizer(fields: dict[str, Any], where: str) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises `UserError` where its model or splitting rule is not known here."""
    model, rule = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    tokens, kinds = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    if not tokens or not kinds or len(tokens) != len(kinds):
        raise UserError(f"{where}: lacks tokenizer.ggml.tokens with their token_type; download the file again")
    if model == "gpt2" and rule in _RULES:
        found = _byte_level(fields, rule, where)
    elif model == "llama":
        found = _sentencepiece(fields, where)
    else:
        raise UserError(
            f"{where}: tokenizer {model!r} with splitting rule {rule!r} is not known here; expected 'gpt2' with one of "
            f"{sorted(_RULES)}, or 'llama'. Use a Hugging Face directory of this model instead, it has tokenizer.json"
        )
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        named = zip(tokens, kinds, strict=True)
        added = [AddedToken(token, special=special, normalized=False) for token, kind in named if kind == wanted]
        (found.add_special_tokens if special else found.add_tokens)(added)
    begin = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token") and begin is not None:
        token, pieces = tokens[begin], [(tokens[begin], int(begin))]
        found.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=pieces
        )
    return found


def side_files(fields: dict[str, Any]) -> Side:
    """Stop ids, the tokens' names and the chat template. A turn ends at eos or, where there is one, at eot."""
    tokens = fields.get("tokenizer.ggml.tokens") or []
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    ids = {name: int(i) for name, i in ids.items() if i is not None and int(i) < len(tokens)}
    stops = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if name in ids))
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if name != "eot"}
    generation = {"bos_token_id": ids["bos"]} if "bos" in ids else {}
    generation |= {"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {}
    general = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return Side({**general, **named}, generation, fields.get("tokenizer.chat_template"))


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# tokenizer.ggml.pre -> how text is split
_RULES = {
    "gpt-2": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
    "llama-bpe": lambda: _split(LLAMA3),
    "qwen2": lambda: _split(QWEN2),
}


def _byte_level(fields: dict[str, Any], rule: str, where: str) -> Tokenizer:
    """BPE over bytes, its merges as listed. Llama 3 keeps a word that is a token whole; Qwen composes characters."""
    if "tokenizer.ggml.merges" not in fields:
        raise UserError(f"{where}: lacks tokenizer.ggml.merges; download the file again")
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama-bpe")
    except Exception as error:  # the library raises plain Exception for a merge of unknown tokens
        raise UserError(f"{where}: tokenizer.ggml.merges: {error}; download the file again") from error
    found: Any = Tokenizer(model)
    if rule == "qwen2":
        found.normalizer = normalizers.NFC()
    found.pre_tokenizer = _RULES[rule]()
    found.decoder = decoders.ByteLevel()
    return found


def _sentencepiece(fields: dict[str, Any], where: str) -> Tokenizer:
    """SentencePiece's BPE: merges by falling score, bytes where no piece fits; spaces are written as U+2581."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    scores = fields.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise UserError(f"{where}: lacks tokenizer.ggml.scores, one a token; download the file again")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    bytes_too = _BYTE in kinds
    model = models.BPE(
        vocab=vocab, merges=_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too
    )
    found: Any = Tokenizer(model)
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    found.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return found


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best piece first."""
    found = [
        (-scores[index], vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, index in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(found)]
