"""Byte-level tokenizers with merges and with the control tokens of a model family, built on the spot."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = (
    "system user assistant tool model the answer is a result and so on\n\n you are helpful. look at this\n"
    '{"name": "pay", "arguments": {"order": 12}} {"parameters": {}} think about it. <tool_response>\n</tool_response>\n'
)
SPECIAL = {
    "chatml": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "gemma3": ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
}
MARKUP = {"qwen3": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")}


@functools.cache
def family(name: str, *, normalizer: bool = False) -> Tokenizer:
    """`MARKUP` are added tokens that are not special, as in Qwen3. With `normalizer`, NFKC comes first: full-width
    brackets become the brackets of control tokens."""
    tokenizer = Tokenizer(models.BPE())
    if name == "chatml":  # GPT-2's words, as in SmolLM2
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:  # newlines stand together, as in Llama 3 and Qwen: what ends a header does not depend on what comes next
        words = pre_tokenizers.Split(Regex(r"[\r\n]+| ?\w+|\s|[^\s\w]+"), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizers.NFKC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL[name]])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=normalizer) for t in MARKUP.get(name, ())])
    return tokenizer
