"""What a decoder is, as one frozen record: shapes, constants and the parts a family has or lacks."""

from __future__ import annotations

from dataclasses import dataclass

_ACTIVATIONS = ("silu", "gelu_tanh")
_SCALINGS = ("linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to a longer context than the one first trained on; see `rotary.frequencies`.

    `linear`: Chen et al. 2023, arXiv:2306.15595. `yarn`: Peng et al. 2023, arXiv:2309.00071. `llama3`: Grattafiori
    et al. 2024, arXiv:2407.21783.
    """

    kind: str  # linear | llama3 | yarn
    factor: float
    original_context: int = 8192  # positions before the stretch; llama3 and yarn
    low_frequency: float = 1.0  # llama3: turns over the original context below which a channel is stretched in full
    high_frequency: float = 4.0  # llama3: turns above which it is left alone
    beta_fast: float = 32.0  # yarn: turns above which a channel is left alone
    beta_slow: float = 1.0  # yarn: turns below which it is stretched in full
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: whole channels as the ends of the ramp

    def __post_init__(self) -> None:
        if self.kind not in _SCALINGS:
            raise ValueError(f"RopeScaling: kind={self.kind!r}, expected one of {', '.join(_SCALINGS)}")
        if not self.factor > 0:
            raise ValueError(f"RopeScaling: factor={self.factor} must be above 0")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shapes and constants of one model. Raises `ValueError` naming the fields that do not fit together."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int  # of the MLP, or of one expert
    context: int = 2048  # positions the model was made for
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = True  # the head is the embedding
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    model_type: str = "llama"  # the family, in the word of config.json
    activation: str = "silu"  # silu | gelu_tanh
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False  # RMSNorm of every query and key head
    norm_offset: bool = False  # RMSNorm multiplies by 1 + scale
    post_norms: bool = False  # attention and MLP are normalised again before they join the residual stream
    embedding_scale: bool = False  # embeddings times sqrt(width)
    attention_scale: float | None = None  # of the scores; None: head_width ** -0.5
    attention_soft_cap: float | None = None  # bounds the scores: cap * tanh(score / cap)
    final_soft_cap: float | None = None  # bounds the logits; whoever forms logits applies it
    rope_scaling: RopeScaling | None = None
    window: int | None = None  # positions that a token of a sliding-window layer reads back, itself included
    window_layers: tuple[bool, ...] = ()  # which layers slide
    window_rope_theta: float | None = None  # rotary base of sliding layers, unscaled; None: as the others
    experts: int = 0  # 0: one dense MLP a layer
    experts_per_token: int = 0
    normalize_experts: bool = True  # the chosen experts' probabilities are divided by their sum
    expert_dispatch: str | None = None  # dense | ragged; None: ragged on a TPU, else dense. See `experts.mixture`

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"DecoderConfig: kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_width % 2:
            raise ValueError(
                f"DecoderConfig: head_width={self.head_width} must be even, rotary positions pair channels"
            )
        if self.activation not in _ACTIVATIONS:
            expected = ", ".join(_ACTIVATIONS)
            raise ValueError(f"DecoderConfig: activation={self.activation!r}, expected one of {expected}")
        if (self.window is None) != (not self.window_layers):
            raise ValueError(f"DecoderConfig: window={self.window} and window_layers={self.window_layers} go together")
        if self.window_layers and len(self.window_layers) != self.layers:
            raise ValueError(f"DecoderConfig: window_layers={self.window_layers} must name layers={self.layers} layers")
        if self.window is not None and self.window < 1:
            raise ValueError(f"DecoderConfig: window={self.window} must be at least 1, a token reads itself")
        if not 0 <= self.experts_per_token <= self.experts or bool(self.experts) != bool(self.experts_per_token):
            raise ValueError(
                f"DecoderConfig: experts_per_token={self.experts_per_token} must be 1 to experts={self.experts}"
            )
        if self.expert_dispatch not in (None, "dense", "ragged"):
            raise ValueError(f"DecoderConfig: expert_dispatch={self.expert_dispatch!r}, expected dense, ragged or None")

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_width**-0.5 if self.attention_scale is None else self.attention_scale

    def window_of(self, layer: int) -> int | None:
        """Positions that a token of this layer reads back, itself included; None: all."""
        return self.window if self.window_layers and self.window_layers[layer] else None


Axes = tuple[str | None, ...]


def layer_parameters(config: DecoderConfig) -> dict[str, tuple[tuple[int, ...], Axes]]:
    """Shape and logical axes of each parameter of one layer."""
    d, h, j, c, f = config.width, config.heads, config.kv_heads, config.head_width, config.mlp_width
    found: dict[str, tuple[tuple[int, ...], Axes]] = {
        "attention_norm": ((d,), (None,)),
        "query": ((d, h, c), ("width", "heads", None)),
        "key": ((d, j, c), ("width", "kv_heads", None)),
        "value": ((d, j, c), ("width", "kv_heads", None)),
        "out": ((h, c, d), ("heads", None, "width")),
        "mlp_norm": ((d,), (None,)),
    }
    if config.qkv_bias:
        found["query_bias"] = ((h, c), ("heads", None))
        found["key_bias"] = found["value_bias"] = ((j, c), ("kv_heads", None))
    if config.out_bias:
        found["out_bias"] = ((d,), (None,))
    if config.qk_norm:
        found["query_norm"] = found["key_norm"] = ((c,), (None,))
    if config.post_norms:
        found["attention_post_norm"] = found["mlp_post_norm"] = ((d,), (None,))
    if not config.experts:
        mlp = {"gate": ((d, f), ("width", "mlp")), "up": ((d, f), ("width", "mlp")), "down": ((f, d), ("mlp", "width"))}
        return found | mlp
    e = config.experts
    wide = ((e, d, f), ("experts", "width", "mlp"))
    narrow = ((e, f, d), ("experts", "mlp", "width"))
    return found | {"router": ((d, e), ("width", None)), "gate": wide, "up": wide, "down": narrow}


def top_parameters(config: DecoderConfig) -> dict[str, tuple[tuple[int, ...], Axes]]:
    """Shape and logical axes of each parameter outside the layers."""
    vocab = ((config.vocab_size, config.width), ("vocab", "width"))
    found: dict[str, tuple[tuple[int, ...], Axes]] = {"embedding": vocab, "final_norm": ((config.width,), (None,))}
    return found if config.tied else {**found, "unembedding": vocab}
