"""Loaded by transformers, with `trust_remote_code=True`, in two cases.

`from_pretrained()` finds it in a model's folder that `selfspec prepare` has prepared. The first
`generate()` of that model attaches selfspec, so that all its calls draft. And
`model.generate(custom_generate=FOLDER)` runs it for one call.
"""

import inspect
import os
from functools import partial

from transformers.generation.utils import GenerationMixin

try:  # Else transformers would advise to install a package from an index.
    import selfspec
    from selfspec.cache.file import FILE_NAME
    from selfspec.plugin.attach import Attachment
    from selfspec.plugin.loop import loop_for
except ImportError as error:
    raise ImportError(
        "this needs selfspec, which is on no package index; run 'pip install .' in a copy of its "
        "repository"
    ) from error

_NAMED = inspect.signature(GenerationMixin.generate).parameters


def generate(*args, model, spec=None, **kwargs):
    """Takes the arguments of `generate()`, and a `SelfSpec` as `spec`.

    Without `spec`, what is learned stays with the model from call to call.
    """
    if isinstance(vars(model).get("generate"), partial):  # transformers took it from the folder.
        selfspec.attach(model, _spec_of_folder(model))
        return model.generate(*args, **kwargs)
    if spec is None:
        spec = _spec_of(model)
    # transformers fills in its arguments with None; a None among other arguments says something
    kwargs = {name: v for name, v in kwargs.items() if v is not None or name not in _NAMED}
    loop, ready = loop_for(spec, model, kwargs)
    return type(model).generate(model, custom_generate=loop, **ready)


generate.belongs_to_selfspec = True  # `attach` puts its own method in the place of this one.


def _spec_of_folder(model):
    """A `SelfSpec` with the cache beside the weights, if there is one."""
    has_cache = os.path.exists(os.path.join(model.name_or_path, FILE_NAME))
    return (
        selfspec.SelfSpec.from_pretrained(model.name_or_path) if has_cache else selfspec.SelfSpec()
    )


def _spec_of(model):
    if getattr(model, "_selfspec", Attachment()).spec is None:
        model._selfspec = Attachment(selfspec.SelfSpec())
    return model._selfspec.spec
