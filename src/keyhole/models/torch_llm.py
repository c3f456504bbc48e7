"""Finds what can be cut in language models, and keeps what was trained as `safetensors`.

Models are those of Hugging Face `transformers`, adapters those of `peft`; both are recognised by
the names and attributes of their modules, so neither is imported here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import CutError, InputError
from keyhole.models.torch_layers import (
    LayerCut,
    cut_module_of,
    digest_of_tensors,
    trained_tensors,
)
from keyhole.models.torch_model import TorchModel

ADAPTER, TRAINED = "adapter_model.safetensors", "trained.safetensors"
_BASE = "keyhole_base"  # where a file says which base it belongs to
_LORA = re.compile(r"(.*\.lora_(?:A|B|embedding_A|embedding_B))\.([^.]+)(\.weight)")
_NUMBER = re.compile(r"\.\d+\.")


def vocabulary_cut(module: Any, name: str = "word") -> LayerCut:
    """Returns the cut of a language model's words: rows of its embedding and of its output head.

    Key k is word k. Outputs are over the client's words in the order of its keys, so the softmax
    of a client is over these. Tied tensors travel once.

    Args:
        module: with `get_input_embeddings` and `get_output_embeddings`, as `transformers` has them.
        name: of the key space.

    Raises:
        CutError: the module has no embedding.
    """
    found = getattr(module, "get_input_embeddings", lambda: None)()
    if found is None:
        raise _not_found("word", module, "get_input_embeddings()", "name the tensors in a LayerCut")
    head = getattr(module, "get_output_embeddings", lambda: None)()
    held = [p for each in (found, head) if each is not None for p in each.parameters(recurse=False)]
    axes = {
        each: 0
        for each, parameter in module.named_parameters(remove_duplicate=False)
        if any(parameter is p for p in held)
    }
    return LayerCut(name, axes, FitVocabulary(found.padding_idx))


@dataclass(frozen=True)
class FitVocabulary:
    """Lets a language model know how many words it has, and which of them is padding."""

    padding: int | None

    def __call__(self, module: Any, units: Sequence[Array]) -> None:
        """Sets sizes; see `LayerCut`."""
        (words,) = units
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        embedding.num_embeddings = len(words)
        at = np.flatnonzero(words == self.padding)
        embedding.padding_idx = int(at[0]) if len(at) else None
        if head is not None:
            head.out_features = len(words)
        config = module.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        for holder in (config, *module.modules()):
            if isinstance(getattr(holder, "vocab_size", None), int):
                holder.vocab_size = len(words)


def lora_cut(module: Any, name: str = "rank", adapter: str = "default") -> LayerCut:
    """Returns the cut of LoRA by (layer, rank): key `layer * r + j` owns rank j of every adapted
    tensor of a layer.

    What a client lacks is absent, as if it were zero; the scale `alpha / r` stays.

    Args:
        module: of `peft.get_peft_model` with a `LoraConfig`.
        name: of the key space.
        adapter: which of its adapters.

    Raises:
        CutError: there is no such adapter, or it is no plain LoRA.
    """
    names = [n for n, _ in module.named_parameters() if f".{adapter}" in n and "lora_" in n]
    axes = {}
    for each in names:
        matched = _LORA.fullmatch(each)
        if matched is None or "embedding" in matched[1] or _NUMBER.search(each) is None:
            raise CutError(
                f"the adapter is no LoRA of numbered layers: got {each!r}; expected lora_A and "
                "lora_B weights below a layer's number; adapt linear layers only, without DoRA and "
                "without a bias"
            )
        axes[_pattern(each)] = 0 if matched[1].endswith("A") else 1
    if not axes:
        raise _not_found("rank", module, f"a LoRA adapter {adapter!r}", "call peft.get_peft_model")
    return LayerCut(name, axes)


def expert_cut(module: Any, name: str = "expert") -> LayerCut:
    """Returns the cut of a mixture of experts by (layer, expert): key `layer * E + e` owns the
    weights of an expert and its row of the router.

    A client's router chooses among the experts that the client holds in that layer: the others are
    absent. Where there are fewer than `top_k`, all of them are used; where there is none, the block
    adds nothing to the residual.

    Args:
        module: whose experts are stacked tensors, as in `transformers` since its version 5.
        name: of the key space.

    Raises:
        CutError: no such experts are found.
    """
    axes: dict[str, int] = {}
    top_k: set[int] = set()
    for path, each in module.named_modules():
        weights = [p for p in each.parameters(recurse=False) if p.dim() == 3]
        if path.endswith(".experts") and weights and _NUMBER.search(path):
            axes |= {_pattern(f"{path}.{n}"): 0 for n, _ in each.named_parameters(recurse=False)}
            above = path.removesuffix(".experts")
            for child, router in module.get_submodule(above).named_children():
                rows = [n for n, p in router.named_parameters() if len(p) == len(weights[0])]
                if child != "experts" and rows and hasattr(router, "top_k"):
                    axes |= {_pattern(f"{above}.{child}.{n}"): 0 for n in rows}
                    top_k.add(int(router.top_k))
    if len(top_k) != 1:
        raise _not_found(
            "expert", module, "stacked experts and a router with top_k", "write a LayerCut"
        )
    first = next(iter(axes))
    block = first.partition(".experts.")[0]
    blocks = tuple(block.format(layer=n) for n in _numbers(module, first))
    return LayerCut(name, axes, FitExperts(blocks, *top_k))


@dataclass(frozen=True)
class FitExperts:
    """Lets routers choose among the experts that are there.

    Args:
        blocks: of each layer, the name of the module that has the experts.
        top_k: how many experts a token goes to in the whole model.
    """

    blocks: tuple[str, ...]
    top_k: int

    def __call__(self, module: Any, units: Sequence[Array]) -> None:
        """Sets sizes; see `LayerCut`."""
        for path, experts in zip(self.blocks, units, strict=True):
            block = module.get_submodule(path)
            for each in (block, *block.children()):
                if hasattr(each, "num_experts"):
                    each.num_experts = len(experts)
                if hasattr(each, "top_k"):
                    each.top_k = min(self.top_k, len(experts))
            if len(experts):
                block.experts.__dict__.pop("forward", None)
            else:
                block.experts.forward = _nothing


def _nothing(hidden: Any, *_: Any) -> Any:
    return hidden.new_zeros(hidden.shape)


_FEED_FORWARD = (  # what makes neurons, and what reads them
    (("gate_proj", "up_proj"), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("wi",), "wo"),
    (("wi_0", "wi_1"), "wo"),
)


def neuron_cut(module: Any, name: str = "neuron") -> LayerCut:
    """Returns the cut of feed-forward networks by (layer, neuron): key `layer * width + j` owns the
    weights into neuron j of a layer, its bias, and the weights out of it.

    Args:
        module: whose layers are named as those of GPT-2, Llama, OPT, GPT-NeoX or T5.
        name: of the key space.

    Raises:
        CutError: no such layers are found.
    """
    axes: dict[str, int] = {}
    for path, each in module.named_modules():
        children = dict(each.named_children())
        for into, out in _FEED_FORWARD:
            if _NUMBER.search(f"{path}.") and {*into, out} <= children.keys():
                for child in into:
                    axes |= _of_neurons(f"{path}.{child}", children[child], is_into=True)
                axes |= _of_neurons(f"{path}.{out}", children[out], is_into=False)
    if not axes:
        known = ", ".join("/".join((*into, out)) for into, out in _FEED_FORWARD)
        raise _not_found("neuron", module, f"layers named {known}", "write a LayerCut")
    return LayerCut(name, axes, FitNeurons(axes))


def _of_neurons(path: str, layer: Any, *, is_into: bool) -> dict[str, int]:
    """The tensors of a linear layer that neurons own, and their axis."""
    is_transposed = hasattr(layer, "nf")  # Conv1D of GPT-2 holds (inputs, outputs)
    if not hasattr(layer, "weight"):
        raise CutError(
            f"the layer {path!r} has no weight of its own: got {type(layer).__name__}; expected a "
            "linear layer; adapt other layers than those whose neurons are cut"
        )
    found = {_pattern(f"{path}.weight"): int(is_into == is_transposed)}
    if is_into and getattr(layer, "bias", None) is not None:
        found[_pattern(f"{path}.bias")] = 0
    return found


@dataclass(frozen=True)
class FitNeurons:
    """Sets the width of layers that hold it as a number, as GPT-2's do.

    Args:
        tensors: those of the cut, by their names with `{layer}`, and the axis of neurons.
    """

    tensors: Mapping[str, int]

    def __call__(self, module: Any, units: Sequence[Array]) -> None:
        """Sets sizes; see `LayerCut`."""
        for pattern, axis in self.tensors.items():
            for layer, neurons in zip(_numbers(module, pattern), units, strict=True):
                path, _, tensor = pattern.format(layer=layer).rpartition(".")
                linear = module.get_submodule(path)
                if not hasattr(linear, "nf") or tensor == "bias":
                    continue
                if axis == 1:
                    linear.nf = len(neurons)
                elif len(neurons):
                    linear.__dict__.pop("forward", None)
                else:  # its own cannot read rows of no numbers
                    linear.forward = partial(_bias_alone, linear)


def _bias_alone(linear: Any, hidden: Any) -> Any:
    return hidden.new_zeros((*hidden.shape[:-1], linear.nf)) + linear.bias


def _pattern(name: str) -> str:
    """A tensor's name with `{layer}` for the first number in it."""
    return _NUMBER.sub(".{layer}.", name, count=1)


def _numbers(module: Any, pattern: str) -> list[int]:
    """The layers that have a module of this name."""
    above, _, below = pattern.partition(".{layer}.")
    inner = below.rpartition(".")[0]
    found = module.get_submodule(above).named_children()
    numbers = [int(n) for n, each in found if n.isdigit()]
    return sorted(n for n in numbers if _has(module, f"{above}.{n}.{inner}"))


def _has(module: Any, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def _not_found(unit: str, module: Any, expected: str, advice: str) -> CutError:
    return CutError(
        f"the module has nothing to cut by {unit}: got {type(module).__name__}; expected "
        f"{expected}; {advice}"
    )


def base_digest(module: Any) -> str:
    """Returns a digest of a module without its adapters: the same before and after
    `peft.get_peft_model`."""
    own = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in module.state_dict().items()
        if "lora_" not in name
    }
    return digest_of_tensors(own)


def save_trained(model: TorchModel, params: Tree, directory: str | Path) -> None:
    """Writes what was trained as `safetensors`, with the digest of the base that it belongs to.

    LoRA goes to `adapter_model.safetensors` beside `adapter_config.json`, which
    `peft.PeftModel.from_pretrained(base, directory)` loads; all else to `trained.safetensors`,
    under the names of the base's state dict.

    Args:
        model: of `from_module`.
        params: of the whole model, such as `run.model()`.
        directory: is made where it does not exist.
    """
    folder, whole = Path(directory), cut_module_of(model).whole
    model.layout.check(params)
    files: dict[str, dict[str, Any]] = {}
    for names, tensor in trained_tensors(model, params):
        like = whole.get_parameter(names[0])
        place, name = _place(names[0])
        files.setdefault(place, {})[name] = tensor.to(like.dtype).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": "pt", _BASE: base_digest(whole)}
    for place, tensors in files.items():
        _safetensors().save_file(tensors, folder / place, metadata=about)
    if ADAPTER in files:
        config = copy.copy(whole.peft_config[whole.active_adapter])
        config.inference_mode = True
        config.save_pretrained(str(folder))


def load_trained(model: TorchModel, directory: str | Path, *, any_base: bool = False) -> Tree:
    """Returns the parameters that `save_trained` or `peft` wrote, such as for `kh.train(start=)`.

    Args:
        model: of `from_module`, on the same base.
        directory: with the files.
        any_base: takes files that do not say which base they belong to, as `peft` writes them.

    Raises:
        InputError: the files are missing, are of another base, or do not fit the model.
    """
    folder, whole = Path(directory), cut_module_of(model).whole
    digest = base_digest(whole)
    files: dict[str, Mapping[str, Any]] = {}
    params = model.init(0)
    found: dict[str, Array] = {}
    for names, tensor in trained_tensors(model, params):
        place, name = _place(names[0])
        if place not in files:
            files[place] = _read(folder / place, None if any_base else digest)
        held = files[place].get(name)
        if held is None or held.shape != tensor.shape:
            got = "no such tensor" if held is None else f"shape {tuple(held.shape)}"
            raise InputError(
                f"{folder / place} does not fit the model: got {got} for {name!r}; expected shape "
                f"{tuple(tensor.shape)}; load it with the cuts and ranks that it was made with"
            )
        found[names[0]] = held.float().numpy()
    return _stacked(model, params, found)


def _stacked(model: TorchModel, params: Tree, found: Mapping[str, Array]) -> Tree:
    """Parameters of the model, with values by the names of the whole module."""
    filled = dict(params)
    for stacks in cut_module_of(model).stacks:
        for stack in stacks.each:
            own = [np.moveaxis(found[names[0]], stack.axis, 0) for _, names in stack.layers]
            filled[stack.path] = np.concatenate(own)
    return filled | {name: value for name, value in found.items() if name in params}


def _place(name: str) -> tuple[str, str]:
    """The file that keeps a tensor, and its name there; `peft` leaves the adapter's name out."""
    matched = _LORA.fullmatch(name)
    if matched is not None:
        return ADAPTER, f"{matched[1]}{matched[3]}"
    return TRAINED, name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _read(path: Path, digest: str | None) -> dict[str, Any]:
    """The tensors of a file, once it is known to be of this base."""
    if not path.is_file():
        raise InputError(
            f"there is no file of trained tensors: got {path}; expected one that save_trained or "
            "peft wrote; check the directory"
        )
    with _safetensors("safetensors").safe_open(path, "pt") as file:
        base = (file.metadata() or {}).get(_BASE, "none")
        if digest is not None and base != digest:
            raise InputError(
                f"{path} belongs to another base: got base {base[:16]}; expected {digest[:16]}; "
                "load the base that it was trained on"
                + (", or pass any_base=True" if base == "none" else "")
            )
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _safetensors(name: str = "safetensors.torch") -> ModuleType:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            "safetensors is not installed: got no safetensors; expected the extra 'llm'; pip "
            "install 'keyhole[llm]'"
        ) from error
