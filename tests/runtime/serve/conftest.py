"""A tiny random policy behind a real socket, and a sampler that says what it is told to."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl_jax.models import llama
from agentrl_jax.recipes.serve import EngineSize, Served, open_service
from agentrl_jax.rollout.calls import JSON
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.sampling import Partial, Sample
from agentrl_jax.runtime import pretrained

pytest.importorskip("uvicorn", reason="needs the server's libraries: pip install -e '.[serve]'")
from agentrl_jax.runtime.serve.chat import Chat
from agentrl_jax.runtime.serve.pump import Pump
from agentrl_jax.runtime.serve.server import beside
from agentrl_jax.runtime.serve.service import Service


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    """Every byte is a token, so that a character may come in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in TINY.controls])
    return ChatRenderer(tokenizer, TINY, JSON)


@pytest.fixture(scope="session")
def served(renderer) -> Served:
    config = llama.LlamaConfig(
        vocab_size=renderer.vocab_size, width=32, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=64, context=256
    )
    chat = Chat(renderer=renderer, vocab_size=config.vocab_size)
    return Served(name="tiny", model=config, params=llama.init(config, jax.random.key(0)), chat=chat)


@pytest.fixture(scope="session")
def checkpoint(served, tmp_path_factory):
    """The same policy with other params, as a directory."""
    path = tmp_path_factory.mktemp("checkpoint")
    params = jax.tree.map(lambda x: x * 1.3, served.params)
    pretrained.save(path, served.model, params, served.chat.renderer.tokenizer)
    return path


@pytest.fixture(scope="session")
def service(served) -> Service:
    return open_service(served, EngineSize(slots=4, context=160, bank=2, prefill_chunk=16, decode_steps=4, seed=7))


@pytest.fixture(scope="session")
def url(service):
    with beside(service) as url:
        yield url


class Scripted:
    """A `LiveSampler` whose every turn is `script(request)`: ids that it emits `step` at a time, or an exception."""

    def __init__(self, script, *, slots=2, context=4096, step=2, hold=lambda: False) -> None:
        self.script, self.slots, self.context, self.step, self.hold = script, slots, context, step, hold
        self.version, self.params = 0, None
        self.turns: dict[int, list] = {}
        self.cancelled: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self.turns)

    def publish(self, params, version) -> None:
        self.params, self.version = params, version

    def submit(self, request) -> None:
        said = self.script(request)
        if isinstance(said, Exception):
            raise said
        self.turns[request.slot] = [tuple(said)[: request.max_tokens], 0, len(said) > request.max_tokens]

    def peek(self, slot) -> Partial:
        ids = self.turns[slot][0][: self.turns[slot][1]]
        return Partial(ids, tuple(-0.5 for _ in ids), tuple(self.version for _ in ids))

    def cancel(self, slot) -> None:
        self.turns.pop(slot, None)
        self.cancelled.append(slot)

    def advance(self) -> list[Sample]:
        found = []
        for slot, turn in list(self.turns.items()):
            turn[1] = min(turn[1] + self.step, len(turn[0]) - self.hold())
            if turn[1] == len(turn[0]):
                partial = self.peek(slot)
                found.append(Sample(slot=slot, stop="length" if turn[2] else "stop", **partial._asdict()))
                del self.turns[slot]
        return found


@pytest.fixture
def say(renderer):
    """`say(script, ...)`: a service whose policy says `script`, a text or a function of the request."""

    def make(script, *, queue=8, **options) -> Service:
        speak = script if callable(script) else lambda _: renderer.turn(script)
        chat = Chat(renderer=renderer, vocab_size=renderer.vocab_size)
        return Service(pump=Pump(Scripted(speak, **options), queue=queue), chat=chat, name="scripted")

    return make


@pytest.fixture(scope="session")
def replace():
    return dataclasses.replace
