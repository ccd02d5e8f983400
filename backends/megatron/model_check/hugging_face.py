"""The model of transformers: its own forward pass, with the weights of one layer at a time."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.load import SafetensorsFolder
from backends.megatron.cpu.shim import replaced
from backends.megatron.model_check.record import Probe, Record, main_output, return_memory, sketch
from rlcore.errors import ModelError, UserError
from rlcore.hf_config.language import as_trained

_EAGER = "eager_attention_forward"
# Called with the number of a layer and what it computed.
Visit = Callable[[int, Record], None]


class HuggingFaceModel:
    """A model of transformers without weights, which reads them when a module runs.

    Attributes:
        target: the parameter or buffer of transformers' model that each tensor of the folder is
            part of, by the tensor's name.
        ignored: the tensors of the folder that are part of none.

    Raises:
        UserError: transformers is too old.
        ModelError: transformers has no such model, or the folder lacks one of its weights.
    """

    def __init__(self, arch: Architecture, source: SafetensorsFolder) -> None:
        try:
            import transformers.core_model_loading as loading
        except ImportError:
            import transformers

            raise UserError(
                f"rlcore check-model needs transformers 5: installed is {transformers.__version__}"
            ) from None
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._loading = loading
        self._source = source
        self._table = arch.table
        self.model = _on_meta(arch)
        self._conversions = get_model_conversion_mapping(self.model)
        layers = self.model.get_decoder().layers
        self.path = next(name for name, module in self.model.named_modules() if module is layers)
        self.target, self.ignored = self._match(source)
        # What a layer returns beside its hidden states, if it does.
        self._beside: tuple[Any, ...] | None = None
        # Outputs [n, ...] of the modules outside the layers, once they have run.
        self.outputs: dict[str, Tensor] = {}
        self._wrapped: dict[str, nn.Module] = dict(self._outside())
        for name in [*self._wrapped, *(f"{self.path}.{n}" for n in range(len(layers)))]:
            self._release(name)

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    @torch.no_grad()
    def run(self, probe: Probe, layers: int, visit: Visit) -> Tensor:
        """Run the first `layers` layers and the head; returns the logits [n, V] (or values).

        `visit` is called after each layer, when its weights are gone.
        """
        with ExitStack() as stack:
            for number, layer in enumerate(self.model.get_submodule(self.path)):
                forward: Any = self._skip
                if number < layers:
                    forward = partial(self._layer, number, layer, layer.forward, probe, visit)
                stack.enter_context(replaced(layer, "forward", forward))
            for name, module in self._wrapped.items():
                before = module.register_forward_pre_hook(partial(self._before, name))
                after = module.register_forward_hook(partial(self._after, name, probe))
                stack.callback(before.remove)
                stack.callback(after.remove)
            output = self.model(input_ids=probe.ids, use_cache=False)
        # A sequence classifier picks a token of each sequence after its head.
        rows = probe.of_batch(output.logits)
        return self.outputs["score"] if rows is None else rows

    def module_in_layer(self, tensor: str) -> str:
        """The module that a tensor of the folder belongs to, by its path in a layer.

        Empty if there is none.
        """
        target = self.target.get(self._source.stored_name(tensor), "")
        path = re.sub(rf"^{re.escape(self.path)}\.\d+\.", "", target)
        return path.rpartition(".")[0]

    def sources(self, name: str) -> list[str]:
        """The tensors of the folder for a module and its submodules."""
        own = [disk for disk, target in self.target.items() if target.startswith(name + ".")]
        if own:
            return own
        # A tied head reads the embedding.
        tied = self.model.all_tied_weights_keys
        of = [tied[key] for key in tied if key.startswith(name + ".")]
        return [disk for disk, target in self.target.items() if target in of]

    # --- weights ----------------------------------------------------------------------------------

    def _match(self, source: SafetensorsFolder) -> tuple[dict[str, str], list[str]]:
        """Find what each tensor of the folder becomes, as transformers does when it loads it."""
        loading = self._loading
        renamings = [c for c in self._conversions if isinstance(c, loading.WeightRenaming)]
        converters = [c for c in self._conversions if isinstance(c, loading.WeightConverter)]
        known = self.model.state_dict()
        prefix = self.model.base_model_prefix
        target: dict[str, str] = {}
        ignored = []
        for disk in sorted(source.names):
            name = self._in_model(disk)
            found = loading.rename_source_key(name, renamings, converters, prefix, known)[0]
            if found in known:
                target[disk] = found
            elif name in known:
                target[disk] = name
            else:
                ignored.append(disk)
        return target, ignored

    def _in_model(self, disk: str) -> str:
        """A tensor's name in a folder of the language model alone, which is what runs here."""
        alone, folder = self._table.prefix
        return alone + disk.removeprefix(folder) if disk.startswith(folder) else disk

    def _outside(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules outside the layers that have weights of their own."""
        for name, module in self.model.named_modules():
            if not name.startswith(self.path + ".") and [*module.parameters(recurse=False)]:
                yield name, module

    def _load(self, name: str) -> None:
        """Read the weights of a module and its submodules, in fp32."""
        own = self.sources(name)
        tied = self.model.all_tied_weights_keys
        from transformers.modeling_utils import LoadStateDictConfig

        read = LoadStateDictConfig(
            device_map={"": "cpu"}, dtype=torch.float32, weight_mapping=self._conversions
        )
        slices = {self._in_model(disk): self._source.lazy(disk) for disk in own}
        load = self._loading.convert_and_load_state_dict_in_model
        info = load(self.model, slices, read)[0]
        folder = self._source.folder
        for target, stored, expected in info.mismatched_keys:
            raise ModelError(
                f"{folder}: {target} has the shape {tuple(stored)}, {self.name} of transformers"
                f" makes it {tuple(expected)}"
            )
        for target, error in info.conversion_errors.items():
            raise ModelError(f"{folder}: transformers cannot convert {target}: {error}")
        module = self.model.get_submodule(name)
        for key, owner, attribute, weight in _weights(module):
            full = f"{name}.{key}"
            if weight.is_meta and full in tied:
                weight = self.model.get_parameter(tied[full])
            if weight.is_meta:
                raise ModelError(
                    f"{folder}: no tensor for {full}, which {self.name} of transformers has"
                )
            _set(owner, attribute, weight.float())

    def _release(self, name: str) -> None:
        """Drop the weights of a module; what takes their place has the dtype of the folder.

        So experts are joined in the folder's dtype, and only the result is made fp32.
        """
        stored = {self.target[disk]: self._source.dtype(disk) for disk in self.sources(name)}
        for key, owner, attribute, weight in _weights(self.model.get_submodule(name)):
            dtype = stored.get(f"{name}.{key}", torch.float32)
            _set(owner, attribute, torch.empty(weight.shape, dtype=dtype, device="meta"))
        for target in self.model.all_tied_weights_keys.values():
            owner, _, attribute = target.rpartition(".")
            weight = self.model.get_parameter(target)
            if not weight.is_meta and not name.startswith(self.path + "."):
                _set(self.model.get_submodule(owner), attribute, weight.to("meta"))

    def _before(self, name: str, module: nn.Module, args: Any) -> None:
        self._load(name)

    def _after(self, name: str, probe: Probe, module: nn.Module, args: Any, output: Tensor) -> None:
        rows = probe.of_batch(output)
        if rows is not None:
            self.outputs[name] = rows
        self._release(name)

    # --- a layer ----------------------------------------------------------------------------------

    def _layer(
        self, number: int, layer: nn.Module, forward: Callable[..., Any], probe: Probe,
        visit: Visit, hidden: Tensor, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        name = f"{self.path}.{number}"
        self._load(name)
        rows = probe.of_batch(hidden)
        assert rows is not None
        record = Record(rows)
        self._sketch_gradients(name, layer, record)
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad(), _recording(layer, probe, record):
            output = forward(leaf, *args, **kwargs)
            main = main_output(output)
        found = probe.of_batch(main)
        assert found is not None
        record.output = found
        vector = torch.zeros_like(main).flatten(0, 1)
        vector[probe.rows] = probe.cotangent(main.size(-1), number)
        main.backward(vector.view_as(main))
        gradient = probe.of_batch(leaf.grad)  # type: ignore[arg-type]
        assert gradient is not None
        record.input_gradient = gradient
        after = main.detach()
        self._beside = None
        if isinstance(output, tuple):
            self._beside = tuple(x.detach() if isinstance(x, Tensor) else x for x in output[1:])
        # The graph holds the weights.
        del main, output, leaf, vector
        self._release(name)
        return_memory()
        visit(number, record)
        return self._skip(after)

    def _skip(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return hidden states as a layer does, with what the last layer had beside them."""
        return hidden if self._beside is None else (hidden, *self._beside)

    def _sketch_gradients(self, name: str, layer: nn.Module, record: Record) -> None:
        """Sketch the gradient of each weight that is one tensor of the folder, when it is made.

        Stacked experts have none: torch would make a gradient of the whole stack for each expert.
        """
        sources: dict[str, list[str]] = {}
        for disk in self.sources(name):
            sources.setdefault(self.target[disk], []).append(disk)
        for key, weight in layer.named_parameters():
            own = sources.get(f"{name}.{key}", [])
            is_stack = weight.dim() == 3 and "experts" in key
            weight.requires_grad_(len(own) == 1 and not is_stack)

            def keep(weight: Tensor, own: list[str] = own) -> None:
                assert weight.grad is not None
                record.gradients[own[0]] = sketch(weight.grad)
                weight.grad = None

            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(keep)


def text_fields(arch: Architecture) -> dict[str, Any]:
    """The fields of the language model in `config.json`."""
    within = arch.table.within
    found = arch.hf_config[within] if within else arch.hf_config
    # transformers writes infinity, which JSON has not, as an object.
    read: dict[str, Any] = json.loads(json.dumps(found), object_hook=_float)
    return read


def _float(found: dict[str, Any]) -> Any:
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _on_meta(arch: Architecture) -> Any:
    """Build the model without memory for weights; rotary frequencies and the like have values."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    fields = text_fields(arch)
    kind = arch.table.known_as or fields["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"{arch.folder}: transformers {transformers.__version__} has no model_type {kind!r}, so"
            " there is nothing to compare with; install a version that has it"
        )
    config = transformers.CONFIG_MAPPING[kind].from_dict({**fields, "model_type": kind})
    if arch.head == "value":
        # Transformers looks for the last token of each sequence.
        config.pad_token_id = 0
    classes = {
        "lm": transformers.AutoModelForCausalLM,
        "value": transformers.AutoModelForSequenceClassification,
    }
    with torch.device("meta"):
        model = classes[arch.head].from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
    as_trained(model)
    for key, buffer in list(model.named_non_persistent_buffers()):
        owner, _, name = key.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, name, torch.empty_like(buffer, device="cpu"))
    with torch.no_grad():
        for module in model.modules():
            if module._non_persistent_buffers_set:
                model._init_weights(module)
    return model.eval()


def _weights(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (path, owner, attribute, tensor) of parameters and of buffers that folders hold."""
    for prefix, owner in module.named_modules():
        own = [*owner._parameters.items(), *owner._buffers.items()]
        for name, weight in own:
            if weight is not None and name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), owner, name, weight


def _set(owner: nn.Module, name: str, weight: Tensor) -> None:
    is_parameter = name in owner._parameters
    setattr(owner, name, nn.Parameter(weight.detach()) if is_parameter else weight.detach())


@contextmanager
def _recording(layer: nn.Module, probe: Probe, record: Record) -> Iterator[None]:
    """Inside, the submodules of a layer write what they compute into the record."""

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        record.keep(name, args, kwargs, main_output(output), probe.of_batch)
        # transformers' experts: (hidden, choice [B * L, k], weights [B * L, k]).
        is_choice = len(args) == 3 and all(isinstance(x, Tensor) for x in args)
        if is_choice and args[1].dtype == torch.int64 and args[1].dim() == 2:
            experts = int(getattr(module, "num_experts", args[1].max() + 1))
            every = args[2].new_zeros(len(args[1]), experts).scatter(1, args[1], args[2])
            record.routing = probe.of_batch(every)

    def attend(original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any,
               **kwargs: Any) -> Any:  # fmt: skip
        q, k, v = (probe.of_batch(x.transpose(1, 2)) for x in (query, key, value))
        if q is not None and k is not None and v is not None:
            scale = kwargs.get("scaling", args[1] if len(args) > 1 else None)
            record.enter_attention(q, k, v, scale)
        return original(module, query, key, value, *args, **kwargs)

    with ExitStack() as stack:
        for name, module in layer.named_modules():
            if name:
                hook = module.register_forward_hook(partial(keep, name), with_kwargs=True)
                stack.callback(hook.remove)
        for code in {type(module).__module__ for module in layer.modules()}:
            original = getattr(sys.modules[code], _EAGER, None)
            if original is not None:
                recorded = partial(attend, original)
                stack.enter_context(replaced(sys.modules[code], _EAGER, recorded))
        yield
