"""The shapes of draft heads, and the tensors a head of each shape consists of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from eyas.errors import InvalidInputError

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Accepted values of ``hidden_act``; "swish" is another name of "silu"."""


@dataclass(frozen=True)
class HeadConfig(ABC):
    """What fixes the arithmetic of any draft head; field names are those of a Llama ``config.json``.

    Attributes:
        hidden_size: H, that of the target.
        intermediate_size: width of the gated MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads; divides ``num_attention_heads``.
        head_dim: size of one attention head, even; need not be ``hidden_size / num_attention_heads``.
        vocab_size: V, that of the target.
        num_layers: decoder layers.
        rms_norm_eps: added to the mean square under the root.
        rope_theta: base of the rotary frequencies; official heads use 10000 whatever their target uses.
        rope_scaling: how the frequencies are stretched, as in ``config.json`` (see ``eyas.heads.rope``).
        max_position_embeddings: positions the head was made for.
        qkv_bias: the query, key and value projections have biases (Qwen2).
        draft_vocab_size: tokens that are scored, or None for all of them.
        hidden_act: activation of the MLP's gate, one of ``ACTIVATIONS``.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    qkv_bias: bool = False
    draft_vocab_size: int | None = None
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        for name in (*sizes, "vocab_size", "num_layers", "max_position_embeddings"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"{name} of a draft head must be a whole number >= 1, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidInputError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise InvalidInputError(f"head_dim must be even, rotary embedding turns pairs; got {self.head_dim}")
        if self.hidden_act not in ACTIVATIONS:
            raise InvalidInputError(f"hidden_act {self.hidden_act!r} is unknown; known: {', '.join(ACTIVATIONS)}")
        if not self.rope_theta > 0 or not self.rms_norm_eps > 0:
            raise InvalidInputError(
                f"rope_theta and rms_norm_eps must be positive, got {self.rope_theta!r} and {self.rms_norm_eps!r}"
            )
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise InvalidInputError(
                f"draft_vocab_size must lie between 1 and vocab_size ({self.vocab_size}), got {self.draft_vocab_size}"
            )

    @property
    def scored_tokens(self) -> int:
        """Tokens among which the head chooses."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @abstractmethod
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the head's own weights in the layout of the published heads of its kind, maps of the
        vocabulary left out."""

    def layer_shapes(self, at: str, input_size: int) -> dict[str, tuple[int, ...]]:
        """A decoder layer's projections and the norm before its MLP, under names that begin with ``at``.

        Args:
            input_size: what queries, keys and values read.
        """
        hidden, mlp = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            shapes[f"{at}self_attn.{name}.weight"] = (rows, input_size)
            if self.qkv_bias:
                shapes[f"{at}self_attn.{name}.bias"] = (rows,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "mlp.gate_proj.weight"] = (mlp, hidden)
        shapes[at + "mlp.up_proj.weight"] = (mlp, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, mlp)
        return shapes

    def later_layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The layers after the first, which are a Llama's own, input norm and all, whatever the kind of head."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(1, self.num_layers):
            at = f"layers.{layer}."
            shapes[at + "input_layernorm.weight"] = (self.hidden_size,)
            shapes |= self.layer_shapes(at, self.hidden_size)
        return shapes


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """The shape of an EAGLE-1/2 head: 1 layer as published; layers after the first have an input norm.

    Attributes:
        fc_bias: ``fc`` has a bias (``bias`` in ``config.json``).
    """

    fc_bias: bool = False

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """``fc.weight`` [H, 2H] reads the embedding first, the feature second."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
        if self.fc_bias:
            shapes["fc.bias"] = (hidden,)
        return shapes | self.layer_shapes("layers.0.", hidden) | self.later_layer_shapes()


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """The shape of an EAGLE-3 head: 1 layer as published, the first over ``FEATURE_LEVELS`` levels of the target; a
    final norm.

    Attributes:
        target_lm_head: the target's lm_head scores, as for EAGLE-1/2; else the head has one of its own, as published.
    """

    FEATURE_LEVELS: ClassVar[int] = 3

    target_lm_head: bool = False

    @property
    def feature_size(self) -> int:
        """Width of the features that ``fc`` reads."""
        return self.FEATURE_LEVELS * self.hidden_size

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Queries, keys and values of the first layer read the embedding first, the hidden state second."""
        hidden = self.hidden_size
        shapes = {
            "fc.weight": (hidden, self.feature_size),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            **self.layer_shapes("midlayer.", 2 * hidden),
            **self.later_layer_shapes(),
            "norm.weight": (hidden,),
        }
        if not self.target_lm_head:
            shapes["lm_head.weight"] = (self.scored_tokens, hidden)
        return shapes
