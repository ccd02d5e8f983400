"""The sizes of a transformer, and the parameters and FLOPs that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class CostModel:
    """The FLOPs of a sequence of n tokens, up to a factor: `linear * n` + attention.

    Attention without a window costs `quadratic * n^2`. With a window of w keys, a query sees at
    most w, so it costs `factor * (2 n m - m^2)` with m = min(n, w).

    Attributes:
        windows: (w, factor) of the layers with a window.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()

    def __call__(self, length: int) -> float:
        return self.linear * length + self.attention(length)

    def attention(self, length: int) -> float:
        """The part of attention."""
        total = self.quadratic * length * length
        for window, factor in self.windows:
            # The minimum, also of arrays.
            seen = (length + window - abs(length - window)) // 2
            total += factor * seen * (2 * length - seen)
        return total


@dataclass(frozen=True)
class RecurrentShape:
    """A layer with a state, of a gated delta rule or of Mamba-2, in the place of attention."""

    matrices: int  # entries of its projections
    vectors: int  # weights of the convolution and of heads, which tensor parallelism divides
    norm: int  # weights of the norm that are whole on every tensor-parallel rank
    heads: int  # of values
    width: int  # rows of the input projection
    values: int  # columns of the output projection
    state: int  # entries of the state of a sequence
    products: int  # of each entry of the state, at a token
    corrects: bool  # what a token adds to the state depends on the state

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> RecurrentShape:
        """Make a shape from Megatron's `linear_*` fields."""
        hidden = int(fields["hidden_size"])
        heads = int(fields["linear_num_value_heads"])
        value_dim = int(fields["linear_value_head_dim"])
        key_dim = int(fields["linear_key_head_dim"])
        values = heads * value_dim
        convolved = 2 * int(fields["linear_num_key_heads"]) * key_dim + values
        mamba = "mamba_num_heads" in fields
        # Rates and decays, or time steps.
        width = convolved + values + (1 if mamba else 2) * heads
        vectors = convolved * int(fields["linear_conv_kernel_dim"]) + 2 * heads
        if mamba:
            # Biases of the convolution, D, and the norm.
            vectors += convolved + heads + values
        return cls(
            matrices=hidden * (width + values),
            vectors=vectors,
            norm=0 if mamba else value_dim,
            heads=heads,
            width=width,
            values=values,
            state=values * key_dim,
            # With the key and the query; with the error of a delta rule too.
            products=2 if mamba else 3,
            corrects=not mamba,
        )


@dataclass(frozen=True)
class ModelShape:
    """A decoder with rotary attention over grouped heads, and layers of gated MLPs or experts."""

    layers: int
    hidden: int
    heads: int
    groups: int  # KV heads
    head_dim: int
    ffn: int  # width of a dense MLP
    vocab: int  # without padding
    tied: bool = False  # the LM head is the embedding
    qkv_bias: bool = False
    biases: bool = False  # the other linear layers have biases too, and attention has sinks
    qk_norm: bool = False
    norm_over_heads: bool = False  # one norm for all heads of Q, and one for K's
    sandwich: bool = False  # the outputs of attention and MLP pass norms too, like their inputs
    experts: int = 0
    topk: int = 0  # experts per token
    expert_ffn: int = 0
    shared_ffn: int = 0  # width of the shared expert
    shared_gate: bool = False
    expert_layers: tuple[bool, ...] = ()  # whether each layer has experts; empty: no layer has
    latent: int = 0  # weights of a layer's latent attention (MLA), which replace Q, K, V and output
    output_gate: bool = False  # each query head has a gate, as wide as the head
    recurrent: RecurrentShape | None = None
    recurrent_layers: tuple[bool, ...] = ()  # as `expert_layers`
    gated: bool = True  # MLPs and experts have gates
    # Whether each layer that is one block alone has an MLP; empty: all layers are two blocks.
    mlp_layers: tuple[bool, ...] = ()
    # Of each layer, the number of keys up to its own that a query sees (None: all); empty: all.
    windows: tuple[int | None, ...] = ()
    mtp: bool = False  # a layer like the last one, behind it, is trained to predict further tokens
    normed_values: bool = False  # values pass a norm without weights
    keys_are_values: bool = False  # there is no projection of values
    # (KV heads, head size) of layers without a window, whose keys are their values, if others.
    full_heads: tuple[int, int] | None = None

    @classmethod
    def of_fields(
        cls,
        fields: Mapping[str, Any],
        *,
        vocab: int,
        tied: bool,
        latent: int = 0,
        norm_over_heads: bool = False,
        mlp_layers: tuple[bool, ...] = (),
        windows: tuple[int | None, ...] = (),
        mtp: bool = False,
        sandwich: bool = False,
        normed_values: bool = False,
        full_heads: tuple[int, int] | None = None,
    ) -> ModelShape:
        """Make a shape from keyword arguments of megatron.core's `TransformerConfig`."""
        layers = int(fields["num_layers"])
        experts = int(fields.get("num_moe_experts") or 0)
        every = fields.get("moe_layer_freq", 1)
        recurrent = fields.get("linear_attention_freq") or ()
        has_experts = map(bool, every if isinstance(every, list) else [True] * layers)
        return cls(
            layers=layers,
            hidden=int(fields["hidden_size"]),
            heads=int(fields["num_attention_heads"]),
            groups=int(fields.get("num_query_groups") or fields["num_attention_heads"]),
            head_dim=int(fields["kv_channels"]),
            ffn=int(fields["ffn_hidden_size"]),
            vocab=vocab,
            tied=tied,
            qkv_bias=bool(fields.get("add_qkv_bias")),
            biases=bool(fields.get("add_bias_linear")),
            qk_norm=bool(fields.get("qk_layernorm")),
            experts=experts,
            topk=int(fields.get("moe_router_topk") or 0) if experts else 0,
            expert_ffn=int(fields.get("moe_ffn_hidden_size") or 0),
            shared_ffn=int(fields.get("moe_shared_expert_intermediate_size") or 0),
            shared_gate=bool(fields.get("moe_shared_expert_gate")),
            expert_layers=tuple(has_experts)[:layers] if experts else (),
            latent=latent,
            norm_over_heads=norm_over_heads,
            sandwich=sandwich,
            normed_values=normed_values,
            full_heads=full_heads,
            output_gate=bool(fields.get("attention_output_gate")),
            recurrent=RecurrentShape.of_fields(fields) if recurrent else None,
            recurrent_layers=tuple(map(bool, recurrent)),
            gated=bool(fields.get("gated_linear_unit", True)),
            mlp_layers=mlp_layers,
            windows=windows,
            mtp=mtp,
        )

    def of_layers(self, layers: range) -> ModelShape:
        """Return the shape of some of the layers."""
        here = slice(layers.start, layers.stop)
        return replace(
            self,
            layers=len(layers),
            expert_layers=self.expert_layers[here],
            recurrent_layers=self.recurrent_layers[here],
            mlp_layers=self.mlp_layers[here],
            windows=self.windows[here],
            mtp=self.mtp and layers.stop == self.layers,
        )

    def joined(self, parts: Iterable[ModelShape]) -> ModelShape:
        """Return the shape of the layers of several parts together."""
        known = list(parts)
        return replace(
            self,
            layers=sum(part.layers for part in known),
            expert_layers=sum((part.expert_layers for part in known), ()),
            recurrent_layers=sum((part.recurrent_layers for part in known), ()),
            mlp_layers=sum((part.mlp_layers for part in known), ()),
            windows=sum((part.windows for part in known), ()),
            mtp=any(part.mtp for part in known),
        )

    def layer_kinds(self) -> list[ModelShape]:
        """Return each layer as a shape of one layer, with the heads of this layer."""
        kinds = [self.of_layers(range(layer, layer + 1)) for layer in range(self.layers)]
        return [kind.attentions()[-1][1] for kind in kinds]

    def attentions(self) -> list[tuple[int, ModelShape]]:
        """Return how many layers have attention, by the sizes of heads, and a shape with these."""
        if self.full_heads is None:
            return [(self.attention_layers, self)]
        groups, head_dim = self.full_heads
        full = self.windows.count(None)
        other = replace(
            self, groups=groups, head_dim=head_dim, keys_are_values=True, full_heads=None
        )
        counts = [(self.attention_layers - full, self), (full, other)]
        return [one for one in counts if one[0]]

    @property
    def prediction(self) -> ModelShape | None:
        """The layer for multi-token prediction, as a shape of one layer; None: there is none.

        `joint` is next to it.
        """
        last = range(self.layers - 1, self.layers)
        return replace(self.of_layers(last), mtp=False) if self.mtp else None

    @property
    def joint(self) -> int:
        """The weights of three norms and the projection of that layer, whole on each tensor rank.

        The projection maps a hidden state and an embedding to a hidden state.
        """
        return 3 * self.hidden + 2 * self.hidden * self.hidden

    @property
    def moe_layers(self) -> int:
        """The number of layers that have experts."""
        return sum(self.expert_layers)

    @property
    def dense_layers(self) -> int:
        """The number of layers that have an MLP."""
        return sum(self.mlp_layers) if self.mlp_layers else self.layers - self.moe_layers

    @property
    def states(self) -> int:
        """The number of layers that have a state."""
        return sum(self.recurrent_layers)

    @property
    def attention_layers(self) -> int:
        """The number of layers that have attention."""
        others = self.moe_layers + self.dense_layers if self.mlp_layers else 0
        return self.layers - self.states - others

    @property
    def blocks(self) -> int:
        """The number of norms, residual sums and pairs of collectives of all layers."""
        return self.layers if self.mlp_layers else 2 * self.layers

    @property
    def matrices_of_mlp(self) -> int:
        """The number of an MLP's or an expert's matrices."""
        return 3 if self.gated else 2

    @property
    def qkv_width(self) -> int:
        """The number of columns of the QKV projection, output gates included."""
        projected = 2 - self.keys_are_values
        return (self.heads * (1 + self.output_gate) + projected * self.groups) * self.head_dim

    @property
    def attention_matrices(self) -> int:
        """The number of entries of one layer's attention projections."""
        return self.latent or self.hidden * (self.qkv_width + self.heads * self.head_dim)

    @property
    def attention(self) -> int:
        """The number of attention weights of one layer that tensor parallelism divides."""
        norms = (self.heads + self.groups) * self.head_dim * self.norm_over_heads
        biases = self.qkv_width * self.qkv_bias + self.heads * self.biases
        return self.attention_matrices + biases + norms

    @property
    def mixers(self) -> int:
        """The weights of all layers' attention or delta rule that tensor parallelism divides."""
        total = sum(count * shape.attention for count, shape in self.attentions())
        if self.recurrent is not None:
            each = self.recurrent.matrices + self.recurrent.vectors
            total += self.states * each
        return total

    @property
    def norms(self) -> int:
        """The norm weights of all layers, which every tensor-parallel rank holds whole."""
        total = (self.blocks * (1 + self.sandwich) + self.biases * self.layers) * self.hidden
        heads = sum(count * shape.head_dim for count, shape in self.attentions())
        total += 2 * heads * self.qk_norm
        if self.recurrent is not None:
            total += self.states * self.recurrent.norm
        return total

    @property
    def mlp(self) -> int:
        """The number of weights of one layer's dense MLP."""
        return self.matrices_of_mlp * self.hidden * self.ffn

    @property
    def routed(self) -> int:
        """The number of weights of one layer's routed experts."""
        biases = (2 * self.expert_ffn + self.hidden) * self.biases
        matrices = self.matrices_of_mlp * self.hidden * self.expert_ffn
        return self.experts * (matrices + biases)

    @property
    def shared(self) -> int:
        """The number of weights of one layer's shared expert."""
        return self.matrices_of_mlp * self.hidden * self.shared_ffn

    @property
    def router(self) -> int:
        """The number of weights of a layer's router and shared gate, whole on each tensor rank."""
        return self.hidden * (self.experts + self.shared_gate) + self.experts * self.biases

    @property
    def chosen(self) -> int:
        """The number of matrix entries that a token passes through in one layer's experts."""
        chosen = self.topk * self.matrices_of_mlp * self.hidden * self.expert_ffn
        return chosen + self.shared + self.router

    @property
    def layer_weights(self) -> int:
        """The number of weights of all layers."""
        dense = self.dense_layers * self.mlp
        experts = self.moe_layers * (self.routed + self.shared + self.router)
        return self.mixers + self.norms + dense + experts

    @property
    def parameters(self) -> int:
        """The number of all weights of the language model."""
        blocks = self.layer_weights
        if self.prediction is not None:
            blocks += self.prediction.layer_weights + self.joint
        return blocks + self.hidden + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def layer_matrices(self) -> int:
        """The matrix entries in all layers that a token passes; norms and biases cost nothing.

        Entries of a state count as often as a token is multiplied with them.
        """
        matrices = sum(count * shape.attention_matrices for count, shape in self.attentions())
        matrices += self.dense_layers * self.mlp
        if self.recurrent is not None:
            each = self.recurrent.matrices + self.recurrent.products * self.recurrent.state
            matrices += self.states * each
        return matrices + self.moe_layers * self.chosen

    @property
    def active_parameters(self) -> int:
        """The number of matrix entries that a token passes, with LM head and without embedding."""
        return self.layer_matrices + self.vocab * self.hidden

    def forward_flops(self, lengths: Iterable[int], trainable: int) -> float:
        """Count the FLOPs of one forward pass. A backward pass takes twice as many.

        Nothing is counted twice: the layers at every token, causal attention inside each sequence,
        the LM head at trainable positions only.
        """
        return self.layer_flops(lengths) + 2.0 * trainable * self.vocab * self.hidden

    def layer_flops(self, lengths: Iterable[int]) -> float:
        """Count the forward FLOPs of the layers."""
        cost = replace(self.cost, linear=2.0 * self.layer_matrices)
        return sum(map(cost, lengths))

    def prediction_flops(self, lengths: Iterable[int], trainable: int) -> float:
        """Count the FLOPs of multi-token prediction in an update, forward and backward.

        The backward pass takes twice as many as the forward one; at the head as many, whose weight
        gets no gradient. Scoring passes have none.
        """
        if self.prediction is None:
            return 0.0
        known = list(lengths)
        projection = 2.0 * sum(known) * 2 * self.hidden * self.hidden
        layer = self.prediction.layer_flops(known) + projection
        return 3.0 * layer + 2.0 * 2.0 * trainable * self.vocab * self.hidden

    @property
    def cost(self) -> CostModel:
        """The forward FLOPs of a sequence, for balancing a batch and for plans.

        They are 2 per parameter and token, and for causal attention over n tokens 2 * 2 * heads *
        head_dim * n / 2 per layer and token.
        """
        factor = 2.0 * self.heads
        heads = sum(count * shape.head_dim for count, shape in self.attentions())
        counts = Counter(filter(None, self.windows))
        return CostModel(
            2.0 * self.active_parameters,
            factor * (heads - counts.total() * self.head_dim),
            tuple(
                (window, factor * self.head_dim * count) for window, count in sorted(counts.items())
            ),
        )
