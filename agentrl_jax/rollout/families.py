"""Which renderer speaks for a model directory: its own chat template, or a family's frame by name.

`FAMILIES` are small templates of our own with the frames of model families, for directories that come without one
(base models); they frame turns as the families' own do and leave the rest (dates, default system turns) out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Tool
from agentrl_jax.rollout.calls import JSON, CallFormat
from agentrl_jax.rollout.renderers import FRAMES, ChatRenderer
from agentrl_jax.rollout.template_renderer import History, TemplateRenderer

AUTO = "auto"

_CHATML = """\
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""

# Reasoning is shown from the last user message on; consecutive tool results share one user turn.
_QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\nCall a tool as <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif m.role == 'assistant' and '</think>' in m.content %}
        {%- set answer = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
        {{- answer + '<|im_end|>\\n' }}
    {%- elif not (m.role == 'system' and loop.first and tools) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

_LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and m.role == 'system' and tools %}
        {{- 'Call a function with nothing but {"name": ..., "parameters": {...}}\\n' }}
        {%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '\\n' }}
    {%- endif %}
    {{- (m.content | tojson if m.role == 'tool' else m.content | trim) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# No system role: it is put before the first user message. Users and models take turns.
_GEMMA3 = """\
{{- '<bos>' }}
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if first else messages) %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- (first if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

FAMILIES: Mapping[str, str] = {"qwen3": _QWEN3, "llama3": _LLAMA3, "gemma3": _GEMMA3}
# A token that only one family frames turns with; for a directory without a template.
_TELLTALE = {
    "<|im_start|>": "chatml", "<|start_header_id|>": "llama3", "<start_of_turn>": "gemma3", "<assistant>": "tiny",
}  # fmt: skip


def renderer_for(
    directory: Path,
    tokenizer: Tokenizer,
    frame: str = AUTO,
    calls: CallFormat = JSON,
    tools: Sequence[Tool] = (),
    *,
    history: History = "keep",
    show_tools: bool = False,
    thinking: bool | None = None,
) -> ChatRenderer | TemplateRenderer:
    """The renderer of the model in `directory`.

    `frame="auto"` takes the directory's chat template (chat_template.jinja, or `chat_template` in
    tokenizer_config.json), else the family whose control tokens the tokenizer has; `chatml`, `tiny`, `qwen3`, `llama3`
    and `gemma3` name a frame. `thinking` sets the template's `enable_thinking`; None leaves it to the template.

    Raises `UserError` in one line that names what was not understood.
    """
    template = read_template(directory, with_tools=show_tools) if frame == AUTO else None
    if frame == AUTO and template is None:
        frame = _guess(directory, tokenizer)
    try:
        if frame in FRAMES:
            preamble = calls.describe(tools) if show_tools and tools else None
            return ChatRenderer(tokenizer, FRAMES[frame], calls, tools, preamble=preamble)
        source = template if template is not None else FAMILIES.get(frame)
        if source is None:
            raise ValueError(f"unknown; expected {AUTO!r} or one of {', '.join([*FRAMES, *FAMILIES])}")
        variables = special_tokens(directory)
        if thinking is not None:
            variables["enable_thinking"] = thinking
        return TemplateRenderer(
            tokenizer, source, calls, tools,
            variables=variables, history=history, show_tools=show_tools, stops=_ends(directory, tokenizer, variables),
        )  # fmt: skip
    except ValueError as error:
        hint = "; name another frame, such as 'chatml'" if frame == AUTO else ""
        raise UserError(f"{directory}: frame {frame!r}: {error}{hint}") from error


def own_calls(template: str) -> str:
    """The name of the format in which a chat template tells the model to call, or its family was trained to; else
    `json`. The templates of Llama 3.0 and the first of 3.1 tell of no tools."""
    if "<tool_call>" in template and '"arguments"' in template.replace("\\", ""):
        return "qwen"
    return "llama" if "<|start_header_id|>" in template else "json"


def special_tokens(directory: Path) -> dict[str, Any]:
    """The names that templates know special tokens by (`bos_token`)."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _read_json(directory / name).items():
            content = value.get("content") if isinstance(value, Mapping) else value
            if key.endswith("_token") and isinstance(content, str):
                found[key] = content
    return found


def _ends(directory: Path, tokenizer: Tokenizer, special: Mapping[str, Any]) -> list[str]:
    """The names of what ends a generation: the tokenizer's `eos_token`, and every `eos_token_id` of the model, of which
    there are often several (Llama 3.1: the ends of a text, of a turn and of a call)."""
    found = [special["eos_token"]] if "eos_token" in special else []
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(directory / name).get("eos_token_id")
        names = (
            tokenizer.id_to_token(i) for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and i >= 0
        )
        found += [name for name in names if name is not None]
    return found


def read_template(directory: Path, *, with_tools: bool) -> str | None:
    """The directory's chat template. Where there are several, `tool_use` or `default`."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = _read_json(directory / "tokenizer_config.json").get("chat_template")
    if found is None or isinstance(found, str):
        return found
    try:
        named = {item["name"]: item["template"] for item in found}
    except (TypeError, KeyError):
        raise UserError(
            f"{directory / 'tokenizer_config.json'}: chat_template is neither text nor a list of them"
        ) from None
    name = "tool_use" if with_tools and "tool_use" in named else "default"
    if name not in named:
        raise UserError(f"{directory / 'tokenizer_config.json'}: chat_template has no {name!r}: {', '.join(named)}")
    return named[name]


def _guess(directory: Path, tokenizer: Tokenizer) -> str:
    for token, family in _TELLTALE.items():
        if tokenizer.token_to_id(token) is not None:
            return family
    raise UserError(
        f"{directory}: no chat template (chat_template.jinja, or in tokenizer_config.json), and the tokenizer has none "
        f"of {', '.join(_TELLTALE)}; name the frame: {', '.join([*FRAMES, *FAMILIES])}"
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected an object, got {type(found).__name__}")
    return found
