"""What torch, accelerate and PEFT keep on modules: hooks, compiled code, adapters, devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from selfspec.compat.authors import NOT_IN_STEPS
from selfspec.compat.swapped import swapped

# What `to()`, `float()`, `cuda()` and the like call on all modules; there is no public hook.
MOVES = "_apply"

_INSIDE_COMPILED = "_torchdynamo_orig_callable"  # The forward that `torch.compile` has compiled.

# Types of switches on modules. Whole numbers are none: some modules count their calls in them.
_SWITCHES = frozenset((bool, float, str))
# These have neither a forward nor weights; a large part of an adapter's modules.
_CONTAINERS = frozenset((nn.ModuleDict, nn.ModuleList))


def accelerate_hooks(module: nn.Module) -> Sequence[Any]:
    """The hooks that were handed to accelerate's `add_hook_to_module`, those of users among them.

    Without it, a user's hook would pass for one that moves tensors about.
    """
    hook = vars(module).get("_hf_hook")
    return getattr(hook, "hooks", [hook]) if hook is not None else []


def hooks_on(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The hooks before and after a module's forward. torch has no public way to read them.

    The keys are the numbers that torch gives to hooks; no two hooks of a process ever share one.
    """
    before, after = module._forward_pre_hooks, module._forward_hooks
    return {**before, **after} if before or after else {}


def hooks_of_all() -> dict[int, Callable[..., Any]]:
    return {**torch_module._global_forward_pre_hooks, **torch_module._global_forward_hooks}


def is_of_one_call(hook: Callable[..., Any]) -> bool:
    """Has PEFT put this hook on a module for one call only?

    PEFT does so for `adapter_names=`, which names an adapter for each row, and for an activated
    LoRA, which counts the tokens of a forward from its end. Without this, rows could get the
    adapter of another row, and drafts could get none.
    """
    origin = getattr(getattr(hook, "func", None), "__module__", None) or ""
    return origin.split(".")[0] == "peft"


def prompt_learning(model: nn.Module) -> bool:
    """Does a PEFT wrapper put virtual tokens in front of the prompt?

    PEFT then replaces a method of the inner model by one of the wrapper. Without this, only the
    trial of the model would find it out.
    """
    override = vars(model).get("prepare_inputs_for_generation")
    adapter = getattr(getattr(override, "__self__", None), "active_peft_config", None)
    return bool(getattr(adapter, "is_prompt_learning", False))


def is_compiled(module: nn.Module) -> bool:
    """Is this module's forward run by `torch.compile`?

    Without the private marks, packed weights and captured graphs would be tried on compiled code.
    """
    return _is_compiled(vars(module))


def _is_compiled(attributes: Mapping[str, Any]) -> bool:
    is_called = attributes.get("_compiled_call_impl") is not None
    return is_called or hasattr(attributes.get("forward"), _INSIDE_COMPILED)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, a model that was compiled as a whole runs as it is, in all threads.

    Forwards over drafts have many widths, for each of which torch would compile the model anew.
    Without the private marks it does so.
    """
    with ExitStack() as swaps:
        for name, as_it_is in _AS_IT_IS.items():
            if name in vars(model):
                swaps.enter_context(swapped(vars(model), name, as_it_is))
        yield


def _without_dynamo(forward: Any) -> Any:
    return getattr(forward, _INSIDE_COMPILED, forward)


# How to undo torch.compile: the attributes that it sets, and what each is without it.
_AS_IT_IS = {"_compiled_call_impl": lambda _compiled: None, "forward": _without_dynamo}


def inside_wrappers(model: PreTrainedModel) -> Any:
    """The model inside the result of `torch.compile(model)` or of PEFT, or the model itself.

    The wrapper's `generate()` runs this model.
    """
    model = inside_compiled(model)
    inner = getattr(model, "get_base_model", None)
    return inside_compiled(inner()) if callable(inner) else model


def encoder_of(model: PreTrainedModel) -> nn.Module | None:
    """The part of an encoder-decoder that reads the prompt before the first step; else None.

    transformers gives the model itself where it finds no such part.
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    encoder = model.get_encoder()
    return None if encoder is model else encoder


def inside_compiled(model: PreTrainedModel) -> Any:
    """The model inside the result of `torch.compile(model)`, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_parallel(model: PreTrainedModel) -> bool:
    """Is the model spread over several processes, as by `tp_plan=`?

    Without it, each process could choose a width of its own, and they would wait for each other
    without end. A test makes such a model, so that a renamed attribute is noticed.
    """
    marks = ("_device_mesh", "_tp_size")
    return any(getattr(model, name, None) is not None for name in marks)


def num_writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place, as torch counts it.

    Always 0 for tensors made in inference mode, whose writes torch does not count. Without the
    count, only the next call would notice that a weight was written while a call ran.
    """
    return 0 if tensor.is_inference() else tensor._version


def has_moving_hook(module: nn.Module) -> bool:
    """Has accelerate put a hook on the module, which may move its tensors?"""
    return "_hf_hook" in vars(module)


def execution_device(model: nn.Module) -> torch.device | None:
    """The device on which accelerate runs an offloaded model; None if it does not."""
    for module in model.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None


def bare_twin(module: nn.Module, twins: dict[nn.Module, nn.Module]) -> Any:
    """A second tree of modules over the same tensors, without hooks and without compiled code.

    `twins` has what stands for some modules, and gets the others. Functions that were set on a
    module, and stand for a method of its class, are left out. Without torch's private dictionaries
    a twin could not be made.
    """
    if module not in twins:
        twin = twins[module] = object.__new__(type(module))
        blank = vars(nn.Module())  # Has no hooks.
        for name, value in vars(module).items():
            stands_for_method = isinstance(value, MethodType) or hasattr(nn.Module, name)
            stands_for_method |= callable(getattr(type(module), name, None))
            if name not in blank and not stands_for_method:
                vars(twin)[name] = value
        vars(twin).update(blank, training=False)
        for name in ("_parameters", "_buffers"):
            vars(twin)[name] = dict(vars(module)[name])
        vars(twin)["_modules"] = {
            name: None if part is None else bare_twin(part, twins)
            for name, part in vars(module)["_modules"].items()
        }
    return twins[module]


class Modules(NamedTuple):
    """All that is asked of a model's modules, gathered in one walk over them."""

    all: list[nn.Module]  # Each of them once.
    state: tuple[Hashable, ...]  # Their classes, switches, adapters, dtypes and devices.
    whole_numbers: tuple[int, ...]  # How many experts a token gets, or counts of calls.
    tensors: list[torch.Tensor]  # Their parameters and buffers.
    # Modules with hooks, or with functions of their own that may replace methods; with names.
    hooked: list[tuple[str, nn.Module]]
    classes: dict[type[nn.Module], str]  # With the name of the first module of each.


def modules_of(model: nn.Module) -> Modules:
    """Walks over a model's modules. Costs about 3 µs per module, by torch's private dictionaries.

    Without one of them it raises, and no verdict is kept.
    """
    state: list[Any] = []
    numbers: list[int] = []
    tensors: list[torch.Tensor] = []
    hooked: list[tuple[str, nn.Module]] = []
    classes: dict[type[nn.Module], str] = {}
    names = {id(model): ""}
    parts = [model]
    for module in parts:  # The list grows while it is walked.
        kind, name = type(module), names[id(module)]
        state.append(kind)
        classes.setdefault(kind, name)
        if isinstance(module, torch.jit.ScriptModule):  # Keeps tensors elsewhere.
            tensors += (*module.parameters(), *module.buffers())
            continue
        attributes = module.__dict__.copy()  # Another thread's forward may change it meanwhile.
        for part_name, part in attributes["_modules"].items():
            if part is not None and id(part) not in names:
                names[id(part)] = f"{name}.{part_name}" if name else part_name
                parts.append(part)
        values = attributes.values()
        numbers += [value for value in values if type(value) is int]
        hooks = attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]
        functions: set[str] = set()
        if any(map(callable, values)):  # Hardly any module has some.
            functions = {attribute for attribute, value in attributes.items() if callable(value)}
        if hooks or functions - NOT_IN_STEPS:
            hooked.append((name, module))
        if _is_compiled(attributes) and module is not model:  # The whole model runs as it is.
            state.append(_INSIDE_COMPILED)
        for named in (attributes["_parameters"], attributes["_buffers"]):
            tensors += [tensor for tensor in named.values() if tensor is not None]
        if kind not in _CONTAINERS:
            state += [value for value in values if type(value) in _SWITCHES]
            if "_disable_adapters" in attributes or hasattr(kind, "_disable_adapters"):
                state.append(_adapters(module))
    for tensor in tensors:
        state += (tensor.dtype, tensor.device)
    return Modules(parts, tuple(state), tuple(numbers), tensors, hooked, classes)


def _adapters(module: nn.Module) -> str:
    """Which adapters of PEFT act in a layer, and how strongly."""
    names = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
    return repr([getattr(module, name, None) for name in names])


def embeddings_of(model: PreTrainedModel) -> nn.Module | None:
    """The module that embeds token ids; None if transformers finds none, as in PP-FormulaNet."""
    try:
        embeddings: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embeddings
